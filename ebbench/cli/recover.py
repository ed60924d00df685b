"""``ebbench recover``: rebuild runs that were cut off, from what they had stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recover(
    runs: Annotated[list[Path], typer.Argument(help="Cut-off run directories, or directories that hold some.")],
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave damaged shards out instead of stopping at them.")
    ] = False,
) -> None:
    """Rebuild runs whose program was killed. They are then readable, interrupted and INVALID: never gated.

    Requests without a record are counted as cancelled. Complete runs are left as they are.
    """
    from ebbench.analysis.rebuild import cut_off_runs, rebuild

    found = cut_off_runs(runs)
    if not found:
        typer.echo("nothing to recover: no cut-off run here")
    for directory in found:
        done = rebuild(directory, skip_damaged=skip_damaged)
        typer.echo(f"{directory}: rebuilt, {done.recorded} of {done.planned} requests have a record")
        for path in done.damaged:
            typer.echo(f"{path}: damaged, left out")
