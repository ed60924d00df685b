"""Lag of the event loop, measured by a timer that is due every 10 ms.

The lag of sends alone would not show a stalled loop: in a closed loop the intended start is set by the loop itself.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ebbench.process.alarm import Alarm

PERIOD_NS = 10_000_000


class LagMonitor:
    """Runs a periodic timer during a run; ``late_ns`` holds the lateness of every tick."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.late_ns: array[int] = array("q")
        self._due_ns = time.monotonic_ns() + PERIOD_NS
        self._alarm = Alarm(loop, self._tick)
        self._alarm.set(self._due_ns)

    def close(self) -> None:
        """Stop the timer. A tick that is overdue is recorded."""
        late_ns = time.monotonic_ns() - self._due_ns
        if late_ns > 0:
            self.late_ns.append(late_ns)
        self._alarm.close()

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        self.late_ns.append(max(0, now_ns - self._due_ns))
        self._due_ns = now_ns + PERIOD_NS
        self._alarm.set(self._due_ns)


def lag_percentile_ns(
    late_ns: Sequence[int] | npt.NDArray[np.int64], share: float, period_ns: int = PERIOD_NS
) -> float:
    """The delay that a share ``share`` of events at random times does not exceed, in ns.

    A loop blocked for L ns delays events of that time by L to 0 ns, so the time in which the delay exceeds x is the sum
    of max(0, L - x) over all ticks. Counting ticks would hide long stalls, which are one tick each.
    """
    late = np.asarray(late_ns, dtype=np.float64)
    if late.size == 0:
        return 0.0
    allowed_ns = (1.0 - share) * float((late + period_ns).sum())
    low, high = 0.0, float(late.max())
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.maximum(late - middle, 0.0).sum()) > allowed_ns:
            low = middle
        else:
            high = middle
    return high
