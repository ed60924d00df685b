"""Runs as data: SQL over them, notebooks' libraries, and schemas that are documented."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbench.analysis.sessions import SESSIONS
from ebbench.analysis.summary import summarise
from ebbench.gate.baselines import BASELINES
from ebbench.records.run import SCHEMAS, Run
from ebbench.records.schema import DECISIONS_EXTRAS, PLAN_EXTRAS, REQUESTS_EXTRAS, SERVER_METRICS
from ebbench.report.database import TABLES
from ebbench.sweep.drive import SCHEMA
from tests.processes.process_tree import wait_until
from tests.report.report_data import invoke, rewrite

DOCS = Path(__file__).resolve().parents[2] / "docs"


def answer(runs: Path, sql: str) -> list[dict[str, object]]:
    done = invoke("query", sql, "--runs", runs, "--format", "json")
    assert done.exit_code == 0, done.output
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def test_figures_can_be_asked_for_in_sql(runs: Path) -> None:
    rows = answer(runs, "select policy, sum(output_tokens) as tokens from requests join runs using (run) group by all")
    assert {row["policy"] for row in rows} == {"v1", "eb", "ebplus"}
    for row in rows:
        metrics = summarise(Run.load(runs / str(row["policy"]))).metrics
        assert row["tokens"] == metrics.total_output_tokens
    (row,) = answer(runs, "select output_throughput, median_ttft_ms from runs where policy = 'eb'")
    metrics = summarise(Run.load(runs / "eb")).metrics
    assert row == {"output_throughput": metrics.output_throughput, "median_ttft_ms": metrics.ttft.median}


def test_the_load_the_machine_and_the_policys_settings_can_be_asked_for(runs: Path) -> None:
    wanted = "load, sessions, max_concurrency, request_rate, gpus, topology, max_num_batched_tokens, max_num_seqs"
    (row,) = answer(runs, f"select {wanted}, policy_settings from runs where policy = 'eb'")
    summary = summarise(Run.load(runs / "eb")).to_dict()
    assert json.loads(str(row.pop("policy_settings"))) == summary["policy_settings"] != {}
    assert row == {name: summary[name] for name in row}
    assert row["sessions"] == 450


@pytest.mark.parametrize("view", sorted(SCHEMAS))
def test_every_table_is_a_view_with_the_run_in_front(runs: Path, view: str) -> None:
    rows = answer(runs, f"select run, count(*) as n from {view} group by run order by run")
    counts = {Path(str(row["run"])).name: row["n"] for row in rows}
    held = {path.name: pq.read_metadata(path / f"{view}.parquet").num_rows for path in runs.iterdir()}
    assert counts == {name: rows for name, rows in held.items() if rows}


def test_server_metrics_are_a_view_empty_where_no_server_was_read(runs: Path, tmp_path: Path) -> None:
    assert answer(runs, "select count(*) as n from server_metrics") == [{"n": 0}]
    shutil.copytree(runs / "v1", tmp_path / "runs" / "served")
    shutil.copytree(runs / "eb", tmp_path / "runs" / "simulated")
    row = {"time_ns": 5, "name": "vllm:num_requests_running", "labels": "{}", "value": 3.0}
    pq.write_table(
        pa.Table.from_pylist([row], schema=SERVER_METRICS), tmp_path / "runs" / "served" / "server_metrics.parquet"
    )
    (found,) = answer(tmp_path / "runs", "select * from server_metrics")
    assert found == {"run": str(tmp_path / "runs" / "served")} | row


def test_columns_that_older_runs_lack_are_null(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "v1", tmp_path / "runs" / "older")
    path = tmp_path / "runs" / "older" / "requests.parquet"
    pq.write_table(pq.read_table(path).drop(["ttft_ms", "tpot_ms"]), path)
    rows = answer(tmp_path / "runs", "select ttft_ms, tpot_ms, output_tokens from requests limit 1")
    assert [(row["ttft_ms"], row["tpot_ms"]) for row in rows] == [(None, None)]
    assert rows[0]["output_tokens"]


def test_lists_can_be_unnested_in_sql(runs: Path) -> None:
    (row,) = answer(runs, "select count(*) as gaps from (select unnest(itl_ns) from requests where run like '%/v1')")
    assert row["gaps"] == sum(len(gaps) for gaps in Run.load(runs / "v1").requests["itl_ns"].to_pylist())


def test_query_writes_csv_tables_and_parquet(runs: Path, tmp_path: Path) -> None:
    sql = "select policy, valid from runs order by policy"
    assert invoke("query", sql, "-r", runs, "-f", "csv").stdout == "policy,valid\neb,True\nebplus,True\nv1,True\n"
    assert "ebplus" in invoke("query", sql, "-r", runs).stdout
    invoke("query", sql, "-r", runs, "-f", "parquet", "-o", tmp_path / "answer.parquet")
    assert pq.read_table(tmp_path / "answer.parquet")["policy"].to_pylist() == ["eb", "ebplus", "v1"]


def test_columns_of_one_name_are_told_apart_in_every_format(runs: Path, tmp_path: Path) -> None:
    sql = "select 1 as a, 2 as a, 3 as a_1, 4 as a"
    assert answer(runs, sql) == [{"a": 1, "a_2": 2, "a_1": 3, "a_3": 4}]
    assert invoke("query", sql, "-r", runs, "-f", "csv").stdout == "a,a_2,a_1,a_3\n1,2,3,4\n"
    shown = invoke("query", sql, "-r", runs).stdout.splitlines()
    assert (shown[0].split(), shown[2].split()) == (["a", "a_2", "a_1", "a_3"], ["1", "2", "3", "4"])
    invoke("query", sql, "-r", runs, "-f", "parquet", "-o", tmp_path / "answer.parquet")
    assert pq.read_table(tmp_path / "answer.parquet").column_names == ["a", "a_2", "a_1", "a_3"]


def test_a_join_of_all_columns_keeps_values_under_their_names(runs: Path) -> None:
    done = invoke("query", "select * from requests join runs using (run) limit 1", "-r", runs, "-f", "csv")
    names, values = csv.reader(done.stdout.splitlines())
    assert len(names) == len(values) == len(set(names))
    assert {"cached_tokens", "cached_tokens_1", "preemptions", "preemptions_1"} <= set(names)
    assert dict(zip(names, values, strict=True))["policy"] in ("v1", "eb", "ebplus")


def test_json_has_no_nan_and_no_infinity(runs: Path) -> None:
    sql = "select 1.0 / 0 as x, 'nan'::double as y, [1.5, -1.0 / 0] as z, {'a': 'nan'::double} as s, 0.5::double as w"
    done = invoke("query", sql, "-r", runs, "-f", "json")

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (row,) = json.loads(done.stdout, parse_constant=refused)
    assert row == {"x": None, "y": None, "z": [1.5, None], "s": {"a": None}, "w": 0.5}


def test_a_table_in_a_file_is_the_table(runs: Path, tmp_path: Path) -> None:
    sql = "select policy, 1.5 as number, repeat('long ', 60) as words from runs order by policy"
    done = invoke("query", sql, "-r", runs, "-f", "table", "-o", tmp_path / "answer.txt")
    assert (done.exit_code, done.stdout) == (0, "")
    head, rule, *rows = (tmp_path / "answer.txt").read_text(encoding="utf-8").splitlines()
    assert head.split() == ["policy", "number", "words"]
    assert set(rule) == {"─"}
    assert [row.split()[:3] for row in rows] == [[name, "1.5", "long"] for name in ("eb", "ebplus", "v1")]
    assert "\x1b" not in "".join([head, rule, *rows])


def test_figures_that_no_run_has_are_null_columns(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "v1", tmp_path / "v1")
    rewrite(tmp_path / "v1", slo={})
    requests = pq.read_table(tmp_path / "v1" / "requests.parquet")
    failed = pa.array(["failed"] * requests.num_rows)
    place = requests.column_names.index("status")
    pq.write_table(requests.set_column(place, "status", failed), tmp_path / "v1" / "requests.parquet")
    (row,) = answer(tmp_path, "select output_throughput, slo_attainment, request_goodput, completed from runs")
    assert row == {"output_throughput": None, "slo_attainment": None, "request_goodput": None, "completed": 0}
    (row,) = answer(tmp_path, "select typeof(slo_attainment) as a, typeof(completed) as b from runs")
    assert row == {"a": "DOUBLE", "b": "BIGINT"}
    assert "goodput_slo_ms" not in answer(tmp_path, "select * from runs")[0]


def test_options_of_several_types_become_text(runs: Path, tmp_path: Path) -> None:
    for name, value in (("a", 5), ("b", "auto")):
        shutil.copytree(runs / "v1", tmp_path / name)
        rewrite(tmp_path / name, options={"setting": value})
    found = answer(tmp_path, "select setting from runs order by run")
    assert [row["setting"] for row in found] == ["5", "auto"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("selec 1",), 2, "Parser Error"),
        (("select nothing from runs",), 2, '"nothing"'),
        (("select 1", "-f", "xml"), 2, "unknown format"),
        (("select 1", "-f", "parquet"), 2, "needs --output"),
        (("create table t (a int)",), 2, "for example a select"),
        (("select * from read_text('/etc/hostname')",), 2, "disabled"),
        (("copy runs to 'stolen.csv'",), 2, "for example a select"),
        (("explain analyze copy (select 1) to 'stolen.csv'",), 2, "for example a select"),
        (("/* a */ EXPLAIN --b\n(analyze) create table t as select 1",), 2, "for example a select"),
        (("explain (select 1)",), 2, "for example a select"),
        (("prepare v as select 1",), 2, "for example a select"),
        (("checkpoint",), 2, "for example a select"),
        (("pragma enable_profiling",), 2, "for example a select"),
        (("select * from query('copy (select 1) to ''stolen.csv''')",), 2, "single SELECT"),
        (("select * from enable_logging(storage='file', storage_config={'path': 'stolen'})",), 2, "enable_logging"),
        (("select * from connection",), 2, "does not exist"),
        (("select * from glob('/etc/*')",), 2, "disabled"),
        (("select 1; select 2",), 2, "for example a select"),
        (("set enable_external_access = true",), 2, "for example a select"),
    ],
)
def test_wrong_queries_are_refused_in_one_line(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("query", *arguments, "-r", runs)
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1)
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["copy (select 1 as x) to '{}'", "create table t as select * from '{}'"])
@pytest.mark.parametrize("begin", ["explain analyze", "explain", "explain (analyze)", "explain/**/analyze--\n", ""])
def test_no_statement_writes_to_a_run_that_it_may_read(runs: Path, tmp_path: Path, words: str, begin: str) -> None:
    shutil.copytree(runs / "v1", tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    done = invoke("query", f"{begin} {words.format(tmp_path / 'run' / 'requests.parquet')}", "-r", tmp_path)
    assert done.exit_code == 2, done.output
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("begin", ["explain ", "explain analyze ", "EXPLAIN(ANALYZE)", "/* c */explain --d\nANALYZE "])
def test_a_select_can_be_explained(runs: Path, begin: str) -> None:
    done = invoke("query", f"{begin}select count(*) from requests", "-r", runs)
    assert done.exit_code == 0, done.output
    assert "plan" in done.stdout


@pytest.mark.parametrize("sql", ["describe requests", "summarize plan", "show tables", "from runs", "values (1)"])
def test_short_forms_of_a_select_are_answered(runs: Path, sql: str) -> None:
    assert invoke("query", sql, "-r", runs).exit_code == 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_query_that_computes_ends_at_a_signal(runs: Path, number: signal.Signals) -> None:
    sql = "select count(*) from range(10000000000000) t(a) where a % 7 = 3"
    command = [sys.executable, "-m", "ebbench", "query", sql, "-r", str(runs)]

    def limited() -> None:  # it must not compute for hours where these tests are killed
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=limited)
    wait_until(lambda: cpu_s(process.pid) > 2, "no query began")  # more than it takes to begin
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    # On a busy machine a line of progress, every 10 s, comes before it.
    assert [line for line in stderr.decode().splitlines() if not re.fullmatch(r"query: \d+ s so far", line)] == [
        "error: interrupted"
    ]


def test_a_folder_without_runs_exits_with_3(tmp_path: Path) -> None:
    done = invoke("query", "select 1", "-r", tmp_path)
    assert done.exit_code == 3
    assert "no run under" in done.stderr


def test_hostile_directory_names(runs: Path, tmp_path: Path) -> None:
    odd = tmp_path / "it's; drop view runs --"
    shutil.copytree(runs / "v1", odd / "v1")
    (row,) = answer(odd, "select run, policy from runs join (select distinct run from requests) using (run)")
    assert row == {"run": str(odd / "v1"), "policy": "v1"}


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?b", "[a", "a]"])
def test_directory_names_are_no_patterns(runs: Path, tmp_path: Path, name: str) -> None:
    for place, source in ((name, "v1"), ("a1", "eb"), ("axb", "ebplus")):
        shutil.copytree(runs / source, tmp_path / place / "run")
    (row,) = answer(tmp_path / name, "select run, count(*) as n from steps join runs using (run) group by run")
    assert row == {"run": str(tmp_path / name / "run"), "n": Run.load(runs / "v1").steps.num_rows}


def test_views_join_inside_a_run_directory(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs / "v1")
    (row,) = answer(Path(), "select run, policy from runs join (select distinct run from requests) using (run)")
    assert row == {"run": ".", "policy": "v1"}


def test_notebooks_open_runs_directly(runs: Path) -> None:
    """pandas, polars and DuckDB read the files without ebbench."""
    path = runs / "v1" / "requests.parquet"
    tokens = summarise(Run.load(runs / "v1")).metrics.total_output_tokens
    pandas = pytest.importorskip("pandas")
    assert pandas.read_parquet(path)["output_tokens"].sum() == tokens
    import duckdb

    found = duckdb.sql(f"select sum(output_tokens) from '{path}'")
    assert found is not None
    assert found.fetchall() == [(tokens,)]
    polars = pytest.importorskip("polars")
    assert polars.read_parquet(path)["output_tokens"].sum() == tokens


def section(page: str, heading: str) -> str:
    """The text under a heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"\n{heading}\n")[1].split("\n##")[0]


def named(text: str) -> set[str]:
    """Everything in the first cells of a table's rows that is set as code."""
    return {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall("`([^`]+)`", line.split("|")[1])
    }


@pytest.mark.parametrize("name", sorted(TABLES))
def test_columns_are_documented_and_no_others(name: str) -> None:
    only_of_some_runs = {"decisions": DECISIONS_EXTRAS.names, "requests": REQUESTS_EXTRAS.names}.get(name, [])
    assert named(section("reading-a-run.md", f"### {name}.parquet")) == {*TABLES[name].names, *only_of_some_runs}


def test_columns_of_sessions_and_those_that_few_plans_have_are_documented() -> None:
    assert named(section("sessions.md", "## What the plan says")) == set(PLAN_EXTRAS.names)
    assert named(section("reading-a-run.md", "### classes.parquet and sessions.parquet")) == set(SESSIONS.names)


def test_stored_files_tell_the_types_of_their_columns(runs: Path) -> None:
    """The page gives this command instead of a list."""
    (command,) = re.findall(r"```bash\n(.*?)```", section("reading-a-run.md", "### Types"), re.DOTALL)
    assert "read_schema" in command
    for path in (runs / "v1").glob("*.parquet"):
        fields = TABLES.get(path.stem, ())
        assert [pq.read_schema(path).field(field.name) for field in fields] == list(fields), path.name


def test_columns_of_results_and_baselines_are_documented() -> None:
    baselines = section("ci-gate.md", "## A stored baseline")
    for schema, text in ((SCHEMA, (DOCS / "sweeps.md").read_text(encoding="utf-8")), (BASELINES, baselines)):
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert set(schema.names) <= set(re.findall("`([^`]+)`", prose))
