"""The gateway's connections to its upstreams are open before they are needed, and never too old to be used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import httpx
import pytest

from ebbench.gateway.transport import _RESERVE, StreamTransport

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers every request with 204 and counts connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def request(transport: StreamTransport, port: int) -> int:
    response = await transport.handle_async_request(httpx.Request("GET", f"http://127.0.0.1:{port}/"))
    await response.aread()
    return response.status_code


def refilling(transport: StreamTransport) -> bool:
    return any(connections.refill is not None for connections in transport._servers.values())


def scenario(play: Callable[[StreamTransport, Server, int], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server()
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        transport = StreamTransport(5.0)
        try:
            await play(transport, server, listening.sockets[0].getsockname()[1])
        finally:
            await transport.aclose()
            listening.close()

    asyncio.run(run())


def test_spares_are_an_eighth_of_what_was_in_use_and_taken_by_the_next() -> None:
    async def play(transport: StreamTransport, server: Server, port: int) -> None:
        assert await request(transport, port) == 204
        await until(lambda: not refilling(transport))
        assert server.connections == 2, "one, and one ahead"
        assert await asyncio.gather(*(request(transport, port) for _ in range(40))) == [204] * 40
        await until(lambda: not refilling(transport))
        assert server.connections <= 40 + max(_RESERVE, 40 // 8) + 1

    scenario(play)


def test_spares_that_the_server_closed_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(transport: StreamTransport, server: Server, port: int) -> None:
        assert await request(transport, port) == 204
        await until(lambda: server.connections >= 2 and not refilling(transport))
        for writer in server.writers:
            writer.close()
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert await request(transport, port) == 204

    scenario(play)


def test_a_server_that_is_gone_fails_the_request_and_nothing_else() -> None:
    async def play(transport: StreamTransport, server: Server, port: int) -> None:
        with pytest.raises(httpx.ConnectError):
            await request(transport, 1)
        assert await request(transport, port) == 204
        await until(lambda: not refilling(transport))

    scenario(play)
