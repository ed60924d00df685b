"""What is due when: many streams, one timer."""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import Protocol

from ebbench.alarm import Alarm

TICK_NS = 250_000


class Timed(Protocol):
    """Something that acts at a time."""

    def act(self) -> int:
        """Do what is due; returns when to act next (monotonic ns), or 0 for never."""
        ...


class Wheel:
    """Calls ``act`` of everything entered once its time has come, to within a quarter of a millisecond.

    Times are rounded up to ticks, which keeps the number of wake-ups bounded with thousands of streams.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = Alarm(loop, self._turn)
        self._ticks: list[int] = []
        self._due: dict[int, list[Timed]] = {}

    def enter(self, item: Timed, due_ns: int) -> None:
        """Have ``item`` act at ``due_ns``."""
        if self._put(item, due_ns) == self._ticks[0]:
            self._alarm.set(self._ticks[0] * TICK_NS)

    def close(self) -> None:
        """Stop the timer."""
        self._alarm.close()

    def _put(self, item: Timed, due_ns: int) -> int:
        tick = -(-due_ns // TICK_NS)
        items = self._due.get(tick)
        if items is None:
            self._due[tick] = [item]
            heapq.heappush(self._ticks, tick)
        else:
            items.append(item)
        return tick

    def _turn(self) -> None:
        now_tick = time.monotonic_ns() // TICK_NS
        while self._ticks and self._ticks[0] <= now_tick:
            for item in self._due.pop(heapq.heappop(self._ticks)):
                due_ns = item.act()
                if due_ns:
                    self._put(item, due_ns)
        if self._ticks:
            self._alarm.set(self._ticks[0] * TICK_NS)
