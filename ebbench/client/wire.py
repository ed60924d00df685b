"""HTTP/1.1 for streams: bytes are handed over inside the read callback, and no task wakes per token.

httpx's own transport and httpx-aiohttp wake a task for every read and pass the bytes through several
asynchronous generators; that costs more than everything else a load generator does per token, and an httpx
request costs 0.2 ms to build and send (measured in docs/client.md). Here httptools parses in the loop's read
callback, the body of an event stream goes to the request's receiver in the same call, and a request is the constant
head httpx built once plus an id and a length. Errors are httpx's.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable
from typing import Protocol, cast

import httptools
import httpx

from ebbench.connections import Address, Connections, Wire

IDLE_LIMIT_NS = 2_000_000_000  # below the 5 s after which common servers close an idle connection
_CONNECTS_AT_ONCE = 64
_RESERVE = 16  # idle connections; a request that must first open one is sent up to 20 ms later in a busy loop


class AnswerReceiver(Protocol):
    """Receives the events of one exchange, each with its time (monotonic ns), inside the read callback."""

    def sent(self, now_ns: int) -> None:
        """The request goes out (a new connection, if one is needed, is opened now)."""
        ...

    def head(self, status: int, now_ns: int) -> None:
        """The response headers are complete."""
        ...

    def feed(self, data: bytes, now_ns: int) -> None:
        """Bytes of the body of a 200 event stream; other bodies are kept by the exchange."""
        ...


class Pool:
    """Keep-alive connections to one server, without limit in number, one request at a time on each.

    ``template`` is a request as httpx builds it; its method, target and headers go out with every request.
    """

    def __init__(self, template: httpx.Request, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        self._connections = Connections(
            Address.of(template.url), _Wire, tls=tls, connect_timeout_s=connect_timeout_s, idle_limit_ns=IDLE_LIMIT_NS
        )
        lines = [b"%b %b HTTP/1.1" % (template.method.encode(), template.url.raw_path)]
        lines += [b"%b: %b" % h for h in template.headers.raw if h[0].lower() != b"content-length"]
        self._head = b"\r\n".join(lines)

    async def send(self, request_id: str, body: bytes, receiver: AnswerReceiver) -> Exchange:
        """Send one request; returns once the response headers are there. Raises httpx's transport errors."""
        wire = self._connections.take()
        receiver.sent(time.monotonic_ns())
        if wire is None:
            wire = await self._connections.connect()
        try:
            data = b"%b\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
                self._head, request_id.encode(), len(body), body,
            )  # fmt: skip
            exchange = wire.begin(data, receiver)
            await exchange.headers_complete
        except BaseException:
            wire.abort()
            raise
        return exchange

    async def prepare(self, connections: int, *, reserve: bool) -> None:
        """Open connections ahead of a start, as far as the server lets it; ``reserve`` keeps some ready ever after."""
        self._connections.reserve = _RESERVE if reserve else 0
        gate = asyncio.Semaphore(_CONNECTS_AT_ONCE)

        async def one() -> None:
            async with gate:
                self._connections.give(await self._connections.connect())

        await asyncio.gather(*(one() for _ in range(connections)), return_exceptions=True)

    def close(self) -> None:
        """Close the idle connections."""
        self._connections.close()


class _Wire(Wire):
    """One connection, with at most one exchange at a time."""

    def __init__(self, connections: Connections[_Wire]) -> None:
        super().__init__()
        self._connections = connections

    def begin(self, data: bytes, receiver: AnswerReceiver) -> Exchange:
        """Send a request."""
        if self.transport is None:
            raise httpx.ConnectError("the connection was closed at once")
        exchange = Exchange(self, receiver)
        # The exchange itself receives from now on: one call less for every read.
        self.transport.set_protocol(exchange)
        self.transport.write(data)
        return exchange

    def complete(self, keep_alive: bool) -> None:
        """The exchange is over; keep the connection if the server does."""
        if self.transport is not None:
            self.transport.set_protocol(self)
        if keep_alive and self.usable:
            self._connections.give(self)
        else:
            self.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the loop: bytes without a request."""
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.gone()

    def gone(self) -> None:
        """The connection is no more."""
        self.transport = None


class Exchange(asyncio.Protocol):
    """One request and its response; receives the parser's callbacks."""

    def __init__(self, wire: _Wire, receiver: AnswerReceiver) -> None:
        loop = asyncio.get_running_loop()
        self.headers_complete: Awaitable[None] = loop.create_future()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._end: asyncio.Future[None] = loop.create_future()
        self._start = cast("asyncio.Future[None]", self.headers_complete)
        self._parts: list[bytes] = []
        self._wire, self._receiver, self._feed = wire, receiver, receiver.feed
        self._parser = httptools.HttpResponseParser(self)
        self._tapped = False
        self._now_ns = 0

    @property
    def streaming(self) -> bool:
        """Whether the response is a 200 event stream, whose body the receiver gets."""
        return self._tapped

    async def body(self) -> bytes:
        """The body as far as the receiver did not take it, once it is complete. Raises httpx's transport errors."""
        await self._end
        return b"".join(self._parts)

    def close(self) -> None:
        """Give the exchange up if it is not complete, and its connection with it."""
        if not self._end.done():
            self._wire.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._now_ns = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            why = error.__context__ or error  # the error of a callback, if it was one
            self._fail(httpx.RemoteProtocolError(f"cannot read the response: {why!r}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop: the connection is gone before the exchange was complete."""
        self._wire.gone()
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if exc is None and self._start.done() and not framed:
            self._end.set_result(None)  # a body without length or chunks ends with the connection
            return
        where = "in the middle of the response" if self._start.done() else "before any response"
        if exc is None:
            self._fail(httpx.RemoteProtocolError(f"connection closed {where}"))
        else:
            self._fail(httpx.ReadError(f"{exc}, {where}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()
        if self.status < 200:  # an interim response; the real one follows
            self.headers = {}
            return
        self._tapped = self.status == 200 and self.headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._receiver.head(self.status, self._now_ns)
        if not self._start.done():
            self._start.set_result(None)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        if self._tapped:
            self._feed(data, self._now_ns)
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.status >= 200 and not self._end.done():
            self._end.set_result(None)
            self._wire.complete(self._parser.should_keep_alive())

    def _fail(self, error: Exception) -> None:
        for future in (self._start, self._end):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen: only one of the two is awaited
