"""``ebbench trend``: figures of stored runs over commits, with the places where they change."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli.options import Command, Format, check_format, grouped, opt
from ebbench.cli.runs import Filters
from ebbench.errors import DataError, UsageError
from ebbench.untrusted import visible

if TYPE_CHECKING:
    from ebbench.report.trend import Series

_JUDGE, _OUTPUT = "Judging", "Output"


@dataclass(frozen=True)
class TrendRules:
    """What counts as a change."""

    metric: Annotated[
        list[str] | None,
        opt("--metric", help="Figures, as of `gate`. Repeatable. Default throughput, ttft, tpot.", panel=_JUDGE),
    ] = None
    margin: Annotated[
        list[str] | None,
        opt("--margin", help="Change that matters in percent: 3, or ttft:10. Repeatable. Default 3.", panel=_JUDGE),
    ] = None
    alpha: Annotated[float, opt("--alpha", help="Accepted probability of a false change.", panel=_JUDGE)] = 0.05
    alert: Annotated[
        bool,
        opt("--alert", help="Exit code 1 if the last change, or the newest point, is worse; 5 if it may be.",
            panel=_JUDGE),
    ] = False  # fmt: skip


@dataclass(frozen=True)
class TrendOutput:
    """Where the trend goes."""

    plot: Annotated[Path | None, opt("--plot", help="Write the curves to this .png, .svg or .pdf.", panel=_OUTPUT)] = (
        None
    )
    html: Annotated[Path | None, opt("--html", help="Write a page.", panel=_OUTPUT)] = None
    summary: Annotated[
        Path | None,
        opt("--summary", help="Append Markdown, as for a comment; default: $GITHUB_STEP_SUMMARY.", panel=_OUTPUT),
    ] = None
    last: Annotated[int | None, opt("--last", help="Rows of the table. Default 30; 0: all.", panel=_OUTPUT)] = 30
    as_json: Annotated[bool, opt("--json", help="One JSON object on stdout.", panel=_OUTPUT)] = False


@grouped
def trend(
    filters: Filters,
    rules: TrendRules,
    output: TrendOutput,
    runs: Annotated[list[str] | None, typer.Argument(help="Directories, or --name, of runs. Default: runs.")] = None,
    style: Format = "table",
) -> None:
    """Show figures over commits, the changes in them, and whether the newest point is worse.

    A point is a commit: its runs (seeds, repeats) with their mean and interval. Commits come from --commit, the CI job,
    or ebbench itself; a server without one has a point per measurement. A change is shown by the gate's test on pairs
    of runs, six at least. A worse level stays an alert until it is mended, or --since leaves out what was before it.
    """
    from ebbench.analysis.trend import trends_of
    from ebbench.analysis.units import parse_figures, parse_margins
    from ebbench.analysis.verdict import GATED, Rules
    from ebbench.records.run import Run
    from ebbench.report.trend import EXIT_CODES, worst_alert
    from ebbench.runs.stored import DEFAULT_ROOTS, listed, meant
    from ebbench.sizing.chart import check_suffix

    check_format(style, as_json=output.as_json)
    if output.plot is not None:
        check_suffix(output.plot)
    margin, single = parse_margins(rules.margin or ())
    figures = parse_figures(rules.metric or ()) or GATED
    if unused := [name for name in single if name not in figures]:
        raise UsageError(f"--margin names {unused[0]}, which is not among the figures; add --metric for it")
    judged = Rules(default_margin=margin, margin=single, alpha=rules.alpha, gated=figures)
    listing = meant(runs) if runs else listed(DEFAULT_ROOTS)
    chosen = [run for run in filters.of(listing).runs if run.kind == "run"]
    if not chosen:
        raise DataError("no run matches; `ebbench runs` with the same filters lists what there is")
    series = trends_of([Run.load(run.path) for run in chosen], figures, judged)
    _write(series, output, style)
    for path, why in listing.problems.items():
        typer.echo(visible(f"left out: {path}: {why}"), err=True)
    if rules.alert:
        raise typer.Exit(EXIT_CODES[worst_alert(series)])


def _write(series: Sequence[Series], output: TrendOutput, style: str) -> None:
    from ebbench.records import files
    from ebbench.render.documents import rendered
    from ebbench.report import page
    from ebbench.report.trend import as_json, document, save_chart, trend_page

    if output.plot is not None:
        save_chart(series, output.plot)
    if output.html is not None:
        page.write(trend_page(series), output.html)
    table = document(series, output.last)
    files.append_to_summary(rendered(table, "markdown"), output.summary)
    if output.as_json:
        sys.stdout.write(json.dumps(as_json(series), indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write(rendered(table, style))


trend.command_class = Command  # type: ignore[attr-defined]
