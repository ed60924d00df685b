"""``ebbench fake-server``: an OpenAI-compatible server with known latencies, for testing clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.options import OptionsOf, grouped
from ebbench.fakeserver.config import KINDS, FakeConfig, parse_fault


@grouped
def fake_server(
    config: Annotated[FakeConfig, OptionsOf({"port": 8000})],
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
    from ebbench.fakeserver.server import run

    if fault == ["list"]:
        _list_faults()
        return
    if ledger is not None and (ledger.exists() or not ledger.absolute().parent.is_dir()):
        why = "exists" if ledger.exists() else "is in a folder that does not exist"
        raise UsageError(f"--ledger {ledger} {why}; give another path")
    from ebbench.records import files

    served = replace(config, faults=tuple(parse_fault(text) for text in fault or ()))
    scheme = "http" if served.ssl_certfile is None else "https"
    kept = run(served, lambda bound: typer.echo(f"{scheme}://127.0.0.1:{bound} is ready; Ctrl-C ends it", err=True))
    if ledger is not None:
        files.write_bytes(kept.encode(), ledger)
    counts = f"{kept.received} requests, {kept.completed} complete answers, {kept.sent_tokens} tokens"
    typer.echo(counts, err=True)


def _list_faults() -> None:
    from ebbench.render.documents import Console
    from ebbench.render.tables import plain_table

    table = plain_table("fault", "what happens")
    for kind, text in KINDS.items():
        table.add_row(kind, text)
    console = Console(highlight=False)
    console.print(table, markup=False)
    console.print(
        "Which requests: request=N, every=N, rate=SHARE; otherwise all. Example: status:code=429,every=5", markup=False
    )
