"""GPUStack's published vLLM runs: the data agree with themselves, and the runs are repeated with their settings."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.errors import EbbenchError
from ebbench.papers.fidelity.case import Case
from ebbench.papers.fidelity.cases import WITHOUT, engine_alone
from ebbench.papers.fidelity.cases_servers import (
    GPUSTACK,
    gpustack,
    kv_capacity,
)
from ebbench.papers.fidelity.report import read_cells, write_report
from ebbench.papers.fidelity.runs import case_runs, run_cases
from ebbench.papers.fidelity.scores import PublishedFigure
from ebbench.papers.published import rows

ROWS = rows(GPUSTACK)
LONG = ("random-2", "random-4", "random-32")
"""Begins the workloads of prompts from 2,000 tokens on."""


def errors(cases: list[Case], *metrics: str) -> list[float]:
    return [abs(cell.error) for cell in run_cases(cases, 0, lambda _: None) if not metrics or cell.metric in metrics]


def test_printed_rates_are_printed_totals_over_printed_durations() -> None:
    timed = [row for row in ROWS if row["duration_s"]]
    assert len(timed) == 58
    for row in timed:
        inputs, outputs, duration_s = int(row["input_tokens"]), int(row["output_tokens"]), float(row["duration_s"])
        assert (inputs + outputs) / duration_s == pytest.approx(float(row["total_tokens_per_s"]), rel=2e-3)
        assert outputs / duration_s == pytest.approx(float(row["output_tokens_per_s"]), rel=2e-3)


def test_rates_without_a_duration_say_that_every_answer_had_its_length() -> None:
    for row in ROWS:
        if row["workload"].startswith("random") and not row["duration_s"]:
            inputs, outputs = (int(part) for part in row["workload"].split("-")[1:])
            ratio = float(row["total_tokens_per_s"]) / float(row["output_tokens_per_s"])
            assert ratio == pytest.approx((inputs + outputs) / outputs, rel=2e-3)


def test_every_row_is_repeated_but_the_pipeline_and_static_scales() -> None:
    left_out = [row for row in ROWS if "-pp" in row["serve_arguments"] or row["precision"] == "fp8 static"]
    cases = list(gpustack())
    assert (len(ROWS), len(left_out), len(cases)) == (65, 2, 63)
    assert len({(case.device, case.model, case.name) for case in cases}) == 63
    assert not any(case.fitted for case in cases)


def test_a_gpustack_server_has_its_versions_defaults_and_its_arguments() -> None:
    for case in gpustack():
        for run in case_runs(case, 0):
            options = run.server
            assert not options.scheduler_reserve_full_isl
            assert options.async_scheduling is ("async" in case.name)
            budget = 16_384 if "B=16384" in case.name else 8192
            wanted = (1024, budget) if case.device == "h100" else (256, 2048)
            assert (options.max_num_seqs, options.max_num_batched_tokens) == wanted


def test_a_run_that_our_memory_does_not_hold_has_no_figure() -> None:
    case = next(c for c in gpustack() if (c.model, c.name) == ("qwen3-32b", "random-32000-100, all at once"))
    assert not case.refused
    without_flashinfer = kv_capacity(replace(case, vllm_version="0.11.1"))
    assert isinstance(without_flashinfer, int)
    assert without_flashinfer < 32_100  # one request
    refused = replace(case, refused="one request needs more KV tokens than fit")
    cells = run_cases([refused], 0, lambda _: None)
    assert all(isnan(cell.ours) and not cell.scored and cell.note == refused.refused for cell in cells)


@pytest.mark.parametrize("model", ["qwen3-14b", "qwen3-32b", "qwen3-235b-a22b"])
def test_version_0_11_0_leaves_the_kv_cache_that_the_runs_had(model: str) -> None:
    """Sequences that decode = peak output rate x ITL; with a full cache, x their length is its size."""
    names = {
        "qwen3-14b": "Qwen/Qwen3-14B", "qwen3-32b": "Qwen/Qwen3-32B",
        "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B-Instruct-2507",
    }  # fmt: skip
    of_runs = []
    for row in ROWS:
        if (row["model"], row["gpu"][:4]) == (names[model], "H100") and row["workload"].startswith(LONG):
            inputs, outputs = (int(part) for part in row["workload"].split("-")[1:])
            sequences = float(row["peak_output_tokens_per_s"]) * float(row["itl_p50_ms"]) / 1e3
            of_runs.append(sequences * (inputs + outputs / 2))
    assert len(of_runs) == 3
    case = next(c for c in gpustack() if c.model == model)
    assert case.vllm_version == "0.11.0"
    assert kv_capacity(case) == pytest.approx(median(of_runs), rel=0.08)
    without_flashinfer = kv_capacity(replace(case, vllm_version="0.11.1"))
    assert isinstance(without_flashinfer, int)
    assert without_flashinfer < 0.95 * median(of_runs)
    assert kv_capacity(replace(case, vllm_version="0.11")) == without_flashinfer  # its last patch


def test_variants_keep_the_published_figures_and_name_their_source() -> None:
    without = list(engine_alone(gpustack()))
    assert len(without) == 63
    assert all(number.source.endswith(WITHOUT) for case in without for number in case.published)
    assert all(case.api_server == "off" for case in without)


def test_the_rtx_4090_on_which_nothing_is_fitted_stays_within_9_percent() -> None:
    chosen = [case for case in gpustack() if case.device == "rtx-4090"]
    found = errors(chosen)
    assert len(found) == 9
    assert max(found) < 0.09


def test_long_prompts_on_the_a100_stay_within_11_percent() -> None:
    chosen = [case for case in gpustack() if case.device == "a100" and case.name.startswith(LONG)]
    found = errors(chosen, "requests_per_s")
    assert len(found) == 9
    assert max(found) < 0.11
    assert median(errors(chosen, "tpot_mean_ms")) < 0.08


def test_long_prompts_on_8_h100_stay_within_5_percent_with_their_kv_cache() -> None:
    chosen = [
        case
        for case in gpustack()
        if (case.device, case.model) == ("h100", "qwen3-235b-a22b")
        and case.name.startswith(("random-2", "random-4", "random-32"))
    ]
    found = errors(chosen, "requests_per_s")
    assert len(found) == 3
    assert max(found) < 0.05


def test_a_report_keeps_the_figures_of_groups_that_were_not_run(tmp_path: Path) -> None:
    old = PublishedFigure("table 13", "gpu", "m", "case", "v1", "tpot_mean_ms", 10.0, 11.0)
    stale = PublishedFigure("RTX 4090 run", "gpu", "m", "case", "v1", "tpot_mean_ms", 10.0, 99.0)
    write_report([old, stale], tmp_path)
    arguments = ["fidelity", "--only", "replay", "--out", str(tmp_path), "--against", str(tmp_path)]
    for keep, kept in ((["--keep"], [old]), ([], [])):
        result = CliRunner().invoke(app, [*arguments, *keep, "--runs", str(tmp_path / "runs")], catch_exceptions=False)
        assert result.exit_code == 0
        cells = read_cells(tmp_path)
        assert [cell for cell in cells if cell.source == "table 13"] == kept
        assert stale not in cells
        assert sum(cell.source == "RTX 4090 run" for cell in cells) == 6


def test_fidelity_keep_without_a_report_is_refused(tmp_path: Path) -> None:
    for arguments, message in (([], "--keep needs --only"), (["--only", "replay"], "cells.parquet: does not exist")):
        given = ["fidelity", "--keep", *arguments, "--against", str(tmp_path)]
        result = CliRunner().invoke(app, given, standalone_mode=False)
        assert isinstance(result.exception, EbbenchError)
        assert message in str(result.exception)
