"""Tables and figures of the EB paper's appendices that need no runs: fits, errors, kernels and the convexity index."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ebbench.devices.costs import mixed_shape
from ebbench.errors import UsageError
from ebbench.papers.eb.fluid import BATCHES, fluid_errors
from ebbench.papers.eb.lengths import TABLE12
from ebbench.papers.eb.prefill_costs import LIMITS, LINEAR_MODELS, TABLE5, prefill_r2, r_squared
from ebbench.papers.eb.step_times import (
    FIGURE1,
    FIGURE2,
    KAPPA,
    TABLE1,
    convexity_index,
    measured_attention,
    step_parts,
    table_cost_of,
)
from ebbench.papers.eb.workloads import FACTORS, TABLE4, TABLE17, beside_a_prompt
from ebbench.papers.options import PaperOptions
from ebbench.papers.published import rows
from ebbench.runs.store import RunStore
from vllm_eb.calibration import Calibration


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path)


def test_table_1_has_the_profiles_beside_the_printed_gpus(store: RunStore) -> None:
    by_gpu = {row[0]: row for row in TABLE1.document(PaperOptions(), store).sections[0].rows}
    assert set(by_gpu) == {"B300", "H200", "RTX PRO 6000", "L40S"}
    assert all(row[1] == pytest.approx(row[2]) for row in by_gpu.values()), "bandwidth as printed"
    printed, dense = (float(str(by_gpu["H200"][column])) for column in (4, 5))
    assert printed == pytest.approx(2 * dense, rel=1e-2), "printed with sparsity, ours dense"
    for row in rows("table1_gpus"):
        quotient = float(row["fp16_tflops"]) / float(row["bandwidth_tb_per_s"])
        assert quotient == pytest.approx(float(row["flop_per_byte"]), abs=1), "guards the transcription"


class Quadratic:
    """Step time a + b x + c x^2 of a single prompt."""

    def __init__(self, a: float, b: float, c: float) -> None:
        self.coefficients = (c, b, a)

    def step_s(self, shape) -> float:  # type: ignore[no-untyped-def]
        return float(np.polyval(self.coefficients, sum(tokens for tokens, _ in shape.prefill)))


def test_a_line_explains_all_of_a_line_and_less_of_a_curve() -> None:
    assert r_squared([1, 2, 3], [5, 7, 9]) == pytest.approx(1.0)
    assert prefill_r2(Quadratic(1e-3, 1e-5, 0), 4096) == pytest.approx(1.0)
    curved = [prefill_r2(Quadratic(1e-3, 1e-5, 1e-9), limit) or 0.0 for limit in (4096, 16_384, 65_536)]
    assert curved == sorted(curved, reverse=True)
    assert prefill_r2(Quadratic(1e-3, 1e-5, 0), 131_072) is None, "longer than any step"


def test_published_fits_fall_with_the_range_and_ours_stay_near(store: RunStore) -> None:
    printed = [row for row in rows("table5_table7_prefill_r2") if row["table"] == "7"]
    assert all(float(a[name]) > float(b[name]) for a, b in pairwise(printed) for name in LINEAR_MODELS)
    document = TABLE5.document(PaperOptions(models=("qwen3-8b",)), store)
    (row,) = document.sections[0].rows
    published, ours = row[1::2], row[2::2]
    assert len(ours) == len(LIMITS[5])
    assert ours == pytest.approx(published, abs=0.005)


COST = Calibration(alpha_p=5e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4)


def test_fluctuations_fall_with_the_root_of_n_and_overshoot_does_not() -> None:
    found = {n: fluid_errors(COST, n, 1 / 200, 300) for n in BATCHES}
    assert found[64].fluctuation / found[1024].fluctuation == pytest.approx(4, rel=0.3)
    assert abs(found[1024].rounding) < abs(found[64].rounding)
    assert found[1024].discretisation == pytest.approx(found[256].discretisation, abs=0.01)
    assert abs(found[1024].discretisation) > 0.01
    assert all(-1e-3 < errors.loss <= 0 for errors in found.values()), "the optimum is flat"


def test_the_continuous_limit_is_an_error_of_the_order_of_the_hazard() -> None:
    short, long = (fluid_errors(COST, 256, hazard, 300).continuous for hazard in (1 / 20, 1 / 2000))
    assert abs(long) < 1e-3 < abs(short) < 1 / 20


def test_the_parts_of_a_step_add_up_to_its_gpu_time() -> None:
    cost = table_cost_of("rtx-pro-6000", "qwen3-8b")
    shape = mixed_shape(1024, 0.5, 512)
    parts = step_parts(cost, shape)
    assert sum(parts) == pytest.approx(cost.gpu_s(shape))
    assert min(parts) > 0
    with pytest.raises(UsageError, match="no kernel tables"):
        table_cost_of("linear:5e-3,5e-5,1e-2,1e-4,100000", "qwen3-8b")


@pytest.mark.parametrize("device", ["rtx-pro-6000", "h200"])
def test_every_published_attention_call_has_one_of_ours(device: str) -> None:
    calls = measured_attention(device)
    assert len(calls) == 30
    decodes = [call["ours"] / call["measured"] for call in calls if call["series"] == "decode only"]
    assert decodes == pytest.approx([1.0] * 5, abs=0.1)


def test_the_convexity_index_is_the_curvature_over_pure_decode() -> None:
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    times = [2.0 + r - 0.3 * r * r for r in shares]
    assert convexity_index(shares, times, times[-1]) == pytest.approx(-0.3 / 2.7)
    assert convexity_index(shares, [1 + r for r in shares], 2.0) == pytest.approx(0.0, abs=1e-12)


def test_published_mixed_costs_curve_the_other_way_than_step_times(store: RunStore) -> None:
    by_source = {(row[0], row[2]): row for row in KAPPA.document(PaperOptions(), store).sections[0].rows}
    costs = [float(str(row[3])) for (_, source), row in by_source.items() if "cost of mixed" in str(source)]
    assert len(costs) == 2
    assert min(costs) > 0
    kernels = {
        gpu: float(str(row[4])) for (gpu, source), row in by_source.items() if "kernels of a step" in str(source)
    }
    assert kernels["RTX PRO 6000"] < kernels["H200"] < 0


def test_table_12_says_that_profiles_prove_nothing(store: RunStore) -> None:
    document = TABLE12.document(PaperOptions(num_prompts=400), store)
    assert [row[0] for row in document.sections[0].rows] == ["ShareGPT", "NuminaMath", "WildChat"]
    assert any("shows nothing about the data sets" in note for note in document.notes)


def test_table_17_runs_v0_and_wildchat_too() -> None:
    cells = TABLE17.cells(PaperOptions())
    assert len(set(cells)) == 2 * 4 * 3
    assert {cell.policy.partition(":")[0] for cell in cells} == {"v0", "v1", "eb"}
    assert sum(cell.plan.workload == "wildchat" for cell in cells) == 6
    assert {cell.model for cell in cells} == {"gemma-3-1b-it"}


def test_table_4_asks_what_mixed_attention_would_have_to_cost(store: RunStore) -> None:
    factors = {cell.host.mixed_excess for cell in TABLE4.cells(PaperOptions()) if cell.host is not None}
    assert factors == set(FACTORS) - {1.0}
    assert not [cell for cell in TABLE4.cells(PaperOptions(devices=("b300",))) if cell.host is not None]
    own, raised = (beside_a_prompt("l40s", "qwen3-8b", factor) for factor in (1.0, 4.0))
    assert own is not None
    assert raised is not None
    assert own == pytest.approx(beside_a_prompt("rtx-4090", "qwen3-8b"), rel=0.05), "its ratio stands for the L40S"
    assert raised - 1 == pytest.approx(4 * (own - 1), rel=0.05)


def test_the_published_crossover_is_drawn_for_its_own_model_only(store: RunStore) -> None:
    marked = {
        model: "published crossover" in str(FIGURE1.drawn(PaperOptions(models=(model,)), store)[0].to_dict())
        for model in ("qwen3-4b", "gemma-3-1b-it")
    }
    assert marked == {"qwen3-4b": True, "gemma-3-1b-it": False}


def test_figure_2_of_another_gpu_has_no_published_calls(store: RunStore) -> None:
    assert "published attention" not in str(FIGURE2.drawn(PaperOptions(devices=("l40s",)), store)[0].to_dict())
