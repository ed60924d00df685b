"""``ebbench fake-server``: an OpenAI-compatible server with known latencies, for testing clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ebbench.cli.options import grouped


@dataclass(frozen=True)
class ServedFlags:
    """What the server answers, and when; the fields of :class:`ebbench.fakeserver.config.FakeConfig`."""

    port: Annotated[int, typer.Option("--port", help="TCP port on 127.0.0.1; 0 takes a free one.")] = 8000
    ttft_ms: Annotated[float, typer.Option("--ttft-ms", help="Time to the first token.")] = 20.0
    itl_ms: Annotated[float, typer.Option("--itl-ms", help="Time between tokens.")] = 10.0
    max_model_len: Annotated[int, typer.Option("--max-model-len", help="Longest prompt plus output, tokens.")] = (
        1_000_000
    )
    default_tokens: Annotated[
        int, typer.Option("--default-tokens", help="Output tokens of requests that set no length.")
    ] = 16
    ssl_certfile: Annotated[str | None, typer.Option("--ssl-certfile", help="Serve https with this PEM file.")] = None
    ssl_keyfile: Annotated[str | None, typer.Option("--ssl-keyfile", help="Its key, if not in the same file.")] = None
    thinking_tokens: Annotated[
        int, typer.Option("--thinking-tokens", help="Thinking tokens that a chat response begins with.")
    ] = 0
    thinking_field: Annotated[
        str, typer.Option("--thinking-field", help="Field of the deltas: reasoning, or the older reasoning_content.")
    ] = "reasoning"
    max_running: Annotated[
        int | None,
        typer.Option("--max-running", help="Responses at a time; further requests wait. Default: all."),
    ] = None
    keep_ledger: Annotated[bool, typer.Option(help="Keep the ledger; without it memory stays constant.")] = True


@grouped
def fake_server(
    served: ServedFlags,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Name of the model served; may be repeated. Default: fake-model."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="KIND[:key=value,...]; may be repeated. `--fault list` shows all."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", help="Write the ledger (JSON, one entry per request) here at the end.")
    ] = None,
) -> None:
    """Serve /v1/completions and /v1/chat/completions with exact timing, and record every token sent in a ledger.

    Token i of a response is sent --ttft-ms + i times --itl-ms after the request was received, or after one of
    --max-running slots became free. The ledger (GET /ledger) has the server's own times, against which a client's can
    be checked. Runs until Ctrl-C. Example:

    ebbench fake-server --port 8000 --ttft-ms 50 --itl-ms 20 --fault reset:every=10,after=5
    """
    from ebbench.errors import UsageError
    from ebbench.fakeserver.config import FakeConfig, parse_fault
    from ebbench.fakeserver.server import run

    if fault == ["list"]:
        _list_faults()
        return
    if ledger is not None and (ledger.exists() or not ledger.absolute().parent.is_dir()):
        why = "exists" if ledger.exists() else "is in a folder that does not exist"
        raise UsageError(f"--ledger {ledger} {why}; give another path")
    from ebbench.records import files

    first, *further = model or ["fake-model"]
    faults = tuple(parse_fault(text) for text in fault or ())
    config = FakeConfig(**vars(served), model=first, further_models=tuple(further), faults=faults)
    scheme = "http" if served.ssl_certfile is None else "https"
    kept = run(config, lambda bound: typer.echo(f"{scheme}://127.0.0.1:{bound} is ready; Ctrl-C ends it", err=True))
    if ledger is not None:
        files.write_bytes(kept.encode(), ledger)
    counts = f"{kept.received} requests, {kept.completed} complete answers, {kept.sent_tokens} tokens"
    typer.echo(counts, err=True)


def _list_faults() -> None:
    from rich.table import Table

    from ebbench.fakeserver.config import KINDS
    from ebbench.render.documents import Console

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("fault", no_wrap=True)
    table.add_column("what happens")
    for kind, text in KINDS.items():
        table.add_row(kind, text)
    console = Console(highlight=False)
    console.print(table, markup=False)
    console.print(
        "Which requests: request=N, every=N, rate=SHARE; otherwise all. Example: status:code=429,every=5", markup=False
    )
