"""Fits the share of requests that meet a requirement over log(load), and finds where it crosses the required share.

Quasi-binomial logistic regression (Wedderburn 1974) on the probes near the crossing. A pure bisection would treat each
noisy probe as exact and give no interval; the fit uses how far each probe was above or below, and its residuals measure
the noise. Requests of one run are not
independent (they share a queue), so the variance is multiplied by the dispersion, the larger of two estimates: between
probes, from the residuals, and within probes, from batches of consecutive requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import stats

from ebbench.capacity.search_types import Estimate, MetCounts, Probe, Requirement

Floats = npt.NDArray[np.float64]
_NEAR = math.log(1.25)
"""Largest distance from the crossing, in log(load), of probes in the fit; the logistic curve is a local
approximation."""
_NEAR_LOGITS = 2.5
"""Distance from the crossing, in logits of the fitted share, of probes in the fit: a steep curve uses fewer loads."""
FEWEST = 5
"""Least number of probes for a fit: two parameters and three residuals."""
CONFIDENCE = 0.95
_WIDEST = math.log(2)
"""Wider half intervals, in log(load), are not reported."""
_MERGED = (1, 2, 4, 5, 10)
"""Numbers of neighbouring batches (of 20 per probe) that are taken together to estimate the dispersion."""
_FLATTEST = -0.5
"""Slopes of logit(share) over log(load) above this do not locate the crossing."""


def crossing_of(requirement: Requirement, index: int, probes: Sequence[Probe], middle: float) -> Estimate | None:
    """Capacity under one requirement; None if there are too few probes, or none above it."""
    usable = [probe for probe in probes if not probe.failed and not probe.runaway and probe.counts[index].counted]
    centre, reach = math.log(middle), _NEAR
    for _ in range(5):  # the fit moves the centre, and the centre selects the probes of the fit
        near = _nearest(usable, centre, reach)
        fit = _fit(near, index)
        if fit is None or fit.slope > _FLATTEST:
            return None
        moved = (_logit(requirement.share) - fit.level) / fit.slope + fit.centre
        if abs(moved - centre) < 1e-4:
            break
        centre = min(max(moved, centre - _NEAR), centre + _NEAR)
        reach = min(_NEAR, _NEAR_LOGITS / -fit.slope)
    assert fit is not None
    half = fit.half_width(moved)
    if half > _WIDEST:
        return None
    return Estimate(math.exp(moved), math.exp(moved - half), math.exp(moved + half), requirement.name, fitted=True)


def _nearest(probes: Sequence[Probe], centre: float, reach: float) -> list[Probe]:
    """The probes whose log(load) is at most ``reach`` from ``centre``, but at least as many as a fit needs."""
    by_distance = sorted(probes, key=lambda probe: abs(math.log(probe.load) - centre))
    near = [probe for probe in by_distance if abs(math.log(probe.load) - centre) <= reach]
    return near if len(near) >= FEWEST else by_distance[:FEWEST]


@dataclass(frozen=True)
class _Fit:
    """logit(share) = level + slope * (log(load) - centre), with the covariance of level and slope."""

    level: float
    slope: float
    centre: float
    covariance: Floats
    freedom: float

    def half_width(self, x: float) -> float:
        """Half the interval of the crossing at ``x``, in log(load): delta method with a t quantile."""
        gradient = np.array([-1 / self.slope, -(x - self.centre) / self.slope])
        variance = float(gradient @ self.covariance @ gradient)
        return float(stats.t.ppf(0.5 + CONFIDENCE / 2, self.freedom)) * math.sqrt(variance)


def _fit(probes: Sequence[Probe], index: int) -> _Fit | None:
    """Quasi-binomial logistic regression by iteratively reweighted least squares; None if it has no solution."""
    if len(probes) < FEWEST:
        return None
    x = np.log([probe.load for probe in probes])
    if np.ptp(x) <= 0:
        return None
    centre = float(x.mean())
    design = np.column_stack([np.ones(len(x)), x - centre])
    counted = np.array([probe.counts[index].counted for probe in probes], float) + 1
    met = np.array([probe.counts[index].met for probe in probes], float) + 0.5  # finite even if all or none met it
    share = met / counted
    beta = np.linalg.lstsq(design, np.log(share / (1 - share)), rcond=None)[0]
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(design @ beta, -30, 30)))
        weight = counted * p * (1 - p)
        information = design.T @ (design * weight[:, None])
        if np.linalg.cond(information) > 1e12:
            return None
        step = np.linalg.solve(information, design.T @ (met - counted * p))
        beta = beta + np.clip(step, -5, 5)
        if float(np.abs(step).max()) < 1e-9:
            break
    pearson = float((((met - counted * p) ** 2) / weight).sum())
    freedom = len(x) - 2
    dispersion = max(1.0, pearson / freedom, dispersion_within(probes, index))
    return _Fit(float(beta[0]), float(beta[1]), centre, np.linalg.inv(information) * dispersion, freedom)


def dispersion_within(probes: Sequence[Probe], index: int) -> float:
    """Dispersion from batches of consecutive requests: variance of the batches' counts over the binomial one.

    Batches shorter than a queue remembers are correlated, and then understate it: of several lengths the largest
    dispersion counts. With the shortest batches alone, 84 % of the intervals held the capacity of M/D/1 in runs of
    1,000 requests, and 91 % with all.
    """
    return max(_dispersion(probes, index, merged) for merged in _MERGED)


def _dispersion(probes: Sequence[Probe], index: int, merged: int) -> float:
    """The dispersion of batches of which ``merged`` neighbours are taken together."""
    variations = [_variation(probe.counts[index], merged) for probe in probes]
    freedom = sum(own for _, own in variations)
    return sum(observed for observed, _ in variations) / freedom if freedom else 1.0


@lru_cache(4096)
def _variation(count: MetCounts, merged: int) -> tuple[float, int]:
    """Variance of one probe's batches over the binomial one, summed, and its degrees of freedom.

    Every further probe of a search fits the earlier ones again.
    """
    batches = _joined([(met, counted) for met, counted in count.batches if counted], merged)
    if len(batches) < 2 or not 0 < count.met < count.counted:
        return 0.0, 0
    p = count.share
    return sum((met - counted * p) ** 2 / (counted * p * (1 - p)) for met, counted in batches), len(batches) - 1


def _joined(batches: Sequence[tuple[int, int]], merged: int) -> list[tuple[int, int]]:
    """Sums of ``merged`` neighbouring batches each."""
    parts = [batches[first : first + merged] for first in range(0, len(batches), merged)]
    return [(sum(met for met, _ in part), sum(counted for _, counted in part)) for part in parts]


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
