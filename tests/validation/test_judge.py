"""The verdict of a validation, on synthetic measurements whose errors and noise are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ebbench.validation.judge import (
    FIGURE_LIMITS,
    METRICS,
    THROUGHPUT,
    TPOT,
    TTFT,
    Judgement,
    Observation,
    error_freedom,
    interval_factor,
    judge,
    noise_between_rounds,
)

POLICIES, LOADS = ("v1", "eb"), (8, 32)
TRUE_GAIN = 1.2
"""Gain of eb over v1 on the synthetic machine."""


def observations(
    rounds: int = 3, *, factor: float = 1.0, gain: float = TRUE_GAIN, noise: float = 0.0, seed: int = 0
) -> list[Observation]:
    """Runs of a machine with ``noise`` (standard deviation of the log), predicted ``factor`` too high."""
    random = np.random.default_rng(seed)
    found = []
    for round_ in range(rounds):
        for policy in POLICIES:
            for load in LOADS:
                truth = {THROUGHPUT: 100.0 * load, TTFT: 10.0 * load, TPOT: 20.0}
                predicted_gain = gain if policy == "eb" else 1.0
                predicted = {key: value * factor for key, value in truth.items()}
                predicted[THROUGHPUT] *= predicted_gain
                measured = {key: value * math.exp(random.normal(0.0, noise)) for key, value in truth.items()}
                measured[THROUGHPUT] *= TRUE_GAIN if policy == "eb" else 1.0
                found.append(Observation(policy, load, round_, predicted, measured))
    return found


def with_true_gain(made: list[Observation], true_gain: float) -> list[Observation]:
    """The same runs on a machine on which eb gains so much over v1."""
    return [
        replace(
            one, measured={**one.measured, THROUGHPUT: float(one.measured[THROUGHPUT] or 0) * true_gain / TRUE_GAIN}
        )
        if one.policy == "eb"
        else one
        for one in made
    ]


def judged(made: list[Observation]) -> Judgement:
    return judge(made, "v1")


def test_right_predictions_on_a_quiet_machine_give_figures() -> None:
    found = judged(observations(factor=1.02, noise=0.005))
    assert found.word == "figures"
    assert (found.directions_right, found.directions_clear) == (2, 2)


def test_figures_off_with_the_right_directions_give_choices() -> None:
    found = judged(observations(factor=1.15, noise=0.005))
    assert found.word == "choices"
    assert {one.metric for one in found.metrics if one.within_limit is False} >= {THROUGHPUT, TPOT}


@pytest.mark.parametrize(("factor", "gain"), [(1.5, TRUE_GAIN), (1.0, 0.9)], ids=["far off", "wrong direction"])
def test_far_off_or_wrong_directions_give_neither(factor: float, gain: float) -> None:
    assert judged(observations(noise=0.005, factor=factor, gain=gain)).word == "neither"


def test_noise_leaves_undecided_what_it_hides() -> None:
    assert judged(observations(factor=1.02, noise=0.2, seed=3)).word == "undecided"


def test_an_error_far_above_the_noise_is_decided_all_the_same() -> None:
    assert judged(observations(factor=2.5, noise=0.1)).word == "neither"


def test_one_round_gives_no_estimate_of_the_noise() -> None:
    found = judged(observations(rounds=1))
    assert found.word == "undecided"
    assert all(math.isinf(error.uncertainty) for error in found.errors)
    assert all(gain.right is None for gain in found.gains)


def test_nothing_measured_is_undecided() -> None:
    assert judged([]).word == "undecided"


def test_invalid_runs_count_for_nothing() -> None:
    made = observations(noise=0.01)
    broken = [replace(made[0], round=9, measured=dict.fromkeys(METRICS, 1.0), valid=False)]
    assert judged(made + broken) == judged(made)


def test_errors_and_their_uncertainty_are_those_of_the_docstring() -> None:
    found = judged(observations(rounds=4, factor=1.1, noise=0.03, seed=5))
    made = observations(rounds=4, factor=1.1, noise=0.03, seed=5)
    groups = [
        [
            math.log(1.1 * 20.0 / float(one.measured[TPOT] or 0))
            for one in made
            if (one.policy, one.load) == (policy, load)
        ]
        for policy in POLICIES
        for load in LOADS
    ]
    own = [float(np.std(group, ddof=1)) for group in groups]
    typical = float(np.median(own)) / math.sqrt(stats.chi2.ppf(0.5, 3) / 3)
    mine = [error for error in found.errors if error.metric == TPOT]
    assert [error.error for error in mine] == pytest.approx([math.expm1(np.mean(group)) for group in groups])
    t = float(stats.t.ppf(0.975, error_freedom([dict(enumerate(group)) for group in groups])))
    expected = [t * max(value, typical) / math.sqrt(4) for value in own]
    assert [error.uncertainty for error in mine] == pytest.approx(expected, rel=0.01)


def test_degrees_of_freedom_fall_where_rounds_are_slow_together() -> None:
    apart = [{0: 0.01, 1: -0.01, 2: 0.0}, {0: -0.01, 1: 0.01, 2: 0.0}, {0: 0.0, 1: 0.0, 2: 0.0}]
    assert error_freedom(apart) == 6
    together = [{0: 0.01, 1: -0.02, 2: 0.03} for _ in range(8)]
    assert error_freedom(together) == pytest.approx(2.0)
    assert error_freedom([{0: 0.1}, {0: 0.2}]) == 0  # nothing was measured twice
    assert error_freedom([{0: 0.1, 1: 0.2, 2: 0.4}]) == 2


@pytest.mark.parametrize(("rounds", "common"), [(2, 1.0), (3, 0.0), (3, 0.5), (3, 1.0), (6, 1.0)])
def test_intervals_cover_a_machine_that_is_slow_for_whole_rounds(rounds: int, common: float) -> None:
    """Coverage of nearly 95 %; with the freedom of all settings it is 82 to 91 % where all noise is common."""
    random = np.random.default_rng(3)
    covered = []
    for _ in range(400):
        of_round = random.normal(0.0, math.sqrt(common), rounds)
        values = random.normal(0.0, math.sqrt(1.0 - common), (8, rounds)) + of_round
        sigmas = np.array(noise_between_rounds(values.tolist())[1])
        t = interval_factor(error_freedom([dict(enumerate(row)) for row in values.tolist()]))
        covered += (np.abs(values.mean(axis=1)) <= t * sigmas / math.sqrt(rounds)).tolist()
    assert np.mean(covered) > 0.92


def test_rounds_slow_together_count_as_one_measurement() -> None:
    slow = {0: 1.0, 1: 1.06, 2: 0.97}
    made = [
        replace(one, measured={key: float(value or 0) * slow[one.round] for key, value in one.measured.items()})
        for one in observations(rounds=3)
    ]
    sigma = float(np.std(np.log(list(slow.values())), ddof=1))
    typical = sigma / math.sqrt(stats.chi2.ppf(0.5, 2) / 2)  # as noise_of takes it
    t = float(stats.t.ppf(0.975, 2))
    for error in judged(made).errors:
        assert error.uncertainty == pytest.approx(t * typical / math.sqrt(3), rel=0.02)


def test_one_erratic_setting_does_not_hide_the_others() -> None:
    made = observations(rounds=3, factor=1.01, noise=0.002)
    shaken = [
        replace(one, measured={**one.measured, TTFT: 10.0 * one.load * (1.0 + one.round)})
        if (one.policy, one.load) == ("eb", 8)
        else one
        for one in made
    ]
    found = judged(shaken)
    assert found.word == "figures"
    assert max(error.uncertainty for error in found.errors if error.metric == TTFT) > 0.5


def test_a_gain_that_was_not_predicted_at_all_is_wrong() -> None:
    for gain in (1.0, 1.0004):  # both are shown as 0.0 %
        assert [one.right for one in judged(observations(gain=gain, noise=0.002)).gains] == [False, False]


@pytest.mark.parametrize(("true_gain", "right"), [(1.01, None), (1.04, True)])
def test_a_gain_has_a_direction_from_two_per_cent_on(true_gain: float, right: bool | None) -> None:
    made = with_true_gain(observations(noise=0.0005), true_gain)
    assert [gain.right for gain in judged(made).gains] == [right, right]


def test_where_policies_are_equal_noise_seldom_looks_like_a_gain() -> None:
    made = (judged(with_true_gain(observations(noise=0.05, rounds=2, seed=seed), 1.0)) for seed in range(400))
    clear = [any(gain.right is not None for gain in found.gains) for found in made]
    assert len(clear) == 400
    assert sum(clear) < 0.05 * len(clear)


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3.0), st.floats(0.0, 0.3))
def test_the_unit_and_the_order_do_not_matter(seed: int, factor: float, noise: float) -> None:
    made = observations(factor=factor, noise=noise, seed=seed)
    scaled = [
        replace(
            one,
            predicted={key: 1000.0 * float(value or 0) for key, value in one.predicted.items()},
            measured={key: 1000.0 * float(value or 0) for key, value in one.measured.items()},
        )
        for one in reversed(made)
    ]
    assert judged(scaled).word == judged(made).word


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.2))
def test_a_verdict_of_figures_means_most_settings_keep_their_limits(seed: int, noise: float) -> None:
    found = judged(observations(factor=1.0 + noise / 2, noise=noise, seed=seed))
    if found.word == "figures":
        for metric, limit in FIGURE_LIMITS.items():
            sizes = sorted(abs(error.error) + error.uncertainty for error in found.errors if error.metric == metric)
            assert sizes[2] <= limit


@given(st.lists(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=4), min_size=1, max_size=8))
def test_the_noise_of_a_group_is_at_least_the_typical_noise(groups: list[list[float]]) -> None:
    typical, sigmas = noise_between_rounds(groups)
    assert all(sigma >= typical for sigma in sigmas)
    assert math.isinf(typical) == all(len(group) == 1 for group in groups)


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_typical_noise_is_that_of_the_machine(rounds: int) -> None:
    random = np.random.default_rng(1)
    typical, _ = noise_between_rounds(random.normal(0.0, 0.07, (4000, rounds)).tolist())
    assert typical == pytest.approx(0.07, rel=0.05)
