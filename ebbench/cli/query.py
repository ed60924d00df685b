"""``ebbench query``: SQL over stored runs."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.errors import UnknownNameError

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("table", "csv", "json", "parquet")


def query(
    sql: Annotated[str, typer.Argument(help="One select over runs, requests, steps, decisions, plan.")],
    runs: Annotated[
        list[Path] | None, typer.Option("--runs", "-r", help="Where to look for runs. Repeatable. Default: runs.")
    ] = None,
    form: Annotated[str, typer.Option("--format", "-f", help="table, csv, json or parquet (with --output).")] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file.")] = None,
) -> None:
    """Ask stored runs in SQL (DuckDB). Every view has the column `run`; docs/reading-a-run.md lists the others.

    Example: ebbench query "select policy, avg(output_tokens) from requests join runs using (run) group by all"
    """
    from ebbench.errors import UsageError
    from ebbench.report import database

    if form not in FORMATS:
        raise UnknownNameError("format", form, FORMATS)
    if form == "parquet" and output is None:
        raise UsageError("--format parquet needs --output FILE")
    found = database.load(runs or [Path("runs")])
    answer = database.query(database.connect(found, summaries="runs" in sql.lower()), sql)
    _give(answer, form, output)


def _give(answer: pa.Table, form: str, output: Path | None) -> None:
    from ebbench.records import files

    if form == "parquet" and output is not None:
        files.write_table(answer, output)
        return
    if form == "table" and output is None:
        _print(answer)
        return
    text = _json(answer) if form == "json" else _csv(answer)
    if output is None:
        sys.stdout.write(text)
    else:
        files.write_bytes(text.encode(), output)


def _json(answer: pa.Table) -> str:
    return json.dumps(answer.to_pylist(), indent=2, default=_plain) + "\n"


def _plain(value: object) -> object:
    """Sums of integers come as decimals; whatever else JSON does not know becomes text."""
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    return str(value)


def _csv(answer: pa.Table) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.column_names)
    writer.writerows([["" if value is None else value for value in row.values()] for row in answer.to_pylist()])
    return text.getvalue()


_LEAST_WIDTH = 9  # a column narrower than this cannot be read; rows are then shown one below the other


def _print(answer: pa.Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if answer.num_columns * _LEAST_WIDTH > console.width:
        for number, row in enumerate(answer.to_pylist(), start=1):
            console.print(f"row {number}", style="bold")
            for name, value in row.items():
                console.print(f"  {escape(name)}: {escape(_text(value))}", soft_wrap=True)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for field in answer.schema:
        numeric = str(field.type).startswith(("int", "uint", "float", "double", "decimal"))
        table.add_column(escape(field.name), justify="right" if numeric else "left", overflow="fold")
    for row in answer.to_pylist():
        table.add_row(*(escape(_text(value)) for value in row.values()))
    console.print(table)


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
