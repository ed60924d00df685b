"""Exports, read by the tools they are for or compared with what these read."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import yaml

from ebbench.analysis import trend
from ebbench.analysis.summary import summarise
from ebbench.analysis.units import FIGURES, gate_unit
from ebbench.errors import DataError
from ebbench.export import llm_d_report, otava_series, vllm_result
from ebbench.records.run import Run
from tests.report.report_data import invoke, rewrite


@pytest.fixture(scope="module")
def exported(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All exports of the runs."""
    target = tmp_path_factory.mktemp("exports")
    done = invoke("report", runs, "--export", "llm-d", "--export", "vllm", "--export", "otava", "-o", target)
    assert done.exit_code == 0, done.output
    assert len(done.stderr.splitlines()) == len(list(target.iterdir())) == 3 + 3 + 4
    return target


def test_llm_ds_own_reader_accepts_the_report(exported: Path, runs: Path) -> None:
    core = pytest.importorskip("llmd_benchmark_report.core")
    schema = pytest.importorskip("llmd_benchmark_report.schema_v0_2")
    for name in ("v1", "eb", "ebplus"):
        path = exported / f"{name}.llm-d.json"
        report = schema.BenchmarkReportV02(**json.loads(path.read_text()))
        assert core.load_benchmark_report(yaml.safe_load(path.read_text())).version == report.version
        metrics = summarise(Run.load(runs / name)).metrics
        aggregate = report.results.request_performance.aggregate
        assert aggregate.requests.total == metrics.planned
        assert aggregate.throughput.output_token_rate.mean == metrics.output_throughput
        assert 1e3 * aggregate.latency.time_to_first_token.p50 == pytest.approx(metrics.ttft.median)
        assert 1e3 * aggregate.latency.time_per_output_token.p50 == pytest.approx(metrics.tpot.median)
        assert 1e3 * aggregate.latency.inter_token_latency.mean == pytest.approx(metrics.itl.mean)
        assert 1e3 * aggregate.latency.request_latency.p90 == pytest.approx(metrics.e2el.p90)
        (engine,) = report.scenario.stack
        assert engine.standardized.accelerator.model == Run.load(runs / name).manifest.device


def stack_of(run: Path, **changes: object) -> list[dict[str, object]]:
    """The stack of the llm-d report for a run with these fields in its manifest."""
    rewrite(run, **changes)
    loaded = Run.load(run)
    document = llm_d_report(loaded, summarise(loaded))
    told = {part["component_label"] for part in document["results"]["observability"]["components"]}
    stack = document["scenario"]["stack"]
    assert told <= {component["metadata"]["label"] for component in stack}
    if schema := _schema():
        schema.BenchmarkReportV02(**json.loads(json.dumps(document)))
    return [component["standardized"] for component in stack]


def _schema() -> Any:
    try:
        from llmd_benchmark_report import schema_v0_2
    except ImportError:
        return None
    return schema_v0_2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("replica", 1, 1, {"tp": 1, "dp": 1, "ep": 1})]),
        ({"facts": {"topology": "dp=4", "gpus": 4}}, [("replica", 4, 1, {"tp": 1, "dp": 1, "ep": 1})]),
        ({"facts": {"topology": "dp=2,tp=4", "gpus": 8}}, [("replica", 2, 4, {"tp": 4, "dp": 1, "ep": 1})]),
        ({"facts": {"topology": "tp=4,dp=8,ep=32", "gpus": 32}}, [("replica", 1, 32, {"tp": 4, "dp": 8, "ep": 32})]),
        (
            {"facts": {"topology": "1p2d,tp=2", "gpus": 6}},
            [("prefill", 1, 2, {"tp": 2, "dp": 1, "ep": 1}), ("decode", 2, 2, {"tp": 2, "dp": 1, "ep": 1})],
        ),
        ({"facts": {"topology": "ours", "gpus": 3}}, [("replica", 1, 3, {})]),
        ({"facts": {"topology": "dp=4", "gpus": 3}}, [("replica", 1, 3, {})]),
        ({"facts": {"topology": "gone.toml", "gpus": 3}}, [("replica", 1, 3, {})]),
        ({"facts": {"replicas": 3}, "engine": "vllm"}, [("replica", 3, 1, {"tp": 1, "dp": 1, "ep": 1})]),
        ({"engine": "endpoint"}, [("replica", 1, 0, {})]),
    ],
)
def test_the_llm_d_report_has_the_number_of_instances(
    runs: Path, tmp_path: Path, changes: dict[str, object], expected: list[tuple[object, ...]]
) -> None:
    shutil.copytree(runs / "v1", tmp_path / "v1")
    found: list[Any] = stack_of(tmp_path / "v1", **changes)
    shapes = [(part["role"], part["replicas"], part["accelerator"]["count"]) for part in found]
    assert shapes == [shape[:3] for shape in expected]
    assert [part["accelerator"]["parallelism"] for part in found] == [shape[3] for shape in expected]


def test_the_sides_of_a_cluster_are_measured_apart(tmp_path: Path) -> None:
    done = invoke(
        "run", "balanced", "--source", "profile", "-n", "24", "-c", "8", "--engine", "sim", "--topology", "1p2d",
        "-p", "v1", "-q", "-o", tmp_path / "run",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    run = Run.load(tmp_path / "run")
    parts = llm_d_report(run, summarise(run))["results"]["observability"]["components"]
    assert [part["component_label"] for part in parts] == ["prefill-0", "decode-0"]
    steps = run.steps.to_pylist()
    for part, here in zip(parts, (lambda n: n == 0, lambda n: n > 0), strict=True):
        running = [step["running"] for step in steps if here(step["instance"])]
        assert part["aggregate"]["running_requests"]["mean"] == pytest.approx(sum(running) / len(running))


def test_runs_of_one_question_share_the_experiment_id(exported: Path) -> None:
    documents = [json.loads((exported / f"{name}.llm-d.json").read_text()) for name in ("v1", "ebplus")]
    assert documents[0]["run"]["eid"] == documents[1]["run"]["eid"]
    assert documents[0]["run"]["uid"] != documents[1]["run"]["uid"]


def test_vllms_result_file_has_the_runs_figures(exported: Path, runs: Path) -> None:
    document = json.loads((exported / "v1.vllm.json").read_text())
    metrics = summarise(Run.load(runs / "v1")).metrics
    assert document["completed"] == metrics.completed == len(document["ttfts"])
    assert document["output_throughput"] == metrics.output_throughput
    assert [len(gaps) + 1 for gaps in document["itls"]] == document["output_lens"]


def test_vllms_result_has_the_keys_that_vllm_writes(exported: Path) -> None:
    """Read from vLLM's own source: what it writes always, and the statistics it writes for the metrics asked for."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(found.origin).parent / "benchmarks" / "serve.py").read_text()
    generating = source[source.index("if isinstance(metrics, BenchmarkMetrics):\n        result = {") :]
    always = set(re.findall(r'"(\w+)":', generating[: generating.index("}")]))
    setup = source[source.index("# Setup\n") : source.index("# Merge with benchmark result")]
    always |= set(re.findall(r'^    result_json\["(\w+)"\]', setup, re.MULTILINE))
    statistics = {
        f"{statistic}_{metric}_ms"
        for statistic in ("mean", "median", "std", "p90", "p95", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    }
    assert {"latencies", "queue_times", "rtfx", "max_concurrent_requests", "request_rate"} < always
    assert set(json.loads((exported / "v1.vllm.json").read_text())) == always | statistics


def test_vllms_lists_and_peaks(runs: Path) -> None:
    """Two requests of two tokens in the first second, one of them into the second, one that failed."""
    run = Run.load(runs / "v1")
    rows = run.requests.slice(0, 3).to_pylist()
    second = 1_000_000_000
    times = {"status": "ok", "output_tokens": 2, "error_class": None, "error_body": None}
    rows[0] |= times | {"intended_ns": 0, "sent_ns": second // 4, "first_token_ns": second // 2,
                        "last_token_ns": 3 * second // 4, "itl_ns": [second // 4]}  # fmt: skip
    rows[1] |= times | {"intended_ns": second // 2, "sent_ns": second // 2, "first_token_ns": 3 * second // 4,
                        "last_token_ns": 3 * second // 2, "itl_ns": [3 * second // 4]}  # fmt: skip
    rows[2] |= {"status": "failed", "error_class": "http_400", "error_body": "no"}
    table = pa.Table.from_pylist(rows, schema=run.requests.schema)
    changed = Run(run.path, msgspec.structs.replace(run.manifest, phases=(), max_concurrency=2), {"requests": table})
    document = vllm_result(changed, summarise(changed))
    assert document["latencies"] == [0.75, 1.0, 0.0]
    assert document["ttfts"] == [0.5, 0.25, 0.0]
    assert document["queue_times"][:2] == [0.25, 0.0]
    assert document["errors"] == ["", "", "http_400: no"]
    assert (document["max_output_tokens_per_s"], document["max_concurrent_requests"], document["rtfx"]) == (3.0, 2, 0.0)


def test_a_finished_request_without_its_times_does_not_stop_the_export(runs: Path) -> None:
    """A server reports success and no token was received; the run is INVALID and must still be exported."""
    run = Run.load(runs / "v1")
    rows = run.requests.to_pylist()
    rows[0] |= {"first_token_ns": None, "itl_ns": None, "output_tokens": None}
    rows[1] |= {"intended_ns": None}
    changed = Run(run.path, run.manifest, {"requests": pa.Table.from_pylist(rows, schema=run.requests.schema)})
    document = vllm_result(changed, summarise(changed))
    assert document["ttfts"][:2] == [0.0, 0.0]
    assert (document["itls"][0], document["output_lens"][0]) == ([], 0)
    assert document["ttfts"][2:] == vllm_result(run, summarise(run))["ttfts"][2:]


def test_no_export_overwrites_another(runs: Path, tmp_path: Path) -> None:
    for parent in ("x", "y"):
        shutil.copytree(runs / "v1", tmp_path / parent / "r" / "v1")
    target = tmp_path / "out"
    for _ in range(2):  # a second export of the same runs replaces the first
        done = invoke("report", tmp_path / "x/r/v1", tmp_path / "y/r/v1", "--export", "vllm", "-o", target)
        assert done.exit_code == 0, done.output
        assert sorted(path.name for path in target.iterdir()) == ["r-v1-2.vllm.json", "r-v1.vllm.json"]


def test_otava_gets_one_series_per_policy_and_environment(exported: Path, runs: Path) -> None:
    config = yaml.safe_load((exported / "otava.yaml").read_text())
    assert {name.rsplit("-", 1)[0] for name in config["tests"]} == {"v1", "eb", "ebplus"}
    for test in config["tests"].values():
        with (exported / test["file"]).open() as file:
            (row,) = csv.DictReader(file)
        assert {test["time_column"], *test["attributes"], *test["metrics"]} == set(row)
        run = Run.load(runs / row["policy"])
        assert float(row["output_throughput"]) == pytest.approx(summarise(run).metrics.output_throughput, rel=1e-5)
    directions = {name: metric["direction"] for name, metric in test["metrics"].items()}
    assert directions["output_throughput"] == 1
    assert directions["median_ttft_ms"] == -1


def test_history_has_a_row_a_commit_in_order_of_time(runs: Path, tmp_path: Path) -> None:
    for place, (commit, created) in enumerate([("b", 3), ("a", 1), ("a", 2), ("c", 0)]):
        shutil.copytree(runs / "v1", tmp_path / str(place))
        rewrite(tmp_path / str(place), git_commit=commit, anchor_unix_ns=created * 10**9, valid=commit != "c")
    loaded = [Run.load(tmp_path / str(place)) for place in range(4)]
    (series,) = otava_series(loaded)
    rows = list(csv.DictReader(series.csv.splitlines()))
    assert [(row["commit"], row["runs"], row["time"]) for row in rows] == [
        ("a", "2", "1970-01-01T00:00:01+00:00"),
        ("b", "1", "1970-01-01T00:00:03+00:00"),
    ]
    assert {row["environment"] for row in rows} == {gate_unit(loaded[0]).configuration_hash}
    assert series.name.startswith("v1-")
    with pytest.raises(DataError, match="no valid run"):
        otava_series(loaded[3:])


def test_a_row_never_mixes_loads_or_limits(runs: Path, tmp_path: Path) -> None:
    facts = Run.load(runs / "v1").manifest.facts
    cases: dict[str, dict[str, Any]] = {
        "same": {"seed": 1},
        "larger": {"facts": facts | {"sessions": 4_000}},
        "faster": {"facts": facts | {"request_rate": 9.0}},
        "capped": {"max_concurrency": 7},
        "limits": {"slo": {"ttft": 1.0}},
    }
    for name, changes in cases.items():
        shutil.copytree(runs / "v1", tmp_path / name)
        rewrite(tmp_path / name, **{"phases": (), **changes})
    found = otava_series([Run.load(path) for path in sorted(tmp_path.iterdir())])
    assert len({series.name for series in found}) == len(found) == 5
    assert all(len(series.csv.splitlines()) == 2 for series in found)


def test_measurements_of_servers_are_rows_of_their_own_series(runs: Path, tmp_path: Path) -> None:
    """ebbench's own commit does not tell one server, or one week, from another."""
    facts = Run.load(runs / "v1").manifest.facts
    one, other = "http://10.0.0.1:8000", "http://10.0.0.1:8001"
    week_s = 7 * 86_400
    made = [(one, 0, 0), (one, 1, 60), (other, 0, 120), (one, 0, week_s), (one, 0, week_s + 60), (one, 2, 3 * week_s)]
    for place, (server, seed, begun_s) in enumerate(made):
        shutil.copytree(runs / "v1", tmp_path / str(place))
        rewrite(
            tmp_path / str(place), engine="endpoint", device="unknown", seed=seed, anchor_unix_ns=begun_s * 10**9,
            facts={**facts, "server": server, "server_machine": "10.0.0.1", "server_version": "0.11.0"},
        )  # fmt: skip
    found = otava_series([Run.load(tmp_path / str(place)) for place in range(len(made))])
    rows = {series.name: list(csv.DictReader(series.csv.splitlines())) for series in found}
    by_server = {held[0]["server"]: [(row["seeds"], row["runs"]) for row in held] for held in rows.values()}
    assert by_server == {one: [("0 1", "2"), ("0", "1"), ("0", "1"), ("2", "1")], other: [("0", "1")]}
    assert {row["commit"] for held in rows.values() for row in held} == {"0.11.0"}
    shown = invoke("trend", tmp_path).stdout
    assert ("version" in shown, "commit" in shown, "0.11.0" in shown) == (True, False, True)


def test_a_history_keeps_zeros_and_leaves_unknown_cells_empty(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = [
        replace(gate_unit(Run.load(runs / "v1")), anchor_unix_ns=place, figures=figures)
        for place, figures in enumerate(
            [
                dict.fromkeys(FIGURES) | {"output_throughput": 5.0, "request_goodput": 2.0, "p99_ttft_ms": 3.0},
                dict.fromkeys(FIGURES) | {"output_throughput": 4.0, "request_goodput": 0.0},
            ]
        )
    ]
    runs_of_two_commits = [
        replace(loaded, manifest=msgspec.structs.replace(loaded.manifest, git_commit=commit))
        for loaded, commit in ((Run.load(runs / "v1"), commit) for commit in "ab")
    ]
    monkeypatch.setattr(trend, "gate_unit", lambda run: units["ab".index(run.manifest.git_commit)])
    (series,) = otava_series(runs_of_two_commits)
    rows = list(csv.DictReader(series.csv.splitlines()))
    assert [row["request_goodput"] for row in rows] == ["2", "0"]
    assert [row["p99_ttft_ms"] for row in rows] == ["3", ""]
    assert set(series.figures) == {"output_throughput", "request_goodput"}  # otava reads numbers only
