"""A server on 127.0.0.1 that answers what a test says, byte for byte, for what the fake server never does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

EVENTS = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Bytes to send, or a coroutine that sends them."""


def reply(status: str, body: bytes = b"", **headers: str) -> bytes:
    """A whole response; ``content_type`` stands for the header content-type."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def models(*names: str) -> bytes:
    """The answer of /v1/models."""
    return reply("200 OK", json.dumps({"data": [{"id": name} for name in names]}).encode())


def event(document: object) -> bytes:
    """A message of an event stream."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def completion(tokens: int) -> bytes:
    """The messages of a completion with so many tokens."""
    parts = [
        event({"choices": [{"text": "a", "finish_reason": "length" if left == 1 else None}]})
        for left in range(tokens, 0, -1)
    ]
    usage = {"prompt_tokens": 5, "completion_tokens": tokens}
    return b"".join(parts) + event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def streamed(tokens: int) -> bytes:
    """A completion as a chunked response."""
    body = completion(tokens)
    return EVENTS.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@dataclass
class OddServer:
    """``pages``: answers by path; ``post``: the answer of every POST, None a completion of as many tokens as asked."""

    pages: Mapping[str, Answer] = field(default_factory=dict)
    post: Answer | None = None
    tls: ssl.SSLContext | None = None
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, object]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
                path = lines[0].split(" ")[1]
                length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                self.paths.append(path)
                await self._answer(path, body, writer)
                await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        answer = self.pages.get(path)
        if answer is None and path.partition("?")[0].endswith("completions"):
            asked = json.loads(body)
            self.bodies.append(asked)
            answer = self.post or streamed(asked.get("max_tokens") or asked.get("max_completion_tokens"))
        if answer is None:
            answer = {"/health": reply("200 OK"), "/v1/models": models("m")}.get(path, reply("404 Not Found"))
        if isinstance(answer, bytes):
            writer.write(answer)
        else:
            await answer(writer)


@contextmanager
def running(server: OddServer) -> Iterator[OddServer]:
    """Run the server in a thread of its own."""
    started, stop = SimpleQueue[int](), threading.Event()

    async def listen() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=512, ssl=server.tls)
        started.put(listening.sockets[0].getsockname()[1])
        await asyncio.to_thread(stop.wait)
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    server.port = started.get(timeout=30)
    try:
        yield server
    finally:
        stop.set()
        thread.join()
