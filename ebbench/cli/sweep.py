"""``ebbench sweep``: runs a grid of settings with processes or on a cluster; can be resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.config.options import grouped
from ebbench.errors import UsageError
from ebbench.spec.commands import RunSettings
from ebbench.spec.run import OF_LABELS

if TYPE_CHECKING:
    from rich.console import RenderableType


_METRIC = (
    "Figure to maximise: request_throughput, output_throughput, total_token_throughput, request_goodput. "
    "Default: request_goodput if all cells have limits (goodput), else request_throughput."
)


@grouped
def sweep(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The grid; see docs/sweeps.md.")],
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Directory of the results, also to resume. Default: sweeps/NAME."),
    ] = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="Cells at a time; always one for a server's URL. Default: one per CPU."),
    ] = None,
    executor: Annotated[str, typer.Option("--executor", help="process or ray.")] = "process",
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="auto or HOST:PORT; default: RAY_ADDRESS, else a new local cluster."),
    ] = None,
    gpus_per_cell: Annotated[
        float | None, typer.Option("--gpus-per-cell", help="With ray; default 1 for engine vllm, else 0.")
    ] = None,
    labels: Annotated[dict[str, Any], RunSettings(only=OF_LABELS)],
    metric: Annotated[str | None, typer.Option("--metric", help=_METRIC)] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again: earlier results get a name with their date.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the grid and the cells left to run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run every combination of a grid and show the best configuration of each policy.

    A stopped or killed sweep continues where it was: finished cells are not run again, without --fresh. A cell that
    fails is reported, the others continue, and the next call tries it again. Cells on a server's URL run one at a time.
    """
    from ebbench.records.run import slug
    from ebbench.render.documents import Console
    from ebbench.render.live import Work, shown
    from ebbench.sweep import show
    from ebbench.sweep.drive import SweepStore, missing, require_finished, run_sweep, sweep_pool
    from ebbench.sweep.spec import load_sweep, trace_notes

    grid = load_sweep(spec).labelled(labels)
    metric = show.ranking_metric(grid, metric)
    store = SweepStore(output_dir or Path("sweeps") / slug(grid.name))
    if not quiet:
        for note in trace_notes(grid.cells):
            Console(stderr=True, highlight=False).say(note)
    if dry_run:
        if fresh:
            raise UsageError("--dry-run changes nothing, so leave out --fresh")
        _print((show.dry_run_json if as_json else show.dry_run)(grid, missing(grid, store)))
        return
    chosen = sweep_pool(grid, workers, executor, ray_address, gpus_per_cell)
    if fresh and (kept := store.set_aside()) is not None:
        typer.echo(f"earlier results: {kept}", err=True)
    with shown(Console(stderr=True, highlight=False), Work("sweep", unit="cells"), quiet=quiet) as work:
        result = run_sweep(grid, store, chosen, spec=spec.read_bytes(), work=work)
    found = show.findings(result.finished, grid.axes, metric)
    _print(show.to_json(result, found, metric) if as_json else show.console_report(result, found, metric))
    require_finished(grid, store, result)


def _print(shown: dict[str, Any] | RenderableType) -> None:
    from ebbench.render.documents import Console

    if isinstance(shown, dict):
        sys.stdout.write(json.dumps(shown, indent=2, allow_nan=False) + "\n")
    else:
        Console(highlight=False).print(shown)
