"""The servers behind the gateway: state, health checks, ejection, return and draining."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import httpx
import msgspec

from ebbench.config.server_url import ServerUrl
from ebbench.errors import RunError, UsageError
from ebbench.foreign.documents import BadValueError, json_value, visible
from ebbench.gateway.settings import GatewaySettings
from ebbench.gateway.transport import StreamTransport
from ebbench.network.connections import TransportError
from ebbench.network.credentials import KEY_VARIABLES, api_key
from ebbench.network.questions import Answer, ask

# Infers the ends of forward passes from the response streams of one upstream.
#
# An engine sends all tokens of a pass together, so messages arrive in bursts. The first message after a pause marks
# the end of a pass; the time between two marks is the duration of a pass. A pause is a quarter of the smoothed
# duration, at least 1 ms. Silence without open requests is not counted.

_SHARE, _LEAST_NS = 4, 1_000_000

_WEIGHT = 0.1


class BurstClock:
    """Turns the message times of one upstream into durations of forward passes."""

    def __init__(self) -> None:
        self._mark_ns = 0
        self._last_ns = 0
        self._mean_ns = 0.0

    def message(self, now_ns: int) -> int | None:
        """Record a message.

        Returns the duration (ns) of the pass that it ended, or None if it belongs to an earlier pass.
        """
        quiet_ns, self._last_ns = now_ns - self._last_ns, now_ns
        if quiet_ns < max(_LEAST_NS, self._mean_ns / _SHARE):
            return None
        mark_ns, self._mark_ns = self._mark_ns, now_ns
        if not mark_ns:
            return None
        duration_ns = now_ns - mark_ns
        self._mean_ns += _WEIGHT * (duration_ns - self._mean_ns) if self._mean_ns else duration_ns
        return duration_ns

    def idle(self) -> None:
        """Record that no request is open: the next pause is not a pass."""
        self._mark_ns = 0


State = Literal["active", "ejected", "draining"]

_MAX_BYTES = 1 << 20  # of an answer of /v1/models or /health


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _ModelError(Exception):
    """The server does not say which model it serves."""


@dataclass
class Upstream:
    """One server. ``failed_checks`` and ``passed_checks`` count consecutive failed and passed health checks."""

    index: int
    server: ServerUrl
    state: State = "active"
    failed_checks: int = 0
    passed_checks: int = 0
    open_requests: int = 0
    ejections: int = 0
    bursts: BurstClock = field(default_factory=BurstClock)
    url: str = field(init=False)
    base: httpx.URL = field(init=False)

    def __post_init__(self) -> None:
        self.url, self.base = str(self.server), httpx.URL(self.server.root)
        self._pages = self.base.raw_path.rstrip(b"/")
        self._api = httpx.URL(self.server.api).raw_path
        self._query = self.server.query.encode()

    def target_of(self, asked: bytes) -> bytes:
        """Path and query at this server for those of the gateway's client: of its API, or of a page beside it."""
        if not asked.startswith(b"/v1/"):
            return self._pages + asked
        more = (b"&" if b"?" in asked else b"?") + self._query if self._query else b""
        return self._api + asked[3:] + more


class Upstreams:
    """All servers. ``on_change`` is called with the indices of those that take requests, whenever these change."""

    def __init__(
        self, settings: GatewaySettings, transport: StreamTransport, on_change: Callable[[set[int]], None]
    ) -> None:
        self._settings, self._transport, self._on_change = settings, transport, on_change
        key = api_key()  # for the gateway's own queries; requests carry what their clients send
        headers = {"authorization": f"Bearer {key}"} if key else None
        self._client = httpx.AsyncClient(transport=transport, headers=headers, trust_env=False)
        self.all = [Upstream(index, server) for index, server in enumerate(settings.servers())]
        self.model = ""
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
                    f"{self.all[0].url} serves {_name(models[0])} and {upstream.url} serves {_name(model)}: requests "
                    "of one model cannot go to the other; start one gateway a model"
                )
        self.model = models[0]
        self._tasks = [asyncio.create_task(self._watch(upstream)) for upstream in self.all]

    async def close(self) -> None:
        """Stop the health checks."""
        for task in self._tasks:
            task.cancel()

    def failed(self, upstream: Upstream) -> None:
        """Record that a request could not reach the server: it gets no request until a health check passes."""
        upstream.passed_checks = 0
        if upstream.state == "active":
            self._eject(upstream)

    def stream_broke(self, upstream: Upstream) -> None:
        """Record a broken response.

        It counts as one failed health check, since the connection alone may have broken.
        """
        self._record_check(upstream, healthy=False)

    def drain(self, url: str, *, drain: bool) -> Upstream:
        """Send no new request to an upstream, or (``drain`` False) send requests again.

        Raises UsageError for an unknown URL.
        """
        asked = ServerUrl.parse(url)
        named = next((upstream for upstream in self.all if upstream.server == asked), None)
        if named is None:
            raise UsageError(f"no upstream {url}; there are {', '.join(u.url for u in self.all)}")
        if drain:
            named.state = "draining"
        elif named.state == "draining":
            named.state, named.failed_checks = "active", 0
        self._on_change(self.active)
        return named

    async def _model_of(self, upstream: Upstream) -> str:
        """The model that the server serves; waits up to ``start_timeout_s`` for a response."""
        deadline = asyncio.get_running_loop().time() + self._settings.start_timeout_s
        while True:
            try:
                return await self._listed_model(upstream)
            except (httpx.HTTPError, TransportError, _ModelError) as error:
                reason = str(error) or type(error).__name__
            if asyncio.get_running_loop().time() > deadline:
                raise RunError(
                    f"upstream {upstream.url} does not answer /v1/models ({reason}); start it first, or leave it out"
                )
            await asyncio.sleep(0.2)

    async def _listed_model(self, upstream: Upstream) -> str:
        answer = await self._get(upstream.server.endpoint("models"))
        if answer.status in (401, 403):
            raise UsageError(f"upstream {upstream.url} refuses the API key; set {KEY_VARIABLES[0]} to one it accepts")
        if answer.status != 200:
            raise _ModelError(f"status {answer.status}")
        try:
            return msgspec.convert(json_value(answer.body), _Models).data[0].id
        except (msgspec.MsgspecError, BadValueError, UnicodeError, RecursionError, IndexError) as error:
            raise _ModelError(f"no list of models: {visible(str(error))}") from None

    async def _get(self, url: str) -> Answer:
        timeout_s = self._settings.health_timeout_s
        return await ask(self._client, "GET", url, timeout_s=timeout_s, limit_bytes=_MAX_BYTES)

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval_s)
            healthy = False
            with contextlib.suppress(httpx.HTTPError, TransportError):
                healthy = (await self._get(upstream.server.page("health"))).status < 500  # not all have that page
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
        if self.active:
            self._transport.give_up(upstream.url, "it failed its health checks")


def _name(model: str) -> str:
    return visible(model[:200])
