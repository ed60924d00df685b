"""``ebbench trend``: figures of stored runs over commits, with the places where they change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.options import Format, check_format, grouped, under
from ebbench.errors import DataError, UsageError
from ebbench.foreign.documents import visible
from ebbench.runs.stored import DEFAULT_ROOTS, Wanted, listed, meant

judging, output = under("Judging"), under("Output")
_ALERT = "Exit code 1 if the last change, or the newest point, is worse; 5 if it may be."


@grouped
def trend(
    filters: Wanted,
    metric: Annotated[
        list[str] | None, judging(help="Figures, as of `gate`. Repeatable. Default throughput, ttft, tpot.")
    ] = None,
    margin: Annotated[
        list[str] | None, judging(help="Change that matters in percent: 3, or ttft:10. Repeatable. Default 3.")
    ] = None,
    alpha: Annotated[float, judging(help="Accepted probability of a false change.")] = 0.05,
    alert: Annotated[bool, judging("--alert", help=_ALERT)] = False,
    plot: Annotated[Path | None, output(help="Write the curves to this .png, .svg or .pdf.")] = None,
    html: Annotated[Path | None, output(help="Write a page.")] = None,
    summary: Annotated[
        Path | None, output(help="Append Markdown, as for a comment; default: $GITHUB_STEP_SUMMARY.")
    ] = None,
    last: Annotated[int | None, output(help="Rows of the table. Default 30; 0: all.")] = 30,
    as_json: Annotated[bool, output("--json", help="One JSON object on stdout.")] = False,
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
    from ebbench.render.figures import check_plot
    from ebbench.report.trend import EXIT_CODES, worst_alert, write

    check_format(style, as_json=as_json)
    if plot is not None:
        check_plot(plot)
    default, single = parse_margins(margin or ())
    figures = parse_figures(metric or ()) or GATED
    if unused := [name for name in single if name not in figures]:
        raise UsageError(f"--margin names {unused[0]}, which is not among the figures; add --metric for it")
    listing = meant(runs) if runs else listed(DEFAULT_ROOTS)
    chosen = [run for run in listing.only(filters).runs if run.kind == "run"]
    if not chosen:
        raise DataError("no run matches; `ebbench runs` with the same filters lists what there is")
    judged = Rules(default_margin=default, margin=single, alpha=alpha, gated=figures)
    series = trends_of([Run.load(run.path) for run in chosen], judged)
    write(series, "json" if as_json else style, plot=plot, html=html, summary=summary, last=last)
    for path, why in listing.problems.items():
        typer.echo(visible(f"left out: {path}: {why}"), err=True)
    if alert:
        raise typer.Exit(EXIT_CODES[worst_alert(series)])
