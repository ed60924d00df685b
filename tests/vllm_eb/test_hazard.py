"""Both estimators against plain loops, and against a closed loop whose true hazard is known."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.hazard import CensoredHazard, HazardEstimate, SlidingHazard, empirical_hazard

MEAN = 1024
Draw = Callable[[np.random.Generator, int], np.ndarray]

lengths = st.lists(st.integers(1, 300), min_size=30, max_size=120)


def geometric(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.geometric(1 / MEAN, n)


def uniform(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(MEAN // 2, MEAN * 3 // 2 + 1, n)


def gamma4(rng: np.random.Generator, n: int) -> np.ndarray:
    return 1 + rng.gamma(4, (MEAN - 1) / 4, n).astype(np.int64)


def closed_loop(
    draw: Draw, seed: int, slots: int = 512, total: int = 2500, every: int = 100
) -> Iterator[tuple[int, HazardEstimate, HazardEstimate]]:
    """``slots`` requests at a time, each followed by the next at once, until ``total`` have ended.

    Yields completions so far and the two estimates (published, censored) at every update.
    """
    rng = np.random.default_rng(seed)
    published, censored = SlidingHazard(), CensoredHazard()
    length, age, running = draw(rng, slots), np.zeros(slots, dtype=np.int64), np.ones(slots, dtype=bool)
    admitted, done, due = slots, 0, every
    while running.any():
        age[running] += 1
        ended = np.flatnonzero(running & (age == length))
        for output_tokens in length[ended].tolist():
            published.observe(output_tokens)
            censored.observe(output_tokens)
        done += len(ended)
        refill = ended[: max(total - admitted, 0)]
        running[ended[len(refill) :]] = False
        length[refill], age[refill] = draw(rng, len(refill)), 0
        admitted += len(refill)
        if done >= due:
            due += every
            left, right = published.estimate(age[running]), censored.estimate(age[running])
            assert left is not None
            assert right is not None
            yield done, left, right


def test_empirical_hazard_by_hand() -> None:
    t, h, at_risk = empirical_hazard([1, 3, 3, 5], censored=[2, 4], delayed=[1])
    assert t.tolist() == [1, 2, 3, 4, 5]
    assert at_risk.tolist() == [5, 5, 4, 2, 1]  # six began, one of them unseen at t = 1
    assert h.tolist() == [1 / 5, 0, 2 / 4, 0, 1]


def test_empirical_hazard_reaches_the_oldest_running_request() -> None:
    t, h, at_risk = empirical_hazard([2], censored=[4])
    assert (t.tolist(), h.tolist(), at_risk.tolist()) == ([1, 2, 3, 4], [0, 0.5, 0, 0], [2, 2, 1, 1])
    assert len(empirical_hazard(())[0]) == 0


def test_a_request_seen_only_after_the_longest_output_is_at_risk_nowhere() -> None:
    """``delayed`` beyond every length: a caller may pass ages that the other lists do not reach."""
    _, h, at_risk = empirical_hazard([2, 3, 3], censored=[3], delayed=[7])
    assert at_risk.tolist() == [3, 3, 2]
    assert h.tolist() == [0, 1 / 3, 1]


def test_an_output_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        empirical_hazard([3, 0])


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.lists(st.integers(0, 250), max_size=40))
def test_the_exposure_is_every_token_generated(ended: list[int], running: list[int]) -> None:
    _, h, at_risk = empirical_hazard(ended, running)
    assert at_risk.sum() == sum(ended) + sum(running)
    assert (h * at_risk).sum() == pytest.approx(len(ended))
    assert ((h >= 0) & (h <= 1)).all()


def reference_fit(window: list[int]) -> tuple[float, float]:
    """Section 3.4 in plain loops: normal equations over [5th, 95th percentile], then the two clamps."""
    ordered = sorted(window)
    first, last = ordered[int(0.05 * len(window))], ordered[int(0.95 * len(window))]
    points = []
    for t in range(first, max(last, first + 10) + 1):
        alive = sum(o >= t for o in window)
        if alive >= 5:
            points.append((alive, t, sum(o == t for o in window) / alive))
    w, wt, wtt = (sum(n * t**i for n, t, _ in points) for i in range(3))
    wh, wth = (sum(n * t**i * h for n, t, h in points) for i in range(2))
    determinant = w * wtt - wt * wt
    mean = sum(window) / len(window)
    if determinant == 0:
        return 1 / mean, 0.0
    p0 = (wtt * wh - wt * wth) / determinant
    return min(max(p0, 1 / mean), 1.0), max(0.0, (w * wth - wt * wh) / determinant)


@given(lengths)
def test_the_sliding_estimator_is_the_published_one(window: list[int]) -> None:
    estimator = SlidingHazard(window=100)
    for output_tokens in window:
        estimator.observe(output_tokens)
    found = estimator.estimate()
    assert found is not None
    kept = window[-100:]
    p0, eta = reference_fit(kept)
    assert found.p0 == pytest.approx(p0, rel=1e-9)
    assert found.eta == pytest.approx(eta, rel=1e-6, abs=1e-12)
    assert (found.mean, found.samples) == (pytest.approx(sum(kept) / len(kept)), len(kept))


@given(lengths, st.lists(st.integers(0, 400), max_size=50))
def test_estimates_stay_in_their_range(window: list[int], running: list[int]) -> None:
    for estimator in (SlidingHazard(), CensoredHazard()):
        for output_tokens in window:
            estimator.observe(output_tokens)
        found = estimator.estimate(running)
        assert found is not None
        assert 1.0 / found.mean * (1 - 1e-9) <= found.p0 <= 1.0
        assert 0.0 <= found.eta < math.inf
        assert 1.0 <= found.mean < math.inf


@pytest.mark.parametrize("make", [SlidingHazard, CensoredHazard])
def test_no_estimate_below_the_minimum_of_samples(make: type[SlidingHazard] | type[CensoredHazard]) -> None:
    estimator = make(window=50, min_samples=30)
    for _ in range(29):
        estimator.observe(7)
    assert estimator.estimate([3, 4]) is None
    estimator.observe(7)
    assert estimator.estimate([3, 4]) is not None


def test_both_estimators_forget_what_left_the_window() -> None:
    published, censored = SlidingHazard(window=100), CensoredHazard(window=100)
    for block in range(10):
        for output_tokens in np.random.default_rng(block).geometric(0.5 if block < 5 else 0.01, 100).tolist():
            published.observe(output_tokens)
            censored.observe(output_tokens)
        left, right = published.estimate(), censored.estimate()
    for found in (left, right):
        assert found is not None
        assert found.samples == 100
        assert found.mean == pytest.approx(100, rel=0.3)


@pytest.mark.parametrize("draw", [geometric, uniform, gamma4])
def test_the_censored_mean_is_right_from_early_on_to_the_drain(draw: Draw) -> None:
    for done, published, censored in closed_loop(draw, seed=5):
        if done >= 500:
            assert censored.mean == pytest.approx(MEAN, rel=0.2)
            assert censored.p0 == pytest.approx(1 / MEAN, rel=0.2)
        elif done < 200:
            assert published.mean < 0.6 * MEAN


def test_the_censored_estimator_is_unbiased_on_long_geometric_outputs() -> None:
    """True hazard 1/1024. The published window holds short outputs after the start and long ones in the drain."""
    runs = [list(closed_loop(geometric, seed)) for seed in range(8)]

    def average(update: int, which: int) -> float:
        found: list[Any] = [run[update][which] for run in runs]
        return float(np.mean([estimate.p0 for estimate in found])) * MEAN

    first, steady, last = 0, slice(5, 18), -1
    assert average(first, 1) > 5.0  # twenty times too high at the very start
    assert average(last, 1) == pytest.approx(0.5, abs=0.12)  # half of the truth at the end
    assert average(first, 2) == pytest.approx(1.0, abs=0.1)
    assert average(last, 2) == pytest.approx(1.0, abs=0.05)
    over_all = np.mean([[found.p0 * MEAN for _, _, found in run[steady]] for run in runs])
    assert over_all == pytest.approx(1.0, abs=0.03)


def test_an_increasing_hazard_shows_as_a_slope_in_both() -> None:
    *_, (_, published, censored) = (update for update in closed_loop(gamma4, seed=2) if update[0] <= 1900)
    for found in (published, censored):
        # gamma of shape 4: h rises from 0 towards 4/mean; the mean slope over the bulk is about 1.5/mean**2
        assert 0.7 < found.eta * MEAN**2 < 3.0
        assert found.p0 == pytest.approx(1 / MEAN, rel=0.1)
