"""The threshold from the ages that requests have: limits, an independent optimum, and throughput in simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.hazard import CensoredHazard, SlidingHazard
from vllm_eb.policies.eb import renewal_threshold
from vllm_eb.policy import PolicyError, parse_policy
from vllm_eb.theory import base_threshold

DECODE_S = 0.01


def geometric(mean: float, longest: int = 40_000) -> np.ndarray:
    return (1 - 1 / mean) ** np.maximum(np.arange(longest) - 1, 0)


@given(mean=st.floats(50, 1000), ratio=st.floats(0.2, 40))
def test_with_a_constant_hazard_it_is_proposition_3_1(mean: float, ratio: float) -> None:
    theta = renewal_threshold(geometric(mean), ratio * DECODE_S, DECODE_S)
    hazard = -math.log1p(-1 / mean)
    assert theta == pytest.approx(base_threshold(hazard, ratio * DECODE_S, DECODE_S), rel=0.05, abs=1.5 / mean)


@given(length=st.integers(2, 2000), ratio=st.floats(0.01, 100))
def test_answers_of_one_length_are_refilled_all_at_once(length: int, ratio: float) -> None:
    """Requests that began together end together; every earlier refill would only cost more."""
    survival = np.ones(length + 1)
    survival[length:] = 0.0
    assert renewal_threshold(survival, ratio * DECODE_S, DECODE_S) == 1.0


def test_answers_of_one_token_leave_nothing_to_decide() -> None:
    assert renewal_threshold(np.array([1.0]), 0.1, 0.01) == 1.0
    assert renewal_threshold(np.array([1.0, 0.0]), 0.1, 0.01) == 1.0


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40), ratio=st.floats(0.1, 50)
)  # fmt: skip
def test_no_other_number_of_steps_costs_less(lengths: list[int], ratio: float) -> None:
    """Against the definition: each request pays for every phase that it decodes in."""
    made = np.array(lengths)
    survival = np.array([(made > a).mean() for a in range(61)])

    def cost(phase_steps: int) -> tuple[float, float]:
        phases = float(np.ceil((made - 1) / phase_steps).mean())
        return (ratio + phase_steps) * phases, min(1 / phases, 1.0)

    theta = renewal_threshold(survival, ratio, 1.0)
    least = min(cost(steps)[0] for steps in range(1, 61))
    assert any(math.isclose(cost(s)[1], theta, rel_tol=1e-9) and cost(s)[0] <= least * (1 + 1e-9) for s in range(1, 61))


@pytest.mark.parametrize("estimator", [SlidingHazard, CensoredHazard])
def test_estimators_give_the_share_that_is_longer(estimator: type) -> None:
    hazard = estimator(window=100, min_samples=4)
    for length in [2, 2, 4, 8] * 20:
        hazard.observe(length)
    estimate = hazard.estimate(())
    assert estimate is not None
    assert estimate.survival[:8] == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25])


def test_the_correction_is_a_setting_of_every_online_threshold() -> None:
    for policy in ("eb:correction=renewal", "ebplus:correction=off"):
        parse_policy(policy)
    assert parse_policy("eb").correction == "published"  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match="correction"):
        parse_policy("eb:correction=none")


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gamma:0.5", "gamma:4", "uniform"])
def test_renewal_is_within_2_percent_of_the_best_fixed_theta(shape: str) -> None:
    """In simulation with the linear costs that the controller is told and a refill that costs 14 decode steps."""
    from ebbench.papers.eb.thresholds import REFILL_S, linear_costs, sweep_cell
    from ebbench.runs.execute import Task, make

    def tokens_per_s(policy: str) -> float:
        cell = sweep_cell(
            linear_costs("rtx-pro-6000", "qwen3-8b", REFILL_S), "qwen3-8b", policy, 256, 0, budget=65536, warmup=100,
            num_prompts=2000, input_len=128, output_len=512, length_distribution=shape,
        )  # fmt: skip
        return float(make(Task(cell)).figures["output_throughput"])

    best = max(tokens_per_s(f"eb:theta={theta}") for theta in (0.1, 0.15, 0.2, 0.25, 0.3))
    assert tokens_per_s("eb:correction=renewal") >= 0.98 * best
