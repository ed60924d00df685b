"""Settings of the gateway."""

from __future__ import annotations

import msgspec

from ebbench.config.declare import COUNT, NOT_NEGATIVE, PORT, POSITIVE, check_fields
from ebbench.config.server_url import ServerUrl
from ebbench.dispatch import DEFAULT_DISPATCH, parse_dispatch
from ebbench.errors import UsageError
from vllm_eb.signals import endpoint_of_rank

_POSITIVE = (
    "health_interval_s", "health_timeout_s", "connect_timeout_s", "start_timeout_s", "max_body_mb", "max_bodies_mb",
    "max_wait_s",
)  # fmt: skip


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a gateway.

    ``upstreams``: URLs in any form that :class:`ServerUrl` takes. ``dispatch``: a policy in the syntax of
    :func:`ebbench.dispatch.parse_dispatch`.
    ``dp_ranks``: data-parallel ranks inside each upstream, chosen by the header X-data-parallel-rank; 1 sends no such
    header. ``signals``: ZeroMQ endpoints of the vllm_eb plugin, one per upstream (rank r publishes on the port plus r);
    empty: ends of forward passes are inferred from the streams. ``chunk_tokens``: the servers' token budget per step.
    ``network_ms``: round-trip time to a server. ``max_queue``: requests held in the queue before 429; ``max_wait_s``:
    time in the queue before 503, and without a byte from the server before 504. ``max_body_mb`` limits one request,
    ``max_bodies_mb`` all requests whose answers have not begun. ``resends``: further servers that get a request whose
    server broke off before any answer. ``eject_after``, ``return_after``: consecutive health checks. ``drain_s``: time
    that open requests get at shutdown.
    """

    upstreams: tuple[str, ...]
    dispatch: str = DEFAULT_DISPATCH
    host: str = "127.0.0.1"
    port: int = 8080
    dp_ranks: int = 1
    signals: tuple[str, ...] = ()
    chunk_tokens: int = 8192
    network_ms: float = 1.0
    max_queue: int = 10_000
    max_wait_s: float = 300.0
    max_body_mb: float = 64.0
    max_bodies_mb: float = 1024.0
    resends: int = 1
    health_interval_s: float = 2.0
    health_timeout_s: float = 2.0
    eject_after: int = 2
    return_after: int = 1
    connect_timeout_s: float = 5.0
    drain_s: float = 30.0
    start_timeout_s: float = 5.0

    def servers(self) -> tuple[ServerUrl, ...]:
        """The upstreams. Raises UsageError for what is no URL of a server."""
        try:
            return tuple(ServerUrl.parse(url) for url in self.upstreams)
        except UsageError as error:
            raise UsageError(f"--upstream: {error}") from None

    def checked(self) -> GatewaySettings:
        """The settings, checked. Raises UsageError for a value that cannot work."""
        if not self.upstreams:
            raise UsageError("the gateway needs at least one --upstream URL")
        if len(set(self.servers())) < len(self.upstreams):
            raise UsageError("the same --upstream is given twice; a server's own ranks are chosen with --dp-ranks")
        if self.signals and len(self.signals) != len(self.upstreams):
            raise UsageError(f"give --signals once for each of the {len(self.upstreams)} upstreams, in the same order")
        check_fields(self, ("dp_ranks", "chunk_tokens", "max_queue", "eject_after", "return_after"), COUNT)
        check_fields(self, _POSITIVE, POSITIVE)
        check_fields(self, ("network_ms", "drain_s", "resends"), NOT_NEGATIVE)
        check_fields(self, ("port",), PORT)
        for endpoint in self.signals:
            try:
                endpoint_of_rank(endpoint, 0)
            except ValueError as error:
                raise UsageError(f"--signals: {error}") from None
        parse_dispatch(self.dispatch)
        return self
