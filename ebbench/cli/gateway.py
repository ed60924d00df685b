"""``ebbench gateway``: dispatches requests over several OpenAI-compatible servers."""

from __future__ import annotations

import typer

from ebbench.config.options import grouped
from ebbench.gateway.settings import GatewaySettings


@grouped
def gateway(settings: GatewaySettings) -> None:
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
    from ebbench.process.interpreter import no_full_collections

    text = f"{len(settings.upstreams)} upstreams, dispatch {settings.dispatch}; Ctrl-C ends it"

    def ready(bound: int) -> None:
        no_full_collections()
        typer.echo(f"http://{settings.host}:{bound} is ready: {text}", err=True)

    serve(settings, ready)
