"""An httpx transport for event streams: HTTP/1.1 on keep-alive connections, parsed by httptools.

httpx's own transport parses in Python and passes every piece of a body through several asynchronous generators, which
costs more per token than the rest of the gateway. Here one read wakes the relaying task once, with all bytes that
arrived. Supports HTTP/1.1 with and without TLS, no proxies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import httptools
import httpx

from ebbench.connections import Address, BaseConnection, Connections, tls_context

_IDLE_LIMIT_NS = 4_000_000_000  # below the 5 s after which uvicorn closes an idle connection
_RESERVE = 8  # connections per server that are opened before requests need them
_PAUSE_BYTES = 1 << 20  # bounds the gateway's memory for a client that reads slowly


class StreamTransport(httpx.AsyncBaseTransport):
    """Keep-alive connections to any number of servers."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._tls: ssl.SSLContext | None = None
        self._servers: dict[Address, Connections[_Connection]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; returns when the response headers are complete. Raises httpx's transport errors.

        If the server has closed a kept connection in the meantime, the request is sent on a new one: no response had
        begun. It is sent once more at most, as the server may close every connection that brings this request.
        """
        body = await request.aread()
        connections = self._connections(Address.of(request.url))
        kept = connections.take()
        while True:
            connection = kept or await connections.open_for_use()
            try:
                return await connection.exchange(request, body)
            except httpx.RemoteProtocolError:
                if kept is None or not connection.untouched:
                    raise
                kept = None
            except BaseException:
                connection.abort()
                raise

    async def aclose(self) -> None:
        """Close the idle connections."""
        for connections in self._servers.values():
            connections.close()

    def _connections(self, address: Address) -> Connections[_Connection]:
        found = self._servers.get(address)
        if found is None:
            if address.secure and self._tls is None:
                self._tls = tls_context()
            found = self._servers[address] = Connections(
                address,
                _Connection,
                tls=self._tls,
                connect_timeout_s=self._connect_timeout_s,
                idle_limit_ns=_IDLE_LIMIT_NS,
                reserve=_RESERVE,
            )
        return found


class _Connection(BaseConnection):
    """One connection with at most one open exchange."""

    def __init__(self, connections: Connections[_Connection]) -> None:
        super().__init__(connections)
        self._reply: _UpstreamResponse | None = None
        self.untouched = True

    async def exchange(self, request: httpx.Request, body: bytes) -> httpx.Response:
        """Send the request and wait for the response headers."""
        if self.transport is None:
            raise httpx.RemoteProtocolError("the connection was closed at once")
        self.untouched = True
        reply = self._reply = _UpstreamResponse(self, bodyless=request.method == "HEAD")
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%b: %b" % header for header in request.headers.raw]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        await reply.head
        return httpx.Response(reply.status, headers=reply.headers, stream=reply, request=request)

    def complete(self, keep_alive: bool) -> None:
        """See BaseConnection; further bytes belong to no request."""
        self._reply = None
        super().complete(keep_alive)

    def reading(self, wanted: bool) -> None:
        """Resume or pause reading from the server."""
        if self.transport is not None and self.usable:
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.untouched = False
        if self._reply is None:
            self.abort()  # the server sent bytes without a request
        else:
            self._reply.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.detach()
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.lost(exc)


class _UpstreamResponse(httpx.AsyncByteStream):
    """A response while it arrives; iterating yields the bytes received since the last iteration.

    ``bodyless``: the response ends with its headers, whatever they say about a body, as for a HEAD request.
    """

    def __init__(self, connection: _Connection, *, bodyless: bool) -> None:
        self.head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._connection, self._bodyless = connection, bodyless
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
                    self._connection.reading(True)
                yield data
            elif self._error is not None:
                raise self._error
            elif self._complete:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    async def aclose(self) -> None:
        """Abort the rest of the response, if any; the server sees its connection closed."""
        if not self._complete:
            self._connection.abort()

    def received(self, data: bytes) -> None:
        """Process bytes from the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(f"cannot read the response: {error}"))
            self._connection.abort()
        if self._size > _PAUSE_BYTES and not self._paused and not self._complete:
            self._paused = True
            self._connection.reading(False)
        self._wake()

    def lost(self, exc: Exception | None) -> None:
        """Record that the connection is closed."""
        framed = any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if exc is None and self.head.done() and not framed:
            self._complete = True  # the end of the connection ends a body that has neither length nor chunks
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
        if self.status < 200:  # an interim response; the final one follows
            self.headers = []
        elif not self.head.done():
            self._connection.begun()
            self.head.set_result(None)
            if self._bodyless:
                # The parser expects a body: do not use it or the connection again.
                self._complete = True
                self._connection.complete(keep_alive=False)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        if not self._complete:
            self._parts.append(data)
            self._size += len(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.status >= 200 and not self._complete:
            self._complete = True
            if self._paused:
                self._paused = False
                self._connection.reading(True)
            self._connection.complete(self._parser.should_keep_alive())

    def _fail(self, error: httpx.TransportError) -> None:
        if self._complete or self._error is not None:
            return
        self._error = error
        if not self.head.done():
            self.head.set_exception(error)
            self.head.exception()  # marks the exception as retrieved, in case no task waits for it

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
