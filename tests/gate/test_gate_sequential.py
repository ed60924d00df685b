"""The sequential test: its error rates by simulation, its bounds by their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.analysis.cases import two_sided_p
from ebbench.analysis.statistics import anytime_p, confidence_sequence, evidence, sign_flip_p

losses = st.lists(st.floats(-1, 1, allow_nan=False), min_size=1, max_size=12)
TRIALS, LOOKS = 2_000, 40


def drawn(name: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    args = {"normal": (0, 1), "standard_t": (2,), "exponential": (1,)}[name]
    one, other = (getattr(rng, name)(*args, size=(TRIALS, LOOKS)) for _ in range(2))
    return 0.01 * (one - other)


@pytest.mark.parametrize("name", ["normal", "standard_t", "exponential"])
def test_looking_after_every_pair_raises_no_more_alarms(name: str) -> None:
    """Equal sides tested after each of forty pairs: at most 5 % ever reach p = 5 %; the fixed-n test exceeds that."""
    trials = drawn(name)
    alarms = np.array([anytime_p(trial) <= 0.05 for trial in trials])
    assert float(alarms.mean()) <= 0.05
    few = trials[:300]
    peeked = [min(sign_flip_p(trial[:n]) for n in range(5, 13)) <= 0.05 for trial in few]
    assert float(np.mean(peeked)) > 0.07, "peeking at the fixed-n test is what this rule replaces"


def test_a_p_value_is_at_most_one() -> None:
    assert anytime_p(np.full(6, -0.1)) == 1.0
    assert 0 < anytime_p(np.full(6, 0.1)) < 1


@pytest.mark.parametrize("bound", [0.0, 0.03])
def test_a_loss_below_the_bound_raises_no_more_alarms(bound: float) -> None:
    trials = drawn("normal") + bound - 0.005
    assert np.mean([anytime_p(trial, bound) <= 0.05 for trial in trials]) <= 0.05


def test_a_bound_on_the_loss_holds_at_every_look() -> None:
    """Equal sides: in at most 5 % of trials 0 lies outside the confidence sequence after any of forty pairs."""
    trials = drawn("standard_t")
    outside = [min(anytime_p(trial), anytime_p(-trial)) <= 0.025 for trial in trials]
    assert np.mean(outside) <= 0.05


def test_a_clear_loss_is_found_with_as_few_pairs_as_the_fixed_test_can() -> None:
    rng = np.random.default_rng(2)
    needed = [first_look(rng.normal(0.05, 0.012, 40), 0.05 / 3) for _ in range(200)]
    assert np.quantile(needed, 0.9) <= 8
    assert min(needed) >= 6  # 2**-6 is the first value below 5 % / 3


def first_look(trial: np.ndarray, alpha: float) -> int:
    values = evidence(trial)
    return int(np.argmax(values >= 1 / alpha)) + 1 if (values >= 1 / alpha).any() else 999


@given(losses, st.floats(-1, 1))
def test_evidence_is_never_above_two_to_the_pairs_and_p_only_falls(values: list[float], bound: float) -> None:
    found = evidence(values, bound)
    assert len(found) == len(values)
    assert all(0 <= e <= 2.0 ** (i + 1) * (1 + 1e-9) for i, e in enumerate(found))
    ps = [anytime_p(values[: n + 1], bound) for n in range(len(values))]
    assert ps == sorted(ps, reverse=True)
    assert (two_sided_p(values, sequential=True) or 0.0) <= 1


@given(losses, st.floats(-0.5, 0.5), st.floats(0, 0.5))
def test_evidence_falls_as_the_bound_rises(values: list[float], bound: float, step: float) -> None:
    assert anytime_p(values, bound) <= anytime_p(values, bound + step) + 1e-12


@given(st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=12))
def test_the_sequence_is_what_the_tests_do_not_reject(values: list[float]) -> None:
    found = confidence_sequence(values)
    assert found.low <= found.high
    if len(values) < 6:
        assert (found.low, found.high) == (-math.inf, math.inf)
        return
    assert anytime_p(values, found.low - 1e-6) <= 0.025 < anytime_p(values, found.low + 1e-6)
    mirrored = [-value for value in values]
    assert anytime_p(mirrored, -found.high - 1e-6) <= 0.025 < anytime_p(mirrored, -found.high + 1e-6)


def test_evidence_of_zero_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        evidence([])
