"""Lag of the event loop, measured by a timer that is due every 20 ms.

The lag of sends alone would not show a stalled loop: in a closed loop the intended start is set by the loop itself.
"""

from __future__ import annotations

import asyncio
import time
from array import array

from ebbench.process.alarm import Alarm

PERIOD_NS = 20_000_000


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
