"""Relays one request: waits for an upstream, sends the request, relays every byte of the response at once."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import msgspec

from ebbench.dispatch import EndForward
from ebbench.gateway.dispatch_queue import DispatchQueue, RefusedError
from ebbench.gateway.events import LineBuffer
from ebbench.gateway.metrics import GatewayMetrics
from ebbench.gateway.prompts import dispatch_request
from ebbench.gateway.settings import GatewaySettings
from ebbench.gateway.upstreams import Upstream, Upstreams

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection"}
)
_NOT_SENT_ON = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
RANK_HEADER = b"x-data-parallel-rank"
ID_HEADER = b"x-request-id"


class _ClientLeftError(Exception):
    """The client has closed its connection."""


@dataclass
class _Request:
    """A client's request and the state of its relay."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    request_id: bytes
    tried: int = 0
    started: bool = field(default=False)  # whether the client has received part of the response


class Relay:
    """ASGI endpoint for all paths that go to one upstream."""

    def __init__(
        self,
        settings: GatewaySettings,
        upstreams: Upstreams,
        queue: DispatchQueue,
        transport: httpx.AsyncBaseTransport,
        metrics: GatewayMetrics,
        *,
        infer: bool,
    ) -> None:
        self._settings, self._upstreams, self._queue = settings, upstreams, queue
        self._transport, self._metrics, self._infer = transport, metrics, infer
        self._keys = itertools.count()
        self._attempts = 2 * len(upstreams.all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request."""
        try:
            body = await self._body(receive)
        except _ClientLeftError:
            return
        if body is None:
            await refuse(send, 413, f"the body is larger than {self._settings.max_body_mb:g} MB", self._metrics)
            return
        request = _read(scope, body)
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

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body, or None if it is too large."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeftError
            part = message.get("body", b"")
            size += len(part)
            if size > self._settings.max_body_mb * 1e6:
                return None
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _relay_request(self, request: _Request, send: Send) -> None:
        """Try upstreams until one responds. An upstream that sent no byte of a response is replaced by another one."""
        while True:
            key = next(self._keys)
            to_dispatch = dispatch_request(key, request.body, prefix=self._queue.dispatcher.wants_prefix)
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(self._settings.max_wait_s):
                    unit = await self._queue.assign(to_dispatch)
            except RefusedError as error:
                await refuse(send, 429, str(error), self._metrics, error.retry_after_s)
                return
            except TimeoutError:
                reason = f"no upstream took the request within {self._settings.max_wait_s:g} s"
                await refuse(send, 503, reason, self._metrics, 1)
                return
            self._metrics.wait.observe(time.monotonic() - began_s)
            upstream = self._upstreams.all[unit // self._settings.dp_ranks]
            if await self._try_upstream(request, upstream, unit, key, send):
                return
            request.tried += 1
            if request.tried >= self._attempts:
                await refuse(send, 502, f"{request.tried} upstreams gave no answer", self._metrics)
                return

    async def _try_upstream(self, request: _Request, upstream: Upstream, unit: int, key: int, send: Send) -> bool:
        """Send the request to one upstream. Returns False if it sent no byte of a response."""
        upstream.open_requests += 1
        try:
            outgoing = self._outgoing(request, upstream, unit)
            try:
                response = await self._transport.handle_async_request(outgoing)
            except httpx.TransportError:
                self._upstreams.failed(upstream)
                self._metrics.retries.labels(upstream.url).inc()
                return False
            await self._relay_response(request, response, upstream, key, send)
            return True
        finally:
            upstream.open_requests -= 1
            if not upstream.open_requests:
                upstream.bursts.idle()
            self._queue.ended(key)

    def _outgoing(self, request: _Request, upstream: Upstream, unit: int) -> httpx.Request:
        headers = request.headers
        if self._settings.dp_ranks > 1 and all(name != RANK_HEADER for name, _ in headers):
            headers = [*headers, (RANK_HEADER, str(unit % self._settings.dp_ranks).encode())]
        return httpx.Request(request.method, upstream.url + request.target, headers=headers, content=request.body)

    async def _relay_response(
        self, request: _Request, response: httpx.Response, upstream: Upstream, key: int, send: Send
    ) -> None:
        headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _HOP_BY_HOP]
        if all(name != ID_HEADER for name, _ in headers):
            headers.append((ID_HEADER, request.request_id))
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        stream = cast(AsyncIterator[bytes], response.stream)
        outcome = "ok" if response.status_code < 400 else f"http_{response.status_code}"
        lines = LineBuffer() if _carries_events(response) else None
        first = True
        try:
            async for data in stream:
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
            self._upstreams.stream_broke(upstream)
            if lines is not None:
                await _end_with_error(upstream, error, send)
        except asyncio.CancelledError:
            outcome = "abandoned"
            raise
        finally:
            self._metrics.answers.labels(upstream.url, outcome).inc()
            await response.aclose()

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


def error_body(message: str, status: int) -> bytes:
    """An error object in OpenAI's format."""
    kind = {413: "invalid_request_error", 429: "rate_limit_error"}.get(status, "api_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


async def refuse(
    send: Send, status: int, message: str, metrics: GatewayMetrics, retry_after_s: int | None = None
) -> None:
    """Respond with an error of the gateway itself."""
    metrics.refused.labels(str(status)).inc()
    body = error_body(message, status)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _read(scope: Scope, body: bytes) -> _Request:
    headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT_ON]
    request_id = next((value for name, value in headers if name == ID_HEADER), b"")
    if not request_id:
        request_id = uuid.uuid4().hex.encode()
        headers.append((ID_HEADER, request_id))
    query = scope.get("query_string", b"")
    target = scope.get("raw_path", scope["path"].encode()).split(b"?")[0].decode()
    return _Request(scope["method"], target + (f"?{query.decode()}" if query else ""), headers, body, request_id)
