"""Memory-safe batch: the order of the bounds, what each of them promises, and D against a simulated slot."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.theory import TheoryError, memory_bounds, memory_safe_batch, slot_tokens

capacities = st.floats(1e3, 1e7)
prompts = st.floats(1.0, 5000.0)
hazards = st.floats(1e-4, 1.0)
shares = st.floats(0.0, 0.99)
epsilons = st.floats(1e-6, 0.36)  # up to 1/e the paper's order holds


@given(capacities, prompts, hazards, shares, epsilons)
def test_the_bounds_come_in_the_order_of_appendix_d5(
    c: float, mu_l: float, p0: float, theta: float, eps: float
) -> None:
    bounds = memory_bounds(c, mu_l, p0, theta, eps)
    assert 0 <= bounds.n_paper <= bounds.n_peak <= bounds.n_static
    assert 0 <= bounds.n_code <= bounds.n_static


@given(capacities, prompts, hazards, shares, epsilons)
def test_the_code_form_is_the_largest_batch_within_its_inequality(
    c: float, mu_l: float, p0: float, theta: float, eps: float
) -> None:
    zeta = -math.log1p(-theta)
    ratio = zeta / theta if theta else 1.0
    sigma = math.sqrt(2 * zeta * (1 + (p0 * mu_l + ratio) ** 2)) / p0
    slot = mu_l + (1 - theta) * ratio / p0

    def needed(n: int) -> float:
        return n * slot + sigma * math.sqrt(n * math.log(1 / eps))

    n = memory_safe_batch(c, mu_l, p0, theta, eps)
    assert needed(n) <= c * (1 + 1e-9)
    assert needed(n + 1) > c * (1 - 1e-9)


@given(capacities, prompts, hazards, shares, epsilons, st.floats(1.0, 4.0))
def test_more_capacity_or_more_risk_never_shrinks_the_batch(
    c: float, mu_l: float, p0: float, theta: float, eps: float, factor: float
) -> None:
    for form in ("code", "paper"):
        n = memory_safe_batch(c, mu_l, p0, theta, eps, form=form)
        assert n <= memory_safe_batch(c * factor, mu_l, p0, theta, eps, form=form)
        assert n <= memory_safe_batch(c, mu_l, p0, theta, min(eps * factor, 0.99), form=form)


def test_a_worked_example_of_the_paper_form() -> None:
    # nu = 1/(0.01**2 * 100) = 100, ln(1/eps) = 5, D = 100 + (0.5/0.005)*ln 2
    bounds = memory_bounds(100_000, 100, 0.01, 0.5, math.exp(-5))
    slot = 100 + 100 * math.log(2)
    assert bounds.slot_tokens == pytest.approx(slot)
    assert bounds.n_paper == int((100_000 - 500) / slot)
    assert bounds.n_star("paper") == bounds.n_paper
    assert bounds.n_star() == bounds.n_code


def test_slot_tokens_tend_to_prompt_plus_output_if_refilled_at_once() -> None:
    assert slot_tokens(100, 0.01, 0.0) == pytest.approx(200)
    assert slot_tokens(100, 0.01, 1e-9) == pytest.approx(200)


@pytest.mark.parametrize("theta", [0.1, 0.4])
def test_slot_tokens_match_a_simulated_batch(theta: float) -> None:
    """Refill a batch after theta*N departures, many times: the mean tokens held at decode start are D."""
    rng = np.random.default_rng(7)
    n, p0, mu_l = 4000, 0.005, 50
    age, held = np.zeros(n), []
    warm_up = int(8 / theta)  # cycles until all but exp(-8) of the slots are in their steady state
    for cycle in range(warm_up + 40):
        if cycle >= warm_up:
            held.append(mu_l + age.mean())
        busy = np.ones(n, dtype=bool)
        while busy.sum() > (1 - theta) * n:
            age[busy] += 1
            busy &= rng.random(n) > p0
        age[~busy] = 0
    assert np.mean(held) == pytest.approx(slot_tokens(mu_l, p0, theta), rel=0.02)


def test_a_batch_that_does_not_fit_is_zero() -> None:
    assert memory_safe_batch(10, 5000, 0.01, 0.5) == 0
    assert memory_safe_batch(10, 5000, 0.01, 0.5, form="paper") == 0
    for arguments, named in [
        ((-1.0, 100, 0.01, 0.5), "capacity"),
        ((1e5, 0, 0.01, 0.5), "mu_l"),
        ((1e5, 100, 0.0, 0.5), "p0"),
        ((1e5, 100, 0.01, 1.0), "theta"),
        ((1e5, 100, 0.01, 0.5, 1.0), "epsilon"),
    ]:
        with pytest.raises(TheoryError, match=named):
            memory_bounds(*arguments)
