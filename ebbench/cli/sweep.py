"""``ebbench sweep``: runs a grid of settings with processes or on a cluster; can be resumed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli.options import grouped
from ebbench.cli.run_settings import RunSettings
from ebbench.errors import InterruptedRunError, RunError, UnknownNameError, UsageError
from ebbench.runs.key import key_of
from ebbench.spec.run import OF_LABELS

if TYPE_CHECKING:
    from ebbench.render.documents import Console
    from ebbench.runs.pool import Pool
    from ebbench.sweep.drive import Result, SweepStore
    from ebbench.sweep.spec import Sweep

EXECUTORS = ("process", "ray")
METRICS = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")


@dataclass(frozen=True)
class PoolFlags:
    """Where cells run."""

    workers: Annotated[
        int | None,
        typer.Option("--workers", help="Cells at a time; always one for a server's URL. Default: one per CPU."),
    ] = None
    executor: Annotated[str, typer.Option("--executor", help="process or ray.")] = "process"
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="auto or HOST:PORT; default: RAY_ADDRESS, else a new local cluster."),
    ] = None
    gpus_per_cell: Annotated[
        float | None, typer.Option("--gpus-per-cell", help="With ray; default 1 for engine vllm, else 0.")
    ] = None


@grouped
def sweep(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The grid; see docs/sweeps.md.")],
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Directory of the results, also to resume. Default: sweeps/NAME."),
    ] = None,
    *,
    pool: PoolFlags,
    labels: Annotated[dict[str, Any], RunSettings(only=OF_LABELS)],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="Figure to maximise: request_throughput, output_throughput, total_token_throughput, request_goodput. "
            "Default: request_goodput if all cells have limits (goodput), else request_throughput.",
        ),
    ] = None,
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
    from ebbench.sweep import show
    from ebbench.sweep.drive import SweepStore, run_sweep
    from ebbench.sweep.show import findings
    from ebbench.sweep.spec import load_sweep, trace_notes

    grid = load_sweep(spec).labelled(labels)
    metric = _metric(grid, metric)
    store = SweepStore(output_dir or Path("sweeps") / slug(grid.name))
    output = Console(highlight=False)
    if not quiet:
        for note in trace_notes(grid.cells):
            Console(stderr=True, highlight=False).say(note)
    if dry_run and fresh:
        raise UsageError("--dry-run changes nothing, so leave out --fresh")
    if dry_run:
        _dry_run(grid, store, output, as_json=as_json)
        return
    chosen = pool_of(grid, pool)
    if fresh and (kept := store.set_aside()) is not None:
        typer.echo(f"earlier results: {kept}", err=True)
    with show.progress_on(Console(stderr=True, highlight=False), quiet=quiet) as report:
        result = run_sweep(grid, store, chosen, spec=spec.read_bytes(), report=report)
    found = findings(result.finished, grid.axes, metric)
    if as_json:
        sys.stdout.write(json.dumps(show.to_json(result, found, metric), indent=2, allow_nan=False) + "\n")
    else:
        output.print(show.console_report(result, found, metric))
    _verdict(grid, store, result)


def _metric(grid: Sweep, asked: str | None) -> str:
    """The figure that ranks. Raises UnknownNameError, and UsageError for goodput without limits."""
    from ebbench.sweep.show import GOODPUT, metric_of

    if asked is not None and asked not in METRICS:
        raise UnknownNameError("metric", asked, METRICS)
    if asked == GOODPUT and not all(cell.goodput for cell in grid.cells):
        raise UsageError(
            '--metric request_goodput needs limits for all cells: goodput = "ttft:500 tpot:50" in [common]'
        )
    return asked or metric_of(grid.cells)


def _verdict(grid: Sweep, store: SweepStore, result: Result) -> None:
    """Raise InterruptedRunError or RunError unless every cell is finished and valid."""
    if result.interrupted:
        raise InterruptedRunError(f"interrupted; {len(result.finished)} of {len(grid.cells)} cells are finished")
    if result.failed:
        raise RunError(
            f"{len(result.failed)} of {len(grid.cells)} cells failed; their errors are in {store.directory}/failed"
        )
    if result.invalid:
        raise RunError(f"{len(result.invalid)} of {len(grid.cells)} cells are INVALID; they are named above")


def _dry_run(grid: Sweep, store: SweepStore, output: Console, *, as_json: bool) -> None:
    from ebbench.sweep import show
    from ebbench.sweep.drive import missing
    from ebbench.sweep.spec import problem_of

    todo = missing(grid, store)
    if not as_json:
        output.print(show.dry_run(grid, todo))
        return
    left = set(todo)
    cells = [
        {"key": key_of(cell), "finished": cell not in left, "problem": problem_of(cell) or None} for cell in grid.cells
    ]
    sys.stdout.write(json.dumps({"name": grid.name, "cells": cells, "axes": list(grid.axes)}, indent=2) + "\n")


def pool_of(grid: Sweep, flags: PoolFlags) -> Pool:
    """The chosen pool. The vllm engine gets a GPU per cell on a cluster, and one cell at a time on this machine."""
    from ebbench.runs.pool import Processes, RayCluster

    real = any(cell.engine in ("vllm", "auto") for cell in grid.cells)
    gpus = flags.gpus_per_cell
    if flags.executor == "ray":
        return RayCluster(
            flags.ray_address, gpus=(1.0 if real else 0.0) if gpus is None else gpus, workers=flags.workers
        )
    if flags.executor != "process":
        raise UnknownNameError("executor", flags.executor, EXECUTORS)
    if flags.ray_address is not None or gpus is not None:
        raise UsageError("--ray-address and --gpus-per-cell need --executor ray")
    return Processes(flags.workers if flags.workers is not None or not real else 1)
