"""An httpx transport for event streams: HTTP/1.1 on keep-alive connections, parsed by httptools.

httpx's own transport parses in Python and passes every piece of a body through several asynchronous generators, which
costs more per token than the rest of the gateway; aiohttp's doubles the time that the gateway adds to a first token
(reports/cluster). Here one read wakes the relaying task once, with all bytes that arrived. Supports HTTP/1.1 with and
without TLS, no proxies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import httptools
import httpx

from ebbench.network.connections import (
    IDLE_LIMIT_S,
    Address,
    ConnectError,
    Connection,
    Connections,
    ConnectTimeoutError,
    tls_context,
)

MAX_HEAD_BYTES = 1 << 16  # of one response: headers, interim responses before them, trailers
_RESERVE = 8  # connections per server that are opened before requests need them
_PAUSE_BYTES = 1 << 20  # bounds the gateway's memory for a client that reads slowly


class StreamTransport(httpx.AsyncBaseTransport):
    """Keep-alive connections to any number of servers.

    A response of which no byte arrives for ``silence_s`` fails with ReadTimeout.
    """

    def __init__(self, connect_timeout_s: float, silence_s: float = 300.0) -> None:
        self._connect_timeout_s, self.silence_s = connect_timeout_s, silence_s
        self.unanswered: set[_UpstreamResponse] = set()
        self._tls: ssl.SSLContext | None = None
        self._servers: dict[Address, Connections] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; returns when the response headers are complete. Raises httpx's transport errors.

        ConnectError and ConnectTimeout mean that the server has not seen the request. Nothing is sent twice.
        """
        body = await request.aread()
        address = _address(request.url)
        connections = self._connections(address)
        try:
            connection = connections.take() or await connections.open_for_use()
        except ConnectTimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except ConnectError as error:
            raise httpx.ConnectError(str(error)) from error
        try:
            return await self._exchange(connection, address, request, body)
        except BaseException:
            connection.abort()
            raise

    async def _exchange(
        self, connection: Connection, address: Address, request: httpx.Request, body: bytes
    ) -> httpx.Response:
        """Send the request and wait for the response headers."""
        reply = _UpstreamResponse(connection, address, self.silence_s, bodyless=request.method == "HEAD")
        target = request.extensions.get("target", request.url.raw_path)
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), target)]
        lines += [b"%b: %b" % header for header in request.headers.raw]
        try:
            connection.begin(reply, [b"\r\n".join(lines) + b"\r\n\r\n", body])  # the body is not copied
        except ConnectError as error:
            raise httpx.ConnectError(str(error)) from error
        self.unanswered.add(reply)
        try:
            await reply.head
        finally:
            self.unanswered.discard(reply)
        return httpx.Response(reply.status, headers=reply.headers, stream=reply, request=request)

    def give_up(self, url: str, reason: str) -> None:
        """Fail the requests to a server that have no answer yet, with ReadTimeout."""
        address = _address(httpx.URL(url))
        for response in [r for r in self.unanswered if r.address == address]:
            response.give_up(httpx.ReadTimeout(reason))

    async def aclose(self) -> None:
        """Close the idle connections."""
        for connections in self._servers.values():
            connections.close()

    def _connections(self, address: Address) -> Connections:
        connections = self._servers.get(address)
        if connections is None:
            if address.secure and self._tls is None:
                self._tls = tls_context()
            connections = self._servers[address] = Connections(
                address,
                tls=self._tls,
                connect_timeout_s=self._connect_timeout_s,
                idle_limit_ns=round(IDLE_LIMIT_S * 1e9),
                reserve=_RESERVE,
            )
        return connections


class _UpstreamResponse(httpx.AsyncByteStream):
    """A response while it arrives; iterating yields the bytes received since the last iteration.

    ``bodyless``: the response ends with its headers, whatever they say about a body, as for a HEAD request.
    """

    def __init__(self, connection: Connection, address: Address, silence_s: float, *, bodyless: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.head: asyncio.Future[None] = self._loop.create_future()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.address, self._silence_s = address, silence_s
        self._connection, self._bodyless = connection, bodyless
        # The parser refers to the response: dropped at the end, since the gateway runs no full collections.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._size = self._unparsed = self._head_bytes = 0
        self._paused = False
        self._complete = False
        self._error: httpx.TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(self._silence_s, self._check_silence)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._parts:
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._size = 0
                if self._paused:
                    self._paused = False
                    self._read(True)
                yield data
            elif self._error is not None:
                raise self._error
            elif self._complete:
                return
            else:
                self._waiter = self._loop.create_future()
                await self._waiter

    async def aclose(self) -> None:
        """Abort the rest of the response, if any; the server sees its connection closed."""
        if not self._complete:
            self._end()
            self._connection.abort()

    def received(self, data: bytes) -> None:
        """Process bytes from the connection."""
        self._heard_s = self._loop.time()
        parser = self._parser
        if parser is None:
            self._connection.abort()
            return
        self._unparsed += len(data)
        try:
            parser.feed_data(data)
            if self._unparsed > MAX_HEAD_BYTES:
                raise _too_large()
        except httptools.HttpParserUpgrade:
            self.give_up(httpx.RemoteProtocolError("it switched protocols unasked"))
        except (httptools.HttpParserError, httpx.RemoteProtocolError) as error:
            self.give_up(httpx.RemoteProtocolError(f"cannot read the response: {error.__context__ or error}"))
        if self._size > _PAUSE_BYTES and not self._paused and not self._complete:
            self._paused = True
            self._read(False)
        self._wake()

    def lost(self, exc: Exception | None) -> None:
        """Record that the connection is closed."""
        framed = any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if exc is None and self.head.done() and not framed and self._error is None:
            self._complete = True  # the end of the connection ends a body that has neither length nor chunks
            self._end()
        else:
            where = "in the middle of the answer" if self.head.done() else "before any answer"
            self._fail(httpx.RemoteProtocolError(f"connection closed {where}" if exc is None else f"{exc}, {where}"))
        self._wake()

    def give_up(self, error: httpx.TransportError) -> None:
        """Fail the response and close its connection."""
        self._fail(error)
        self._connection.abort()
        self._wake()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._complete:  # a second response in the same read belongs to no request
            self._connection.abort()
            raise httpx.RemoteProtocolError("the server sent more than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, for trailers too; these are not passed on."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _too_large()
        if not self.head.done():
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200:  # an interim response; the final one follows
            self.headers = []
        elif not self.head.done():
            self._connection.begun()
            self.head.set_result(None)
            if self._bodyless:
                # The parser expects a body: do not use it or the connection again.
                self._complete = True
                self._end()
                self._connection.complete(keep_alive=False)
            else:
                self._unparsed = 0

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        if not self._complete:
            self._parts.append(data)
            self._size += len(data)
            self._unparsed = 0

    def on_message_complete(self) -> None:
        """Called by the parser."""
        parser = self._parser
        interim = 100 <= self.status < 200
        if not interim and not self._complete and parser is not None:
            self._complete = True
            self._end()
            if self._paused:
                self._paused = False
                self._read(True)
            self._connection.complete(parser.should_keep_alive())

    def _read(self, wanted: bool) -> None:
        """Resume or pause reading from the server."""
        transport = self._connection.transport
        if transport is not None and self._connection.usable:
            (transport.resume_reading if wanted else transport.pause_reading)()

    def _end(self) -> None:
        """Free what refers to this response."""
        self._parser = None
        self._timer.cancel()

    def _check_silence(self) -> None:
        """Give up a server that was silent for too long; a client that reads slowly is not the server's fault."""
        quiet_s = 0.0 if self._paused else self._loop.time() - self._heard_s
        if quiet_s >= self._silence_s:
            self.give_up(httpx.ReadTimeout(f"no byte within {self._silence_s:g} s"))
        else:
            self._timer = self._loop.call_later(self._silence_s - quiet_s, self._check_silence)

    def _fail(self, error: httpx.TransportError) -> None:
        if self._complete or self._error is not None:
            return
        self._error = error
        self._end()
        if not self.head.done():
            self.head.set_exception(error)
            self.head.exception()  # marks the exception as retrieved, in case no task waits for it

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _address(url: httpx.URL) -> Address:
    secure = url.scheme == "https"
    return Address(url.host, url.port or (443 if secure else 80), secure)


def _too_large() -> httpx.RemoteProtocolError:
    return httpx.RemoteProtocolError(f"headers larger than {MAX_HEAD_BYTES >> 10} KiB")
