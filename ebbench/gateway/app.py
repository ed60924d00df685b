"""The gateway's routes, start-up and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ebbench.dispatch import Fleet, make_dispatcher, parse_dispatch
from ebbench.dispatch.staggered import StaggeredDispatcher
from ebbench.errors import UsageError
from ebbench.gateway.dispatch_queue import DispatchQueue
from ebbench.gateway.metrics import GatewayMetrics
from ebbench.gateway.relay import Relay
from ebbench.gateway.settings import GatewaySettings
from ebbench.gateway.subscriber import SignalSubscriber
from ebbench.gateway.transport import StreamTransport
from ebbench.gateway.upstreams import Upstreams

_LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
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
        self.upstreams = Upstreams(settings, self.queue.topology)
        self.transport = StreamTransport(settings.connect_timeout_s)
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

    def metrics_page(self) -> bytes:
        """The metrics page, with gauges set to their current values."""
        for upstream in self.upstreams.all:
            self.metrics.open.labels(upstream.url).set(upstream.open_requests)
            self.metrics.active.labels(upstream.url).set(upstream.state == "active")
            self.metrics.ejections.labels(upstream.url).set(upstream.ejections)
        self.metrics.waiting.set(self.queue.waiting)
        if isinstance(self.dispatcher, StaggeredDispatcher):
            self.metrics.interval.set(self.dispatcher.interval.interval_ns / 1e9)
            self.metrics.forward.set(self.dispatcher.interval.mean_ns / 1e9)
        return self.metrics.render()

    def state(self) -> dict[str, Any]:
        """The JSON document of `/gateway`."""
        return {
            "model": self.upstreams.model,
            "dispatch": self.settings.dispatch,
            "waiting": self.queue.waiting,
            "upstreams": [
                {"url": u.url, "state": u.state, "open": u.open_requests, "ejections": u.ejections}
                for u in self.upstreams.all
            ],
        }

    def _on_signal(self, signal: Any) -> None:
        self.metrics.passes.labels(self.upstreams.all[signal.instance].url).inc()
        self.queue.end_forward(signal)


def make_app(gateway: Gateway) -> Starlette:
    """The ASGI application of a gateway that has been started."""

    async def health(_request: Request) -> Response:
        return Response(status_code=200 if gateway.upstreams.active else 503)

    async def metrics(_request: Request) -> Response:
        return Response(gateway.metrics_page(), media_type="text/plain; version=0.0.4")

    async def state(_request: Request) -> Response:
        return JSONResponse(gateway.state())

    async def drain(request: Request) -> Response:
        return await _set_draining(gateway, request, drain=True)

    async def resume(request: Request) -> Response:
        return await _set_draining(gateway, request, drain=False)

    async def for_all(request: Request) -> Response:
        return await _send_to_all(gateway, request)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await gateway.close()

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/gateway", state),
        Route("/gateway/drain", drain, methods=["POST"]),
        Route("/gateway/resume", resume, methods=["POST"]),
        *(Route(path, for_all, methods=["POST"]) for path in _FOR_ALL),
        Route("/{path:path}", gateway.relay, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def _set_draining(gateway: Gateway, request: Request, *, drain: bool) -> Response:
    """``POST /gateway/drain?upstream=URL``; accepted from the gateway's machine only."""
    if request.client is not None and request.client.host not in _LOCAL:
        return JSONResponse({"error": "only from the gateway's own machine"}, status_code=403)
    try:
        upstream = gateway.upstreams.drain(request.query_params.get("upstream", ""), drain=drain)
    except UsageError as error:
        return JSONResponse({"error": str(error)}, status_code=404)
    return JSONResponse({"url": upstream.url, "state": upstream.state, "open": upstream.open_requests})


async def _send_to_all(gateway: Gateway, request: Request) -> Response:
    body = await request.body()
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")

    async def one(url: str) -> int:
        outgoing = httpx.Request("POST", url + path, content=body)
        try:
            response = await gateway.transport.handle_async_request(outgoing)
            await response.aread()
        except httpx.TransportError:
            return 502
        return response.status_code

    active = [upstream.url for upstream in gateway.upstreams.all if upstream.state == "active"]
    worst = max(await asyncio.gather(*(one(url) for url in active)), default=503)
    return Response(status_code=worst)
