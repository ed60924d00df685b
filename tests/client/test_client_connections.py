"""Connections are opened before requests need them in an open loop, so that no request waits for a handshake."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ebbench.client.request_sender import ConnectionPool
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.network.connections import ProtocolError, RequestHead
from tests.client.client_runs import plan_of, run

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 2\r\n\r\nok"


class Nothing:
    """A response handler that discards everything."""

    first_on_connection = False

    def sent(self, now_ns: int) -> None: ...
    def head(self, status: int, now_ns: int) -> None: ...
    def takes(self, content_type: str) -> bool:
        return content_type == "text/event-stream"

    def feed(self, data: bytes, now_ns: int) -> None: ...


class Listener:
    """Answers every request at once, or never when ``mute``; counts connections."""

    def __init__(self) -> None:
        self.opened = 0
        self.mute = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if not self.mute:
                    writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def with_pool(test: Callable[[ConnectionPool, Listener], Awaitable[None]], listener: Listener | None = None) -> None:
    listener = listener or Listener()

    async def main() -> None:
        server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(RequestHead.of("POST", f"http://127.0.0.1:{port}/v1/completions", {}), None, 5.0)
        try:
            await test(pool, listener)
        finally:
            pool.close()
            server.close()

    asyncio.run(main())


async def settled(listener: Listener, opened: int) -> None:
    """Wait until that many connections were opened, and a little longer to see that no more come."""
    async with asyncio.timeout(10):
        while listener.opened < opened:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


@pytest.mark.parametrize("reserve", [True, False])
def test_connections_are_opened_ahead_of_need_in_an_open_loop_only(reserve: bool) -> None:
    async def scenario(pool: ConnectionPool, listener: Listener) -> None:
        await pool.prepare(2, reserve=reserve)
        sends = [asyncio.create_task(pool.send(f"r{i}", b"", Nothing())) for i in range(16)]
        # Sixteen are busy. The pool opens an eighth besides; without a reserve it opens no further connection.
        await settled(listener, 18 if reserve else 16)
        assert listener.opened == (18 if reserve else 16)
        for send in sends:
            send.cancel()
        await asyncio.gather(*sends, return_exceptions=True)

    with_pool(scenario)


def test_requests_use_the_connections_opened_ahead() -> None:
    async def scenario(pool: ConnectionPool, listener: Listener) -> None:
        listener.mute = False
        await pool.prepare(3, reserve=False)
        await settled(listener, 3)
        for i in range(20):
            exchange = await pool.send(f"r{i}", b"", Nothing())
            await exchange.body()
            exchange.close()
            if not i:
                await asyncio.sleep(0.02)  # until the server is seen to keep connections, others are used meanwhile
        assert listener.opened == 3

    with_pool(scenario)


def test_a_run_leaves_no_descriptor_open() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1)) as server:
        run(server.url, plan_of(2))
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            run(server.url, plan_of(2))
        assert len(list(Path("/proc/self/fd").iterdir())) == before


class Closer(Listener):
    """Closes a connection instead of answering a second request, although its headers say keep-alive."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()


def test_a_close_instead_of_an_answer_ends_the_use_of_connections() -> None:
    async def scenario(pool: ConnectionPool, _: Listener) -> None:
        await (await pool.send("1", b"", Nothing())).body()
        await asyncio.sleep(0.02)
        with pytest.raises(ProtocolError):
            await (await pool.send("2", b"", Nothing())).body()
        assert not pool.connections.reuse

    with_pool(scenario, Closer())


def test_a_close_that_a_busy_loop_has_not_read_is_seen_before_use() -> None:
    def serve(listening: socket.socket) -> None:
        client, _ = listening.accept()
        with client:
            client.recv(1 << 16)
            client.sendall(ANSWER)
            time.sleep(0.01)

    async def main(port: int) -> None:
        pool = ConnectionPool(RequestHead.of("POST", f"http://127.0.0.1:{port}/v1/completions", {}), None, 5.0)
        await (await pool.send("1", b"", Nothing())).body()
        time.sleep(0.1)
        assert pool.connections.take() is None
        pool.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,))
        server.start()
        asyncio.run(main(listening.getsockname()[1]))
        server.join()
