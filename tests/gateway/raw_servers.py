"""Servers that write raw bytes, a gateway before them, and clients that write raw bytes to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings

MODELS = b'{"data":[{"id":"m"}]}'
Answer = Callable[[asyncio.StreamWriter], Awaitable[bool]]
"""Writes the answer to a POST; True ends the connection."""


def head(status: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers]) + b"\r\n\r\n"


OK = head(b"200 OK", b"content-length: 2") + b"{}"


def post(*headers: bytes, body: bytes = b"{}", path: bytes = b"/v1/completions", host: bytes = b"host: x") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, *([host] if host else []), b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def bytes_of(data: bytes, *, close: bool = False) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        await writer.drain()
        return close

    return answer


async def silence(_: asyncio.StreamWriter) -> bool:
    await asyncio.Event().wait()
    return True


async def reset(writer: asyncio.StreamWriter) -> bool:
    writer.transport.abort()
    return True


class RawServer:
    """Answers POST with ``answer`` and GET with its model, unless ``frozen``. Keeps the heads of POST requests."""

    def __init__(self, answer: Answer, key: bytes = b"") -> None:
        self.answer, self.key = answer, key
        self.posts: list[bytes] = []
        self.frozen = False
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                if request.startswith(b"GET"):
                    await self._get(request, writer)
                    continue
                length = next(line for line in request.lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.partition(b":")[2]))
                self.posts.append(request)
                if await self.answer(writer):
                    break
        writer.close()

    async def _get(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        if self.frozen:
            await asyncio.Event().wait()
        if self.key and b"authorization: Bearer " + self.key not in request:
            writer.write(head(b"401 Unauthorized", b"content-length: 0"))
        else:
            writer.write(head(b"200 OK", b"content-length: %d" % len(MODELS)) + MODELS)


async def ask(port: int, data: bytes) -> bytes:
    """All bytes that come back for ``data``, up to the end of the first response or of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            while not _whole(received) and (part := await reader.read(1 << 16)):
                received += part
    except ConnectionError:
        received += b"<reset>"
    finally:
        writer.close()
    return received


def _whole(response: bytes) -> bool:
    start, _, body = response.partition(b"\r\n\r\n")
    length = start.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length) if length else response.endswith(b"\r\n0\r\n\r\n")


def status_of(response: bytes) -> int:
    return int(response[9:12]) if response.startswith(b"HTTP/1.1 ") else 0


def behind_gateway(play: Callable[[int], Awaitable[Any]], *servers: RawServer, **settings: Any) -> Any:
    """Run ``play`` with the port of a gateway before ``servers``."""

    async def run() -> Any:
        listening = [await asyncio.start_server(server, "127.0.0.1", 0) for server in servers]
        for server, sockets in zip(servers, listening, strict=True):
            server.url = f"http://127.0.0.1:{sockets.sockets[0].getsockname()[1]}"
        urls = tuple(server.url for server in servers)
        gateway = GatewayProcess(GatewaySettings(**{"upstreams": urls, "port": 0, "drain_s": 1.0, **settings}))
        await asyncio.to_thread(gateway.__enter__)
        try:
            return await play(int(gateway.url.rpartition(":")[2]))
        finally:
            await asyncio.to_thread(gateway.stop)
            for sockets in listening:
                sockets.close()

    loop_errors: Callable[..., None] = lambda *_: None  # noqa: E731  (of servers that are cancelled)
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(loop_errors)
        return runner.run(run())
