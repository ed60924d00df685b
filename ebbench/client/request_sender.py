"""Sends requests and enforces their timeouts. A request is never sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

import httpx

from ebbench.client.classify import HUNG_UP, transport_failure
from ebbench.client.http_streams import BODY_BYTES, BODY_S, ConnectionPool, is_event_stream
from ebbench.client.messages import ConnectionCounts
from ebbench.client.response import StreamedResponse
from ebbench.config.server_url import ServerUrl
from ebbench.network.connections import IDLE_LIMIT_S, tls_context
from ebbench.network.credentials import api_key
from ebbench.spec.client import ClientOptions

_HEADER_CHARACTERS = 200  # of a header that is kept with an error

_ANSWERED, _BODY_END_S = "answered", 0.1
"""Why the client ends a request whose body goes on after the answer, and the seconds that it waits for its end."""

_NO_COMPRESSION = "compression buffers tokens, so their times are not those of generation"


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
        """Stop the timers and let go of the response."""
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
    """Sends requests to one server. Use as an asynchronous context manager."""

    def __init__(self, url: ServerUrl, path: str, options: ClientOptions, environ: Mapping[str, str]) -> None:
        self._options = options
        self._key = api_key(environ)
        self._target = url.endpoint(path)
        tls = tls_context(options.verify_tls, options.ca_file, environ) if url.secure else None
        self._client = httpx.AsyncClient(
            verify=tls if tls is not None else False,
            headers=_headers(options, self._key),
            timeout=httpx.Timeout(None, connect=options.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_LIMIT_S),
            trust_env=options.transport != "direct",
        )
        self._pool: ConnectionPool | None = None
        if options.transport == "direct":
            template = self._client.build_request("POST", self._target)
            self._pool = ConnectionPool(template, tls, options.connect_timeout_s, options.connections)
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
            else:
                await self._httpx(request_id, body, streamed)
            streamed.ended()
        except asyncio.CancelledError:
            if request.verdict is None:
                raise
            task.uncancel()
            if request.verdict[0] != _ANSWERED:
                streamed.fail(*request.verdict)
        except httpx.HTTPError as error:
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

    async def _httpx(self, request_id: str, body: bytes, streamed: StreamedResponse) -> None:
        headers = {"x-request-id": request_id}
        request = self._client.build_request("POST", self._target, content=body, headers=headers)
        streamed.sent(time.monotonic_ns())
        response = await self._client.send(request, stream=True)
        try:
            streamed.head(response.status_code, time.monotonic_ns())
            plain = response.headers.get("content-encoding", "identity") == "identity"
            stream = is_event_stream(response.headers.get("content-type", ""))
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


async def _bounded_body(response: httpx.Response) -> bytes:
    """What is kept of a body that is no event stream."""
    body = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_S):
            async for data in response.aiter_raw():
                body += data
                if len(body) >= BODY_BYTES:
                    break
    return bytes(body[:BODY_BYTES])


def _refused(streamed: StreamedResponse, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Record a response that is not an event stream as an error, with those headers that say what to do."""
    encoding = headers.get("content-encoding", "identity")
    if status == 200 and encoding != "identity":
        message = f"the server sent its stream with content-encoding {encoding[:_HEADER_CHARACTERS]}; {_NO_COMPRESSION}"
        streamed.fail("compressed_stream", message)
        return
    text = body.decode("utf-8", "backslashreplace")
    wanted = ("Content-Type",) if status == 200 else ("Retry-After", "Location")
    advice = [f"{name}: {headers[name.lower()][:_HEADER_CHARACTERS]}" for name in wanted if headers.get(name.lower())]
    error_class = "not_a_stream" if status == 200 else f"http_{status}"
    streamed.fail(error_class, (f"({'; '.join(advice)}) " if advice else "") + text)


def _headers(options: ClientOptions, key: str | None) -> httpx.Headers:
    headers = httpx.Headers({"content-type": "application/json", "accept": "text/event-stream"})
    headers["accept-encoding"] = "identity"  # a compressed stream is buffered, which changes its times
    headers.update(options.headers)
    if options.connections == "per-request":
        headers["connection"] = "close"
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return headers
