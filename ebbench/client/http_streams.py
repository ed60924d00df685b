"""HTTP/1.1 for event streams: bytes are processed inside the read callback, without waking a task per token.

httpx's own transport and httpx-aiohttp wake a task per read and pass the bytes through several asynchronous generators,
which costs more per token than everything else in a load generator; building and sending an httpx request costs 0.2 ms
(reports/client.md). Here httptools parses in the event loop's read callback, and the receiver gets the body of
an event stream in the same call. A request is a constant head, built once by httpx, plus an id and a length. Errors are
httpx's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable
from typing import Protocol, cast

import httptools
import httpx

from ebbench.network.connections import IDLE_LIMIT_S, Address, BaseConnection, Connections
from ebbench.spec.client import Connecting

_CONNECTS_AT_ONCE = 64
_OVERHEAD_BYTES = 256 << 10  # of headers, or of framing between two pieces of a body; servers send a few kB
BODY_BYTES = 64 << 10
"""How much of a body is read that is no event stream."""
BODY_S = 10.0
"""How long such a body is waited for."""
_RESERVE = 16  # idle connections; a request that must first open a connection is sent up to 20 ms later in a busy loop


def is_event_stream(content_type: str) -> bool:
    """Whether a content type is that of server-sent events, whatever its case and parameters."""
    return content_type.partition(";")[0].strip().lower() == "text/event-stream"


class AnswerReceiver(Protocol):
    """Receives the events of one exchange with their times (monotonic ns), inside the read callback.

    ``first_on_connection`` is set when the request is sent: no response has come on its connection before.
    """

    first_on_connection: bool

    def sent(self, now_ns: int) -> None:
        """The request is being sent; a new connection, if needed, is opened now."""
        ...

    def head(self, status: int, now_ns: int) -> None:
        """The response headers are complete."""
        ...

    def feed(self, data: bytes, now_ns: int) -> None:
        """Bytes of the body of a 200 event stream. The exchange keeps bodies of other responses."""
        ...


class ConnectionPool:
    """Keep-alive connections to one server, unlimited in number, one open request per connection.

    ``template``: a request built by httpx whose method, target and headers every request gets.
    """

    def __init__(
        self,
        template: httpx.Request,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        connecting: Connecting = "ahead",
    ) -> None:
        self._connecting = connecting
        self.connections: Connections[_Connection] = Connections(
            Address.of(template.url),
            _Connection,
            tls=tls,
            connect_timeout_s=connect_timeout_s,
            idle_limit_ns=round(IDLE_LIMIT_S * 1e9),
            reuse=connecting != "per-request",
        )
        lines = [b"%b %b HTTP/1.1" % (template.method.encode(), template.url.raw_path)]
        lines += [b"%b: %b" % h for h in template.headers.raw if h[0].lower() != b"content-length"]
        self._head = b"\r\n".join(lines)

    async def send(self, request_id: str, body: bytes, receiver: AnswerReceiver) -> HttpExchange:
        """Send one request; returns once the response headers are complete. Raises httpx's transport errors."""
        connection = self.connections.take()
        receiver.sent(time.monotonic_ns())
        receiver.first_on_connection = connection is None or not connection.answered
        if connection is None:
            connection = await self.connections.open_for_use()
        try:
            data = b"%b\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
                self._head, request_id.encode(), len(body), body,
            )  # fmt: skip
            exchange = connection.begin(data, receiver)
            await exchange.headers_complete
        except BaseException:
            connection.abort()
            raise
        return exchange

    async def prepare(self, connections: int, *, reserve: bool) -> None:
        """Open connections before the start, as many as the server accepts; ``reserve`` keeps some idle ones open
        later. Does nothing unless connections are opened ahead of need."""
        if self._connecting != "ahead":
            return
        self.connections.reserve = _RESERVE if reserve else 0
        gate = asyncio.Semaphore(_CONNECTS_AT_ONCE)

        async def one() -> None:
            async with gate:
                self.connections.give(await self.connections.connect())

        await asyncio.gather(*(one() for _ in range(connections)), return_exceptions=True)

    def close(self) -> None:
        """Close the idle connections."""
        self.connections.close()


class _Connection(BaseConnection):
    """One connection with at most one open exchange."""

    def begin(self, data: bytes, receiver: AnswerReceiver) -> HttpExchange:
        """Send a request and return its exchange."""
        if self.transport is None:
            raise httpx.ConnectError("the connection was closed at once")
        exchange = HttpExchange(self, receiver)
        # From now on the exchange receives the bytes itself: one call less per read.
        self.transport.set_protocol(exchange)
        self.transport.write(data)
        return exchange

    def complete(self, keep_alive: bool) -> None:
        """See BaseConnection; the exchange receives no further bytes."""
        if self.transport is not None:
            self.transport.set_protocol(self)
        super().complete(keep_alive)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop. Bytes outside an exchange break the protocol: close the connection."""
        self.abort()


class HttpExchange(asyncio.Protocol):
    """One request and its response; implements the parser's callbacks."""

    def __init__(self, connection: _Connection, receiver: AnswerReceiver) -> None:
        loop = asyncio.get_running_loop()
        self.headers_complete: Awaitable[None] = loop.create_future()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._end: asyncio.Future[None] = loop.create_future()
        self._start = cast("asyncio.Future[None]", self.headers_complete)
        self._parts: list[bytes] = []
        self._connection, self._receiver, self._feed = connection, receiver, receiver.feed
        # The parser refers to the exchange: dropped at the end, since no full collection runs during a measurement.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._tapped = False
        self._now_ns = self._overhead_bytes = self._kept_bytes = 0

    @property
    def streaming(self) -> bool:
        """Whether the response is a 200 event stream, whose body goes to the receiver."""
        return self._tapped

    async def body(self) -> bytes:
        """The body, unless the receiver got it. Raises httpx's transport errors.

        A body that is no event stream is read up to BODY_BYTES and for BODY_S; the rest is left.
        """
        if self._tapped:
            await self._end
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BODY_S):
                    await self._end
        return b"".join(self._parts)[:BODY_BYTES]

    def close(self) -> None:
        """Abort the exchange if it is incomplete, and close its connection: the server then stops generating.

        Cancelling a task that waits for :meth:`body` cancels ``_end``, which then counts as done.
        """
        if not self._end.done() or self._end.cancelled():
            self._connection.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._now_ns = time.monotonic_ns()
        parser = self._parser
        if parser is None:
            return
        self._overhead_bytes += len(data)
        try:
            parser.feed_data(data)
            if self._overhead_bytes > _OVERHEAD_BYTES:
                self._refuse(f"more than {_OVERHEAD_BYTES >> 10} kB of headers or framing")
        except httptools.HttpParserError as error:
            self._refuse(repr(error.__context__ or error))  # the exception raised in a callback, if there was one

    def _refuse(self, why: str) -> None:
        self._fail(httpx.RemoteProtocolError(f"cannot read the response: {why}"))
        self._connection.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop when the connection closes before the exchange is complete."""
        self._parser = None
        self._connection.detach()
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if exc is None and self._start.done() and not framed:
            if not self._end.done():  # cancelled when the client gave up
                self._end.set_result(None)  # the end of the connection ends a body that has neither length nor chunks
            return
        where = "in the middle of the response" if self._start.done() else "before any response"
        if exc is None:
            self._fail(httpx.RemoteProtocolError(f"connection closed {where}"))
        else:
            self._fail(httpx.ReadError(f"{exc}, {where}"))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._parser is None:  # a second response in the same read belongs to no request
            self._connection.abort()
            raise httpx.RemoteProtocolError("the server sent more than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:  # an interim response; the final one follows
            self.headers = {}
            return
        plain = self.headers.get(b"content-encoding", b"identity") == b"identity"
        streamed = is_event_stream(self.headers.get(b"content-type", b"").decode("latin-1"))
        self._tapped = self.status == 200 and streamed and plain
        self._connection.begun()
        self._receiver.head(self.status, self._now_ns)
        if not self._start.done():
            self._start.set_result(None)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._overhead_bytes = 0
        if self._tapped:
            self._feed(data, self._now_ns)
            return
        self._parts.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes >= BODY_BYTES and not self._end.done():
            self._end.set_result(None)
            self._connection.abort()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        parser = self._parser
        if self.status >= 200 and parser is not None and not self._end.done():
            self._parser = None
            self._end.set_result(None)
            self._connection.complete(parser.should_keep_alive())

    def _fail(self, error: Exception) -> None:
        for future in (self._start, self._end):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks the exception as retrieved: only one of the two futures is awaited
