"""Stored runs as an in-memory DuckDB database: one view per table, and ``runs`` with one row per run."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from msgspec.structs import asdict
from rich.markup import escape

from ebbench.analysis.environment import flat_load, load_of_run, machine_of_run
from ebbench.analysis.sessions import SESSIONS
from ebbench.analysis.summary import metrics_dict, summarise
from ebbench.errors import DataError, UsageError
from ebbench.foreign.documents import csv_cell, visible
from ebbench.installation import need
from ebbench.process.termination import interruptible
from ebbench.records import files
from ebbench.records.run import MANIFEST, SCHEMAS, Run, find_runs
from ebbench.records.schema import REQUEST_LATENCIES, REQUESTS, SERVER_METRICS
from ebbench.render.documents import Console
from ebbench.render.numbers import finite
from ebbench.render.tables import framed

T = TypeVar("T")
_BLANK = r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_EXPLAIN = re.compile(
    rf"^{_BLANK}explain{_BLANK}(?:analyze{_BLANK})?(?:\([^()]*\){_BLANK})?", re.IGNORECASE | re.DOTALL
)
"""What makes an explanation of a statement; DuckDB itself says what kind of statement follows."""
TABLES = {**SCHEMAS, "requests": pa.schema([*REQUESTS, *REQUEST_LATENCIES]), "server_metrics": SERVER_METRICS}
VIEWS = {**TABLES, "sessions": SESSIONS, "classes": pa.schema([]), "summary": pa.schema([])}
"""The tables, and the stored figures of runs and of classes of requests, whose columns are those of ``--json``."""


def connect(runs: Sequence[Run], *, summaries: bool = True) -> Any:
    """A connection with a view ``runs`` and one view per entry of VIEWS; in each, ``run`` is the run's directory.

    ``summaries`` False leaves the figures out of ``runs``, which saves reading all requests. The database can access
    only the files of these runs.
    """
    duckdb = need("duckdb", "ebbench query")
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"})
    connection.register("_runs", _overview(runs, summaries=summaries))
    connection.execute("create view runs as select * from _runs")
    for name, schema in VIEWS.items():
        # The directory as ``runs`` spells it, "." too, so that the column ``run`` joins.
        paths = [f"{run.path}/{name}.parquet" for run in runs if (run.path / f"{name}.parquet").exists()]
        empty = pa.schema([pa.field("run", pa.string()), *schema]).empty_table()
        connection.register(f"_{name}", empty)
        if not paths:  # none of the runs read server metrics
            connection.execute(f"create view {name} as select * from _{name}")
            continue
        relation = connection.read_parquet([_unglobbed(path) for path in paths], filename=True, union_by_name=True)
        tail = len(f"/{name}.parquet")
        own = relation.project(f"left(filename, len(filename) - {tail}) as run, * exclude (filename)")
        own.create_view(f"_stored_{name}")
        # Columns that none of the files has, since their code was older, are null.
        both = f"select * from _stored_{name} union all by name select * from _{name}"
        connection.execute(f"create view {name} as {both}")
    directories = [str(run.path) for run in runs]  # DuckDB checks a path as given and as resolved
    allowed = dict.fromkeys([*directories, *map(_unglobbed, directories)])
    literals = ", ".join("'" + path.replace("'", "''") + "/'" for path in allowed)
    connection.execute(f"set allowed_directories = [{literals}]")
    connection.execute("set python_enable_replacements = false")  # a variable of this program is no table
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def query(connection: Any, sql: str) -> pa.Table:
    """The result of one statement that only reads: a select, or the explanation of one.

    Raises UsageError with DuckDB's message if it is none, DataError if it fails. A signal ends it.
    """
    duckdb = need("duckdb", "ebbench query")
    try:
        statements = connection.extract_statements(sql)
        kinds = [statement.type.name for statement in statements]
        if kinds == ["EXPLAIN"]:  # `explain analyze` carries out what it explains
            explained = connection.extract_statements(_EXPLAIN.sub("", statements[0].query))
            kinds = [inner.type.name for inner in explained]
        if kinds != ["SELECT"]:
            raise UsageError("write one statement that returns rows and changes nothing, for example a select")
        relation = _interruptible(connection, lambda: connection.sql(statements[0]))
    except duckdb.Error as error:
        raise UsageError(_sql_problem(error)) from None
    try:
        return _interruptible(connection, relation.to_arrow_table)
    except duckdb.Error as error:
        raise DataError(_sql_problem(error)) from None


def _interruptible(connection: Any, work: Callable[[], T]) -> T:
    """The result of ``work``, computed in a thread, since DuckDB does not handle signals during a query."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            with interruptible():
                return done.result()
        except KeyboardInterrupt:
            connection.interrupt()
            raise


def _sql_problem(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not set(line.strip()) <= {"^", " "}]
    return " ".join(lines[:3])


def _overview(runs: Sequence[Run], *, summaries: bool) -> pa.Table:
    rows = [_row(run) for run in runs]
    figures = [metrics_dict(summarise(run).metrics) for run in runs] if summaries else []
    described = {name: _column([row.get(name) for row in rows]) for name in _names(rows)}
    names = [name for name in _names(figures) if name not in described and name != "steady"]
    columns = {name: [row.get(name) for row in figures] for name in names}
    for name, values in columns.items():  # integers stay integers; any other column is double, even without values
        whole = all(isinstance(value, int) for value in values)
        described[name] = pa.array(values, pa.int64() if whole else pa.float64(), from_pandas=True)
    return pa.table(described)


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _row(run: Run) -> dict[str, Any]:
    m = run.manifest
    row: dict[str, Any] = {
        "run": str(run.path), "created": m.created, "workload": m.workload, "scenario": m.scenario, "source": m.source,
        "seed": m.seed, "policy": m.policy, "engine": m.engine, "clock": m.clock, "device": m.device, "model": m.model,
        **asdict(m.labels), "plan_hash": m.plan_hash, "git_commit": m.git_commit, "valid": m.valid,
        "interrupted": m.interrupted,
    }  # fmt: skip
    asked = flat_load(load_of_run(m), machine_of_run(m), m.policy)
    asked["policy_settings"] = None if asked["policy_settings"] is None else json.dumps(asked["policy_settings"])
    options = {name: value for name, value in m.options.items() if isinstance(value, str | int | float | bool)}
    return row | asked | options


def _column(values: list[Any]) -> pa.Array:
    """A column; options whose types differ between runs become text."""
    try:
        return pa.array(values, from_pandas=True)
    except pa.ArrowException:
        return pa.array([None if value is None else str(value) for value in values], pa.string())


def _unglobbed(path: str) -> str:
    """The path with ``[``, ``*`` and ``?`` escaped, which DuckDB would read as a pattern."""
    return "".join(f"[{letter}]" if letter in "[*?" else letter for letter in path)


def load(paths: Sequence[Path]) -> list[Run]:
    """All runs under ``paths``, at any depth; probes of a search only where its directory is given.

    Raises DataError if there is none or one is damaged.
    """
    directories = sorted({run for run in find_runs(paths) if (run / MANIFEST).exists()})
    if not directories:
        raise DataError(f"no run under {', '.join(map(str, paths))}; make a run, or give other directories with --runs")
    return [Run.load(path) for path in directories]


# The result of a query as text.


def write(result: pa.Table, form: str, output: Path | None) -> None:
    """Write a result as table, csv, json or parquet to a file, or to stdout; equal column names are told apart.

    Raises RunError if the file cannot be written.
    """
    names: list[str] = []
    taken = set(result.column_names)
    for name in result.column_names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        names.append(next(free for free in numbered if free not in taken) if name in names else name)
        taken.add(names[-1])
    result = result.rename_columns(names)
    if form == "parquet" and output is not None:
        files.write_table(result, output)
    elif output is not None:
        files.write_bytes(_text_of(result, form).encode(), output)
    elif form == "table":
        _print(result)
    else:
        sys.stdout.write(_text_of(result, form))


def _text_of(result: pa.Table, form: str) -> str:
    if form == "json":
        return json.dumps(finite(result.to_pylist()), indent=2, default=_json_value, allow_nan=False) + "\n"
    text = io.StringIO()
    if form == "csv":
        rows = (["" if value is None else value for value in row.values()] for row in result.to_pylist())
        csv.writer(text, lineterminator="\n").writerows(map(csv_cell, row) for row in (result.column_names, *rows))
        return text.getvalue()
    _print(result, Console(file=text, width=_FILE_WIDTH, color_system=None, highlight=False))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _json_value(value: object) -> object:
    """A value for JSON: sums of integers are decimals; other types that JSON lacks become text."""
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    return str(value)


_FILE_WIDTH = 100_000  # a file has no width: no line is broken
_LEAST_WIDTH = 9  # narrower columns are unreadable; rows are then shown one below the other


def _print(result: pa.Table, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    if result.num_columns * _LEAST_WIDTH > console.width:
        for number, row in enumerate(result.to_pylist(), start=1):
            console.print(f"row {number}", style="bold")
            for name, value in row.items():
                console.print(f"  {escape(name)}: {escape(_text(value))}", soft_wrap=True)
        return
    table = framed()
    for field in result.schema:
        numeric = str(field.type).startswith(("int", "uint", "float", "double", "decimal"))
        table.add_column(escape(field.name), justify="right" if numeric else "left", overflow="fold")
    for row in result.to_pylist():
        table.add_row(*(escape(_text(value)) for value in row.values()))
    console.print(table)


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else visible(str(value))
