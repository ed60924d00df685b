"""IOG's published vLLM runs: the data agree with themselves, and a server's runs are repeated one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbench.papers.fidelity.cases_iog import (
    ARRIVALS_NOTE,
    IOG,
    MODELS,
    Row,
    arrival_s,
    session_cells,
    session_device,
    session_figures,
    session_plan,
    sessions,
)
from ebbench.papers.published import rows
from tests.devices.fidelity_report import reported

ROWS = rows(IOG)


def server(model: str, gpus: int = 1) -> list[Row]:
    return next(rows for rows in sessions() if rows[0]["model"].endswith(model) and rows[0]["gpus"] == str(gpus))


def test_a_server_has_one_run_per_rate_in_the_order_of_the_script() -> None:
    assert (len(ROWS), len(sessions())) == (55, 11)
    assert all([row["rate"] for row in rows] == ["32", "16", "8", "4", "1"] for rows in sessions())
    assert {row["model"] for row in ROWS} == set(MODELS)


def test_no_run_ends_before_its_last_prompt_is_sent() -> None:
    """The arrivals are inferred; a Poisson process of 200 prompts is off by 14 s at one request/s."""
    assert arrival_s(200, 1.0)[-1] == pytest.approx(187.58, abs=0.005)
    after = {rate: [] for rate in ("32", "16", "8", "4", "1")}  # type: dict[str, list[float]]
    for row in ROWS:
        after[row["rate"]].append(float(row["duration_s"]) - float(arrival_s(200, float(row["rate"]))[-1]))
    assert min(min(times) for times in after.values()) > 2.0
    assert max(after["1"]) < 6.1


def test_the_runs_of_a_server_have_the_same_prompts_and_their_own_totals() -> None:
    rows = server("Distill-Qwen-7B")
    plan = session_plan(rows, 0).table.to_pydict()
    for i, row in enumerate(rows):
        part = slice(200 * i, 200 * (i + 1))
        assert set(plan["phase"][part]) == {row["rate"]}
        assert plan["content"][part] == plan["content"][:200]
        assert plan["input_tokens"][part] == plan["input_tokens"][:200]
        assert sum(plan["input_tokens"][part]) == pytest.approx(int(row["input_tokens"]), rel=1e-3)
        assert sum(plan["output_tokens"][part]) == pytest.approx(int(row["output_tokens"]), rel=1e-3)
        times = np.array(plan["arrival_ns"][part]) / 1e9
        assert np.allclose(times - times[0], arrival_s(200, float(row["rate"])), atol=1e-6)


def test_prompts_come_from_the_prefix_cache_where_it_holds_a_run() -> None:
    """The 7B model's cache holds one run's 85,000 tokens, that of the 8B model does not."""
    for model, holds in (("Distill-Qwen-7B", True), ("Distill-Llama-8B", False)):
        rows = server(model)
        device = session_device(rows[0])
        used = int(rows[0]["input_tokens"]) + int(rows[0]["output_tokens"])
        assert (device.kv_capacity_tokens > used) is holds
        cold, warm = session_figures(rows[1:2], device, 0)[0], session_figures(rows[:2], device, 0)[1]
        assert (warm["ttft_mean_s"] < 0.8 * cold["ttft_mean_s"]) is holds


def test_the_server_has_the_defaults_of_vllm_0_8_5() -> None:
    request = session_device(server("Distill-Qwen-14B", 4)[0]).request
    assert request is not None
    assert (request.name, request.max_num_seqs, request.max_num_batched_tokens) == ("rtx-4090", 256, 2048)
    assert (request.vllm_version, request.async_scheduling, request.parallel.tp) == ("0.8.5", False, 4)
    assert request.gpu_memory_utilization is None


@pytest.mark.parametrize("model", ["Meta-Llama-3-8B-Instruct", "Distill-Llama-8B", "Distill-Qwen-7B"])
def test_iogs_7b_and_8b_models_on_one_gpu_are_predicted(model: str) -> None:
    cells = session_cells(server(model))
    for metric, largest in (("tpot_mean_ms", 0.085), ("requests_per_s", 0.12)):
        errors = [abs(cell.error) for cell in cells if cell.metric == metric and cell.scored]
        assert len(errors) == (5 if metric == "tpot_mean_ms" else 3)
        assert max(errors) < largest


def test_throughput_that_the_arrivals_set_is_not_scored() -> None:
    cells = session_cells(server("Distill-Qwen-1.5B"), seeds=(0,))
    unscored = [cell for cell in cells if not cell.scored]
    assert [cell.case[-4:] for cell in unscored] == [" 4/s", " 1/s"]
    assert all((cell.metric, cell.note) == ("requests_per_s", ARRIVALS_NOTE) for cell in unscored)
    assert not any(cell.fitted for cell in cells)


@pytest.mark.nightly
def test_the_report_has_every_figure(tmp_path: Path) -> None:
    cells = reported("iog", tmp_path)
    assert len(cells) == 5 * 55
    assert {cell.source for cell in cells} == {"IOG, 1 GPU", "IOG, tp=2", "IOG, tp=4", "IOG, tp=8"}
