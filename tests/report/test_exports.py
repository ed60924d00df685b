"""Exports read back by the tools they are for, or held to what these read."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import yaml
from report_data import invoke, rewrite

from ebbench.analysis.gate_units import unit_of
from ebbench.analysis.history import series_of
from ebbench.analysis.summary import summarise
from ebbench.errors import DataError
from ebbench.records.run import Run


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


def test_runs_of_one_question_share_the_experiment_id(exported: Path) -> None:
    documents = [json.loads((exported / f"{name}.llm-d.json").read_text()) for name in ("v1", "ebplus")]
    assert documents[0]["run"]["eid"] == documents[1]["run"]["eid"]
    assert documents[0]["run"]["uid"] != documents[1]["run"]["uid"]


def test_vllms_result_json(exported: Path, runs: Path) -> None:
    document = json.loads((exported / "v1.vllm.json").read_text())
    metrics = summarise(Run.load(runs / "v1")).metrics
    assert document["completed"] == metrics.completed == len(document["ttfts"])
    assert document["output_throughput"] == metrics.output_throughput
    assert [len(gaps) + 1 for gaps in document["itls"]] == document["output_lens"]


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
    (series,) = series_of(loaded)
    rows = list(csv.DictReader(series.csv.splitlines()))
    assert [(row["commit"], row["runs"], row["time"]) for row in rows] == [
        ("a", "2", "1970-01-01T00:00:01+00:00"),
        ("b", "1", "1970-01-01T00:00:03+00:00"),
    ]
    assert series.name == f"v1-{unit_of(loaded[0]).configuration_hash}"
    with pytest.raises(DataError, match="no valid run"):
        series_of(loaded[3:])
