"""``ebbench compare``: compares stored runs, paired by plan, with intervals and tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.options import Format, check_format
from ebbench.runs.stored import RUNS, runs_meant


def compare(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Policy to compare with. Default: v1, else the first.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="Environment key that may differ. Repeatable.")
    ] = None,
    style: Format = "table",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare policies on the same plans: change, interval, p-value, smallest detectable change.

    Each load and environment among the runs is compared separately; different plans within one are refused. Two
    policies need `ebbench run --repeats 7` or more to show a difference at 5 % (a two-sided test; the gate's is
    one-sided and needs six), several policies one or two more.
    """
    from ebbench.analysis import paired as compare_paired
    from ebbench.analysis.environment import check_allowed
    from ebbench.report import comparison

    check_format(style, as_json=as_json)
    allowed = check_allowed(allow or ())
    groups = compare_paired.load_groups([(given, runs_meant([given])) for given in runs])
    compared = compare_paired.compare_cases(groups, baseline, allowed)
    if as_json:
        sys.stdout.write(json.dumps(comparison.to_json(compared), indent=2, allow_nan=False) + "\n")
        return
    if style != "table":
        from ebbench.render.documents import rendered

        shown_as = comparison.plain if style == "csv" else comparison.document
        sys.stdout.write(rendered(shown_as(compared), style))
        return
    from ebbench.render.documents import Console

    console = Console(highlight=False)
    console.print(comparison.console(compared, console.width))
