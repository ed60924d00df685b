"""How the monotonic clock of another machine relates to this one's, and how exactly that is known.

One exchange reads this clock, the other one, and this clock again. The other clock was read at some time between, so
its offset lies within half the round trip of the value that assumes the middle (Cristian, Distributed Computing 3,
1989). Of several exchanges the one with the shortest round trip is used.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

EXCHANGES = 40


@dataclass(frozen=True)
class ClockOffset:
    """``offset_ns``: the other clock minus this one, at an error of at most half of ``round_trip_ns``."""

    offset_ns: int
    round_trip_ns: int

    @property
    def error_ns(self) -> int:
        """The largest error of the offset."""
        return -(-self.round_trip_ns // 2)


def offset_of(sent_ns: int, other_ns: int, received_ns: int) -> ClockOffset:
    """The offset by one exchange: read here at ``sent_ns`` and ``received_ns``, there at ``other_ns``."""
    return ClockOffset(other_ns - (sent_ns + received_ns) // 2, received_ns - sent_ns)


async def measured_offset(read_other: Callable[[], Awaitable[int]], exchanges: int = EXCHANGES) -> ClockOffset:
    """The offset of the clock that ``read_other`` reads (ns), by the exchange with the shortest round trip."""
    found = []
    for _ in range(exchanges):
        sent_ns = time.monotonic_ns()
        other_ns = await read_other()
        found.append(offset_of(sent_ns, other_ns, time.monotonic_ns()))
    return min(found, key=lambda one: one.round_trip_ns)


def alignment_error_ns(before: ClockOffset, after: ClockOffset) -> int:
    """The largest error of times converted with the offset ``before`` the run, at its start and at its end."""
    drift_ns = abs(after.offset_ns - before.offset_ns)
    return max(before.error_ns, drift_ns + after.error_ns)
