"""``ebbench query``: SQL over stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbench.errors import UsageError, check_known
from ebbench.runs.stored import RunRoots

FORMATS = ("table", "csv", "json", "parquet")
_VIEWS = "One select over runs, summary, requests, classes, sessions, steps, decisions, plan, server_metrics."


def query(
    sql: Annotated[str, typer.Argument(help=_VIEWS)],
    runs: RunRoots = None,
    form: Annotated[str, typer.Option("--format", "-f", help="table, csv, json or parquet (with --output).")] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file.")] = None,
) -> None:
    """Query stored runs in SQL (DuckDB). Every view has the column `run`; docs/reading-a-run.md lists the others.

    Example: ebbench query "select policy, avg(output_tokens) from requests join runs using (run) group by all"
    """
    from ebbench.report import database

    check_known("format", form, FORMATS)
    if form == "parquet" and output is None:
        raise UsageError("--format parquet needs --output FILE")
    stored = database.load(runs or [Path("runs")])
    result = database.query(database.connect(stored, summaries="runs" in sql.lower()), sql)
    database.write(result, form, output)
