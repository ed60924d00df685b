"""Parts of the gateway in this process: its queue of requests, its relay, and its subscriber to signals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebbench.dispatch import DispatchRequest, EndForward, UnitReport
from ebbench.dispatch.base import Dispatcher, Order
from ebbench.gateway.app import SignalSubscriber
from ebbench.gateway.dispatch_queue import DispatchQueue, RefusedError
from ebbench.gateway.relay import GatewayMetrics, Relay
from ebbench.gateway.settings import GatewaySettings
from ebbench.gateway.transport import StreamTransport
from ebbench.gateway.upstreams import Upstreams
from vllm_eb.signals import Signal, SignalPublisher

REQUEST = DispatchRequest(0, 10, 20)
PASS = EndForward(0, 1)


class Ordered(Dispatcher):
    """A dispatcher that gives the orders of ``orders``, and keeps what it is told of requests."""

    wants_signals = wants_prefix = wants_units = False
    waiting = 0

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.calls: list[tuple[str, int]] = []

    def poll(self, now_ns: int) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    def next_ns(self, now_ns: int) -> int | None:
        return None

    def arrive(self, request: DispatchRequest, now_ns: int) -> None:
        self.calls.append(("arrive", request.key))

    def ended(self, key: int, now_ns: int) -> None:
        self.calls.append(("ended", key))

    def withdraw(self, key: int) -> None:
        self.calls.append(("withdraw", key))

    def end_forward(self, signal: EndForward, now_ns: int) -> None: ...

    def prefilled(self, key: int, now_ns: int) -> None: ...

    def topology(self, active: Iterable[int], now_ns: int) -> None: ...


async def waiting_request() -> tuple[Ordered, DispatchQueue, asyncio.Task[int]]:
    """A request without a unit; its task waits for one."""
    dispatcher = Ordered()
    queue = DispatchQueue(dispatcher, 10)
    task = asyncio.create_task(queue.assign(REQUEST))
    await asyncio.sleep(0)
    assert queue.waiting == 1
    return dispatcher, queue, task


def order(dispatcher: Ordered, queue: DispatchQueue, unit: int | None) -> None:
    """Give an order for the request; the end of a pass makes the queue ask for orders."""
    dispatcher.orders.append(Order(REQUEST.key, unit))
    queue.end_forward(PASS)


def test_a_request_cancelled_when_it_is_assigned_leaves_its_unit() -> None:
    async def play() -> list[tuple[str, int]]:
        dispatcher, queue, task = await waiting_request()
        order(dispatcher, queue, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return dispatcher.calls

    assert asyncio.run(play()) == [("arrive", 0), ("ended", 0)]


@pytest.mark.parametrize(("unit", "further"), [(3, [("ended", 0)]), (None, [])])
def test_an_order_for_a_withdrawn_request_leaves_its_unit_free(
    unit: int | None, further: list[tuple[str, int]]
) -> None:
    async def play() -> list[tuple[str, int]]:
        dispatcher, queue, task = await waiting_request()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        order(dispatcher, queue, unit)
        assert queue.waiting == 0
        return dispatcher.calls

    assert asyncio.run(play()) == [("arrive", 0), ("withdraw", 0), *further]


def test_a_request_that_the_dispatcher_refuses_gets_a_retry_time() -> None:
    async def play() -> RefusedError:
        dispatcher, queue, task = await waiting_request()
        order(dispatcher, queue, None)
        with pytest.raises(RefusedError, match="too many dispatch cycles") as refusal:
            await task
        assert (queue.refused, queue.waiting) == (1, 0)
        return refusal.value

    assert asyncio.run(play()).retry_after_s == 1


class Client:
    """An ASGI connection that delivers ``messages`` and then nothing; keeps what it is sent."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = list(messages)
        self.sent: list[MutableMapping[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)


SCOPE = {"method": "POST", "path": "/v1/completions", "headers": []}


def with_relay(play: Callable[[Relay, Ordered, GatewayMetrics], Any]) -> None:
    """Run ``play`` with a relay whose dispatcher assigns no request by itself."""

    async def run() -> None:
        settings = GatewaySettings(upstreams=("http://127.0.0.1:1",))
        dispatcher, metrics, transport = Ordered(), GatewayMetrics(), StreamTransport(1.0)
        queue = DispatchQueue(dispatcher, 10)
        upstreams = Upstreams(settings, transport, queue.topology)
        try:
            relay = Relay(settings, upstreams, queue, transport, metrics, infer=False)
            await asyncio.wait_for(play(relay, dispatcher, metrics), 60)
        finally:
            await upstreams.close()
            await transport.aclose()
            queue.close()

    asyncio.run(run())


def test_a_client_that_leaves_within_its_body_is_never_queued() -> None:
    async def play(relay: Relay, dispatcher: Ordered, metrics: GatewayMetrics) -> None:
        client = Client({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
        await relay(SCOPE, client.receive, client.send)
        assert (client.sent, dispatcher.calls) == ([], [])

    with_relay(play)


@pytest.mark.parametrize("leaves", [True, False])
def test_only_a_request_whose_client_left_counts_as_abandoned(leaves: bool) -> None:
    """A gateway that stops cancels its requests too: that is an error of theirs, not of their clients."""

    async def play(relay: Relay, dispatcher: Ordered, metrics: GatewayMetrics) -> None:
        client = Client({"type": "http.request", "body": b"{}"}, *([{"type": "http.disconnect"}] if leaves else []))
        task = asyncio.create_task(relay(SCOPE, client.receive, client.send))
        while dispatcher.calls != [("arrive", 0), ("withdraw", 0)]:
            await asyncio.sleep(0.001)
            if not leaves and dispatcher.calls:
                task.cancel()
        if leaves:
            await task
        else:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert f"abandoned_total {float(leaves)}" in metrics.render().decode()

    with_relay(play)


def test_signals_of_every_rank_reach_the_gateway(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    endpoints = tuple(f"ipc://{tmp_path}/{name}" for name in "ab")
    first, second = Signal(0, 1, 500, 2, 30, 40, True, False), Signal(1, 7, 900, 3, 50, 60, False, True)

    async def play() -> list[EndForward]:
        heard: list[EndForward] = []
        settings = GatewaySettings(upstreams=("http://a", "http://b"), dp_ranks=2, signals=endpoints)
        subscriber = SignalSubscriber(settings, heard.append)
        subscriber.start()
        context, publisher = zmq.Context(), SignalPublisher(endpoints[1], rank=1)
        plain = context.socket(zmq.PUB)
        plain.bind(endpoints[0])
        try:
            while len({signal.instance for signal in heard}) < 2:  # signals before the connection are lost
                plain.send(b"no signal")
                plain.send(msgspec.msgpack.encode(first))
                publisher.publish(second)
                await asyncio.sleep(0.01)
        finally:
            await subscriber.close()
            publisher.close()
            context.destroy(linger=0)
        return heard

    assert set(asyncio.run(asyncio.wait_for(play(), 60))) == {
        EndForward(0, 500, True, False, (UnitReport(0, 2, 30, 40),)),
        EndForward(1, 900, False, True, (UnitReport(3, 3, 50, 60),)),
    }
