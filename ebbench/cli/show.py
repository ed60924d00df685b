"""``ebbench show``: prints stored runs again, from their directories."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli.options import AllPercentiles, Format, GoodputCommand, RunPaths, check_format
from ebbench.untrusted import visible

if TYPE_CHECKING:
    from ebbench.analysis.metrics import Slo
    from ebbench.errors import DataError
    from ebbench.records.run import Run


def show(
    runs: RunPaths,
    goodput: Annotated[
        list[str] | None, typer.Option("--goodput", help="Other limits in ms: ttft:500 tpot:50 e2el:5000.")
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Figures by the definitions of other tools, side by side: vllm, guidellm, aiperf, inference-perf, "
            "sglang, or all.",
        ),
    ] = None,
    all_percentiles: AllPercentiles = False,
    style: Format = "table",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout, one entry per run.")] = False,
) -> None:
    """Print stored runs again: tables, verdict, reasons and warnings. Damaged runs are named and left out (exit code
    3).

    Runs of different load or environment are not averaged: each has its own table. Of a capacity search the probes
    nearest to its answers are shown.
    """
    from ebbench.analysis.metrics import parse_slo
    from ebbench.analysis.summary import summarise

    check_format(style, as_json=as_json)
    slo = parse_slo(goodput) if goodput else None
    if tools is not None:
        return _finish(_show_as(runs, tools, slo, style, as_json=as_json))
    loaded, damaged = _load(runs)
    if as_json:
        figures = [summarise(run, slo).to_dict(all_percentiles=all_percentiles) for run in loaded]
        sys.stdout.write(json.dumps(figures, indent=2, allow_nan=False) + "\n")
        return _finish(damaged)
    from ebbench.analysis.cases import cases_of_results, result_of
    from ebbench.render import report
    from ebbench.render.documents import Console, rendered

    cases = cases_of_results([result_of(run, slo) for run in loaded])
    if style == "table":
        _begin(runs, several=len(cases) > 1 and len(loaded) >= MANY)
        report.print_report(Console(highlight=False), cases, all_percentiles=all_percentiles)
    else:
        sys.stdout.write(rendered(report.document(cases, all_percentiles=all_percentiles), style))
    return _finish(damaged)


def _show_as(paths: list[Path], tools: str, slo: Slo | None, style: str, *, as_json: bool) -> list[DataError]:
    """Print the runs by the definitions of other tools; returns the errors of damaged runs."""
    from ebbench.analysis.other_tools import chosen_tools, read_as
    from ebbench.render import other_tools
    from ebbench.render.documents import rendered

    chosen = chosen_tools(tools)
    loaded, damaged = _load(paths)
    compared = [read_as(run, chosen, slo) for run in loaded]
    if as_json:
        sys.stdout.write(json.dumps([reading.to_dict() for reading in compared], indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write(rendered(other_tools.document(compared), style))
    return damaged


MANY = 4
"""Unlike runs from which on a list of them comes first."""


def _begin(paths: list[Path], *, several: bool) -> None:
    """Print a list of many unlike runs, and which searches are left out below these directories."""
    from ebbench.report.listing import print_list
    from ebbench.runs.stored import listed

    listing = listed([path for path in paths if path.is_dir()])
    if several:
        print_list(listing, paths)
        typer.echo()
    searches = [run for run in listing.runs if run.kind == "search" and run.path not in paths]
    if searches:
        probes = sum(run.probes for run in searches)
        left_out = f"{len(searches)} capacity search(es) with {probes} probes are left out"
        typer.echo(f"{left_out}: show their directories, such as {searches[0].path}, for their answers", err=True)


def _load(paths: list[Path]) -> tuple[list[Run], list[DataError]]:
    """The complete runs, and the errors of the others. Raises DataError if none is complete."""
    from ebbench.errors import DataError
    from ebbench.records.run import Run, find_runs
    from ebbench.report.page_tables import shown_runs

    loaded, damaged = [], []
    directories = [path for given in paths for path in shown_runs(given) or find_runs([given])]
    if not directories:
        raise DataError(f"{paths[0]}: no run besides the probes of capacity searches; give the directory of a search")
    for path in directories:
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
