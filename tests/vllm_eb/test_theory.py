"""The closed forms against high-precision arithmetic, against each other and against direct numerical optimisation."""

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_eb.calibration import Calibration, MixedCost
from vllm_eb.theory import (
    TheoryError,
    base_threshold,
    crossover,
    eb_throughput,
    ifr_correction,
    mb_throughput,
    optimal_threshold,
    solve_zeta,
)

RTX = Calibration(4.69e-3, 5.01e-5, 1.04e-2, 1.04e-4, mixed=MixedCost(6.29e-5, 1.97e-4, 9.9e-6))

log_ratios = st.floats(-8.0, 3.0)
hazards = st.floats(1e-4, 0.5)
fixed_costs = st.floats(1e-5, 0.1)
slopes = st.floats(1e-7, 1e-3)
lengths = st.floats(1.0, 5000.0)


def exact_theta(ratio: float) -> mpmath.mpf:
    """The root of Prop. 3.1 by bisection in 50 digits: nothing in common with the solver under test."""
    with mpmath.workdps(50):
        low, high = mpmath.mpf(0), mpmath.mpf(1) - mpmath.mpf(10) ** -45
        for _ in range(180):
            middle = (low + high) / 2
            if middle / (1 - middle) + mpmath.log(1 - middle) < mpmath.mpf(ratio):
                low = middle
            else:
                high = middle
        return low


def relative_error(value: float, exact: mpmath.mpf) -> float:
    with mpmath.workdps(50):
        return float(abs(mpmath.mpf(value) - exact) / exact)


@pytest.mark.parametrize("exponent", [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3])
@pytest.mark.parametrize("digit", [1.0, 1.99, 2.01, 4.0, 7.3])
def test_theta0_agrees_with_fifty_digits_over_the_whole_range(exponent: int, digit: float) -> None:
    ratio = digit * 10.0**exponent
    assert relative_error(base_threshold(1.0, ratio, 1.0), exact_theta(ratio)) < 1e-13


@given(log_ratios)
@settings(max_examples=60, deadline=None)
def test_theta0_is_accurate_at_any_ratio(log_ratio: float) -> None:
    ratio = 10.0**log_ratio
    assert relative_error(base_threshold(1.0, ratio, 1.0), exact_theta(ratio)) < 1e-12


@given(hazards)
@settings(max_examples=30, deadline=None)
def test_the_discrete_variant_replaces_p0_by_its_logarithm(p0: float) -> None:
    with mpmath.workdps(50):
        ratio = -mpmath.log(1 - mpmath.mpf(p0)) / 2
        assert relative_error(base_threshold(p0, 0.5, 1.0, discrete=True), exact_theta(ratio)) < 1e-12


@given(log_ratios, st.floats(1.001, 10.0))
def test_theta0_grows_with_the_ratio(log_ratio: float, factor: float) -> None:
    ratio = 10.0**log_ratio
    assert 0.0 < base_threshold(1.0, ratio, 1.0) < base_threshold(1.0, factor * ratio, 1.0) < 1.0


@given(hazards, fixed_costs, fixed_costs, st.floats(0.1, 2.0))
def test_theta0_depends_on_the_ratio_alone(p0: float, alpha_p: float, alpha_d: float, scale: float) -> None:
    reference = base_threshold(p0, alpha_p, alpha_d)
    assert base_threshold(p0, scale * alpha_p, scale * alpha_d) == pytest.approx(reference, rel=1e-12)
    assert base_threshold(p0 * scale, alpha_p / scale, alpha_d) == pytest.approx(reference, rel=1e-12)


def test_theta0_is_a_square_root_near_zero() -> None:
    assert base_threshold(1.0, 1e-20, 1.0) == pytest.approx(math.sqrt(2e-20), rel=1e-9)
    assert base_threshold(0.01, 0.0, 0.01) == 0.0


def test_theta0_stays_below_one_however_dear_a_prefill() -> None:
    assert base_threshold(1.0, 1e300, 1.0) < 1.0
    assert math.isfinite(solve_zeta(1e300))


@pytest.mark.parametrize(
    ("p0", "alpha_p", "alpha_d", "named"),
    [
        (0.0, 1.0, 1.0, "p0"),
        (1.5, 1.0, 1.0, "p0"),
        (math.nan, 1.0, 1.0, "p0"),
        (0.1, -1e-9, 1.0, "alpha_p"),
        (0.1, math.inf, 1.0, "alpha_p"),
        (0.1, 1.0, 0.0, "alpha_d"),
        (0.1, 1.0, math.nan, "alpha_d"),
    ],
)
def test_a_parameter_out_of_range_is_named(p0: float, alpha_p: float, alpha_d: float, named: str) -> None:
    with pytest.raises(TheoryError, match=named):
        base_threshold(p0, alpha_p, alpha_d)


@given(hazards, fixed_costs, fixed_costs, slopes, slopes, lengths, st.integers(1, 4096))
def test_throughput_is_highest_at_theta0(
    p0: float, alpha_p: float, alpha_d: float, beta_p: float, beta_d: float, mu_l: float, n: int
) -> None:
    costs = Calibration(alpha_p, beta_p, alpha_d, beta_d)
    theta0 = base_threshold(p0, alpha_p, alpha_d)

    def throughput(theta: float) -> float:
        return eb_throughput(costs, theta=theta, n=n, p0=p0, mu_l=mu_l)

    others = [theta0 * i / 50 for i in range(1, 50)] + [theta0 + (1 - theta0) * i / 50 for i in range(1, 50)]
    assert throughput(theta0) >= max(throughput(theta) for theta in others) * (1 - 1e-12)


@given(hazards, fixed_costs, fixed_costs, slopes, st.floats(0.0, 1e-2), st.floats(1.0, 4096.0))
def test_an_increasing_hazard_never_lowers_the_threshold(
    p0: float, alpha_p: float, alpha_d: float, beta_d: float, eta: float, n: float
) -> None:
    found = optimal_threshold(p0, alpha_p, alpha_d, eta=eta, beta_d=beta_d, n=n)
    assert found.theta0 <= found.theta_star < 1.0
    assert 0.0 <= found.delta_theta <= 5.0 * found.theta0
    assert found.zeta == pytest.approx(-math.log1p(-found.theta0), rel=1e-9)
    bare = ifr_correction(found.theta0, p0, eta, beta_d, alpha_d, n, cap=None)
    assert bare >= found.delta_theta
    doubled = ifr_correction(found.theta0, p0, 2.0 * eta, beta_d, alpha_d, n, cap=None)
    assert doubled == pytest.approx(2.0 * bare)


@pytest.mark.parametrize("n", [1.0, 64.0, 1024.0])
@pytest.mark.parametrize(("p0", "alpha_p"), [(0.002, 0.005), (0.02, 0.03), (0.3, 0.05)])
def test_the_hazard_correction_is_the_derivative_of_the_true_optimum(p0: float, alpha_p: float, n: float) -> None:
    """Maximise the fluid model's throughput itself at a small eta; Thm 3.2 claims its first-order shift."""
    alpha_d, beta_d = 0.01, 1e-4
    with mpmath.workdps(30):
        eta = mpmath.mpf(p0) ** 2 * mpmath.mpf(10) ** -5

        def cycle_s(theta: mpmath.mpf) -> mpmath.mpf:
            zeta = -mpmath.log(1 - theta)
            end = 2 * zeta / (p0 + mpmath.sqrt(p0**2 + 2 * eta * zeta))
            busy = mpmath.quad(lambda t: mpmath.exp(-p0 * t - eta * t * t / 2), [0, end])
            return alpha_p + alpha_d * end + beta_d * n * busy

        def slope(theta: mpmath.mpf) -> mpmath.mpf:
            return theta * mpmath.diff(cycle_s, theta) - cycle_s(theta)

        theta0 = base_threshold(p0, alpha_p, alpha_d)
        true_shift = mpmath.findroot(slope, (theta0, theta0 * 1.001)) - exact_theta(p0 * alpha_p / alpha_d)
    delta = ifr_correction(theta0, p0, float(eta), beta_d, alpha_d, n, cap=None)
    assert delta == pytest.approx(float(true_shift), rel=2e-3)


def test_the_hazard_correction_keeps_its_digits_at_a_tiny_threshold() -> None:
    theta0, p0, eta, beta_d, alpha_d, n = 1e-7, 0.01, 1e-6, 1e-4, 0.01, 100.0
    with mpmath.workdps(50):
        t = mpmath.mpf(theta0)
        zeta = -mpmath.log(1 - t)
        inner = zeta * (t / (1 - t) - zeta / 2) + mpmath.mpf(beta_d) * n / alpha_d * (zeta - t)
        exact = mpmath.mpf(eta) * (1 - t) ** 2 / (mpmath.mpf(p0) ** 2 * t) * inner
    assert relative_error(ifr_correction(theta0, p0, eta, beta_d, alpha_d, n, cap=None), exact) < 1e-12


@given(lengths, lengths, st.floats(1.0, 4096.0), fixed_costs, fixed_costs, slopes, slopes, slopes)
def test_the_crossover_is_the_difference_of_the_two_throughputs(
    mu_l: float,
    mu_o: float,
    n: float,
    alpha_p: float,
    alpha_d: float,
    beta_p: float,
    beta_d: float,
    beta_mb: float,
) -> None:
    costs = Calibration(alpha_p, beta_p, alpha_d, beta_d, mixed=MixedCost(beta_mb, 0.0, 0.0), alpha_mb=alpha_d)
    theta0 = base_threshold(1.0 / mu_o, alpha_p, alpha_d)
    sides = crossover(costs, mu_l=mu_l, mu_o=mu_o, n_obs=n, theta0=theta0)
    exclusive_s = 1.0 / eb_throughput(costs, theta=theta0, n=n, p0=1.0 / mu_o, mu_l=mu_l)
    mixed_s = 1.0 / mb_throughput(costs, n=n, mu_l=mu_l, mu_o=mu_o)
    assert sides.advantage * (mu_l + mu_o) == pytest.approx(mixed_s - exclusive_s, rel=1e-6, abs=1e-9 * mixed_s)
    assert sides.eb_wins(sides.advantage - 1e-6)
    assert not sides.eb_wins(sides.advantage + 1e-6)


def test_the_crossover_without_mixed_costs_compares_fixed_costs_only() -> None:
    bare = Calibration(RTX.alpha_p, RTX.beta_p, RTX.alpha_d, RTX.beta_d)
    sides = crossover(bare, mu_l=105, mu_o=280, n_obs=512, theta0=0.05)
    assert (sides.lhs, sides.beta_mb) == (0.0, None)
    with pytest.raises(TheoryError, match="mixed"):
        mb_throughput(bare, n=512, mu_l=105, mu_o=280)


def test_without_a_prefill_overhead_the_crossover_takes_its_limit() -> None:
    def rhs(alpha_p: float) -> float:
        costs = Calibration(alpha_p, 5e-5, 0.01, 1e-4, alpha_mb=0.01)
        theta0 = base_threshold(1 / 280, alpha_p, 0.01)
        return crossover(costs, mu_l=105, mu_o=280, n_obs=512, theta0=theta0).rhs

    # Without a prefill overhead both disciplines pay alpha_d a token; mixed batching also pays it for the prompt.
    assert rhs(0.0) == pytest.approx(-0.01 / (512 * 385), rel=1e-9)
    assert rhs(1e-16) == pytest.approx(rhs(0.0), abs=1e-9)
    with pytest.raises(TheoryError, match="theta0"):
        crossover(RTX, mu_l=105, mu_o=280, n_obs=512, theta0=0.0)


@pytest.mark.parametrize(
    ("r", "n_obs", "lhs", "rhs"), [(0.348, 2046, 1.24e-5, 2.29e-6), (0.630, 219, 2.51e-5, 3.88e-5)]
)
def test_the_switches_that_the_authors_print_use_the_threshold_in_use(
    r: float, n_obs: float, lhs: float, rhs: float
) -> None:
    """Their distribution shift on H200, with at least 0.7 for the threshold (PAPER_VS_KVAWARE_COMPARISON.md): both
    evaluations of eq. 8 are those of one near 0.7; the base threshold is below 0.1."""
    h200 = Calibration(
        1.2786e-3, 2.48526e-5, 8.92118e-3, 4.58647e-5, mixed=MixedCost(2.493675e-05, 5.192856e-05, 1.477785e-05)
    )
    mu_l, mu_o = 1108 * (1 - r), 1108 * r
    sides = crossover(h200, mu_l=mu_l, mu_o=mu_o, n_obs=n_obs, theta0=0.7)
    assert sides.lhs == pytest.approx(lhs, rel=0.02)
    assert sides.rhs == pytest.approx(rhs, rel=0.06)
    assert crossover(h200, mu_l=mu_l, mu_o=mu_o, n_obs=n_obs, theta0=0.1).rhs < 0.7 * rhs
