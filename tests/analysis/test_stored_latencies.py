"""What a stored run holds for notebooks: latencies of each request, and the row that the terminal shows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import latency_columns, limited_ns, meets, parse_slo
from ebbench.analysis.summary import summarise
from ebbench.records.run import Run
from ebbench.runs.execute import Task, make
from ebbench.spec.run import simulated


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("stored") / "run"
    cell = simulated("balanced", "v1", "h200", "qwen3-8b", 8, 512, num_prompts=40, max_concurrency=16, output_len=20)
    make(Task(replace(cell, goodput="ttft:60000"), directory))
    return Run.load(directory)


@pytest.fixture
def run(stored: Run, tmp_path: Path) -> Run:
    return Run.load(shutil.copytree(stored.path, tmp_path / "run"))


def test_each_request_has_its_latencies_in_ms(run: Run) -> None:
    table = pq.read_table(run.path / "requests.parquet")
    rows = table.to_pylist()
    assert len(rows) == 40
    for row in rows:
        assert row["ttft_ms"] == pytest.approx((row["first_token_ns"] - row["intended_ns"]) / 1e6)
        assert row["e2el_ms"] == pytest.approx((row["last_token_ns"] - row["intended_ns"]) / 1e6)


def test_a_request_that_did_not_complete_has_none(run: Run) -> None:
    columns = RequestColumns.of(run.requests)
    columns.status[0] = "failed"
    latencies = latency_columns(columns, parse_slo(["ttft:60000"]))
    assert [latencies[name][0].as_py() for name in latencies] == [None, None, None, False]
    assert latencies["ttft_ms"].null_count == 1


def test_means_of_the_columns_are_those_of_the_summary(run: Run) -> None:
    table = pq.read_table(run.path / "requests.parquet")
    metrics = summarise(run).metrics
    for name, mean in (("ttft_ms", metrics.ttft.mean), ("tpot_ms", metrics.tpot.mean), ("e2el_ms", metrics.e2el.mean)):
        known = [value for value in table[name].to_pylist() if value is not None]
        assert np.mean(known) == pytest.approx(mean)


def test_in_limits_is_null_without_limits_and_says_who_met_them(run: Run) -> None:
    columns = RequestColumns.of(run.requests)
    assert set(latency_columns(columns, parse_slo([]))["in_limits"].to_pylist()) == {None}
    median_ms = float(np.median(limited_ns(columns, "e2el")[columns.ok]) / 1e6)
    slo = parse_slo([f"e2el:{median_ms}"])
    met = latency_columns(columns, slo)["in_limits"].to_pylist()
    assert met == meets(columns, columns.ok, slo).tolist()
    assert 0 < sum(met) < len(met)


def test_the_summary_is_the_row_of_the_command(run: Run) -> None:
    [row] = pq.read_table(run.path / "summary.parquet").to_pylist()
    shown = summarise(run).to_dict()
    for name in ("policy", "output_throughput", "mean_ttft_ms", "median_tpot_ms", "completed", "valid", "seed"):
        assert row[name] == shown[name], name


def test_a_run_stored_without_them_is_read_as_before(run: Run) -> None:
    """As runs of before 27 November 2026 are: no summary, no such columns."""
    expected = replace(summarise(run), warnings=())
    (run.path / "summary.parquet").unlink()
    manifest = (run.path / "manifest.json").read_text()
    path = run.path / "requests.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["ttft_ms", "tpot_ms", "e2el_ms", "in_limits"]), path)
    old = json.loads(manifest)
    del old["rows"]["summary"]
    (run.path / "manifest.json").write_text(json.dumps(old))
    assert replace(summarise(Run.load(run.path)), warnings=()) == expected
