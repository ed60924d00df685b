"""EndForward signals: state of a scheduler at the end of every forward pass (Tian et al. 2025, 4.1), for the gateway.

Published over ZeroMQ (PUB), one message per pass, msgpack of :class:`Signal` as an array. A subscriber is not required:
a message without one costs a few microseconds, and a slow subscriber loses messages instead of stopping the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

HIGH_WATER_MARK = 1000


class Signal(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass of one data-parallel rank.

    ``duration_ns``: from start to end of the pass. ``received``: requests received since the start. ``queued_tokens``:
    prompt tokens held and not scheduled. ``kv_tokens``: KV tokens in use. ``continues``: another pass follows at once.
    ``generates``: that pass decodes.
    """

    rank: int
    step_id: int
    duration_ns: int
    received: int
    queued_tokens: int
    kv_tokens: int
    continues: bool
    generates: bool


class SignalPublisher:
    """Binds ``endpoint`` (tcp://HOST:PORT or ipc://PATH); rank r adds r to the port, or appends it to the path."""

    def __init__(self, endpoint: str, rank: int = 0) -> None:
        import zmq  # part of vLLM; only this class needs it

        self.endpoint = endpoint_of_rank(endpoint, rank)
        self._rank = rank
        self._again: type[Exception] = zmq.Again
        self._no_wait = zmq.DONTWAIT
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, signal: Signal) -> None:
        """Send without waiting; if the queue is full, the message is dropped."""
        with contextlib.suppress(self._again):
            self._socket.send(self._encoder.encode(signal), self._no_wait)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


class PassClock:
    """Follows the passes of one scheduler and publishes the end of each.

    With asynchronous scheduling a pass is scheduled while another one runs, so it starts when that one ends.
    """

    def __init__(self, publisher: SignalPublisher, rank: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._publisher, self._rank, self._clock_ns = publisher, rank, clock_ns
        self._scheduled_ns: deque[tuple[object, int]] = deque()
        self._last_end_ns = 0
        self._steps = 0
        self.received = 0

    def scheduled(self, output: object) -> None:
        """Record that a pass was scheduled."""
        self._scheduled_ns.append((output, self._clock_ns()))

    def ended(self, output: object, queued_tokens: int, kv_tokens: int, generates: bool) -> None:
        """Publish the end of the pass of ``output``; ignored if no pass was run."""
        if not self._scheduled_ns or self._scheduled_ns[0][0] is not output:
            return
        now_ns = self._clock_ns()
        start_ns = max(self._last_end_ns, self._scheduled_ns.popleft()[1])
        self._last_end_ns = now_ns
        continues = generates or queued_tokens > 0 or bool(self._scheduled_ns)
        self._publisher.publish(
            Signal(
                self._rank,
                self._steps,
                now_ns - start_ns,
                self.received,
                queued_tokens,
                kv_tokens,
                continues,
                generates,
            )
        )
        self._steps += 1

    def close(self) -> None:
        """Stop publishing."""
        self._publisher.close()


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Endpoint of rank ``rank``. Raises ValueError for an endpoint of another form."""
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        if not port.isdigit():
            raise ValueError(f"endpoint {endpoint!r} has no port; write tcp://HOST:PORT or ipc://PATH")
        return f"{host}:{int(port) + rank}"
    if endpoint.startswith("ipc://"):
        return endpoint if rank == 0 else f"{endpoint}.{rank}"
    raise ValueError(f"endpoint {endpoint!r} is neither tcp:// nor ipc://")
