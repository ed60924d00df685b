"""Receives the EndForward signals of the vllm_eb plugin over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from ebbench.dispatch import EndForward, UnitReport
from ebbench.extras import need
from ebbench.gateway.settings import GatewaySettings
from vllm_eb.signals import Signal, endpoint_of_rank


class SignalSubscriber:
    """Subscribes to every rank of every upstream and passes their signals to ``on_signal``."""

    def __init__(self, settings: GatewaySettings, on_signal: Callable[[EndForward], None]) -> None:
        self._zmq = need("zmq", "signals of the plugin", "gateway")
        need("zmq.asyncio", "signals of the plugin", "gateway")
        self._on_signal = on_signal
        self._ranks = settings.dp_ranks
        self._addresses = [
            (upstream * settings.dp_ranks + rank, endpoint_of_rank(endpoint, rank))
            for upstream, endpoint in enumerate(settings.signals)
            for rank in range(settings.dp_ranks)
        ]
        self._context: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Connect. Publishers may start later."""
        self._context = self._zmq.asyncio.Context()
        for unit, address in self._addresses:
            socket = self._context.socket(self._zmq.SUB)
            socket.setsockopt(self._zmq.SUBSCRIBE, b"")
            socket.connect(address)
            self._tasks.append(asyncio.create_task(self._listen(unit, socket)))

    async def close(self) -> None:
        """Disconnect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _listen(self, unit: int, socket: Any) -> None:
        decoder = msgspec.msgpack.Decoder(Signal)
        while True:
            data = await socket.recv()
            try:
                signal = decoder.decode(data)
            except msgspec.MsgspecError:
                continue  # another program publishes there; health checks decide whether an upstream works
            report = UnitReport(unit, signal.received, signal.queued_tokens, signal.kv_tokens)
            self._on_signal(
                EndForward(unit // self._ranks, signal.duration_ns, signal.continues, signal.generates, (report,))
            )
