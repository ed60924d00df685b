"""The servers behind the gateway: state, health checks, ejection, return and draining."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import httpx

from ebbench.connections import IDLE_LIMIT_S
from ebbench.errors import RunError, UsageError
from ebbench.gateway.bursts import BurstClock
from ebbench.gateway.settings import GatewaySettings

State = Literal["active", "ejected", "draining"]


@dataclass
class Upstream:
    """One server. ``failed_checks`` and ``passed_checks`` count consecutive failed and passed health checks."""

    index: int
    url: str
    state: State = "active"
    failed_checks: int = 0
    passed_checks: int = 0
    open_requests: int = 0
    ejections: int = 0
    bursts: BurstClock = field(default_factory=BurstClock)


class Upstreams:
    """All servers. ``on_change`` is called with the indices of those that take requests, whenever these change."""

    def __init__(self, settings: GatewaySettings, on_change: Callable[[set[int]], None]) -> None:
        self._settings, self._on_change = settings, on_change
        self.all = [Upstream(i, url.rstrip("/")) for i, url in enumerate(settings.upstreams)]
        self.model = ""
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(settings.health_timeout_s, connect=settings.connect_timeout_s),
            limits=httpx.Limits(keepalive_expiry=IDLE_LIMIT_S),
            trust_env=False,
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def active(self) -> set[int]:
        """Indices of the servers that take requests."""
        return {upstream.index for upstream in self.all if upstream.state == "active"}

    async def start(self) -> None:
        """Check all servers, then keep checking.

        Raises RunError if one cannot be reached, UsageError if models differ.
        """
        models = await asyncio.gather(*(self._model_of(upstream) for upstream in self.all))
        for upstream, model in zip(self.all, models, strict=True):
            if model != models[0]:
                raise UsageError(
                    f"{self.all[0].url} serves {models[0]} and {upstream.url} serves {model}: requests of one model "
                    "cannot go to the other; start one gateway a model"
                )
        self.model = models[0]
        self._tasks = [asyncio.create_task(self._watch(upstream)) for upstream in self.all]

    async def close(self) -> None:
        """Stop the health checks."""
        for task in self._tasks:
            task.cancel()
        await self._client.aclose()

    def failed(self, upstream: Upstream) -> None:
        """Record that a request could not reach the server: it gets no request until a health check passes."""
        upstream.passed_checks = 0
        if upstream.state == "active":
            self._eject(upstream)

    def stream_broke(self, upstream: Upstream) -> None:
        """Record a broken response.

        It counts as one failed health check, since the connection alone may have broken.
        """
        upstream.passed_checks, upstream.failed_checks = 0, upstream.failed_checks + 1
        if upstream.state == "active" and upstream.failed_checks >= self._settings.eject_after:
            self._eject(upstream)

    def drain(self, url: str, *, drain: bool) -> Upstream:
        """Send no new request to an upstream, or (``drain`` False) send requests again.

        Raises UsageError for an unknown URL.
        """
        found = next((upstream for upstream in self.all if upstream.url == url.rstrip("/")), None)
        if found is None:
            raise UsageError(f"no upstream {url}; there are {', '.join(u.url for u in self.all)}")
        if drain:
            found.state = "draining"
        elif found.state == "draining":
            found.state, found.failed_checks = "active", 0
        self._on_change(self.active)
        return found

    async def _model_of(self, upstream: Upstream) -> str:
        """The model that the server serves; waits up to ``start_timeout_s`` for a response."""
        deadline = asyncio.get_running_loop().time() + self._settings.start_timeout_s
        while True:
            try:
                response = await self._client.get(f"{upstream.url}/v1/models")
                response.raise_for_status()
                return str(response.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                reason = str(error) or type(error).__name__
            if asyncio.get_running_loop().time() > deadline:
                raise RunError(
                    f"upstream {upstream.url} does not answer /v1/models ({reason}); start it first, or leave it out"
                )
            await asyncio.sleep(0.2)

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval_s)
            healthy = False
            with contextlib.suppress(httpx.HTTPError):
                response = await self._client.get(f"{upstream.url}/health")
                healthy = response.status_code == 200
            self._record_check(upstream, healthy)

    def _record_check(self, upstream: Upstream, healthy: bool) -> None:
        upstream.passed_checks, upstream.failed_checks = (
            (upstream.passed_checks + 1, 0) if healthy else (0, upstream.failed_checks + 1)
        )
        if upstream.state == "active" and upstream.failed_checks >= self._settings.eject_after:
            self._eject(upstream)
        elif upstream.state == "ejected" and upstream.passed_checks >= self._settings.return_after:
            upstream.state = "active"
            self._on_change(self.active)

    def _eject(self, upstream: Upstream) -> None:
        upstream.state = "ejected"
        upstream.ejections += 1
        self._on_change(self.active)
