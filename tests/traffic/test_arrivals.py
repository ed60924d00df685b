import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.traffic.arrivals import Curve, arrival_times, dispersion
from ebbench.traffic.substreams import substream

SEEDS = st.integers(0, 2**32)
MANY = 200_000


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_poisson_counts_have_dispersion_one_and_the_asked_rate(seed: int) -> None:
    times = arrival_times("poisson", 200.0, substream(seed, "arrivals/0"), MANY)
    # 20,000 windows of 0.05 s: the index has a standard error of 0.01, the rate one of 0.2 %.
    assert dispersion(times, 0.05) == pytest.approx(1.0, abs=0.05)
    assert MANY / times[-1] == pytest.approx(200.0, rel=0.015)


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.sampled_from([0.1, 0.25, 4.0]))
def test_gamma_gaps_have_the_asked_burstiness_and_rate(seed: int, burstiness: float) -> None:
    times = arrival_times("gamma", 50.0, substream(seed, "arrivals/0"), MANY, burstiness=burstiness)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@given(st.floats(0.01, 1e5), st.integers(1, 500))
def test_constant_is_constant(rate: float, n: int) -> None:
    times = arrival_times("constant", rate, substream(0, "arrivals/0"), n)
    assert np.allclose(times, np.arange(1, n + 1) / rate, rtol=1e-12)


def test_on_off_sends_only_in_the_on_phases_and_keeps_the_mean() -> None:
    curve = Curve((1.0, 0.0), period_s=20.0)
    times = arrival_times("poisson", 100.0, substream(3, "arrivals/0"), 40_000, curve=curve)
    assert (times % 20.0 <= 10.0 + 1e-9).all()
    per_period = np.bincount((times // 20).astype(int))[:-1]
    assert per_period.mean() == pytest.approx(2000, rel=0.03)
    within = np.histogram(times % 20, bins=10, range=(0, 10))[0]
    assert within == pytest.approx(4000, rel=0.06)


def test_ramp_rises_in_a_line() -> None:
    n, rate = 100_000, 100.0
    times = arrival_times("constant", rate, substream(0, "x"), n, curve=Curve((0.2, 1.8), n / rate, linear=True))
    assert times[-1] == pytest.approx(n / rate)
    counts = np.histogram(times, bins=10, range=(0, n / rate))[0]
    middles = np.arange(0.05, 1.0, 0.1)
    assert counts == pytest.approx(n / 10 * (0.2 + 1.6 * middles), rel=0.001)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 10), min_size=2, max_size=12).filter(lambda levels: max(levels) > 0.1),
    st.booleans(),
    st.floats(0.5, 1000),
)
def test_every_curve_keeps_order_and_whole_periods(levels: list[float], linear: bool, period_s: float) -> None:
    curve = Curve(tuple(levels), period_s, linear)
    operational = np.linspace(0, 3 * period_s, 400, endpoint=False)
    seconds = curve.seconds(operational)
    assert (np.diff(seconds) >= -1e-9 * period_s).all()
    assert (np.floor(seconds / period_s + 1e-9) >= np.floor(operational / period_s)).all()
    assert seconds.max() <= 3 * period_s * (1 + 1e-9)


def test_substreams_are_apart_and_repeatable() -> None:
    assert (substream(5, "a").random(10) == substream(5, "a").random(10)).all()
    assert not (substream(5, "a").random(10) == substream(5, "b").random(10)).any()
    assert not (substream(5, "a").random(10) == substream(6, "a").random(10)).any()
