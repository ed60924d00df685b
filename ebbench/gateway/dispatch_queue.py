"""Queue of requests that the dispatcher has not assigned to a unit yet; driven by events and a timer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from ebbench.dispatch import Dispatcher, DispatchRequest, EndForward
from ebbench.process.alarm import Alarm

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_KINDS = {400: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error"}


class RefusedError(Exception):
    """The gateway refuses a request with ``status``; the client may retry after ``retry_after_s``."""

    def __init__(self, reason: str, status: int, retry_after_s: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.retry_after_s = status, retry_after_s


def error_body(message: str, status: int) -> bytes:
    """An error object in OpenAI's format."""
    kind = _KINDS.get(status, "api_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


async def send_refusal(send: Send, refusal: RefusedError) -> None:
    """Send the refusal as the response."""
    body = error_body(str(refusal), refusal.status)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class DispatchQueue:
    """Assigns requests to units. Runs on one event loop."""

    def __init__(self, dispatcher: Dispatcher, max_queue: int) -> None:
        self.dispatcher = dispatcher
        self._max_queue = max_queue
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._alarm = Alarm(asyncio.get_running_loop(), self._poll)
        self._done_in_s = 1.0  # smoothed time from assignment to the end of a response, for Retry-After
        self._assigned_ns: dict[int, int] = {}
        self.refused = 0

    def close(self) -> None:
        """Stop the timer."""
        self._alarm.close()

    @property
    def waiting(self) -> int:
        """Number of requests without a unit."""
        return len(self._waiting)

    async def assign(self, request: DispatchRequest) -> int:
        """Wait until ``request`` is assigned; returns its unit.

        Raises RefusedError. Cancelling withdraws the request.
        """
        if len(self._waiting) >= self._max_queue:
            raise self._refusal(f"{len(self._waiting)} requests are waiting already")
        now_ns = time.monotonic_ns()
        self.dispatcher.arrive(request, now_ns)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[request.key] = future
        self._poll()
        try:
            unit = future.result() if future.done() else await future
        except asyncio.CancelledError:
            if self._waiting.pop(request.key, None) is not None:
                self.dispatcher.withdraw(request.key)
            elif not future.cancelled() and future.exception() is None:
                self.ended(request.key)  # assigned and cancelled in the same iteration of the loop
            raise
        self._assigned_ns[request.key] = time.monotonic_ns()
        return unit

    def first_token(self, key: int) -> None:
        """Record the first bytes of a response."""
        self.dispatcher.prefilled(key, time.monotonic_ns())
        self._poll()

    def ended(self, key: int) -> None:
        """Record that a request has left its unit."""
        now_ns = time.monotonic_ns()
        assigned_ns = self._assigned_ns.pop(key, now_ns)
        self._done_in_s += 0.05 * ((now_ns - assigned_ns) / 1e9 - self._done_in_s)
        self.dispatcher.ended(key, now_ns)
        self._poll()

    def end_forward(self, signal: EndForward) -> None:
        """Record the end of a forward pass."""
        self.dispatcher.end_forward(signal, time.monotonic_ns())
        self._poll()

    def topology(self, active: Iterable[int]) -> None:
        """Set the units that take requests."""
        self.dispatcher.topology(active, time.monotonic_ns())
        self._poll()

    def _poll(self) -> None:
        now_ns = time.monotonic_ns()
        for order in self.dispatcher.poll(now_ns):
            future = self._waiting.pop(order.key, None)
            if future is None or future.done():
                if order.unit is not None:
                    self.dispatcher.ended(order.key, now_ns)
            elif order.unit is None:
                future.set_exception(self._refusal("waited too many dispatch cycles; the servers are overloaded"))
            else:
                future.set_result(order.unit)
        if self._waiting:
            due_ns = self.dispatcher.next_ns(now_ns)
            if due_ns is not None:
                self._alarm.set(due_ns)

    def _refusal(self, reason: str) -> RefusedError:
        self.refused += 1
        return RefusedError(reason, 429, max(1, round(self._done_in_s)))
