"""When each session is due, without sending and without a clock.

``(elapsed, sent) -> wait``: from the time since the start and the number of sessions released so far to the time until
the next release. No function reads a clock, so tests need no waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ebbench.records.plan import ClosedPhase

NEVER = -1


@dataclass(frozen=True)
class Arrivals:
    """Open loop: session i is due ``arrival_ns[i]`` ns after the start (ascending)."""

    arrival_ns: Sequence[int]

    def wait_ns(self, elapsed_ns: int, sent: int) -> int:
        """Ns until session number ``sent`` is due: 0 if it is due, NEVER after the last session."""
        if sent >= len(self.arrival_ns):
            return NEVER
        return max(0, self.arrival_ns[sent] - elapsed_ns)


@dataclass(frozen=True)
class Slots:
    """Closed loop: how many sessions may be open when session i is released.

    ``limits[p]`` holds from session ``first_of_phase[p]`` on; None is no limit. Where the limit rises, the new slots
    open ``spacing_ns`` apart: no client can start hundreds of requests at one instant, and each would count the
    difference as lag.
    """

    first_of_phase: tuple[int, ...]
    limits: tuple[int | None, ...]
    spacing_ns: int = 0

    @classmethod
    def of_phases(cls, phases: Sequence[ClosedPhase], spacing_ns: int = 0) -> Slots:
        """The limits of closed-loop phases; the last limit holds to the end."""
        starts = [sum(p.sessions for p in phases[:i]) for i in range(len(phases))]
        return cls(tuple(starts), tuple(p.max_concurrency for p in phases), spacing_ns)

    @classmethod
    def constant(cls, limit: int | None) -> Slots:
        """The same limit for all sessions; None is no limit."""
        return cls((0,), (limit,))

    def limit(self, session: int) -> int | None:
        """The limit in force at the release of session number ``session``."""
        return self.limits[bisect_right(self.first_of_phase, session) - 1]

    def change(self, session: int) -> int:
        """Change of the limit at session number ``session``; 0 inside a phase."""
        after, before = self.limit(session), self.limit(session - 1) if session else 0
        return (after or 0) - (before or 0)
