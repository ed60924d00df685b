"""Stored runs as a DuckDB database: one view a table, one row a run in ``runs``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ebbench.analysis.summary import summarise
from ebbench.errors import DataError, UsageError
from ebbench.extras import need
from ebbench.records.run import SCHEMAS, Run
from ebbench.records.schema import SERVER_METRICS

TABLES = {**SCHEMAS, "server_metrics": SERVER_METRICS}


def connect(runs: Sequence[Run], *, summaries: bool = True) -> Any:
    """A connection with a view ``runs`` and one for each of TABLES; in each, ``run`` is the run's directory.

    ``summaries`` False leaves the figures out of ``runs``, which spares reading every request. The database is in
    memory and reaches nothing but the files of these runs.
    """
    duckdb = need("duckdb", "analysis", "ebbench query")
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"})
    connection.register("_runs", _overview(runs, summaries=summaries))
    connection.execute("create view runs as select * from _runs")
    for name, schema in TABLES.items():
        paths = [str(path) for run in runs if (path := run.path / f"{name}.parquet").exists()]
        if not paths:  # no server was read in any of these runs
            empty = pa.schema([pa.field("run", pa.string()), *schema]).empty_table()
            connection.register(f"_{name}", empty)
            connection.execute(f"create view {name} as select * from _{name}")
            continue
        relation = connection.read_parquet(paths, filename=True, union_by_name=True)
        tail = len(f"/{name}.parquet")
        relation.project(f"left(filename, len(filename) - {tail}) as run, * exclude (filename)").create_view(name)
    connection.execute(f"set allowed_directories = {_literals(str(run.path) for run in runs)}")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def query(connection: Any, sql: str) -> pa.Table:
    """The answer to one statement. Raises UsageError with the database's own words when it cannot be given."""
    duckdb = need("duckdb", "analysis", "ebbench query")
    try:
        statements = connection.extract_statements(sql)
        if len(statements) != 1 or statements[0].type.name not in ("SELECT", "EXPLAIN"):
            raise UsageError("one statement that gives rows is needed; write a select")
        relation = connection.sql(statements[0])
    except duckdb.Error as error:
        raise UsageError(_told(error)) from None
    try:
        return relation.to_arrow_table()
    except duckdb.Error as error:
        raise DataError(_told(error)) from None


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not set(line.strip()) <= {"^", " "}]
    return " ".join(lines[:3])


def _overview(runs: Sequence[Run], *, summaries: bool) -> pa.Table:
    rows = [_row(run, summaries=summaries) for run in runs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows], from_pandas=True) for name in names})


def _row(run: Run, *, summaries: bool) -> dict[str, Any]:
    m = run.manifest
    row: dict[str, Any] = {
        "run": str(run.path), "created": m.created, "workload": m.workload, "scenario": m.scenario, "source": m.source,
        "seed": m.seed, "policy": m.policy, "engine": m.engine, "clock": m.clock, "device": m.device, "model": m.model,
        "plan_hash": m.plan_hash, "git_commit": m.git_commit, "valid": m.valid, "interrupted": m.interrupted,
    }  # fmt: skip
    row |= {name: value for name, value in m.options.items() if isinstance(value, str | int | float | bool)}
    if summaries:
        figures = summarise(run).to_dict()
        row |= {name: value for name, value in figures.items() if _is_figure(name, value) and name not in row}
    return row


def _is_figure(name: str, value: object) -> bool:
    return (value is None and name.endswith("_ms")) or (isinstance(value, int | float) and not isinstance(value, bool))


def _literals(paths: Any) -> str:
    return "[" + ", ".join("'" + path.replace("'", "''") + "/'" for path in paths) + "]"


def load(paths: Sequence[Path]) -> list[Run]:
    """Every run among ``paths``, at any depth. Raises DataError when there is none or one is damaged."""
    found = sorted({manifest.parent for path in paths for manifest in path.glob("**/manifest.json")})
    if not found:
        raise DataError(f"no run under {', '.join(map(str, paths))}; measure one, or name others with --runs")
    return [Run.load(path) for path in found]
