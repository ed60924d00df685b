"""The closed forms with speculative decoding: against enumeration, against each other, and in their limits."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.calibration import Calibration, MixedCost
from vllm_eb.theory import (
    NO_DRAFTS,
    Drafts,
    TheoryError,
    base_threshold,
    crossover,
    eb_throughput,
    mb_throughput,
    optimal_threshold,
)

H200 = Calibration(1.3e-3, 2.5e-5, 8.9e-3, 4.6e-5, mixed=MixedCost(2.5e-5, 5.2e-5, 1.5e-5), alpha_mb=8.9e-3)

rates = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7).map(lambda values: tuple(sorted(values, reverse=True)))
hazards = st.floats(1e-4, 0.5)
costs_s = st.floats(1e-5, 0.1)
lengths = st.floats(1.5, 5000.0)


def drafting(acceptance: tuple[float, ...]) -> Drafts:
    return Drafts(acceptance, alpha_s=1.5e-3, beta_s=4e-6, lookahead_tokens=len(acceptance))


def tokens_of_a_step(acceptance: tuple[float, ...]) -> list[float]:
    """The probabilities of 1, 2, ... tokens."""
    reached = (1.0, *acceptance, 0.0)
    return [here - further for here, further in itertools.pairwise(reached)]


@given(hazards, costs_s, costs_s, st.floats(0.0, 1e-3), lengths, lengths)
def test_without_drafts_every_formula_is_that_without(
    p0: float, alpha_p: float, alpha_d: float, eta: float, mu_l: float, mu_o: float
) -> None:
    costs = Calibration(alpha_p, 5e-5, alpha_d, 1e-4, mixed=MixedCost(6e-5, 2e-4, 1e-5))
    plain = optimal_threshold(p0, alpha_p, alpha_d, eta=eta, beta_d=1e-4, n=64)
    none = Drafts((), alpha_s=1.0, beta_s=1.0)
    for drafts in (NO_DRAFTS, none):
        assert optimal_threshold(p0, alpha_p, alpha_d, eta=eta, beta_d=1e-4, n=64, drafts=drafts) == plain
        assert drafts.per_step(p0) == p0
        assert drafts.steps(mu_o) == mu_o
        assert drafts.costs(costs) == costs
    tokens = mu_l + mu_o
    sides = crossover(costs, mu_l=mu_l, mu_o=mu_o, n_obs=64, theta0=plain.theta0, drafts=none)
    assert sides.r == mu_o / tokens
    assert sides.beta_eb == (costs.beta_p * mu_l + costs.beta_d * mu_o) / tokens
    assert sides == crossover(costs, mu_l=mu_l, mu_o=mu_o, n_obs=64, theta0=plain.theta0)


@given(st.integers(1, 7), hazards, lengths)
def test_drafts_of_which_none_is_accepted_only_cost(count: int, p0: float, mu_o: float) -> None:
    drafts = drafting((0.0,) * count)
    assert drafts.per_step(p0) == p0
    assert drafts.tokens_per_step == 1.0
    assert drafts.steps(mu_o) == pytest.approx(mu_o)
    found = optimal_threshold(p0, H200.alpha_p, H200.alpha_d, drafts=drafts)
    assert found.theta0 == base_threshold(p0, H200.alpha_p + drafts.alpha_s, H200.alpha_d + drafts.alpha_s)
    without = eb_throughput(H200, theta=0.2, n=64, p0=p0, mu_l=100)
    assert eb_throughput(H200, theta=0.2, n=64, p0=p0, mu_l=100, drafts=drafts) < without


@given(rates, hazards)
def test_the_hazard_per_step_is_that_of_its_tokens(acceptance: tuple[float, ...], p0: float) -> None:
    survives = sum(share * (1.0 - p0) ** tokens for tokens, share in enumerate(tokens_of_a_step(acceptance), 1))
    assert Drafts(acceptance).per_step(p0) == pytest.approx(1.0 - survives, rel=1e-9)


@given(rates)
def test_tokens_per_step_are_the_mean_of_their_distribution(acceptance: tuple[float, ...]) -> None:
    mean = sum(tokens * share for tokens, share in enumerate(tokens_of_a_step(acceptance), 1))
    assert Drafts(acceptance).tokens_per_step == pytest.approx(mean)


@given(rates, hazards, costs_s, costs_s, st.integers(1, 2048))
def test_throughput_with_drafts_is_highest_at_theta0(
    acceptance: tuple[float, ...], p0: float, alpha_p: float, alpha_d: float, n: int
) -> None:
    costs, drafts = Calibration(alpha_p, 5e-5, alpha_d, 1e-4), drafting(acceptance)
    theta0 = optimal_threshold(p0, alpha_p, alpha_d, drafts=drafts).theta0

    def throughput(theta: float) -> float:
        return eb_throughput(costs, theta=theta, n=n, p0=p0, mu_l=300, drafts=drafts)

    others = [theta0 * i / 20 for i in range(1, 20)] + [theta0 + (1 - theta0) * i / 20 for i in range(1, 20)]
    assert throughput(theta0) >= max(map(throughput, others)) * (1 - 1e-12)


@given(rates, lengths, lengths, st.floats(1.0, 4096.0))
def test_the_crossover_with_drafts_is_the_difference_of_both_throughputs(
    acceptance: tuple[float, ...], mu_l: float, mu_o: float, n: float
) -> None:
    drafts = drafting(acceptance)
    theta0 = optimal_threshold(1.0 / mu_o, H200.alpha_p, H200.alpha_d, drafts=drafts).theta0
    sides = crossover(H200, mu_l=mu_l, mu_o=mu_o, n_obs=n, theta0=theta0, drafts=drafts)
    exclusive_s = 1.0 / eb_throughput(H200, theta=theta0, n=n, p0=1.0 / mu_o, mu_l=mu_l, drafts=drafts)
    mixed_s = 1.0 / mb_throughput(H200, n=n, mu_l=mu_l, mu_o=mu_o, drafts=drafts)
    tokens = mu_l + drafts.query_tokens * drafts.steps(mu_o)
    assert sides.advantage * tokens == pytest.approx(mixed_s - exclusive_s, rel=1e-6, abs=1e-9 * mixed_s)


def test_accepted_drafts_raise_the_hazard_per_step_and_the_threshold() -> None:
    thresholds = [
        optimal_threshold(1 / 280, H200.alpha_p, H200.alpha_d, drafts=Drafts((rate, rate**2, rate**3))).theta0
        for rate in (0.0, 0.3, 0.6, 0.9)
    ]
    assert thresholds == sorted(thresholds)
    assert thresholds[-1] > 1.5 * thresholds[0]  # near sqrt(tokens per step), 3.44


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"acceptance": (1.2,)}, "position 1"),
        ({"acceptance": (0.5, -0.1)}, "position 2"),
        ({"acceptance": (0.5, 0.6)}, "must not rise"),
        ({"acceptance": (float("nan"),)}, "position 1"),
        ({"acceptance": (0.5,), "beta_s": -1.0}, "beta_s"),
    ],
)
def test_impossible_drafts_are_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(TheoryError, match=named):
        Drafts(**given)  # type: ignore[arg-type]
