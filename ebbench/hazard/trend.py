"""Tests whether the completion hazard rises, on the empirical hazard (Zhang et al. 2026, appendix E.4).

Both tests use ``h(t)`` up to the 95th percentile of the lengths, as in the paper: Mann-Kendall (no trend against a
monotone one) and linear regression (zero slope against non-zero), from ``pymannkendall`` and ``scipy``.

If more than 1 % of the responses have the maximum length, that length is a limit: these responses are right-censored,
so they count as survivors there and not as completions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.extras import need
from vllm_eb.hazard import MIN_SURVIVORS, CensoredHazard, HazardEstimate, SlidingHazard, empirical_hazard

LEVEL = 0.05
QUANTILE = 0.95
LIMIT_SHARE = 0.01
_MIN_POINTS = 4  # neither test is meaningful with fewer points


@dataclass(frozen=True)
class TrendTests:
    """Two tests of the trend of h(t) for t in [t_min, t_max] tokens. ``tau`` is Kendall's; ``slope`` is per token^2."""

    t_min: int
    t_max: int
    points: int
    tau: float
    mann_kendall_p: float
    slope: float
    intercept: float
    regression_p: float
    r_squared: float

    @property
    def rising(self) -> bool:
        """Whether both tests find a rising trend at the 5 % level."""
        mann_kendall = self.tau > 0 and self.mann_kendall_p < LEVEL
        return mann_kendall and self.slope > 0 and self.regression_p < LEVEL

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.rising:
            return "increasing failure rate (IFR): both tests find a rising hazard"
        if self.tau < 0 and self.mann_kendall_p < LEVEL and self.slope < 0 and self.regression_p < LEVEL:
            return "decreasing failure rate (DFR): both tests find a falling hazard"
        if min(self.mann_kendall_p, self.regression_p) < LEVEL:
            return "undecided: the two tests disagree"
        return "no trend found: a constant hazard (CFR) is not rejected"


@dataclass(frozen=True)
class Hazard:
    """Empirical hazard of output lengths (tokens), the tests, and both estimators' fits ``p0 + eta t``.

    ``survivors[i]`` requests have at least ``t[i]`` tokens. Points above ``t_reliable`` (the 95th percentile or the
    limit) rest on few requests. ``limit``: the length at which responses were cut, with ``censored_samples`` of them;
    None if there is none. The ``published`` estimator treats cut responses as complete, as it does in service. If all
    responses are equally long, there are neither tests nor fits.
    """

    t: npt.NDArray[np.int64]
    h: npt.NDArray[np.float64]
    survivors: npt.NDArray[np.int64]
    t_reliable: int
    limit: int | None
    censored_samples: int
    samples: int
    mean: float
    std: float
    tests: TrendTests | None
    published: HazardEstimate | None
    censored: HazardEstimate | None

    @property
    def untested(self) -> str | None:
        """Why there are no tests; None if there are."""
        if self.tests is not None:
            return None
        if self.std == 0:
            return f"every response has {self.t[-1]:,} tokens: there is no trend to test and no hazard to fit"
        return "too few different lengths to test for a trend"

    def binned(self, bins: int = 40) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Midpoints (tokens) and hazards per token of equal bins over the reliable range: completions over tokens at
        risk."""
        inside = self.t <= self.t_reliable
        edges = np.linspace(0, self.t_reliable, min(bins, self.t_reliable) + 1)
        which = np.clip(np.searchsorted(edges, self.t[inside], "left") - 1, 0, len(edges) - 2)
        ended = np.bincount(which, self.h[inside] * self.survivors[inside], len(edges) - 1)
        exposed = np.bincount(which, self.survivors[inside].astype(float), len(edges) - 1)
        return (edges[:-1] + edges[1:]) / 2, ended / np.maximum(exposed, 1)


def analyse_lengths(lengths: npt.ArrayLike) -> Hazard:
    """Hazard, tests and fits of output lengths (tokens; at least one)."""
    outputs = np.asarray(lengths, np.int64)
    varied = np.ptp(outputs) > 0
    ended, cut, limit = split_at_limit(outputs)
    t, h, survivors = empirical_hazard(ended, cut)
    return Hazard(
        t=t,
        h=h,
        survivors=survivors,
        t_reliable=_reliable(outputs, limit),
        limit=limit,
        censored_samples=len(cut),
        samples=len(outputs),
        mean=float(outputs.mean()),
        std=float(outputs.std()),
        tests=trend_tests(outputs),
        published=_fit(SlidingHazard(window=len(outputs)), outputs, outputs[:0]) if varied else None,
        censored=_fit(CensoredHazard(window=len(outputs)), ended, cut) if varied else None,
    )


def split_at_limit(outputs: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int | None]:
    """Responses that ended, responses cut at a limit, and the limit (None if there is none)."""
    greatest = int(outputs.max())
    cut = outputs == greatest
    if cut.all() or cut.mean() <= LIMIT_SHARE:
        return outputs, outputs[:0], None
    return outputs[~cut], outputs[cut], greatest


def trend_tests(lengths: npt.ArrayLike) -> TrendTests | None:
    """Both tests; None if all lengths are equal or there are too few points. Raises EbbenchError without scipy."""
    outputs = np.asarray(lengths, np.int64)
    if np.ptp(outputs) == 0:  # the hazard is zero before that length: no trend
        return None
    ended, cut, limit = split_at_limit(outputs)
    t, h, survivors = empirical_hazard(ended, cut)
    last = _reliable(outputs, limit)
    keep = (t <= last) & (survivors >= MIN_SURVIVORS)
    if int(keep.sum()) < _MIN_POINTS or np.ptp(h[keep]) == 0:
        return None
    mann_kendall, linregress = _tests()
    trend = mann_kendall(h[keep], alpha=LEVEL)
    line = linregress(t[keep], h[keep])
    return TrendTests(
        t_min=1,
        t_max=last,
        points=int(keep.sum()),
        tau=float(trend.Tau),
        mann_kendall_p=float(trend.p),
        slope=float(line.slope),
        intercept=float(line.intercept),
        regression_p=float(line.pvalue),
        r_squared=float(line.rvalue) ** 2,
    )


def _reliable(outputs: npt.NDArray[np.int64], limit: int | None) -> int:
    last = int(np.quantile(outputs, QUANTILE, method="lower"))
    return last if limit is None else min(last, limit - 1)


def _fit(
    estimator: SlidingHazard | CensoredHazard, ended: npt.NDArray[np.int64], running: npt.NDArray[np.int64]
) -> HazardEstimate | None:
    for length in ended.tolist():
        estimator.observe(length)
    return estimator.estimate(running)


def _tests() -> tuple[Any, Any]:
    purpose = "testing a hazard for a trend"
    kendall = need("pymannkendall", purpose)
    return kendall.original_test, need("scipy.stats", purpose).linregress
