"""``ebbench gateway``: dispatches requests over several OpenAI-compatible servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ebbench.cli.options import grouped, opt

_UPSTREAMS, _DISPATCH, _SERVER = "Upstreams", "Dispatch", "Gateway"


@dataclass(frozen=True)
class GatewayFlags:
    """The gateway's settings, named as in :class:`ebbench.gateway.settings.GatewaySettings`."""

    upstreams: Annotated[
        list[str], opt("--upstream", "-u", help="Base URL of a server; repeat for each.", panel=_UPSTREAMS)
    ]
    dispatch: Annotated[
        str,
        opt(
            "--dispatch",
            help="round-robin, least-outstanding, power-of-two, prefix-affine, iqr or sbs\\[:key=value,...].",
            panel=_DISPATCH,
        ),
    ] = "least-outstanding"
    signals: Annotated[
        list[str] | None,
        opt(
            "--signals",
            help="ZeroMQ endpoint of an upstream's plugin (tcp://HOST:PORT), in the order of --upstream.",
            panel=_UPSTREAMS,
        ),
    ] = None
    dp_ranks: Annotated[
        int, opt("--dp-ranks", help="Data-parallel ranks in each upstream, chosen per request.", panel=_UPSTREAMS)
    ] = 1
    chunk_tokens: Annotated[
        int, opt("--chunk-tokens", help="The servers' --max-num-batched-tokens.", panel=_DISPATCH)
    ] = 8192
    network_ms: Annotated[
        float,
        opt("--network-ms", help="Round-trip time to a server.", panel=_DISPATCH),
    ] = 1.0
    max_queue: Annotated[int, opt("--max-queue", help="Requests in the queue before 429.", panel=_DISPATCH)] = 10_000
    max_wait_s: Annotated[
        float,
        opt(
            "--max-wait",
            help="Seconds in the queue before 503, and without a byte from the server before 504.",
            panel=_DISPATCH,
        ),
    ] = 300.0
    resends: Annotated[
        int,
        opt(
            "--resends",
            help="Further servers that get a request whose server broke off before any answer.",
            panel=_DISPATCH,
        ),
    ] = 1
    max_body_mb: Annotated[float, opt("--max-body-mb", help="Largest body of a request; 413 above.", panel=_SERVER)] = (
        64.0
    )
    max_bodies_mb: Annotated[
        float,
        opt("--max-bodies-mb", help="Bodies of all requests without an answer; 503 above.", panel=_SERVER),
    ] = 1024.0
    host: Annotated[
        str,
        opt("--host", help="Address to listen on; default: this machine only.", panel=_SERVER),
    ] = "127.0.0.1"
    port: Annotated[int, opt("--port", help="TCP port; 0 takes a free one.", panel=_SERVER)] = 8080
    health_interval_s: Annotated[
        float, opt("--health-interval", help="Seconds between health checks.", panel=_UPSTREAMS)
    ] = 2.0
    eject_after: Annotated[
        int, opt("--eject-after", help="Consecutive failed checks that eject an upstream.", panel=_UPSTREAMS)
    ] = 2
    return_after: Annotated[
        int, opt("--return-after", help="Consecutive passed checks that return it.", panel=_UPSTREAMS)
    ] = 1
    drain_s: Annotated[float, opt("--drain", help="Seconds for open requests at shutdown.", panel=_SERVER)] = 30.0


@grouped
def gateway(flags: GatewayFlags) -> None:
    """One endpoint in front of several servers of one model.

    Streams are relayed without delay. When a server dies, only the responses that it had begun are lost; requests
    without a response yet go to another server. /metrics has counts, /gateway the state; POST
    /gateway/drain?upstream=URL stops new requests to a server, /gateway/resume allows them again. Example:

    ebbench gateway -u http://127.0.0.1:8001 -u http://127.0.0.1:8002 --dispatch sbs
    """
    from ebbench.installation import need

    for module in ("starlette", "uvicorn"):
        need(module, "ebbench gateway", "gateway")
    from ebbench.gateway.serve import serve
    from ebbench.gateway.settings import GatewaySettings
    from ebbench.process.interpreter import no_full_collections

    given = vars(flags) | {"upstreams": tuple(flags.upstreams), "signals": tuple(flags.signals or ())}
    text = f"{len(flags.upstreams)} upstreams, dispatch {flags.dispatch}; Ctrl-C ends it"

    def ready(bound: int) -> None:
        no_full_collections()
        typer.echo(f"http://{flags.host}:{bound} is ready: {text}", err=True)

    serve(GatewaySettings(**given), ready)
