"""The gateway's routes, start-up and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ebbench.dispatch import EndForward, Fleet, UnitReport, make_dispatcher, parse_dispatch
from ebbench.dispatch.staggered import StaggeredDispatcher
from ebbench.errors import UsageError
from ebbench.gateway.dispatch_queue import DispatchQueue, RefusedError, error_body
from ebbench.gateway.relay import ClientLeftError, GatewayMetrics, Relay
from ebbench.gateway.settings import GatewaySettings
from ebbench.gateway.transport import StreamTransport
from ebbench.gateway.upstreams import Upstreams
from ebbench.installation import need
from vllm_eb.signals import Signal, endpoint_of_rank

# Receives the EndForward signals of the vllm_eb plugin over ZeroMQ.


class SignalSubscriber:
    """Subscribes to every rank of every upstream and passes their signals to ``on_signal``."""

    def __init__(self, settings: GatewaySettings, on_signal: Callable[[EndForward], None]) -> None:
        self._zmq = need("zmq", "signals of the plugin", "gateway")
        need("zmq.asyncio", "signals of the plugin", "gateway")
        self._on_signal = on_signal
        self._ranks = settings.dp_ranks
        self._addresses = [
            (upstream * settings.dp_ranks + rank, endpoint_of_rank(endpoint, rank))
            for upstream, endpoint in enumerate(settings.signals)
            for rank in range(settings.dp_ranks)
        ]
        self._context: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Connect. Publishers may start later."""
        self._context = self._zmq.asyncio.Context()
        for unit, address in self._addresses:
            socket = self._context.socket(self._zmq.SUB)
            socket.setsockopt(self._zmq.SUBSCRIBE, b"")
            socket.connect(address)
            self._tasks.append(asyncio.create_task(self._listen(unit, socket)))

    async def close(self) -> None:
        """Disconnect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _listen(self, unit: int, socket: Any) -> None:
        decoder = msgspec.msgpack.Decoder(Signal)
        while True:
            data = await socket.recv()
            try:
                signal = decoder.decode(data)
            except msgspec.MsgspecError:
                continue  # another program publishes there; health checks decide whether an upstream works
            report = UnitReport(unit, signal.received, signal.queued_tokens, signal.kv_tokens)
            self._on_signal(
                EndForward(unit // self._ranks, signal.duration_ns, signal.continues, signal.generates, (report,))
            )


_LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
# These requests go to every upstream, since each has its own cache.
_FOR_ALL = ("/reset_prefix_cache", "/flush_cache", "/reset_mm_cache")


class Gateway:
    """State of a running gateway. Create it inside the event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        fleet = Fleet([settings.dp_ranks] * len(settings.upstreams))
        self.dispatcher = make_dispatcher(
            parse_dispatch(settings.dispatch),
            fleet,
            chunk_tokens=settings.chunk_tokens,
            network_ns=round(settings.network_ms * 1e6),
            generates=True,  # the upstreams are whole engines: they prefill and decode
        )
        self.metrics = GatewayMetrics()
        self.queue = DispatchQueue(self.dispatcher, settings.max_queue)
        self.transport = StreamTransport(settings.connect_timeout_s, settings.max_wait_s)
        self.upstreams = Upstreams(settings, self.transport, self.queue.topology)
        signalled = bool(settings.signals) and self.dispatcher.wants_signals
        self.subscriber = SignalSubscriber(settings, self._on_signal) if signalled else None
        self.relay = Relay(
            settings,
            self.upstreams,
            self.queue,
            self.transport,
            self.metrics,
            infer=self.dispatcher.wants_signals and not signalled,
        )

    async def start(self) -> None:
        """Check the upstreams, then subscribe to their signals. Raises RunError, UsageError."""
        await self.upstreams.start()
        if self.subscriber is not None:
            self.subscriber.start()

    async def close(self) -> None:
        """Close connections, timers and subscriptions."""
        if self.subscriber is not None:
            await self.subscriber.close()
        await self.upstreams.close()
        await self.transport.aclose()
        self.queue.close()

    async def health(self, _request: Request) -> Response:
        """200 while an upstream takes requests."""
        return Response(status_code=200 if self.upstreams.active else 503)

    async def metrics_page(self, _request: Request) -> Response:
        """The metrics page, with gauges set to their current values."""
        for upstream in self.upstreams.all:
            self.metrics.open.labels(upstream.url).set(upstream.open_requests)
            self.metrics.active.labels(upstream.url).set(upstream.state == "active")
            self.metrics.ejections.labels(upstream.url).set(upstream.ejections)
        self.metrics.waiting.set(self.queue.waiting)
        if isinstance(self.dispatcher, StaggeredDispatcher):
            self.metrics.interval.set(self.dispatcher.interval.interval_ns / 1e9)
            self.metrics.forward.set(self.dispatcher.interval.mean_ns / 1e9)
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def state(self, _request: Request) -> Response:
        """The JSON document of `/gateway`."""
        upstreams = [
            {"url": u.url, "state": u.state, "open": u.open_requests, "ejections": u.ejections}
            for u in self.upstreams.all
        ]
        about = {"model": self.upstreams.model, "dispatch": self.settings.dispatch, "waiting": self.queue.waiting}
        return JSONResponse(about | {"upstreams": upstreams})

    async def set_draining(self, request: Request) -> Response:
        """``POST /gateway/drain?upstream=URL``, or ``resume``; accepted from the gateway's machine only."""
        client = request.client.host if request.client is not None else ""
        forwarded = any(name in request.headers for name in _FORWARDED)
        local = client in _LOCAL and _host_of(request.headers.get("host", "")) in _LOCAL
        if forwarded or not local or _foreign(request):
            return JSONResponse({"error": "only from the gateway's own machine, at 127.0.0.1"}, status_code=403)
        try:
            drain = request.url.path.endswith("drain")
            upstream = self.upstreams.drain(request.query_params.get("upstream", ""), drain=drain)
        except UsageError as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        return JSONResponse({"url": upstream.url, "state": upstream.state, "open": upstream.open_requests})

    async def send_to_all(self, request: Request) -> Response:
        """Answers with the highest status of the active upstreams, 503 without one."""
        if _foreign(request):
            return JSONResponse({"error": "not from a page of another origin"}, status_code=403)
        try:
            statuses = await self.relay.send_to_all(request.scope, request.receive)
        except RefusedError as refusal:
            return Response(error_body(str(refusal), refusal.status), refusal.status, media_type="application/json")
        except ClientLeftError:
            return Response(status_code=400)
        return Response(status_code=max(statuses, default=503))

    def _on_signal(self, signal: Any) -> None:
        self.metrics.passes.labels(self.upstreams.all[signal.instance].url).inc()
        self.queue.end_forward(signal)


def make_app(gateway: Gateway) -> Starlette:
    """The ASGI application of a gateway that has been started."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await gateway.close()

    routes = [
        Route("/health", gateway.health),
        Route("/metrics", gateway.metrics_page),
        Route("/gateway", gateway.state),
        Route("/gateway/drain", gateway.set_draining, methods=["POST"]),
        Route("/gateway/resume", gateway.set_draining, methods=["POST"]),
        *(Route(path, gateway.send_to_all, methods=["POST"]) for path in _FOR_ALL),
        Route("/{path:path}", gateway.relay, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _host_of(netloc: str) -> str:
    with contextlib.suppress(ValueError):
        return urlsplit(f"//{netloc}").hostname or ""
    return ""


def _foreign(request: Request) -> bool:
    """Whether a page of another origin sent the request with a browser of this machine."""
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")
