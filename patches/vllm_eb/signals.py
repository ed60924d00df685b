"""EndForward signals: state of a scheduler at the end of every forward pass (Tian et al. 2025, 4.1), for the gateway.

Published over ZeroMQ (PUB), one message per pass, msgpack of :class:`Signal` as an array. A subscriber is not required:
a message without one costs a few microseconds, and a slow subscriber loses messages instead of stopping the engine.
"""

from __future__ import annotations

import contextlib
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
