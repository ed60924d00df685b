"""The dispatcher at work: requests wait here for their place, events and the clock move it on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from ebbench.alarm import Alarm
from ebbench.dispatch import Ask, Dispatcher, EndForward


class RefusedError(Exception):
    """No place: ``retry_after_s`` says when to come back."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Desk:
    """Places requests. All of it runs on one event loop."""

    def __init__(self, dispatcher: Dispatcher, max_queue: int) -> None:
        self.dispatcher = dispatcher
        self._max_queue = max_queue
        self._places: dict[int, asyncio.Future[int]] = {}
        self._alarm = Alarm(asyncio.get_running_loop(), self._poll)
        self._done_in_s = 1.0  # smoothed time from place to end, for Retry-After
        self._placed_ns: dict[int, int] = {}
        self.refused = 0

    def close(self) -> None:
        """Stop the timer."""
        self._alarm.close()

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return len(self._places)

    async def place(self, ask: Ask) -> int:
        """The unit ``ask`` goes to, once it has one. Raises RefusedError. A caller that is cancelled withdraws."""
        if len(self._places) >= self._max_queue:
            raise self._refusal(f"{len(self._places)} requests are waiting already")
        now_ns = time.monotonic_ns()
        self.dispatcher.arrive(ask, now_ns)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._places[ask.key] = future
        self._poll()
        try:
            unit = future.result() if future.done() else await future
        except asyncio.CancelledError:
            if self._places.pop(ask.key, None) is not None:
                self.dispatcher.withdraw(ask.key)
            elif not future.cancelled() and future.exception() is None:
                self.ended(ask.key)  # placed and given up in the same moment
            raise
        self._placed_ns[ask.key] = time.monotonic_ns()
        return unit

    def first_token(self, key: int) -> None:
        """The first bytes of the answer came."""
        self.dispatcher.prefilled(key, time.monotonic_ns())
        self._poll()

    def ended(self, key: int) -> None:
        """The request has left its unit."""
        now_ns = time.monotonic_ns()
        placed_ns = self._placed_ns.pop(key, now_ns)
        self._done_in_s += 0.05 * ((now_ns - placed_ns) / 1e9 - self._done_in_s)
        self.dispatcher.ended(key, now_ns)
        self._poll()

    def end_forward(self, signal: EndForward) -> None:
        """A forward pass has ended."""
        self.dispatcher.end_forward(signal, time.monotonic_ns())
        self._poll()

    def topology(self, active: Iterable[int]) -> None:
        """These upstreams take requests."""
        self.dispatcher.topology(active, time.monotonic_ns())
        self._poll()

    def _poll(self) -> None:
        now_ns = time.monotonic_ns()
        for order in self.dispatcher.poll(now_ns):
            future = self._places.pop(order.key, None)
            if future is None or future.done():
                if order.unit is not None:
                    self.dispatcher.ended(order.key, now_ns)
            elif order.unit is None:
                future.set_exception(self._refusal("waited too many dispatch cycles; the servers are overloaded"))
            else:
                future.set_result(order.unit)
        if self._places:
            due_ns = self.dispatcher.next_ns(now_ns)
            if due_ns is not None:
                self._alarm.set(due_ns)

    def _refusal(self, reason: str) -> RefusedError:
        self.refused += 1
        return RefusedError(reason, max(1, round(self._done_in_s)))
