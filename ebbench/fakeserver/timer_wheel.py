"""Timing wheel: one timer for thousands of streams."""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import Protocol

from ebbench.process.alarm import Alarm

TICK_NS = 250_000


class Timed(Protocol):
    """An item with a next due time."""

    def act(self) -> int:
        """Do what is due; returns the next due time (monotonic ns), or 0 for never."""
        ...


class TimerWheel:
    """Calls ``act`` of each item when it is due, at most a quarter of a millisecond late.

    Times are rounded up to ticks, which bounds the number of wake-ups.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = Alarm(loop, self._turn)
        self._ticks: list[int] = []
        self._due: dict[int, list[Timed]] = {}

    def enter(self, item: Timed, due_ns: int) -> None:
        """Schedule ``item`` for ``due_ns``."""
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
