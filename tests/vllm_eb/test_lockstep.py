"""Refills of data-parallel ranks that make every pass together: in the same pass, at the cost of the slowest rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vllm_eb.test_costs import LINEAR
from vllm_eb.calibration import StepCosts
from vllm_eb.refills import JointRefill, PassCount, Refill, decode_steps, largest_normal, longest_period
from vllm_eb.service import FadingMean
from vllm_eb.strategy import LONGEST_PERIOD


def rule(
    costs: StepCosts = LINEAR, *, ranks: int = 4, interval: int = 64, answers: float = 100.0, may_mix: bool = True
) -> JointRefill:
    return JointRefill(
        costs, may_mix=may_mix, ranks=ranks, interval=interval, step_tokens=8192, prior=FadingMean(answers, 500)
    )


def way(made: JointRefill, pass_number: int, *, decoding: int = 60, seqs: int = 4, must: bool = False) -> str:
    refill = Refill(seqs, 500.0, hazard=made.hazard)
    return made.choose(decoding=decoding, context_tokens=500.0, refill=refill, must=must, pass_number=pass_number).way


@given(st.integers(1, 12), st.lists(st.booleans(), max_size=300))
def test_the_pass_count_is_right_after_missed_passes(interval: int, called: list[bool]) -> None:
    """vLLM does not call the scheduler of a rank that has nothing to do, and says only which passes are multiples."""
    count, correct = PassCount(interval), False
    for number, here in enumerate(called):
        if not here:
            correct = False
            continue
        multiple = number % interval == 0
        found = count.next(multiple=multiple)
        assert (found % interval == 0) == multiple
        correct = correct or multiple
        if correct:  # called in every pass since the last multiple
            assert found % interval == number % interval


def test_a_period_divides_the_interval_by_which_ranks_agree() -> None:
    assert [longest_period(interval) for interval in (1, 2, 6, 48, 64, 1024)] == [1, 2, 2, 16, 64, LONGEST_PERIOD]
    for interval in (1, 4, 24, 64):
        made = rule(interval=interval)
        way(made, 0)
        assert interval % made.plan.period == 0


@given(st.integers(20, 400), st.integers(1, 30), st.floats(10.0, 2000.0), st.floats(1e-3, 0.5))
@settings(max_examples=60)
def test_ranks_with_unlike_periods_meet_in_passes_of_the_longer(
    decoding: int, seqs: int, answers: float, alpha_p: float
) -> None:
    """All periods are powers of two, counted from pass 0."""
    first, other = rule(replace(LINEAR, alpha_p=alpha_p)), rule(answers=answers)
    for pass_number in range(128):
        ways = (way(first, pass_number), way(other, pass_number, decoding=decoding, seqs=seqs))
        longer = max(first.plan.period, other.plan.period)
        assert math.log2(longer).is_integer()
        if pass_number % longer == 0:
            assert "decode" not in ways


def test_between_the_multiples_only_what_must_be_done_is() -> None:
    made = rule(replace(LINEAR, alpha_p=0.2), may_mix=False)
    assert way(made, 0) == "prefill"
    assert made.plan.period > 2
    assert way(made, 1) == "decode"
    assert way(made, 1, must=True) == "prefill"
    assert way(made, 1, decoding=0) == "prefill"
    assert way(made, 0, seqs=0) == "decode"


@given(st.integers(1, 40), st.sampled_from([256.0, 512.0, 1024.0, 8192.0, 700.0]))
def test_a_mixed_refill_goes_on_until_its_prompts_are_computed(seqs: int, prompt_tokens: float) -> None:
    """Prompts that end with a step leave none half computed, so that nothing but the count says that more are due."""
    made = JointRefill(
        replace(LINEAR, alpha_p=0.2), may_mix=True, ranks=4, interval=64, step_tokens=1024, prior=FadingMean(500.0, 500)
    )
    left, taken, pass_number = float(seqs), 0, 0
    while left > 0 and pass_number < made.plan.period:
        refill = Refill(left, prompt_tokens, hazard=made.hazard)
        found = made.choose(decoding=60, context_tokens=500.0, refill=refill, must=False, pass_number=pass_number).way
        if found == "prefill":
            return  # exclusive refills are continued by their phase
        if found == "decode":
            break
        left, taken, pass_number = left - 1024 / prompt_tokens, taken + 1, pass_number + 1
    assert taken == min(math.ceil(seqs * prompt_tokens / 1024), made.plan.period)


def test_a_pass_lasts_as_long_as_the_rank_with_most_prompts() -> None:
    """With a cost of one second per prompt: the mean of a Poisson count, and of the largest of several."""
    assert rule(ranks=1)._largest_s(2.5, float) == pytest.approx(2.5, rel=0.02)
    found = [rule(ranks=ranks)._largest_s(0.5, float) for ranks in (1, 2, 4, 8, 16)]
    assert found == sorted(found)
    assert 1.2 < found[2] < 1.5  # of four ranks: more than twice the mean
    assert largest_normal(1) == pytest.approx(0.0, abs=1e-6)
    assert largest_normal(4) == pytest.approx(1.02938, abs=1e-3)  # tabulated (David and Nagaraja, Order Statistics)
    few, many = (rule(ranks=4)._largest_s(mean, float) for mean in (5.9, 6.1))
    assert few == pytest.approx(many, rel=0.06)  # both forms agree where one gives way to the other


@given(st.floats(1e-3, 0.4), st.integers(2, 16))
@settings(max_examples=40)
def test_the_more_ranks_wait_for_a_prompt_the_longer_the_period(alpha_p: float, ranks: int) -> None:
    periods = []
    for beside in (1, ranks):
        made = rule(replace(LINEAR, alpha_p=alpha_p), ranks=beside, may_mix=False)
        way(made, 0)
        periods.append(made.plan.period)
    assert periods[0] <= periods[1]


@given(st.floats(1.0, 500.0), st.floats(1e-4, 0.1), st.floats(1e-3, 2.0), st.integers(1, 64))
def test_decode_steps_and_passes_of_prompts_fill_the_period(
    batch: float, hazard: float, share: float, period: int
) -> None:
    steps = decode_steps(batch, hazard, share, period)
    refilled = hazard * steps * batch / (1 + hazard * steps / 2)
    assert 0.0 < steps < period
    assert steps + max(refilled * share, -math.expm1(-refilled)) == pytest.approx(period, abs=0.05 * period)


def test_the_period_follows_answers_that_have_ended() -> None:
    """Short answers leave slots sooner, so refills come sooner."""
    made = rule(replace(LINEAR, alpha_p=0.1), may_mix=False, answers=1000.0)
    way(made, 0)
    before = made.plan.period
    for _ in range(2000):
        made.ended(20)
    way(made, 64)
    assert made.plan.period < before
