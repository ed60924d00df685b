"""Sends requests and enforces their timeouts. A request is never sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import httptools

from ebbench.client.dialects import DIALECTS
from ebbench.client.messages import ConnectionCounts
from ebbench.client.response import HUNG_UP, StreamedResponse, transport_failure
from ebbench.network.connections import (
    IDLE_LIMIT_S,
    ConnectError,
    Connection,
    Connections,
    ConnectTimeoutError,
    IdleTimeoutError,
    ProtocolError,
    RequestHead,
    ResetError,
    TransportError,
    tls_context,
)
from ebbench.network.credentials import api_key
from ebbench.network.questions import decoded
from ebbench.spec.client import ClientOptions, Connecting

if TYPE_CHECKING:
    import httpx

# HTTP/1.1 for event streams: bytes are processed inside the read callback, without waking a task per token.
#
# httpx's own transport and httpx-aiohttp wake a task per read and pass the bytes through several asynchronous
# generators, which costs more per token than everything else in a load generator; building and sending an httpx
# request costs 0.2 ms (reports/client.md). Here httptools parses in the event loop's read callback, and the
# receiver gets the body of an event stream in the same call. A request is a constant head, built once in the parent
# process, plus an id and a length.

_CONNECTS_AT_ONCE = 64
_OVERHEAD_BYTES = 256 << 10  # of headers, or of framing between two pieces of a body; servers send a few kB
BODY_BYTES = 64 << 10
"""How much of a body is read that is no answer."""
BODY_S = 10.0
"""How long such a body is waited for."""
_RESERVE = 16  # idle connections; a request that must first open a connection is sent up to 20 ms later in a busy loop


class AnswerReceiver(Protocol):
    """Receives the answer of one exchange with its times (monotonic ns), inside the read callback.

    ``first_on_connection`` is set when the request is sent: no response has come on its connection before.
    """

    first_on_connection: bool

    def sent(self, now_ns: int) -> None:
        """The request is being sent; a new connection, if needed, is opened now."""
        ...

    def head(self, status: int, now_ns: int) -> None:
        """The response headers are complete."""
        ...

    def takes(self, content_type: str) -> bool:
        """Whether a body of this type is an answer."""
        ...

    def feed(self, data: bytes, now_ns: int) -> None:
        """Bytes of the body of a 200 response that is an answer. The exchange keeps bodies of other responses."""
        ...


class ConnectionPool:
    """Keep-alive connections to one server, unlimited in number, one open request per connection.

    ``head``: request line and headers of every request.
    """

    def __init__(
        self,
        head: RequestHead,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        connecting: Connecting = "ahead",
    ) -> None:
        self._connecting = connecting
        self.connections = Connections(
            head.address,
            tls=tls,
            connect_timeout_s=connect_timeout_s,
            idle_limit_ns=round(IDLE_LIMIT_S * 1e9),
            reuse=connecting != "per-request",
        )
        self._head = head.text

    async def send(self, request_id: str, body: bytes, receiver: AnswerReceiver) -> HttpExchange:
        """Send one request, without an id if that is empty; its response is awaited. Raises TransportError."""
        connection = self.connections.take()
        receiver.sent(time.monotonic_ns())
        receiver.first_on_connection = connection is None or not connection.answered
        if connection is None:
            connection = await self.connections.open_for_use()
        try:
            named = b"x-request-id: %b\r\n" % request_id.encode() if request_id else b""
            data = b"%b\r\n%bcontent-length: %d\r\n\r\n%b" % (self._head, named, len(body), body)
            exchange = HttpExchange(connection, receiver)
            connection.begin(exchange, (data,))
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

        async def connect() -> None:
            async with gate:
                self.connections.give(await self.connections.connect())

        await asyncio.gather(*(connect() for _ in range(connections)), return_exceptions=True)

    def close(self) -> None:
        """Close the idle connections."""
        self.connections.close()


class HttpExchange:
    """One request and its response; implements the parser's callbacks."""

    def __init__(self, connection: Connection, receiver: AnswerReceiver) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        # One future where one will do: each costs a turn of the loop for every request.
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head: asyncio.Future[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._parts: list[bytes] = []
        self._connection, self._receiver, self._feed = connection, receiver, receiver.feed
        # The parser refers to the exchange: dropped at the end, since no full collection runs during a measurement.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._begun = self._tapped = False
        self._now_ns = self._overhead_bytes = self._kept_bytes = 0

    @property
    def streaming(self) -> bool:
        """Whether the response is a 200 with an answer, whose body goes to the receiver."""
        return self._tapped

    async def head(self) -> None:
        """Wait for the response headers. Raises TransportError."""
        if not self._begun and not self._end.done():
            self._head = asyncio.get_running_loop().create_future()
            await self._head

    async def body(self) -> bytes:
        """The body, unless the receiver got it. Raises TransportError.

        A body that is no answer is read up to BODY_BYTES and for BODY_S; the rest is left.
        """
        await self._end
        return b"".join(self._parts)[:BODY_BYTES]

    def close(self) -> None:
        """Abort the exchange if it is incomplete, and close its connection: the server then stops generating.

        Cancelling a task that waits for :meth:`body` cancels ``_end``, which then counts as done.
        """
        if self._patience is not None:
            self._patience.cancel()
        if not self._end.done() or self._end.cancelled():
            self._connection.abort()

    def received(self, data: bytes) -> None:
        """See Exchange."""
        self._now_ns = time.monotonic_ns()
        parser = self._parser
        if parser is None:
            return
        self._overhead_bytes += len(data)
        try:
            parser.feed_data(data)
            if self._overhead_bytes > _OVERHEAD_BYTES:
                self._refuse(f"more than {_OVERHEAD_BYTES >> 10} kB of headers or framing")
        except httptools.HttpParserUpgrade:
            self._refuse("the server switched protocols unasked")
        except httptools.HttpParserError as error:
            self._refuse(repr(error.__context__ or error))  # the exception raised in a callback, if there was one

    def _refuse(self, why: str) -> None:
        self._fail(ProtocolError(f"cannot read the response: {why}"))
        self._connection.abort()

    def lost(self, exc: Exception | None) -> None:
        """See Exchange."""
        self._parser = None
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if exc is None and self._begun and not framed:
            if not self._end.done():  # cancelled when the client gave up
                self._end.set_result(None)  # the end of the connection ends a body that has neither length nor chunks
            return
        where = "in the middle of the response" if self._begun else "before any response"
        if exc is None:
            self._fail(ProtocolError(f"connection closed {where}"))
        else:
            self._fail(ResetError(f"{exc}, {where}"))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._parser is None:  # a second response in the same read belongs to no request
            self._connection.abort()
            raise ProtocolError("the server sent more than one response")

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
        plain = not _compressed(self.headers.get(b"content-encoding", b"").decode("latin-1"))
        streamed = self._receiver.takes(self.headers.get(b"content-type", b"").decode("latin-1"))
        self._begun, self._tapped = True, self.status == 200 and streamed and plain
        self._connection.begun()
        self._receiver.head(self.status, self._now_ns)
        if not self._tapped:
            self._patience = asyncio.get_running_loop().call_later(BODY_S, self._leave_rest)
        if self._head is not None and not self._head.done():
            self._head.set_result(None)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._overhead_bytes = 0
        if self._tapped:
            self._feed(data, self._now_ns)
            return
        self._parts.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes >= BODY_BYTES:
            self._leave_rest()

    def _leave_rest(self) -> None:
        if not self._end.done():
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
        for future in (self._head, self._end):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # marks the exception as retrieved: only one of the two futures is awaited


_HEADER_CHARACTERS = 200  # of a header that is kept with an error

_ANSWERED, _BODY_END_S = "answered", 0.1
"""Why the client ends a request whose body goes on after the answer, and the seconds that it waits for its end."""

_NO_COMPRESSION = "compression buffers tokens, so their times are not those of generation"
_CODINGS = frozenset({"gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd", "dcb", "dcz"})


def _compressed(encoding: str) -> bool:
    """Whether a content-encoding is compressed; what is no coding (``Identity``, ``UTF-8``) changes no byte."""
    return not _CODINGS.isdisjoint(encoding.lower().replace(" ", "").split(","))


class _OpenRequest:
    """An open request, and why the client ended it, if it did."""

    __slots__ = ("body_end", "patience", "streamed", "task", "verdict")

    def __init__(self, streamed: StreamedResponse, task: asyncio.Task[object]) -> None:
        self.streamed, self.task = streamed, task
        self.verdict: tuple[str, str] | None = None
        self.patience: asyncio.TimerHandle | None = None
        self.body_end: asyncio.TimerHandle | None = None

    def answered(self) -> None:
        """The answer is whole: wait a moment for the end of its body, which keeps the connection, and no longer."""
        if self.body_end is None:
            self.body_end = asyncio.get_running_loop().call_later(_BODY_END_S, self.end, _ANSWERED, "")

    def close(self) -> None:
        """Stop the timers and drop the reference to the response."""
        self.streamed.on_answered = None  # a cycle of references would wait for the garbage collector
        for timer in (self.patience, self.body_end):
            if timer is not None:
                timer.cancel()

    def end(self, error_class: str, message: str) -> None:
        """Abort the request with this error."""
        if self.verdict is None:
            self.verdict = (error_class, message)
            self.task.cancel()


class RequestSender:
    """Sends requests to one URL. Use as an asynchronous context manager. Raises UsageError for the URL."""

    def __init__(self, target: str, options: ClientOptions, environ: Mapping[str, str]) -> None:
        self._options, self._target = options, target
        head = RequestHead.of("POST", target, _headers(options, environ))
        tls = tls_context(options.verify_tls, options.ca_file, environ) if head.address.secure else None
        self._pool: ConnectionPool | None = None
        self._client: httpx.AsyncClient | None = None
        if options.transport == "direct":
            self._pool = ConnectionPool(head, tls, options.connect_timeout_s, options.connections)
        else:
            self._client = _httpx_client(options, tls, environ)
        self._requests: set[_OpenRequest] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RequestSender:
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._pool is not None:
            self._pool.close()
        if self._client is not None:
            await self._client.aclose()

    @property
    def in_flight(self) -> int:
        """Number of open requests."""
        return len(self._requests)

    @property
    def connections(self) -> ConnectionCounts:
        """The connections so far (direct transport only)."""
        if self._pool is None:
            return ConnectionCounts()
        pool = self._pool.connections
        return ConnectionCounts(pool.opened, pool.most_held, pool.most_open)

    async def prepare(self, connections: int, *, reserve: bool) -> None:
        """Open connections before the start; ``reserve`` also keeps idle ones open later (direct transport only)."""
        if self._pool is not None:
            await self._pool.prepare(connections, reserve=reserve)

    def abort(self) -> None:
        """Abort all open requests."""
        for request in list(self._requests):
            request.end("interrupted", "aborted by the user")

    async def send(
        self, request_id: str, body: bytes, streamed: StreamedResponse, hang_up_ns: int | None = None
    ) -> None:
        """Send one request and read its response to the end. Errors are recorded in ``streamed``.

        ``hang_up_ns``: close the connection so long after sending, if the response is not complete by then.
        """
        request_id = request_id if self._options.request_ids else ""
        task = asyncio.current_task()
        assert task is not None, "requests run in tasks"
        request = _OpenRequest(streamed, task)
        streamed.on_answered = request.answered
        self._requests.add(request)
        if hang_up_ns is not None:
            self._hang_up_later(request, hang_up_ns)
        try:
            if self._pool is not None:
                await self._direct(self._pool, request_id, body, streamed)
            elif self._client is not None:
                with errors_of_httpx():
                    await self._httpx(self._client, request_id, body, streamed)
            streamed.ended()
        except asyncio.CancelledError:
            if request.verdict is None:
                raise
            task.uncancel()
            if request.verdict[0] != _ANSWERED:
                streamed.fail(*request.verdict)
        except TransportError as error:
            streamed.fail(transport_failure(error), str(error) or type(error).__name__)
            error.__traceback__ = None  # its frames hold the exchange, which holds the error: never collected
        finally:
            request.close()
            self._requests.discard(request)
            # A complete response ends with its last byte, a broken one when the client noticed it.
            complete = request.verdict is None and streamed.error_class is None and streamed.last_ns
            streamed.end_ns = streamed.last_ns if complete else time.monotonic_ns()

    def _hang_up_later(self, request: _OpenRequest, hang_up_ns: int) -> None:
        """Hang up ``hang_up_ns`` after the request is sent; it may wait for a connection before."""
        sent_ns = request.streamed.sent_ns or time.monotonic_ns()
        left_ns = sent_ns + hang_up_ns - time.monotonic_ns()
        if request.streamed.sent_ns and left_ns <= 0:
            request.end(HUNG_UP, f"the client hung up after {hang_up_ns / 1e9:g} s")
            return
        loop = asyncio.get_running_loop()
        request.patience = loop.call_later(max(left_ns, 1_000_000) / 1e9, self._hang_up_later, request, hang_up_ns)

    async def _direct(self, pool: ConnectionPool, request_id: str, body: bytes, streamed: StreamedResponse) -> None:
        exchange = await pool.send(request_id, body, streamed)
        try:
            rest = await exchange.body()
        finally:
            exchange.close()
        if not exchange.streaming:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers.items()}
            _refused(streamed, exchange.status, rest, headers)

    async def _httpx(self, client: httpx.AsyncClient, request_id: str, body: bytes, streamed: StreamedResponse) -> None:
        headers = {"x-request-id": request_id} if request_id else {}
        request = client.build_request("POST", self._target, content=body, headers=headers)
        streamed.sent(time.monotonic_ns())
        response = await client.send(request, stream=True)
        try:
            streamed.head(response.status_code, time.monotonic_ns())
            plain = not _compressed(response.headers.get("content-encoding", ""))
            stream = streamed.takes(response.headers.get("content-type", ""))
            if response.status_code == 200 and stream and plain:
                async for data in response.aiter_raw():
                    streamed.feed(data, time.monotonic_ns())
            else:
                _refused(streamed, response.status_code, await _bounded_body(response), response.headers)
        finally:
            await response.aclose()

    async def _sweep(self) -> None:
        """Abort requests that exceed a timeout. One periodic pass costs less than a timer per message."""
        idle_ns = round(self._options.idle_timeout_s * 1e9)
        total_ns = round(self._options.total_timeout_s * 1e9)
        pause_s = min(1.0, max(0.02, min(self._options.idle_timeout_s, self._options.total_timeout_s) / 20))
        while True:
            await asyncio.sleep(pause_s)
            now_ns = time.monotonic_ns()
            for request in list(self._requests):
                streamed = request.streamed
                if not streamed.sent_ns:
                    continue
                if now_ns - streamed.sent_ns > total_ns:
                    request.end("total_timeout", f"not complete after {self._options.total_timeout_s:g} s")
                elif now_ns - streamed.last_ns > idle_ns:
                    kind = "idle_timeout" if streamed.times_ns else "first_token_timeout"
                    request.end(kind, f"nothing received for {self._options.idle_timeout_s:g} s")


def _httpx_client(options: ClientOptions, tls: ssl.SSLContext | None, environ: Mapping[str, str]) -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(
        verify=tls if tls is not None else False,
        headers=_headers(options, environ),
        timeout=httpx.Timeout(None, connect=options.connect_timeout_s),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_LIMIT_S),
    )


@contextlib.contextmanager
def errors_of_httpx() -> Iterator[None]:
    """Inside, an error of httpx becomes a TransportError."""
    import httpx

    kinds: dict[type[httpx.HTTPError], type[TransportError]] = {
        httpx.ConnectTimeout: ConnectTimeoutError,
        httpx.TimeoutException: IdleTimeoutError,
        httpx.ConnectError: ConnectError,
        httpx.ReadError: ResetError,
        httpx.WriteError: ResetError,
        httpx.RemoteProtocolError: ProtocolError,
        httpx.HTTPError: TransportError,
    }
    try:
        yield
    except httpx.HTTPError as error:
        kind = next(ours for theirs, ours in kinds.items() if isinstance(error, theirs))
        raise kind(str(error) or type(error).__name__) from error


async def _bounded_body(response: httpx.Response) -> bytes:
    body = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_S):
            async for data in response.aiter_raw():
                body += data
                if len(body) >= BODY_BYTES:
                    break
    return bytes(body[:BODY_BYTES])


def _refused(streamed: StreamedResponse, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Record a response with an error status, with the headers that give the remedy."""
    encoding = headers.get("content-encoding", "")
    if status == 200 and _compressed(encoding):
        message = f"the server sent its stream with content-encoding {encoding[:_HEADER_CHARACTERS]}; {_NO_COMPRESSION}"
        streamed.fail("compressed_stream", message)
        return
    with contextlib.suppress(TransportError):  # as it came, where it cannot be decoded
        body = decoded(body, encoding, BODY_BYTES)
    text = body.decode("utf-8", "backslashreplace")
    wanted = ("Content-Type",) if status == 200 else ("Retry-After", "Location")
    advice = [f"{name}: {headers[name.lower()][:_HEADER_CHARACTERS]}" for name in wanted if headers.get(name.lower())]
    other_kind = "not_json" if streamed.whole else "not_a_stream"
    error_class = other_kind if status == 200 else f"http_{status}"
    streamed.fail(error_class, (f"({'; '.join(advice)}) " if advice else "") + text)


def _headers(options: ClientOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The headers of every request, by names in lower case."""
    key, dialect = api_key(environ), DIALECTS[options.endpoint]
    accepted = ", ".join(sorted(dialect.content_types, reverse=True))
    headers = {"content-type": "application/json", "accept": accepted, **dialect.headers}
    headers["accept-encoding"] = "identity"  # a compressed stream is buffered, which changes its times
    headers |= options.headers
    headers = {name.lower(): value for name, value in headers.items()}
    if options.connections == "per-request":
        headers["connection"] = "close"
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
        if options.endpoint == "messages":
            headers["x-api-key"] = key  # Anthropic's own; other servers of its API take the one above
    return headers
