import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.traffic.arrivals import Curve, arrival_times, dispersion, step_edges, stepped_gaps, substream

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
def test_constant_arrivals_are_equally_spaced(rate: float, n: int) -> None:
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


def test_a_curve_with_widths_has_its_rate_in_each_piece() -> None:
    curve = Curve((3.0, 1.0), period_s=40.0, widths=(1.0, 3.0))  # 10 s at three times the rate of the other 30 s
    times = arrival_times("constant", 20.0, substream(0, "x"), 1600, curve=curve)
    per_piece = np.histogram(times, bins=[0, 10, 40, 50, 80 + 1e-9])[0]
    assert per_piece == pytest.approx([400] * 4, abs=1)


@given(
    widths=st.lists(st.floats(0.001, 1000), min_size=2, max_size=20),
    means=st.lists(st.floats(0, 50), min_size=1, max_size=20),
    root=st.floats(0, 2),
    centre=st.floats(0, 1),
    per_step=st.floats(0.1, 40.0),
    n=st.integers(1, 400),
    seed=SEEDS,
)
def test_each_step_of_bursts_is_filled_exactly(
    widths: list[float], means: list[float], root: float, centre: float, per_step: float, n: int, seed: int
) -> None:
    roots, centres = [root] * len(widths), [centre] * len(widths)
    gaps = stepped_gaps(sorted(means), widths, roots, centres, per_step, n, substream(seed, "x"))
    assert len(gaps) == n
    assert (gaps >= 0).all()
    edges = step_edges(n, per_step)
    ended = np.flatnonzero((np.diff(edges) > 0) & (edges[1:] < n))
    assert np.cumsum(gaps)[edges[ended + 1] - 1] == pytest.approx((ended + 1) * per_step, rel=1e-9)
    assert gaps.sum() == pytest.approx(n, abs=1.0 + per_step)


@pytest.mark.parametrize(("centre", "places"), [(0.15, {0}), (0.5, {1, 2}), (0.85, {3})])
def test_steps_of_one_length_differ_in_their_longest_gap(centre: float, places: set[int]) -> None:
    """Of two steps one has a pause and three short gaps, the other four middling gaps."""
    steps = np.array([[0.0, 0.1, 0.1, 3.8], [1.0, 1.0, 1.0, 1.0]])
    roots = np.sqrt(steps).mean(axis=1)
    means = np.sort(np.tile(steps, (50, 1)).ravel())
    rng, centres = substream(1, "x"), [centre, 0.5]
    gaps = stepped_gaps(means.tolist(), [1.0, 1.0], roots.tolist(), centres, 4.0, 400, rng).reshape(-1, 4)
    assert gaps.sum(axis=1) == pytest.approx(np.full(100, 4.0))
    longest = gaps.max(axis=1)  # a pause and three short gaps cannot be told from a pause and three middling ones
    assert np.median(longest[::2]) > 2.8
    assert np.percentile(longest[1::2], 95) < 2.0
    assert np.isin(gaps[::2].argmax(axis=1), list(places)).mean() > 0.9
