"""Estimates the capacity from all probes so far: the bracket, the crossing within it, and what limits the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ebbench.analysis.metrics import Slo
from ebbench.analysis.statistics import t_quantile

# Fits the share of requests that meet a requirement over log(load), and finds where it crosses the required share.
#
# Quasi-binomial logistic regression (Wedderburn 1974) on the probes near the crossing. A pure bisection would treat
# each noisy probe as exact and give no interval; the fit uses how far each probe was above or below, and its
# residuals measure the noise. Requests of one run are not independent (they share a queue), so the variance is
# multiplied by the dispersion, the larger of two estimates: between probes, from the residuals, and within probes,
# from batches of consecutive requests.

Floats = npt.NDArray[np.float64]
_NEAR = math.log(1.25)
"""Largest distance from the crossing, in log(load), of probes in the fit; the logistic curve is a local
approximation."""
_NEAR_LOGITS = 2.5
"""Distance from the crossing, in logits of the fitted share, of probes in the fit: a steep curve uses fewer loads."""
FEWEST = 5
"""Least number of probes for a fit: two parameters and three residuals."""
USUAL_PROBES = 10
"""Probes of a whole search, before its first one tells more."""
CONFIDENCE = 0.95
_WIDEST = math.log(2)
"""Wider half intervals, in log(load), are not reported."""
_MERGED = (1, 2, 4, 5, 10)
"""Numbers of neighbouring batches (of 20 per probe) that are taken together to estimate the dispersion."""
_FLATTEST = -0.5
"""Slopes of logit(share) over log(load) above this do not locate the crossing."""


def fit_crossing(requirement: Requirement, index: int, probes: Sequence[Probe], middle: float) -> Estimate | None:
    """Capacity under one requirement; None if there are too few probes, or none above it."""
    fitted = (probe for probe in probes if not (probe.failed or probe.runaway or probe.coarse))
    usable = [probe for probe in fitted if probe.counts[index].counted]
    centre, reach = math.log(middle), _NEAR
    for _ in range(5):  # the fit moves the centre, and the centre selects the probes of the fit
        near = _nearest(usable, centre, reach)
        fit = _fit(near, index)
        if fit is None or fit.slope > _FLATTEST:
            return None
        moved = (math.log(requirement.share / (1 - requirement.share)) - fit.level) / fit.slope + fit.centre
        if abs(moved - centre) < 1e-4:
            break
        centre = min(max(moved, centre - _NEAR), centre + _NEAR)
        reach = min(_NEAR, _NEAR_LOGITS / -fit.slope)
    assert fit is not None
    half = fit.half_width(moved)
    if half > _WIDEST:
        return None
    return Estimate(
        math.exp(moved), math.exp(moved - half), math.exp(moved + half), requirement.name, True, fit.freedom
    )


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
        return t_quantile(0.5 + CONFIDENCE / 2, self.freedom) * math.sqrt(variance)


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
    batches = _merge_batches([(met, counted) for met, counted in count.batches if counted], merged)
    if len(batches) < 2 or not 0 < count.met < count.counted:
        return 0.0, 0
    p = count.share
    return sum((met - counted * p) ** 2 / (counted * p * (1 - p)) for met, counted in batches), len(batches) - 1


def _merge_batches(batches: Sequence[tuple[int, int]], merged: int) -> list[tuple[int, int]]:
    parts = [batches[first : first + merged] for first in range(0, len(batches), merged)]
    return [(sum(met for met, _ in part), sum(counted for _, counted in part)) for part in parts]


# Types of a capacity search: its requirements, the counts of one probe, and the estimated capacity.


@dataclass(frozen=True)
class Requirement:
    """``share`` of the requests must meet the limits ``slo``, named ``name`` (``ttft``, ``tpot``, ``ttft tpot``, ...).

    ``of_class``: of which class of requests, whose limits are named ``class:ttft``; None: of all.
    """

    name: str
    share: float
    of_class: str | None = None
    slo: Slo = field(default_factory=Slo, compare=False)

    def __str__(self) -> str:
        """Of a percentile, as ``--goodput`` has it: ``ttft:p99:2000``."""
        (limit_ms,) = self.slo.limits().values()
        return f"{self.name}:p{100 * self.share:g}:{limit_ms:g}"


@dataclass(frozen=True)
class MetCounts:
    """How many of ``counted`` requests met a requirement; ``batches``: the same for consecutive parts of the run."""

    met: int
    counted: int
    batches: tuple[tuple[int, int], ...] = ()

    @property
    def share(self) -> float:
        """Share of the counted requests that met the requirement; 0 if none was counted."""
        return self.met / self.counted if self.counted else 0.0


@dataclass(frozen=True)
class Probe:
    """One run at ``load`` (requests/s or concurrent sessions) with ``seed``; ``counts`` has one entry per requirement.

    ``runaway``: the queue grew during all arrivals, so the load is above capacity regardless of the counts.
    ``served_per_s``: rate of completed sessions. ``failed``: requests failed or the run is INVALID; the load counts as
    above capacity and is not used in fits. ``coarse``: so short that it only tells on which side of the capacity it is.
    """

    load: float
    seed: int
    counts: tuple[MetCounts, ...]
    runaway: bool = False
    failed: str = ""
    served_per_s: float | None = None
    coarse: bool = False

    def meets(self, requirements: Sequence[Requirement]) -> bool:
        """Whether every requirement was met and the queue stayed bounded."""
        return self.within(requirements) and not self.runaway and not self.failed

    def within(self, requirements: Sequence[Requirement]) -> bool:
        """Whether enough of the counted requests met every requirement."""
        return all(c.share >= r.share for c, r in zip(self.counts, requirements, strict=True))


@dataclass(frozen=True)
class Estimate:
    """Capacity with a 95 % interval. ``limited_by``: the requirement that decides, ``queue`` or ``errors``.

    ``low`` and ``high`` are the bracket if there are too few probes for a fit (``fitted`` is False). ``capacity`` is
    None if no probed load met the requirements; ``high`` is infinite if every one did. ``freedom``: of the fit.
    """

    capacity: float | None
    low: float
    high: float
    limited_by: str
    fitted: bool
    freedom: float = math.inf

    @property
    def half_width(self) -> float:
        """Half the interval as a share of the capacity; infinite without an interval."""
        if self.capacity is None or not math.isfinite(self.high) or self.capacity <= 0:
            return math.inf
        return (self.high - self.low) / (2 * self.capacity)


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. ``start``: first load; ``precision``: half of the interval, as a share of the capacity.

    ``integer``: loads are whole numbers (open sessions). ``most``: the highest load that may be tried.
    ``short_probes``: probes are as short as real time demands, and tell less of their noise.
    """

    requirements: tuple[Requirement, ...]
    start: float
    precision: float = 0.02
    integer: bool = False
    most: float = math.inf
    short_probes: bool = False

    @property
    def waiting_counts(self) -> bool:
        """Whether a requirement limits the wait for the first token, which an overloaded system misses in the end."""
        names = (name for requirement in self.requirements for name in requirement.name.split())
        return any(name.rpartition(":")[2] != "tpot" for name in names)

    def rounded(self, load: float) -> float:
        """The load rounded to one that can be run."""
        load = min(load, self.most)
        return float(max(1, round(load))) if self.integer else load


SURELY_OVER = 1.08
"""With less overload a queue may have grown by chance."""
_CARRIED = 2.0
"""An overloaded system that completed less than the highest carried load over this was not full: its run was short."""
_GROWING = 1.02
"""If twice the open sessions complete less than this factor more sessions/s, the additional ones only wait."""
_SURE_DEVIATIONS = 4.0
"""Standard deviations between the share at an end of the bracket and the required one that count as certain."""


def estimate(search: SearchSettings, probes: Sequence[Probe]) -> Estimate:
    """Capacity from all probes so far."""
    if not probes:
        return Estimate(None, 0.0, math.inf, "not reached", fitted=False)
    low, high = bracket(search, probes)
    if low is None:
        return Estimate(None, 0.0, high or math.inf, _blame(search, probes), fitted=False)
    if high is None:
        by = "queue" if waits_only(search, probes) else "not reached"
        return Estimate(low, low, math.inf, by, fitted=False)
    middle = math.sqrt(low * high)
    if any(probe.failed and probe.load <= high for probe in probes):
        return Estimate(middle, low, high, "errors", fitted=False)
    crossings = [
        crossing
        for index, requirement in enumerate(search.requirements)
        if (crossing := fit_crossing(requirement, index, probes, middle)) is not None
    ]
    known = Estimate(middle, *_undisputed(search, probes), _blame(search, probes), fitted=False)
    best = min(crossings, key=lambda crossing: crossing.capacity or math.inf, default=None)
    if best is not None and best.half_width > known.half_width:
        if _beyond_doubt(search, probes, low, high):
            return known
        reached = best.capacity or math.inf
        if reached > high and any(probe.runaway and probe.load <= reached for probe in probes):
            best = None  # a vague fit, beyond loads at which the queue grew
    if best is None:
        alone = known.limited_by == "queue" and not search.waiting_counts
        return _overloaded(probes, low, high) if alone else known
    return best


def supported(search: SearchSettings, estimated: Estimate, used: Sequence[Probe], short: Sequence[Probe]) -> Estimate:
    """The estimate that the probes support: without a fit, a load that was carried, never one between two probes.

    ``short``: probes that were too short to be ``used``. Such runs overstate the share within the limits, so a load
    that clearly missed them there also misses them in longer runs.
    """
    if estimated.capacity is None:
        return estimated
    missed = [probe for probe in short if probe.load <= estimated.capacity and _clearly_missed(search, probe)]
    if missed:
        lowest = min(missed, key=lambda probe: probe.load)
        carried = [probe.load for probe in used if probe.load < lowest.load and probe.meets(search.requirements)]
        low = max(carried, default=0.0)
        return Estimate(low or None, low, lowest.load, _blame(search, [lowest]), fitted=False)
    measured = estimated.fitted or (estimated.limited_by == "queue" and not search.waiting_counts)
    return (
        estimated
        if measured or not math.isfinite(estimated.high)
        else replace(estimated, capacity=estimated.low or None)
    )


def _clearly_missed(search: SearchSettings, probe: Probe) -> bool:
    """Whether a requirement was missed by more than two standard deviations."""
    shares = enumerate(requirement.share for requirement in search.requirements)
    return any(probe.counts[index].counted and _deviations([probe], index, share) < -2 for index, share in shares)


def is_clear(requirements: Sequence[Requirement], probe: Probe) -> bool:
    """Whether a short run tells on which side of the capacity its load is: by two standard deviations."""
    off = [_deviations([probe], index, requirement.share) for index, requirement in enumerate(requirements)]
    return abs(min(off, default=math.inf)) > 2


def bracket(search: SearchSettings, probes: Sequence[Probe]) -> tuple[float | None, float | None]:
    """The highest load that met the requirements below the lowest that did not, and that lowest.

    Noise can put a failing probe below a passing one; each load is then judged by the majority of the probes up to it,
    by isotonic regression of pass (1) and fail (0) over the load.
    """
    from scipy.optimize import isotonic_regression  # takes half a second

    loads = sorted({probe.load for probe in probes})
    passed = [[float(p.meets(search.requirements)) for p in probes if p.load == load] for load in loads]
    means, counts = [np.mean(group) for group in passed], [len(group) for group in passed]
    shares = isotonic_regression(means, weights=counts, increasing=False).x
    passing = [load for load, share in zip(loads, shares, strict=True) if share >= 0.5]
    failing = [load for load, share in zip(loads, shares, strict=True) if share < 0.5]
    return max(passing, default=None), min(failing, default=None)


def waits_only(search: SearchSettings, probes: Sequence[Probe]) -> bool:
    """Whether, in a closed loop, twice the open sessions completed no more sessions/s: the additional ones waited."""
    rates = {p.load: p.served_per_s for p in probes if p.served_per_s}
    highest = max(rates, default=0.0)
    before = rates.get(highest / 2)
    return search.integer and before is not None and rates[highest] < _GROWING * before


def _undisputed(search: SearchSettings, probes: Sequence[Probe]) -> tuple[float, float]:
    """The highest passing load below every failing one, and the lowest failing load above every passing one."""
    passing = [probe.load for probe in probes if probe.meets(search.requirements)]
    failing = [probe.load for probe in probes if not probe.meets(search.requirements)]
    low = max((load for load in passing if load < min(failing)), default=0.0)
    return low, min((load for load in failing if load > max(passing)), default=math.inf)


def is_certain(search: SearchSettings, probes: Sequence[Probe]) -> bool:
    """Whether a bracket without a fit is an answer: requests fail above it, the queue grows, or the share is a step."""
    low, high = bracket(search, probes)
    if low is None or high is None or any(probe.failed for probe in probes) or _blame(search, probes) == "queue":
        return True
    return _beyond_doubt(search, probes, low, high)


def _beyond_doubt(search: SearchSettings, probes: Sequence[Probe], low: float, high: float) -> bool:
    """Whether the ends of the bracket are certain: the share falls in a step between them."""
    if _undisputed(search, probes) != (low, high):
        return False
    at_low, at_high = ([p for p in probes if p.load == load] for load in (low, high))
    requirements = list(enumerate(search.requirements))
    sure = all(_deviations(at_low, index, requirement.share) > _SURE_DEVIATIONS for index, requirement in requirements)
    short = any(
        _deviations(at_high, index, requirement.share) < -_SURE_DEVIATIONS for index, requirement in requirements
    )
    return sure and (short or all(probe.runaway for probe in at_high))


def _deviations(probes: Sequence[Probe], index: int, share: float) -> float:
    """Distance of the counts from the required share in standard deviations; requests of one run are dependent."""
    counted = sum(probe.counts[index].counted for probe in probes)
    met = sum(probe.counts[index].met for probe in probes)
    dispersion = max(1.0, dispersion_within(probes, index))
    return (met - share * counted) / math.sqrt(max(counted, 1) * share * (1 - share) * dispersion)


def _blame(search: SearchSettings, probes: Sequence[Probe]) -> str:
    """The requirement that the lowest failing probe missed; the queue only if the counted requests met all of them."""
    failing = [probe for probe in probes if not probe.meets(search.requirements)]
    if not failing:
        return "not reached"
    probe = min(failing, key=lambda probe: probe.load)
    if probe.failed:
        return "errors"
    short = [
        (count.share - requirement.share, requirement.name)
        for count, requirement in zip(probe.counts, search.requirements, strict=True)
    ]
    worst, name = min(short, default=(0.0, ""))
    return name if worst < 0 else "queue"


def _overloaded(probes: Sequence[Probe], low: float, high: float) -> Estimate:
    """The rate at which overloaded probes completed sessions, with a t interval.

    With fewer than three such probes the interval is the bracket. Rates far below the load ``low``, which was carried,
    are those of runs that were too short.
    """
    runaway = [probe for probe in probes if probe.runaway and probe.served_per_s and not probe.coarse]
    rates = [
        p.served_per_s
        for p in runaway
        if p.served_per_s and p.load >= SURELY_OVER * p.served_per_s and p.served_per_s >= low / _CARRIED
    ]
    if not rates:
        return Estimate(math.sqrt(low * high), low, high, "queue", fitted=False)
    mean = float(np.mean(rates))
    if len(rates) < 3:
        return Estimate(mean, min(low, *rates), max(high, *rates), "queue", fitted=False)
    half = float(t_quantile(0.5 + CONFIDENCE / 2, len(rates) - 1) * np.std(rates, ddof=1) / math.sqrt(len(rates)))
    return Estimate(mean, mean - half, mean + half, "queue", fitted=True)
