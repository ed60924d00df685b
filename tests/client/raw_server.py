"""A server that writes raw bytes, for what no well-behaved server sends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Asked:
    """A request for an answer: its number among those for answers (from 0), path, body, headers, where to write."""

    number: int
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    writer: asyncio.StreamWriter

    @property
    def tokens(self) -> int:
        """Output tokens asked for."""
        return int(self.body.get("max_tokens") or self.body["max_completion_tokens"])

    async def send(self, data: bytes) -> None:
        """Write bytes so that they leave now."""
        self.writer.write(data)
        await self.writer.drain()

    async def event(self, message: Any) -> None:
        """Write one event in a chunk of its own."""
        await self.send(chunk(event(message)))


Answer = Callable[[Asked], Awaitable[None]]


@dataclass
class RawServer:
    """Where it listens, and what was asked so far."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    pages: dict[str, bytes] = field(default_factory=lambda: {"/health": b"", "/v1/models": b'{"data":[{"id":"m"}]}'})


@contextmanager
def raw_server(answer: Answer, pages: Mapping[str, bytes] | None = None) -> Iterator[RawServer]:
    """Serve ``pages`` by path, and each request for an answer with ``answer``. The connection stays open."""
    server, ready, stop = RawServer(), threading.Event(), threading.Event()
    server.pages |= pages or {}

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = lines[0].split(" ")
                if method == "POST" and body:
                    asked = Asked(len(server.asked), path, json.loads(body), headers, writer)
                    server.asked.append(asked)
                    await answer(asked)
                elif path in server.pages:
                    writer.write(whole(server.pages[path]))
                else:
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()  # also when the server stops: an open socket would count against the tests' limits

    async def serve() -> None:
        listening = await asyncio.start_server(client, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await asyncio.to_thread(stop.wait)
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        stop.set()
        thread.join()


def whole(body: bytes) -> bytes:
    """A response with this body."""
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(message: Any) -> bytes:
    """One event; ``message`` is bytes as they are, or encoded as JSON."""
    return b"data: " + (message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n\n"


def said(text: str | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A message of the completions endpoint."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A message of the chat endpoint."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def counted(completion: Any, prompt: Any = 5, **more: Any) -> dict[str, Any]:
    """The closing message with the usage."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}
