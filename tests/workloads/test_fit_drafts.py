"""Acceptance of drafted tokens in logs: read, kept by a fitted workload, and taken by simulations of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.sizing import candidates
from ebbench.workloads.options import fitted_acceptance
from ebbench.workloads.trace import read_trace

STEPS = [5, 5, 5, 5]  # steps that accepted 0, 1, 2, 3 drafts
RATES = (0.75, 0.5, 0.25)


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "160"})


def log_of(folder: Path, told: Any = STEPS, rows: int = 60) -> Path:
    path = folder / "served.jsonl"
    usage = {"prompt_tokens": 80, "completion_tokens": 40}
    metrics = {"speculative_decoding": {"acceptance_histogram": told}}
    lines = [json.dumps({"start_time_s": i * 1.7, "usage": usage, "metrics": metrics}) for i in range(rows)]
    path.write_text("\n".join(lines))
    return path


def test_a_fitted_workload_keeps_the_acceptance_of_its_log(tmp_path: Path) -> None:
    log, workload = log_of(tmp_path), tmp_path / "fitted.toml"
    assert "accepted by position 0.75, 0.50, 0.25" in invoke("workloads", "show", f"log:{log}").output
    assert invoke("workloads", "fit", f"log:{log}", "-o", workload).exit_code == 0
    assert fitted_acceptance(str(workload)) == RATES


@pytest.mark.parametrize(("setting", "rates"), [("", RATES), (",tokens=2", RATES[:2]), (",tokens=4", (*RATES, 0.125))])
def test_a_simulation_of_it_takes_that_acceptance(setting: str, rates: tuple[float, ...], tmp_path: Path) -> None:
    workload = tmp_path / "fitted.toml"
    invoke("workloads", "fit", f"log:{log_of(tmp_path)}", "-o", workload)
    done = invoke("run", workload, "-p", "v1", "--quiet", "--json", "--speculative", f"method=eagle3{setting}",
                  "-o", tmp_path / "runs")  # fmt: skip
    assert done.exit_code == 0, done.output
    [summary] = json.loads(done.stdout)
    assert summary["acceptance"] == pytest.approx(rates, abs=0.05)


@pytest.mark.parametrize("setting", ["", ",tokens=2", ",tokens=4"])
def test_a_plan_of_it_takes_that_acceptance(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = tmp_path / "fitted.toml"
    invoke("workloads", "fit", f"log:{log_of(tmp_path)}", "-o", workload)
    monkeypatch.setattr(candidates, "SESSIONS", 100)
    planned = invoke("plan", workload, "--device", "h200", "--request-rate", "1", "--goodput", "tpot:50", "--tp", "1",
                     "-p", "v1", "--quiet", "--speculative", f"method=eagle3{setting}")  # fmt: skip
    assert planned.exit_code == 0, planned.output


def test_rates_that_are_given_count_before_those_of_the_workload(tmp_path: Path) -> None:
    workload = tmp_path / "fitted.toml"
    invoke("workloads", "fit", f"log:{log_of(tmp_path)}", "-o", workload)
    done = invoke("run", workload, "-p", "v1", "--dry-run", "--speculative", "method=eagle3,acceptance=0.1")
    assert "acceptance=0.1" in done.output


def test_a_workload_without_acceptance_says_that_it_must_be_given(tmp_path: Path) -> None:
    done = invoke("run", "balanced", "-p", "v1", "--quiet", "--speculative", "method=eagle3,tokens=2", "-o", tmp_path)
    assert done.exit_code == 2
    assert "give the acceptance rate per position" in done.output
    assert "fitted to a log" in done.output


@pytest.mark.parametrize("told", [None, "none", "[1, 2", [1, -2], [1.5], [True], {"0": 1}, [], [0, 0], 10**400])
def test_odd_counts_of_a_log_are_left_out(told: Any, tmp_path: Path) -> None:
    trace = read_trace(log_of(tmp_path, told), None, None)
    assert len(trace.requests) == 60
    assert trace.collected.acceptance == ()


def test_requests_of_a_stored_run_are_such_a_log(tmp_path: Path) -> None:
    rows = [
        {"input_tokens": 80, "output_tokens": 40, "intended_ns": i * 10**9, "end_ns": i * 10**9 + 10**8,
         "acceptance_histogram": STEPS if i else None}
        for i in range(60)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "requests.parquet")
    assert read_trace(tmp_path / "requests.parquet", None, None).collected.acceptance == RATES
