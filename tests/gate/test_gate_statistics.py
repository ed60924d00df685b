"""The statistics against SciPy, against their definitions, and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ebbench.analysis.statistics import detectable_loss, holm, paired_t, pairs_to_pass, sign_flip_p, sign_flip_ps
from ebbench.analysis.verdict import Rules, pairs_needed

losses = st.lists(st.floats(-1, 1, allow_nan=False).filter(lambda x: abs(x) > 1e-6 or x == 0), min_size=1, max_size=9)


@pytest.mark.parametrize("pairs", [2, 6, 9, 12])
def test_sign_flip_equals_scipys_exact_permutation_test(pairs: int) -> None:
    values = np.random.default_rng(pairs).normal(0.3, 1.0, pairs)
    exact = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", alternative="greater", n_resamples=np.inf
    )
    assert sign_flip_p(values) == pytest.approx(exact.pvalue, abs=1e-12)


def test_many_pairs_are_resampled_and_agree_with_the_t_test() -> None:
    values = np.random.default_rng(3).normal(0.4, 1.0, 30)
    assert sign_flip_p(values) == pytest.approx(stats.ttest_1samp(values, 0, alternative="greater").pvalue, rel=0.2)
    assert sign_flip_p(values) == sign_flip_p(values)


@given(losses)
def test_sign_flip_is_a_count_of_sign_patterns(values: list[float]) -> None:
    p, patterns = sign_flip_p(values), 2 ** len(values)
    assert 1 / patterns <= p <= 1
    assert p * patterns == pytest.approx(round(p * patterns), abs=1e-9)
    assert sign_flip_p([7 * x for x in values]) == p


@given(losses)
def test_p_of_the_two_directions_cover_everything(values: list[float]) -> None:
    assert sign_flip_p(values) + sign_flip_p([-x for x in values]) >= 1


def test_all_losses_above_zero_give_the_smallest_p() -> None:
    assert sign_flip_p([0.1, 0.2, 0.3, 0.1, 0.2, 0.3]) == 1 / 64
    assert sign_flip_p([0.0] * 6) == 1.0


def test_six_is_the_first_number_of_pairs_that_can_fail_three_figures() -> None:
    losses = [0.05, 0.06, 0.04, 0.05, 0.06, 0.04]
    for pairs, fails in ((5, False), (6, True)):
        adjusted = holm([sign_flip_p(losses[:pairs])] * 3)
        assert (max(adjusted) <= 0.05) == fails
        assert (pairs_needed(Rules(min_pairs=2), 3) <= pairs) == fails


@pytest.mark.parametrize("draw", ["normal", "standard_t", "exponential"])
def test_level_holds_whatever_the_distribution_of_noise(draw: str) -> None:
    """Exact by construction for differences of two alike sides, which are symmetric."""
    rng = np.random.default_rng(11)
    args = {"normal": (0, 1), "standard_t": (2,), "exponential": (1,)}[draw]
    one, other = (getattr(rng, draw)(*args, size=(4_000, 6)) for _ in range(2))
    share = float((sign_flip_ps(one - other) <= 0.05).mean())
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4_000)
    assert share >= 0.03  # 3/64 is the largest attainable level below 5 %


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12).filter(lambda v: float(np.std(v)) > 1e-6))
def test_t_interval_equals_scipys(values: list[float]) -> None:
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = paired_t(values)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)


def test_one_pair_has_no_interval() -> None:
    found = paired_t([0.2])
    assert (found.mean, found.low, found.high) == (0.2, -math.inf, math.inf)


def test_holm_against_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_lowers_a_p_and_keeps_the_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= q <= min(1.0, len(p_values) * p) + 1e-12 for p, q in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert [adjusted[i] for i in order] == sorted(adjusted)


@pytest.mark.parametrize(("pairs", "margin"), [(6, 0.0), (6, 0.03), (8, 0.03), (14, 0.01)])
def test_the_detectable_loss_is_detected_four_times_in_five(pairs: int, margin: float) -> None:
    spread, alpha = 0.01, 0.05 / 3
    smallest = detectable_loss(spread, pairs, alpha=alpha, margin=margin)
    assert smallest is not None
    trials = np.random.default_rng(99).normal(smallest, spread, (2_000, pairs))
    failed = (sign_flip_ps(trials) <= alpha) & (trials.mean(axis=1) >= margin)
    assert float(failed.mean()) == pytest.approx(0.8, abs=0.04)


def test_nothing_is_detectable_with_too_few_pairs() -> None:
    assert detectable_loss(0.01, 5, alpha=0.05 / 3) is None
    assert detectable_loss(0.0, 6, alpha=0.05 / 3, margin=0.03) == 0.03


@pytest.mark.parametrize(("spread", "margin"), [(0.02, 0.03), (0.05, 0.03)])
def test_equal_sides_pass_in_four_of_five_after_the_predicted_pairs(spread: float, margin: float) -> None:
    pairs = pairs_to_pass(spread, margin)
    assert pairs is not None
    losses = np.random.default_rng(5).normal(0.0, spread, (4_000, pairs))
    high = stats.ttest_1samp(losses, 0, axis=1).confidence_interval(0.95).high
    assert float((high < margin).mean()) == pytest.approx(0.8, abs=0.06)


def test_pairs_to_pass_is_two_at_least_and_none_beyond_the_limit() -> None:
    assert pairs_to_pass(0.0, 0.03) == pairs_to_pass(1e-5, 0.03) == 2
    assert pairs_to_pass(1.0, 0.03) is None
