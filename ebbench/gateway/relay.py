"""Relays one request: reads its body within limits, waits for an upstream, relays the response byte by byte."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httpx
import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ebbench.dispatch import EndForward
from ebbench.dispatch.base import DispatchRequest
from ebbench.gateway.dispatch_queue import DispatchQueue, Receive, RefusedError, Scope, Send, error_body, send_refusal
from ebbench.gateway.settings import GatewaySettings
from ebbench.gateway.transport import StreamTransport
from ebbench.gateway.upstreams import Upstream, Upstreams
from ebbench.records import CHUNK_TOKENS

# Relays event streams in whole lines, so that no client receives part of an event.

MAX_LINE_BYTES = 1 << 16  # a longer line is relayed in pieces, which bounds the gateway's memory


class LineBuffer:
    """Holds back the unfinished last line of a stream until its end arrives.

    Lines instead of events: OpenAI's events are one line each, and a comment on its own line must not wait.
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Add received bytes; returns the bytes that can be relayed now."""
        if not self._held and data.endswith(b"\n"):
            return data  # the usual case
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._held += data
        if not end and len(self._held) <= MAX_LINE_BYTES:
            return b""
        unfinished = len(data) - end if end else 0
        whole = bytes(self._held[: len(self._held) - unfinished])
        del self._held[: len(whole)]
        return whole

    def rest(self) -> bytes:
        """The bytes held back of a stream that has ended."""
        return bytes(self._held)


# Estimates a request's length and prefix for the dispatcher, without a tokenizer.

BYTES_PER_TOKEN = 4.0
"""For English text. The servers count exactly; the dispatcher only compares requests with each other."""
_MOST_BYTES = 1 << 23
_MOST_BLOCKS = 2048  # of a prefix: 2**20 tokens; more would stop the event loop for seconds
_MOST_TOKENS = 1 << 24  # no model answers with more; a larger number would decide where every other request goes


class _Body(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_DECODER = msgspec.json.Decoder(_Body)


def dispatch_request(key: int, body: bytes, *, prefix: bool) -> DispatchRequest:
    """The request's estimated tokens and, with ``prefix``, its block hashes.

    A body that is not a JSON object counts as one token; the server will refuse it. A body above 8 MiB is not read, as
    that would stop all streams for up to seconds; its bytes are counted.
    """
    if len(body) > _MOST_BYTES:
        tokens = round(len(body) / BYTES_PER_TOKEN)
        return DispatchRequest(key, tokens, tokens)
    try:
        decoded = _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return DispatchRequest(key, 1, 1)
    raw = bytes(decoded.prompt) or bytes(decoded.messages)
    tokens = _tokens(raw)
    output_tokens = min(max(decoded.max_completion_tokens or decoded.max_tokens or 0, 0), _MOST_TOKENS)
    return DispatchRequest(key, tokens, tokens + output_tokens, _blocks(raw, tokens) if prefix else ())


def _tokens(raw: bytes) -> int:
    if raw[:1] == b"[" and raw[1:2].isdigit():
        return raw.count(b",") + 1
    return max(1, round(len(raw) / BYTES_PER_TOKEN))


def _blocks(raw: bytes, tokens: int) -> tuple[int, ...]:
    """Hashes of the leading blocks of about CHUNK_TOKENS tokens; each hash covers all text before it."""
    pieces: list[Any]
    if raw[:1] == b"[" and raw[1:2].isdigit():
        most = min(tokens, _MOST_BLOCKS * CHUNK_TOKENS)
        ids = raw[1:-1].split(b",", most)
        pieces = [b",".join(ids[i : i + CHUNK_TOKENS]) for i in range(0, most - CHUNK_TOKENS + 1, CHUNK_TOKENS)]
    else:
        size = round(CHUNK_TOKENS * BYTES_PER_TOKEN)
        most = min(len(raw), _MOST_BLOCKS * size)
        pieces = [raw[i : i + size] for i in range(0, most - size + 1, size)]
    hashes: list[int] = []
    before = 0
    for piece in pieces:
        before = hash((before, piece))
        hashes.append(before)
    return tuple(hashes)


# Bodies of requests in the gateway's memory, within limits.


class ClientLeftError(Exception):
    """The client has closed its connection."""


@dataclass
class Body:
    """A body; ``data`` is dropped once no further server can need it."""

    data: bytes
    held_bytes: int


class Bodies:
    """Reads bodies: each at most ``one_bytes`` long, all that wait for an answer at most ``all_bytes``."""

    def __init__(self, one_bytes: float, all_bytes: float) -> None:
        self._one_bytes, self._all_bytes = one_bytes, all_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[Body]:
        """The whole body. Raises RefusedError above a limit, ClientLeftError."""
        body = Body(b"", 0)
        try:
            declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
            self._check(int(declared), 0)
            parts = [part async for part in self._parts(receive, body)]
            body.data = parts[0] if len(parts) == 1 else b"".join(parts)
            yield body
        finally:
            self.drop(body)

    def drop(self, body: Body) -> None:
        """Free the memory of a body that is not sent again."""
        self.held_bytes -= body.held_bytes
        body.data, body.held_bytes = b"", 0

    async def _parts(self, receive: Receive, body: Body) -> AsyncIterator[bytes]:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            part = message.get("body", b"")
            body.held_bytes += len(part)
            self.held_bytes += len(part)
            self._check(body.held_bytes, self.held_bytes)
            yield part
            if not message.get("more_body"):
                return

    def _check(self, one_bytes: int, all_bytes: int) -> None:
        if one_bytes > self._one_bytes:
            raise RefusedError(f"the body is larger than {self._one_bytes / 1e6:g} MB", 413)
        if all_bytes > self._all_bytes:
            raise RefusedError(f"requests of {self._all_bytes / 1e6:g} MB wait already", 503, 1)


# The gateway's metrics in the Prometheus text format.

_WAIT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class GatewayMetrics:
    """Counters and gauges of one gateway, in its own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="ebbench_gateway", registry=self._registry)
        gauge = partial(Gauge, namespace="ebbench_gateway", registry=self._registry)
        self.answers = counter("answers", "Answers relayed, by upstream and outcome.", ["upstream", "outcome"])
        self.retries = counter("retries", "Requests sent on because an upstream gave no answer.", ["upstream"])
        self.refused = counter("refused", "Requests refused by the gateway itself, by status.", ["status"])
        self.abandoned = counter("abandoned", "Requests whose client left before the answer was complete.")
        self.wait = Histogram(
            "ebbench_gateway_dispatch_wait_seconds", "Time requests wait for an upstream.", buckets=_WAIT_BUCKETS,
            registry=self._registry,
        )  # fmt: skip
        self.passes = counter("forward_passes", "Ends of forward passes signalled or inferred.", ["upstream"])
        self.open = gauge("open_requests", "Requests open, by upstream.", ["upstream"])
        self.active = gauge("upstream_active", "1 if the upstream takes requests.", ["upstream"])
        self.ejections = gauge("upstream_ejections", "Times the upstream was taken out.", ["upstream"])
        self.waiting = gauge("waiting", "Requests waiting for an upstream.")
        self.interval = gauge("dispatch_interval_seconds", "Interval of Algorithm 1.")
        self.forward = gauge("forward_seconds", "Mean duration of a forward pass.")

    def render(self) -> bytes:
        """The metrics page."""
        return generate_latest(self._registry)


Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection",
        b"proxy-authorization", b"proxy-authenticate", b"proxy-authentication-info",
    }
)  # fmt: skip
_NOT_SENT_ON = frozenset({b"host", b"content-length", b"expect"})
RANK_HEADER = b"x-data-parallel-rank"
ID_HEADER = b"x-request-id"


@dataclass
class _Request:
    """A client's request. ``sent_to``: indices of the upstreams that have received it."""

    method: str
    target: bytes
    headers: Headers
    body: Body
    request_id: bytes
    sent_to: set[int] = field(default_factory=set)


class Relay:
    """ASGI endpoint for all paths that go to one upstream."""

    def __init__(
        self,
        settings: GatewaySettings,
        upstreams: Upstreams,
        queue: DispatchQueue,
        transport: StreamTransport,
        metrics: GatewayMetrics,
        *,
        infer: bool,
    ) -> None:
        self._settings, self._upstreams, self._queue = settings, upstreams, queue
        self._transport, self._metrics, self._infer = transport, metrics, infer
        self._bodies = Bodies(settings.max_body_mb * 1e6, settings.max_bodies_mb * 1e6)
        self._keys = itertools.count()
        self._attempts = 2 * len(upstreams.all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request, or refuse it."""
        try:
            async with self._bodies.read(scope, receive) as body:
                await self._while_connected(_read(scope, body), receive, send)
        except RefusedError as refusal:
            self._metrics.refused.labels(str(refusal.status)).inc()
            refusal.__traceback__ = None  # its frames hold the request: no full collection would free them
            await send_refusal(send, refusal)
        except ClientLeftError:
            pass

    async def _while_connected(self, request: _Request, receive: Receive, send: Send) -> None:
        """Relay a request; a client that leaves cancels it."""
        task = asyncio.current_task()
        assert task is not None
        left = False

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            left = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await self._relay_request(request, send)
        except asyncio.CancelledError:
            if not left:
                raise
            task.uncancel()
            self._metrics.abandoned.inc()
        finally:
            watcher.cancel()

    async def _relay_request(self, request: _Request, send: Send) -> None:
        """Try upstreams until one responds. Raises RefusedError.

        An upstream that cannot be reached has not seen the request: another one gets it. One that received it and gave
        no answer may have failed because of it: at most ``resends`` others get it, each once.
        """
        failure: RefusedError | None = None
        for _ in range(self._attempts):
            key = next(self._keys)
            unit = await self._next_unit(request, key, failure)
            upstream = self._upstreams.all[unit // self._settings.dp_ranks]
            try:
                await self._try_upstream(request, upstream, unit, key, send)
                return
            except httpx.TransportError as error:
                failure = self._failure(request, upstream, error)
                error.__traceback__ = None  # its frames hold the exchange, which holds the error: never collected
        assert failure is not None
        raise failure

    async def _next_unit(self, request: _Request, key: int, failure: RefusedError | None) -> int:
        """The unit that gets the request now. Raises RefusedError."""
        if failure is None or not request.sent_to:
            return await self._assigned_unit(request, key)
        others = [u for u in self._upstreams.all if u.state == "active" and u.index not in request.sent_to]
        if not others or len(request.sent_to) > self._settings.resends:
            raise failure
        least = min(others, key=lambda upstream: upstream.open_requests)
        return least.index * self._settings.dp_ranks + key % self._settings.dp_ranks

    def _failure(self, request: _Request, upstream: Upstream, error: httpx.TransportError) -> RefusedError:
        """Record that the upstream gave no answer; returns what the client is told if no other one gets the request."""
        self._metrics.retries.labels(upstream.url).inc()
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            self._upstreams.failed(upstream)
            return RefusedError(f"upstream {upstream.url} cannot be reached: {error}", 502)
        request.sent_to.add(upstream.index)
        self._upstreams.stream_broke(upstream)
        status = 504 if isinstance(error, httpx.TimeoutException) else 502
        return RefusedError(f"upstream {upstream.url} gave no answer: {error}", status)

    async def _assigned_unit(self, request: _Request, key: int) -> int:
        """The unit that the dispatcher chooses. Raises RefusedError."""
        to_dispatch = dispatch_request(key, request.body.data, prefix=self._queue.dispatcher.wants_prefix)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.max_wait_s):
                unit = await self._queue.assign(to_dispatch)
        except TimeoutError:
            raise RefusedError(f"no upstream took the request within {self._settings.max_wait_s:g} s", 503, 1) from None
        self._metrics.wait.observe(time.monotonic() - began_s)
        return unit

    async def _try_upstream(self, request: _Request, upstream: Upstream, unit: int, key: int, send: Send) -> None:
        """Send the request to one upstream and relay its answer. Raises httpx's transport errors before an answer."""
        upstream.open_requests += 1
        try:
            outgoing = self._outgoing(request, upstream, unit % self._settings.dp_ranks)
            response = await self._transport.handle_async_request(outgoing)
            self._bodies.drop(request.body)
            try:
                await self._relay_response(request, response, upstream, key, send)
            finally:
                await response.aclose()
        finally:
            upstream.open_requests -= 1
            if not upstream.open_requests:
                upstream.bursts.idle()
            self._queue.ended(key)

    def _outgoing(self, request: _Request, upstream: Upstream, rank: int | None) -> httpx.Request:
        headers = request.headers
        if rank is not None and self._settings.dp_ranks > 1 and all(name != RANK_HEADER for name, _ in headers):
            headers = [*headers, (RANK_HEADER, str(rank).encode())]
        target = upstream.target_of(request.target)
        return httpx.Request(
            request.method, upstream.base, headers=headers, content=request.body.data, extensions={"target": target}
        )

    async def send_to_all(self, scope: Scope, receive: Receive) -> list[int]:
        """Send a request to every active upstream; returns the statuses. Raises RefusedError, ClientLeftError."""
        async with self._bodies.read(scope, receive) as body:
            request = _read(scope, body)

            async def status_of(upstream: Upstream) -> int:
                try:
                    response = await self._transport.handle_async_request(self._outgoing(request, upstream, None))
                except httpx.TransportError:
                    return 502
                await response.aclose()
                return response.status_code

            return await asyncio.gather(*(status_of(self._upstreams.all[index]) for index in self._upstreams.active))

    async def _relay_response(
        self, request: _Request, response: httpx.Response, upstream: Upstream, key: int, send: Send
    ) -> None:
        headers = _end_to_end(response.headers.raw)
        if (fault := _unusable(response)) is not None:
            self._metrics.answers.labels(upstream.url, "broken").inc()
            raise RefusedError(f"upstream {upstream.url}: {fault}", 502)
        if all(name != ID_HEADER for name, _ in headers):
            headers.append((ID_HEADER, request.request_id))
        if response.status_code in (204, 304):  # no body follows, whatever length is declared
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        outcome = "ok" if response.status_code < 400 else f"http_{response.status_code}"
        lines = LineBuffer() if _carries_events(response) else None
        first = True
        try:
            async for data in cast(AsyncIterator[bytes], response.stream):
                if first:
                    first = False
                    self._queue.first_token(key)
                if self._infer:
                    self._note_message(upstream)
                passed = data if lines is None else lines.feed(data)
                if passed:
                    await send({"type": "http.response.body", "body": passed, "more_body": True})
            rest = b"" if lines is None else lines.rest()
            await send({"type": "http.response.body", "body": rest, "more_body": False})
        except httpx.TransportError as error:
            outcome = "broken"
            error.__traceback__ = None
            self._upstreams.stream_broke(upstream)
            if lines is not None:
                await _end_with_error(upstream, error, send)
        except asyncio.CancelledError:
            outcome = "abandoned"
            raise
        finally:
            self._metrics.answers.labels(upstream.url, outcome).inc()

    def _note_message(self, upstream: Upstream) -> None:
        duration_ns = upstream.bursts.message(time.monotonic_ns())
        if duration_ns is not None:
            self._metrics.passes.labels(upstream.url).inc()
            self._queue.end_forward(EndForward(upstream.index, duration_ns, continues=True, generates=True))


def _carries_events(response: httpx.Response) -> bool:
    """Whether the body is an event stream without content coding, to which an event can be appended."""
    headers = response.headers
    fixed = "content-length" in headers or "content-encoding" in headers
    return headers.get("content-type", "").startswith("text/event-stream") and not fixed


async def _end_with_error(upstream: Upstream, error: Exception, send: Send) -> None:
    """End a stream with an error event. The body stays incomplete, which every HTTP client detects."""
    frame = error_body(f"upstream {upstream.url} broke off: {error}", 502)
    # The client may already have a line without the blank line that ends its event.
    data = b"\n\ndata: " + frame + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers, names in lower case, without those that concern one connection only (RFC 9110, 7.6.1)."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lower if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in lower if name not in _HOP_BY_HOP and name not in named]


def _unusable(response: httpx.Response) -> str | None:
    """Why the response cannot be relayed, if it cannot."""
    if not 200 <= response.status_code < 600:
        return f"status {response.status_code}"
    coding = response.headers.get("transfer-encoding", "chunked")
    return None if coding.lower() == "chunked" else f"transfer-encoding {coding}"


def _read(scope: Scope, body: Body) -> _Request:
    headers = [(name, value) for name, value in _end_to_end(scope["headers"]) if name not in _NOT_SENT_ON]
    request_id = next((value for name, value in headers if name == ID_HEADER), b"")
    if not request_id:
        request_id = uuid.uuid4().hex.encode()
        headers.append((ID_HEADER, request_id))
    path, query = scope.get("raw_path", scope["path"].encode()), scope.get("query_string", b"")
    return _Request(scope["method"], path + (b"?" + query if query else b""), headers, body, request_id)
