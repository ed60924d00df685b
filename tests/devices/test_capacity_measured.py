"""Published capacities of one GPU: the data agree with what the source states, and ours follow its rule."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ebbench.papers.fidelity import cases_capacity
from ebbench.papers.fidelity.cases_capacity import CAPACITY, LENGTHS, capacity, rate_figures, served
from ebbench.papers.published import rows
from tests.devices.fidelity_report import reported

ROWS = {row["gpu"]: row for row in rows(CAPACITY)}
FIGURES = ("requests_per_s", "output_tokens_per_s")


def test_the_lengths_have_the_percentiles_that_the_source_states() -> None:
    prompts, answers = (
        np.array([int(row[name]) for row in rows(LENGTHS)]) for name in ("prompt_tokens", "output_tokens")
    )
    assert len(prompts) == 160
    assert [float(np.percentile(prompts, p)) for p in (50, 90)] == [3500.0, 10_000.0]
    assert [float(np.percentile(answers, p)) for p in (50, 90)] == [200.0, 400.0]
    assert (prompts.max(), answers.max() <= 800, (prompts + answers).max() <= 12_000) == (11_200, True, True)
    assert abs(float(np.corrcoef(prompts, answers)[0, 1])) < 0.2


def test_the_two_published_capacities_differ_by_a_tail_only() -> None:
    """Requests/s have the lightest rate's tail taken off the duration, tokens/s have not."""
    answers = [int(row["output_tokens"]) for row in rows(LENGTHS)]
    mean = sum(answers[i % 160] for i in range(512)) / 512
    tails = {}
    for gpu, row in ROWS.items():
        whole_s = 512 / (float(row["capacity_output_tokens_per_s"]) / mean)
        tails[gpu] = whole_s - 512 / float(row["capacity_requests_per_s"])
    assert tails["H200"] == pytest.approx(4.5, abs=0.6)
    assert tails["RTX PRO 6000"] == pytest.approx(39.5, abs=4.0)


def test_a_gpu_carries_its_capacity_and_no_more() -> None:
    row = ROWS["H200"]
    device = served(row)
    light, full, beyond = (rate_figures(row, device, rate, 0) for rate in (0.45, 2.5, 5.0))
    assert 512 / (light["duration_s"] - light["tail_s"]) == pytest.approx(0.45, rel=0.12)  # one draw of 512 arrivals
    assert beyond["output_tokens_per_s"] == pytest.approx(full["output_tokens_per_s"], rel=0.02)
    assert beyond["tail_s"] > full["tail_s"] > 5 * light["tail_s"]


def test_the_rule_takes_the_larger_throughput_and_the_lightest_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def figures(_row: object, _device: object, rate: float, _seed: int) -> dict[str, float]:
        asked.append(round(rate, 6))
        return {"duration_s": 100.0 * rate, "tail_s": 10.0 * rate, "output_tokens_per_s": rate}

    monkeypatch.setattr(cases_capacity, "rate_figures", figures)
    row = {**ROWS["H200"], "reference_requests_per_s": "2", "requests": "512"}
    found = capacity(row, served(ROWS["H200"]), 0)
    assert asked == [0.6, 2.2, 3.3]
    assert found == {"requests_per_s": 512 / (330.0 - 6.0), "output_tokens_per_s": pytest.approx(3.3)}


@pytest.mark.slow
def test_the_capacity_of_both_gpus_is_within_8_percent(tmp_path: Path) -> None:
    cells = reported("capacity", tmp_path)
    assert [(cell.device, cell.metric) for cell in cells] == [
        (device, metric) for device in ("rtx-pro-6000", "h200") for metric in FIGURES
    ]
    assert not any(cell.fitted for cell in cells)
    assert all(math.fabs(cell.error) <= 0.08 for cell in cells)
