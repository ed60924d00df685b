"""``ebbench show``: prints stored runs again, from their directories."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.config.options import AllPercentiles, Format, check_format
from ebbench.foreign.documents import visible
from ebbench.process.command_line import GoodputCommand
from ebbench.runs.stored import RunPaths

if TYPE_CHECKING:
    from ebbench.analysis.metrics import Slo
    from ebbench.errors import DataError


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
    from ebbench.report.listing import MANY, load_shown, print_head

    check_format(style, as_json=as_json)
    slo = parse_slo(goodput) if goodput else None
    if tools is not None:
        return _finish(_show_as(runs, tools, slo, style, as_json=as_json))
    loaded, damaged = load_shown(runs)
    if as_json:
        figures = [summarise(run, slo).to_dict(all_percentiles=all_percentiles) for run in loaded]
        sys.stdout.write(json.dumps(figures, indent=2, allow_nan=False) + "\n")
        return _finish(damaged)
    from ebbench.analysis.cases import cases_of_results, result_of
    from ebbench.render import report
    from ebbench.render.documents import Console, rendered

    cases = cases_of_results([result_of(run, slo) for run in loaded])
    if style == "table":
        print_head(runs, several=len(cases) > 1 and len(loaded) >= MANY)
        report.print_report(Console(highlight=False), cases, all_percentiles=all_percentiles)
    else:
        sys.stdout.write(rendered(report.document(cases, all_percentiles=all_percentiles), style))
    return _finish(damaged)


def _show_as(paths: list[Path], tools: str, slo: Slo | None, style: str, *, as_json: bool) -> list[DataError]:
    """Print the runs by the definitions of other tools; returns the errors of damaged runs."""
    from ebbench.analysis.other_tools import chosen_tools, read_as
    from ebbench.render import other_tools
    from ebbench.render.documents import rendered
    from ebbench.report.listing import load_shown

    chosen = chosen_tools(tools)
    loaded, damaged = load_shown(paths)
    compared = [read_as(run, chosen, slo) for run in loaded]
    if as_json:
        sys.stdout.write(json.dumps([reading.to_dict() for reading in compared], indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write(rendered(other_tools.document(compared), style))
    return damaged


def _finish(damaged: list[DataError]) -> None:
    for error in damaged:
        typer.echo(visible(f"left out: {error}"), err=True)
    if damaged:
        raise typer.Exit(damaged[0].exit_code)


show.command_class = GoodputCommand  # type: ignore[attr-defined]
