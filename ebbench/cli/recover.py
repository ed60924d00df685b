"""``ebbench recover``: rebuilds unfinished runs from what they had stored."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbench.runs.stored import RunPaths


def recover(
    runs: RunPaths,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out damaged shards instead of stopping.")
    ] = False,
) -> None:
    """Rebuild runs whose program was killed. They can then be read; they are marked interrupted and INVALID.

    Requests without a record count as cancelled. Complete runs are not changed.
    """
    from ebbench.analysis.rebuild import cut_off_runs, rebuild
    from ebbench.records.run import is_being_written

    directories = cut_off_runs(runs)
    if not directories:
        typer.echo("nothing to recover: no unfinished run here")
    for directory in directories:
        if is_being_written(directory):
            typer.echo(f"{directory}: is being measured now, left alone")
            continue
        done = rebuild(directory, skip_damaged=skip_damaged)
        typer.echo(f"{directory}: rebuilt, {done.recorded} of {done.planned} requests have a record")
        for path in done.damaged:
            typer.echo(f"{path}: damaged, left out")
