"""Estimates the capacity from all probes so far: the bracket, the crossing within it, and what limits the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from ebbench.capacity.crossing import CONFIDENCE, crossing_of, dispersion_within
from ebbench.capacity.search_types import Estimate, Probe, SearchSettings

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
    found = [
        crossing
        for index, requirement in enumerate(search.requirements)
        if (crossing := crossing_of(requirement, index, probes, middle)) is not None
    ]
    known = Estimate(middle, *_undisputed(search, probes), _blame(search, probes), fitted=False)
    best = min(found, key=lambda crossing: crossing.capacity or math.inf, default=None)
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


def supported(search: SearchSettings, found: Estimate, used: Sequence[Probe], short: Sequence[Probe]) -> Estimate:
    """The estimate as far as probes bear it: a load without a fit is one that was carried, not one between the probes.

    ``short``: probes that were too short to be ``used``. Such runs overstate the share within the limits, so what
    clearly missed them there misses them in longer runs, too.
    """
    if found.capacity is None:
        return found
    missed = [probe for probe in short if probe.load <= found.capacity and _clearly_missed(search, probe)]
    if missed:
        lowest = min(missed, key=lambda probe: probe.load)
        carried = [probe.load for probe in used if probe.load < lowest.load and probe.meets(search.requirements)]
        low = max(carried, default=0.0)
        return Estimate(low or None, low, lowest.load, _blame(search, [lowest]), fitted=False)
    measured = found.fitted or (found.limited_by == "queue" and not search.waiting_counts)
    return found if measured or not math.isfinite(found.high) else replace(found, capacity=found.low or None)


def _clearly_missed(search: SearchSettings, probe: Probe) -> bool:
    """Whether a requirement was missed by more than two standard deviations."""
    shares = enumerate(each.share for each in search.requirements)
    return any(probe.counts[index].counted and _deviations([probe], index, share) < -2 for index, share in shares)


def bracket(search: SearchSettings, probes: Sequence[Probe]) -> tuple[float | None, float | None]:
    """The highest load that met the requirements below the lowest that did not, and that lowest.

    Noise can put a failing probe below a passing one; each load is then judged by the majority of the probes up to it,
    by isotonic regression of pass (1) and fail (0) over the load (pool adjacent violators).
    """
    loads = sorted({probe.load for probe in probes})
    passed = [[float(p.meets(search.requirements)) for p in probes if p.load == load] for load in loads]
    fitted = _falling([float(np.mean(group)) for group in passed], [len(group) for group in passed])
    passing = [load for load, share in zip(loads, fitted, strict=True) if share >= 0.5]
    failing = [load for load, share in zip(loads, fitted, strict=True) if share < 0.5]
    return (max(passing) if passing else None), (min(failing) if failing else None)


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


def _beyond_doubt(search: SearchSettings, probes: Sequence[Probe], low: float, high: float) -> bool:
    """Whether the ends of the bracket are certain: the share falls in a step between them."""
    if _undisputed(search, probes) != (low, high):
        return False
    at_low, at_high = ([p for p in probes if p.load == load] for load in (low, high))
    requirements = list(enumerate(search.requirements))
    sure = all(_deviations(at_low, index, each.share) > _SURE_DEVIATIONS for index, each in requirements)
    short = any(_deviations(at_high, index, each.share) < -_SURE_DEVIATIONS for index, each in requirements)
    return sure and (short or all(probe.runaway for probe in at_high))


def _deviations(probes: Sequence[Probe], index: int, share: float) -> float:
    """Distance of the counts from the required share in standard deviations; requests of one run are dependent."""
    counted = sum(probe.counts[index].counted for probe in probes)
    met = sum(probe.counts[index].met for probe in probes)
    dispersion = max(1.0, dispersion_within(probes, index))
    return (met - share * counted) / math.sqrt(max(counted, 1) * share * (1 - share) * dispersion)


def _falling(values: list[float], weights: list[int]) -> list[float]:
    """Weighted least-squares fit that never increases (pool adjacent violators)."""
    blocks: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, float(weight), 1.0])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            mean, heavy, length = blocks.pop()
            before = blocks[-1]
            before[0] = (before[0] * before[1] + mean * heavy) / (before[1] + heavy)
            before[1] += heavy
            before[2] += length
    return [mean for mean, _, length in blocks for _ in range(int(length))]


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
    runaway = [probe for probe in probes if probe.runaway and probe.served_per_s]
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
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(rates) - 1) * np.std(rates, ddof=1) / math.sqrt(len(rates)))
    return Estimate(mean, mean - half, mean + half, "queue", fitted=True)
