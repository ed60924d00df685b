"""An httpx transport for streams: HTTP/1.1 on keep-alive connections, parsed by httptools.

httpx's own transport parses in Python and passes every piece of a body through several asynchronous generators, which
costs more per token than all the rest of the gateway. Here a read wakes the relaying task once, with everything that
came. Only plain and TLS HTTP/1.1 without proxies, which is what servers behind a gateway speak.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple, cast

import httptools
import httpx

_IDLE_LIMIT_S = 4.0  # below the 5 s after which uvicorn closes an idle connection
_RESERVE = 8  # connections to each server that are open before anyone needs them
_PAUSE_BYTES = 1 << 20  # a client that reads slowly must not fill the gateway's memory


class _Address(NamedTuple):
    """Where a connection goes."""

    host: str
    port: int
    secure: bool


class StreamTransport(httpx.AsyncBaseTransport):
    """Keep-alive connections to any number of servers."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[_Address, deque[_Wire]] = {}
        self._refills: dict[_Address, asyncio.Task[None]] = {}
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send; returns when the response's headers are there. Raises httpx's transport errors.

        A kept connection that the server closed in the meantime is replaced by a new one: nothing was answered on it.
        """
        body = await request.aread()
        while True:
            wire, kept = await self._wire(request)
            try:
                return await wire.exchange(request, body)
            except httpx.RemoteProtocolError:
                if not (kept and wire.untouched):
                    raise
            except BaseException:
                wire.abort()
                raise

    async def aclose(self) -> None:
        """Close the kept connections."""
        self._closed = True
        for task in self._refills.values():
            task.cancel()
        for wires in self._idle.values():
            for wire in wires:
                wire.abort()
        self._idle.clear()

    async def _wire(self, request: httpx.Request) -> tuple[_Wire, bool]:
        url = request.url
        secure = url.scheme == "https"
        address = _Address(url.host, url.port or (443 if secure else 80), secure)
        kept = self._idle.setdefault(address, deque())
        found = None
        while kept and found is None:
            wire = kept.pop()
            if wire.fresh:
                found = wire
            else:
                wire.abort()
        if len(kept) < _RESERVE and address not in self._refills:
            self._refills[address] = asyncio.create_task(self._refill(address, kept))
        if found is not None:
            return found, True
        return await self._connect(address, kept), False

    async def _refill(self, address: _Address, kept: deque[_Wire]) -> None:
        """Open connections ahead of need: one opened in a busy loop makes its request wait for milliseconds."""
        try:
            while kept and not kept[0].fresh:
                kept.popleft().abort()
            while len(kept) < _RESERVE and not self._closed:
                wire = await self._connect(address, kept)
                wire.idle_since_s = time.monotonic()
                kept.appendleft(wire)
        except httpx.TransportError:
            pass  # a request that needs a connection will say so
        finally:
            self._refills.pop(address, None)

    async def _connect(self, address: _Address, kept: deque[_Wire]) -> _Wire:
        if address.secure and self._tls is None:
            self._tls = httpx.create_ssl_context()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, wire = await asyncio.get_running_loop().create_connection(
                    lambda: _Wire(kept),
                    address.host,
                    address.port,
                    ssl=self._tls if address.secure else None,
                    server_hostname=address.host if address.secure else None,
                )
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {self._connect_timeout_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise httpx.ConnectError(str(error)) from error
        return wire


class _Wire(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self, kept: deque[_Wire]) -> None:
        self._kept = kept
        self._transport: asyncio.Transport | None = None
        self._reply: _Reply | None = None
        self.idle_since_s = 0.0
        self.untouched = True

    @property
    def open(self) -> bool:
        """Whether it can be used."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def fresh(self) -> bool:
        """Whether it can be used, and the server will not be about to close it."""
        return self.open and time.monotonic() - self.idle_since_s < _IDLE_LIMIT_S

    async def exchange(self, request: httpx.Request, body: bytes) -> httpx.Response:
        """Send the request and wait for the head of the response."""
        if self._transport is None:
            raise httpx.RemoteProtocolError("the connection was closed at once")
        self.untouched = True
        reply = self._reply = _Reply(self)
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%b: %b" % header for header in request.headers.raw]
        self._transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        await reply.head
        return httpx.Response(reply.status, headers=reply.headers, stream=reply, request=request)

    def complete(self, keep_alive: bool) -> None:
        """The exchange is over."""
        self._reply = None
        if keep_alive and self.open:
            self.idle_since_s = time.monotonic()
            self._kept.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def reading(self, wanted: bool) -> None:
        """Take more from the server, or let it wait."""
        if self._transport is not None and self.open:
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.untouched = False
        if self._reply is None:
            self.abort()  # bytes nobody asked for
        else:
            self._reply.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._transport = None
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.lost(exc)


class _Reply(httpx.AsyncByteStream):
    """A response as it comes; iterating gives what came since the last time, undivided."""

    def __init__(self, wire: _Wire) -> None:
        self.head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._wire = wire
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._size = 0
        self._paused = False
        self._complete = False
        self._error: httpx.TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._parts:
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._size = 0
                if self._paused:
                    self._paused = False
                    self._wire.reading(True)
                yield data
            elif self._error is not None:
                raise self._error
            elif self._complete:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    async def aclose(self) -> None:
        """Give the rest up, if there is any; the server sees the connection closed."""
        if not self._complete:
            self._wire.abort()

    def received(self, data: bytes) -> None:
        """Bytes from the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(f"cannot read the response: {error}"))
            self._wire.abort()
        if self._size > _PAUSE_BYTES and not self._paused and not self._complete:
            self._paused = True
            self._wire.reading(False)
        self._wake()

    def lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        framed = any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if exc is None and self.head.done() and not framed:
            self._complete = True  # a body without length or chunks ends with the connection
        else:
            where = "in the middle of the answer" if self.head.done() else "before any answer"
            self._fail(httpx.RemoteProtocolError(f"connection closed {where}" if exc is None else f"{exc}, {where}"))
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()
        if self.status < 200:  # an interim response; the real one follows
            self.headers = []
        elif not self.head.done():
            self.head.set_result(None)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._parts.append(data)
        self._size += len(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.status >= 200 and not self._complete:
            self._complete = True
            if self._paused:
                self._paused = False
                self._wire.reading(True)
            self._wire.complete(self._parser.should_keep_alive())

    def _fail(self, error: httpx.TransportError) -> None:
        if self._complete or self._error is not None:
            return
        self._error = error
        if not self.head.done():
            self.head.set_exception(error)
            self.head.exception()  # marks it as seen, should nobody wait any more

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
