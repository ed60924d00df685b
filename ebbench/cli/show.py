"""``ebbench show``: prints stored runs again, from their directories."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli.options import AllPercentiles, Format, GoodputCommand, check_format
from ebbench.untrusted import visible

if TYPE_CHECKING:
    from ebbench.errors import DataError
    from ebbench.records.run import Run


def show(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or directories of runs.")],
    goodput: Annotated[
        list[str] | None, typer.Option("--goodput", help="Other limits in ms: ttft:500 tpot:50 e2el:5000.")
    ] = None,
    all_percentiles: AllPercentiles = False,
    style: Format = "table",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout, one entry per run.")] = False,
) -> None:
    """Print stored runs again: tables, verdict, reasons and warnings. Damaged runs are named and left out (exit code
    3).

    Runs of different load or environment are not averaged: each has its own table.
    """
    from ebbench.analysis.metrics import parse_slo
    from ebbench.analysis.summary import summarise

    check_format(style, as_json=as_json)
    slo = parse_slo(goodput) if goodput else None
    loaded, damaged = _load(runs)
    if as_json:
        figures = [summarise(run, slo).to_dict(all_percentiles=all_percentiles) for run in loaded]
        sys.stdout.write(json.dumps(figures, indent=2, allow_nan=False) + "\n")
        return _finish(damaged)
    from ebbench.analysis.cases import cases_of_results, result_of
    from ebbench.render import report
    from ebbench.render.console import Console
    from ebbench.render.documents import rendered

    cases = cases_of_results([result_of(run, slo) for run in loaded])
    if style == "table":
        report.print_report(Console(highlight=False), cases, all_percentiles=all_percentiles)
    else:
        sys.stdout.write(rendered(report.document(cases, all_percentiles=all_percentiles), style))
    return _finish(damaged)


def _load(paths: list[Path]) -> tuple[list[Run], list[DataError]]:
    """The complete runs, and the errors of the others. Raises DataError if none is complete."""
    from ebbench.errors import DataError
    from ebbench.records.run import Run, find_runs

    loaded, damaged = [], []
    for path in find_runs(paths):
        try:
            loaded.append(Run.load(path))
        except DataError as error:
            damaged.append(error)
    if damaged and not loaded:
        raise damaged[0]
    return loaded, damaged


def _finish(damaged: list[DataError]) -> None:
    for error in damaged:
        typer.echo(visible(f"left out: {error}"), err=True)
    if damaged:
        raise typer.Exit(damaged[0].exit_code)


show.command_class = GoodputCommand  # type: ignore[attr-defined]
