"""The end of an exchange: its memory is freed at once, and a second response in the same read reaches no request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest

from ebbench.client.request_sender import ConnectionPool, HttpExchange
from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from ebbench.network.connections import ProtocolError, RequestHead
from tests.client.client_runs import column, plan_of, run

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
WHOLE = HEAD + b"content-length: 3\r\n\r\nabc"


class Receiver:
    """Keeps the body of a response."""

    def __init__(self) -> None:
        self.body, self.heads = b"", 0

    first_on_connection = False

    def sent(self, now_ns: int) -> None: ...

    def head(self, status: int, now_ns: int) -> None:
        self.heads += 1

    def takes(self, content_type: str) -> bool:
        return content_type == "text/event-stream"

    def feed(self, data: bytes, now_ns: int) -> None:
        self.body += data


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live_exchanges() -> int:
    return sum(type(thing) is HttpExchange for thing in gc.get_objects())


def with_pool(answer: bytes, play: Callable[[ConnectionPool], Awaitable[None]], *, closes: bool = False) -> int:
    """Run ``play`` against a server that gives ``answer`` to every request; returns its number of connections."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
                if closes:
                    break
        writer.close()

    async def run() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
        pool = ConnectionPool(RequestHead.of("POST", url, {}), None, 5.0)
        try:
            await play(pool)
        finally:
            pool.close()
            listening.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    return connections


async def request(pool: ConnectionPool) -> Receiver:
    receiver = Receiver()
    exchange = await pool.send("r", b"", receiver)
    await exchange.body()
    exchange.close()
    return receiver


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("answer", "closes"), [(WHOLE, False), (HEAD + b"\r\nabc", True)])
def test_an_exchange_is_freed_when_it_ends(answer: bytes, closes: bool) -> None:
    async def play(pool: ConnectionPool) -> None:
        for _ in range(20):
            await request(pool)
        assert live_exchanges() <= 2

    with_pool(answer, play, closes=closes)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("fault", ["reset:every=1,after=2", "truncate:every=1,after=2", "status:every=1,code=503"])
def test_exchanges_of_failed_requests_are_freed(fault: str) -> None:
    with FakeServerProcess(FakeConfig(faults=(parse_fault(fault),))) as server:
        result = run(server.url, plan_of(20), metrics_interval_s=None)
    assert column(result, "status") == ["failed"] * 20
    assert live_exchanges() <= 2


def test_a_server_that_switches_protocols_is_named() -> None:
    async def play(pool: ConnectionPool) -> None:
        with pytest.raises(ProtocolError, match="switched protocols unasked"):
            await request(pool)

    answer = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    assert with_pool(answer, play) == 1


@pytest.mark.parametrize("second", [WHOLE, b"HTTP/1.1 100 Continue\r\n\r\n", b"stray bytes"])
def test_bytes_after_a_response_reach_no_request(second: bytes) -> None:
    async def play(pool: ConnectionPool) -> None:
        for _ in range(3):
            receiver = await request(pool)
            assert (receiver.body, receiver.heads) == (b"abc", 1)

    assert with_pool(WHOLE + second, play) == 3, "such a connection is not used again"
