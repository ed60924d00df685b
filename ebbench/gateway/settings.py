"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from ebbench.config.declare import check_ranges, declare
from ebbench.config.server_url import ServerUrl
from ebbench.dispatch import DEFAULT_DISPATCH, parse_dispatch
from ebbench.errors import UsageError
from vllm_eb.signals import endpoint_of_rank

_UPSTREAMS, _DISPATCH, _SERVER = "Upstreams", "Dispatch", "Gateway"


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Settings of a gateway.

    ``upstreams``: URLs in any form that :class:`ServerUrl` takes. ``dispatch``: a policy in the syntax of
    :func:`ebbench.dispatch.parse_dispatch`. ``dp_ranks``: chosen by the header X-data-parallel-rank; 1 sends no such
    header. ``signals``: rank r publishes on the port plus r; empty: ends of forward passes are inferred from the
    streams. ``max_bodies_mb``: of all requests whose answers have not begun.
    """

    upstreams: tuple[str, ...] = declare(
        help="Base URL of a server; repeat for each.", panel=_UPSTREAMS, names=("--upstream", "-u"), text=list[str]
    )
    dispatch: str = declare(
        DEFAULT_DISPATCH,
        "round-robin, least-outstanding, power-of-two, prefix-affine, iqr or sbs\\[:key=value,...].", _DISPATCH,
        complete="dispatch",
    )  # fmt: skip
    signals: tuple[str, ...] = declare(
        (), "ZeroMQ endpoint of an upstream's plugin (tcp://HOST:PORT), in the order of --upstream.", _UPSTREAMS,
        text=list[str],
    )  # fmt: skip
    dp_ranks: int = declare(1, "Data-parallel ranks in each upstream, chosen per request.", _UPSTREAMS, at_least=1)
    chunk_tokens: int = declare(8192, "The servers' --max-num-batched-tokens.", _DISPATCH, at_least=1)
    network_ms: float = declare(1.0, "Round-trip time to a server.", _DISPATCH, at_least=0)
    max_queue: int = declare(10_000, "Requests in the queue before 429.", _DISPATCH, at_least=1)
    max_wait_s: float = declare(
        300.0, "Seconds in the queue before 503, and without a byte from the server before 504.", _DISPATCH, above=0
    )
    resends: int = declare(
        1, "Further servers that get a request whose server broke off before any answer.", _DISPATCH, at_least=0
    )
    max_body_mb: float = declare(64.0, "Largest body of a request; 413 above.", _SERVER, above=0)
    max_bodies_mb: float = declare(1024.0, "Bodies of all requests without an answer; 503 above.", _SERVER, above=0)
    host: str = declare("127.0.0.1", "Address to listen on; default: this machine only.", _SERVER)
    port: int = declare(8080, "TCP port; 0 takes a free one.", _SERVER, at_least=0, at_most=65535)
    health_interval_s: float = declare(2.0, "Seconds between health checks.", _UPSTREAMS, above=0)
    eject_after: int = declare(2, "Consecutive failed checks that eject an upstream.", _UPSTREAMS, at_least=1)
    return_after: int = declare(1, "Consecutive passed checks that return it.", _UPSTREAMS, at_least=1)
    drain_s: float = declare(30.0, "Seconds for open requests at shutdown.", _SERVER, at_least=0)
    health_timeout_s: float = declare(2.0, above=0)
    connect_timeout_s: float = declare(5.0, above=0)
    start_timeout_s: float = declare(5.0, above=0)

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
        check_ranges(self)
        for endpoint in self.signals:
            try:
                endpoint_of_rank(endpoint, 0)
            except ValueError as error:
                raise UsageError(f"--signals: {error}") from None
        parse_dispatch(self.dispatch)
        return self
