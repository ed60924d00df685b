"""``ebbench query``: SQL over stored runs."""

from __future__ import annotations

import json
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.errors import UnknownNameError
from ebbench.foreign.documents import csv_cell, visible

if TYPE_CHECKING:
    import pyarrow as pa

    from ebbench.render.documents import Console

FORMATS = ("table", "csv", "json", "parquet")


def query(
    sql: Annotated[
        str, typer.Argument(help="One select over runs, summary, classes, requests, sessions, steps, decisions, plan.")
    ],
    runs: Annotated[
        list[Path] | None, typer.Option("--runs", "-r", help="Directories of runs. Repeatable. Default: runs.")
    ] = None,
    form: Annotated[str, typer.Option("--format", "-f", help="table, csv, json or parquet (with --output).")] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file.")] = None,
) -> None:
    """Query stored runs in SQL (DuckDB). Every view has the column `run`; docs/reading-a-run.md lists the others.

    Example: ebbench query "select policy, avg(output_tokens) from requests join runs using (run) group by all"
    """
    from ebbench.errors import UsageError
    from ebbench.report import database

    if form not in FORMATS:
        raise UnknownNameError("format", form, FORMATS)
    if form == "parquet" and output is None:
        raise UsageError("--format parquet needs --output FILE")
    found = database.load(runs or [Path("runs")])
    result = database.query(database.connect(found, summaries="runs" in sql.lower()), sql)
    _give(_apart(result), form, output)


def _apart(result: pa.Table) -> pa.Table:
    """The result with unique column names: ``a``, ``a_1``, ..."""
    names: list[str] = []
    taken = set(result.column_names)
    for name in result.column_names:
        names.append(_free(name, taken) if name in names else name)
        taken.add(names[-1])
    return result.rename_columns(names)


def _free(name: str, taken: set[str]) -> str:
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _give(result: pa.Table, form: str, output: Path | None) -> None:
    from ebbench.records import files

    if form == "parquet" and output is not None:
        files.write_table(result, output)
    elif output is not None:
        files.write_bytes(_text_of(result, form).encode(), output)
    elif form == "table":
        _print(result)
    else:
        sys.stdout.write(_text_of(result, form))


def _text_of(result: pa.Table, form: str) -> str:
    return {"json": _json, "csv": _csv, "table": _table}[form](result)


def _json(result: pa.Table) -> str:
    return json.dumps(_finite(result.to_pylist()), indent=2, default=_plain, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """``value`` with NaN and infinity replaced by null, also in lists and structs, which JSON needs."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _plain(value: object) -> object:
    """A value for JSON: sums of integers are decimals; other types that JSON lacks become text."""
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    return str(value)


def _csv(result: pa.Table) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(csv_cell, result.column_names))
    for row in result.to_pylist():
        writer.writerow(["" if value is None else csv_cell(value) for value in row.values()])
    return text.getvalue()


_FILE_WIDTH = 100_000  # a file has no width: no line is broken

_LEAST_WIDTH = 9  # narrower columns are unreadable; rows are then shown one below the other


def _table(result: pa.Table) -> str:
    import io

    from ebbench.render.documents import Console

    text = io.StringIO()
    _print(result, Console(file=text, width=_FILE_WIDTH, color_system=None, highlight=False))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _print(result: pa.Table, console: Console | None = None) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from ebbench.render.documents import Console

    console = console or Console(highlight=False)
    if result.num_columns * _LEAST_WIDTH > console.width:
        _print_rows(result, console)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for field in result.schema:
        numeric = str(field.type).startswith(("int", "uint", "float", "double", "decimal"))
        table.add_column(escape(field.name), justify="right" if numeric else "left", overflow="fold")
    for row in result.to_pylist():
        table.add_row(*(escape(_text(value)) for value in row.values()))
    console.print(table)


def _print_rows(result: pa.Table, console: Console) -> None:
    from rich.markup import escape

    for number, row in enumerate(result.to_pylist(), start=1):
        console.print(f"row {number}", style="bold")
        for name, value in row.items():
            console.print(f"  {escape(name)}: {escape(_text(value))}", soft_wrap=True)


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else visible(str(value))
