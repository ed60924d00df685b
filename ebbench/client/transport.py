"""An httpx transport that hands a stream's bytes over where they are read.

httpx's own transport and httpx-aiohttp wake a task for every read and pass the bytes through several
asynchronous generators; that costs more than everything else a load generator does per token (measured in
docs/client.md). Here httptools parses in the loop's read callback, and the body of a streamed response goes to
the request's tap in the same call. The rest of httpx (URLs, headers, TLS settings, errors) stays as it is.
HTTP/1.1 only; proxies and HTTP/2 need httpx's transport.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from typing import Protocol, cast

import httptools
import httpx

TAP = "ebbench_tap"  # name of the request extension that holds a Tap
_IDLE_LIMIT_NS = 2_000_000_000  # below the 5 s after which common servers close an idle connection
_Origin = tuple[str, str, int]


class Tap(Protocol):
    """Receives the events of one exchange, each with its time (monotonic ns), inside the read callback."""

    def sent(self, now_ns: int) -> None:
        """The request goes out (a new connection, if one is needed, is opened now)."""
        ...

    def head(self, status: int, now_ns: int) -> None:
        """The response headers are complete."""
        ...

    def feed(self, data: bytes, now_ns: int) -> None:
        """Bytes of the body of an event stream."""
        ...


class DirectTransport(httpx.AsyncBaseTransport):
    """Keep-alive connections without limit in number, one request at a time on each.

    A request may carry a :class:`Tap` under the extension :data:`TAP`. The body of a 200 event stream then goes
    to the tap, and the response's own stream only ends when it has ended; other bodies are read as usual. Of
    httpx's timeouts only ``connect`` is applied: the caller bounds the rest by cancelling.
    """

    def __init__(self, verify: bool = True) -> None:
        self._tls = httpx.create_ssl_context(verify=verify)
        self._idle: dict[_Origin, list[_Wire]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and return once the response headers are there. Raises httpx's transport errors."""
        body = await request.aread()
        origin = _origin(request.url)
        tap = cast("Tap | None", request.extensions.get(TAP))
        wire = self._reusable(origin)
        if wire is None:
            if tap is not None:
                tap.sent(time.monotonic_ns())
            wire = await self._connect(origin, request)
        elif tap is not None:
            tap.sent(time.monotonic_ns())
        try:
            return await wire.exchange(request, body, tap)
        except BaseException:
            wire.abort()
            raise

    async def aclose(self) -> None:
        """Close the idle connections."""
        for wires in self._idle.values():
            for wire in wires:
                wire.abort()
        self._idle.clear()

    def release(self, wire: _Wire) -> None:
        """Take back a connection whose exchange is complete."""
        self._idle.setdefault(wire.origin, []).append(wire)

    def _reusable(self, origin: _Origin) -> _Wire | None:
        wires = self._idle.get(origin)
        while wires:
            wire = wires.pop()
            if wire.usable and time.monotonic_ns() - wire.idle_since_ns < _IDLE_LIMIT_NS:
                return wire
            wire.abort()
        return None

    async def _connect(self, origin: _Origin, request: httpx.Request) -> _Wire:
        scheme, host, port = origin
        loop = asyncio.get_running_loop()
        limit_s = request.extensions.get("timeout", {}).get("connect")
        try:
            async with asyncio.timeout(limit_s):
                _, wire = await loop.create_connection(
                    lambda: _Wire(origin, self),
                    host,
                    port,
                    ssl=self._tls if scheme == "https" else None,
                    server_hostname=host if scheme == "https" else None,
                )
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {limit_s} s", request=request) from None
        except (OSError, ssl.SSLError) as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return wire


class _Wire(asyncio.Protocol):
    """One connection, with at most one exchange at a time."""

    def __init__(self, origin: _Origin, pool: DirectTransport) -> None:
        self.origin, self.idle_since_ns = origin, 0
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None

    @property
    def usable(self) -> bool:
        """Whether the connection is open."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: httpx.Request, body: bytes, tap: Tap | None) -> httpx.Response:
        """Send the request; returns when the response headers are complete."""
        if self._transport is None:
            raise httpx.ConnectError("the connection was closed at once", request=request)
        self._exchange = _Exchange(self, request, tap)
        self._transport.write(_head_bytes(request, len(body)) + body)
        return await self._exchange.response

    def complete(self, keep_alive: bool) -> None:
        """The exchange is over; keep the connection if the server does."""
        self._exchange = None
        if keep_alive and self.usable:
            self.idle_since_ns = time.monotonic_ns()
            self._pool.release(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._exchange is None:
            self.abort()  # bytes nobody asked for
        else:
            self._exchange.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._transport = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost(exc)


class _Exchange:
    """One request and its response; receives the parser's callbacks."""

    def __init__(self, wire: _Wire, request: httpx.Request, tap: Tap | None) -> None:
        loop = asyncio.get_running_loop()
        self.response: asyncio.Future[httpx.Response] = loop.create_future()
        self.end: asyncio.Future[None] = loop.create_future()
        self.parts: list[bytes] = []
        self._wire, self._request, self._tap = wire, request, tap
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._framed = self._tapped = False
        self._now_ns = 0

    def received(self, data: bytes) -> None:
        """Bytes from the connection."""
        self._now_ns = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            why = error.__context__ or error  # the error of a callback, if it was one
            self._fail(httpx.RemoteProtocolError(f"cannot read the response: {why!r}", request=self._request))
            self.abort()

    def lost(self, exc: Exception | None) -> None:
        """The connection is gone before the exchange was complete."""
        answered = self.response.done()
        if exc is None and answered and not self._framed:
            self.end.set_result(None)  # a body without length or chunks ends with the connection
            return
        where = "in the middle of the response" if answered else "before any response"
        reason = f"{exc}, {where}" if exc is not None else f"connection closed {where}"
        kind = httpx.RemoteProtocolError if exc is None else httpx.ReadError
        self._fail(kind(reason, request=self._request))

    def abort(self) -> None:
        """Give the exchange up, and its connection with it."""
        if not self.end.done():
            self._wire.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status < 200:  # an interim response; the real one follows
            self._headers = []
            return
        response = httpx.Response(status, headers=self._headers, stream=_Body(self), request=self._request)
        if self._tap is not None:
            content_type = response.headers.get("content-type", "")
            self._tapped = status == 200 and content_type.startswith("text/event-stream")
            self._tap.head(status, self._now_ns)
        if not self.response.done():
            self.response.set_result(response)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        if self._tapped and self._tap is not None:
            self._tap.feed(data, self._now_ns)
        else:
            self.parts.append(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._parser.get_status_code() < 200 or self.end.done():
            return
        self.end.set_result(None)
        self._wire.complete(self._parser.should_keep_alive())

    def _fail(self, error: Exception) -> None:
        for future in (self.response, self.end):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen: only one of the two is awaited


class _Body(httpx.AsyncByteStream):
    """What no tap took of a response's body, once it is complete."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._exchange.end
        for part in self._exchange.parts:
            yield part

    async def aclose(self) -> None:
        """Called by httpx when it is done with the response."""
        self._exchange.abort()


def _origin(url: httpx.URL) -> _Origin:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)


def _head_bytes(request: httpx.Request, length: int) -> bytes:
    """Request line and headers as they go out."""
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b" % header for header in request.headers.raw]
    if "content-length" not in request.headers:
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
