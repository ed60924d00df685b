"""Sizes of steps with prompts: where they cost least per token, and refills in even steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.calibration import CostGrid
from vllm_eb.refills import SIZE_GAIN, SIZES, PromptSteps, cheapest_size, even_steps

COSTS_PER_TOKEN = st.lists(st.floats(20e-6, 80e-6), min_size=5, max_size=5)


def costs_with(per_token_s: list[float]) -> CostGrid:
    """Costs with these seconds per prompt token at SIZES and 16,384 tokens."""
    sizes = (*SIZES, 16384)
    times = tuple(size * cost for size, cost in zip(sizes, per_token_s, strict=True))
    return CostGrid(sizes, (1, 64), (128, 512), times, ((1e-3,) * 2,) * 2, (((1e-2,) * 2,) * 2,) * 5)


@given(COSTS_PER_TOKEN, st.integers(512, 20000))
def test_the_prompt_step_is_smaller_where_tokens_then_cost_less(per_token_s: list[float], most: int) -> None:
    costs = costs_with(per_token_s)
    full = costs.prefill_s(most) / most
    fit = [costs.prefill_s(size) / size for size in SIZES if size < most]
    found = cheapest_size(costs, most)
    if found is None:
        assert not fit or min(fit) >= (1 - SIZE_GAIN) * full
    else:
        assert found < most
        assert costs.prefill_s(found) / found == min(fit) < (1 - SIZE_GAIN) * full


@given(COSTS_PER_TOKEN, st.integers(512, 20000), st.floats(1, 100_000))
def test_even_steps_are_never_dearer_than_full_ones_and_fit_the_budget(
    per_token_s: list[float], most: int, tokens: float
) -> None:
    costs, fewest = costs_with(per_token_s), max(1, math.ceil(tokens / most))
    count = even_steps(costs, tokens, most)
    assert count >= fewest
    assert count * costs.prefill_s(tokens / count) <= fewest * costs.prefill_s(tokens / fewest)


@given(COSTS_PER_TOKEN, st.integers(1025, 20000), st.floats(1, 100_000))
def test_the_budgets_of_a_refill_hold_its_tokens(per_token_s: list[float], most: int, tokens: float) -> None:
    steps = PromptSteps(costs_with(per_token_s), most)
    if steps.cheapest is None:
        return
    steps.begin(tokens)
    budgets = []
    while (budget := steps.next_budget()) is not None:
        budgets.append(budget)
        assert sum(budgets) < tokens + len(budgets)
    assert all(budget <= most for budget in budgets)
    assert tokens - most - len(budgets) - 1 <= sum(budgets) < tokens + len(budgets)
    assert steps.next_budget() == steps.cheapest  # of a refill that is longer than its mean


def test_a_small_rest_is_no_step_of_its_own() -> None:
    """Steps of 1,024 tokens cost least per token, but a rest of 76 tokens would cost as much as 512."""
    costs = CostGrid(
        (512, 1024, 2048, 8192), (1, 64), (128, 512), (0.012, 0.022, 0.046, 0.2), ((1e-3,) * 2,) * 2,
        (((1e-2,) * 2,) * 2,) * 4,
    )  # fmt: skip
    steps = PromptSteps(costs, 8192)
    assert steps.cheapest == 1024
    steps.begin(1100)
    assert steps.next_budget() is None
    steps.begin(2124)
    assert [steps.next_budget() for _ in range(2)] == [1062, None]


@pytest.mark.parametrize("tokens", [100.0, 20_000.0])
def test_without_a_cheaper_size_every_step_has_the_engines_budget(tokens: float) -> None:
    steps = PromptSteps(costs_with([50e-6, 40e-6, 30e-6, 25e-6, 20e-6]), 16384)
    steps.begin(tokens)
    assert [steps.next_budget() for _ in range(3)] == [None] * 3
