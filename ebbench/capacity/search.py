"""Finds the load at which requirements stop being met, from noisy probes.

A probe runs one load with one seed and counts, per requirement, how many requests met it. That share falls as the load
grows. Capacity is the load at which the share equals the required one; of several requirements the one with the lowest
capacity decides.

The search has no state: :func:`next_load` and :func:`~ebbench.capacity.estimate.estimate` are pure functions of the
probes so far, so a stopped search continues from stored probes. It has three stages:

1. Bracket: double or halve the load until one probe met every requirement and a higher one did not.
2. Narrow: bisect the bracket, on a log scale, down to a ratio of ``NARROW``.
3. Refine: probe on both sides of the estimated crossing, each time with a new seed, until the interval is narrow
   enough. If the share falls too steeply for a fit, bisect to the end and repeat the probes at both ends. If requests
   meet the requirements even while the queue grows without bound (a limit on TPOT alone), there is no crossing:
   capacity is then the rate at which an overloaded system completes sessions, so probes go above it. A limit on the
   wait is missed in the end where the queue grows, so there the highest load that was carried is the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebbench.capacity.estimate import (
    FEWEST,
    SURELY_OVER,
    Estimate,
    Probe,
    SearchSettings,
    bracket,
    estimate,
    waits_only,
)

NARROW = 1.15
"""Ratio of the bracket's ends at which refining begins."""
_OVERLOAD = 1.25
"""Load of a probe that measures the rate at which an overloaded system completes sessions, over that rate."""
_LOWEST = 1 / 1024
"""The lowest load tried, over the first one: there requests hardly overlap."""
_CONFIRMED = 2
"""Probes at each end of a bracket that is narrow enough, before it is accepted as the result."""


def next_load(search: SearchSettings, probes: Sequence[Probe]) -> float | None:
    """The next load to probe, or None if the interval is narrow enough or no other load may be tried."""
    if not probes:
        return search.rounded(search.start)
    low, high = bracket(search, probes)
    if low is None:
        return _lower(search, min(probe.load for probe in probes))
    if high is None:
        return None if low >= search.most or waits_only(search, probes) else search.rounded(2 * low)
    if search.integer and high - low <= 1 and len(probes) >= FEWEST:
        return None
    if high / low > NARROW:
        return _between(search, low, high, probes)
    found = estimate(search, probes)
    if found.fitted:
        if found.half_width <= search.precision:
            return None
        return _overloading(search, probes, found) if found.limited_by == "queue" else _refined(search, probes, found)
    overloads = found.limited_by == "queue" and not search.waiting_counts
    if overloads and (load := _overloading(search, probes, found)) is not None:
        return load
    if (high - low) / (high + low) > search.precision:
        return _between(search, low, high, probes)
    again = _unconfirmed(low, high, probes)
    return _refined(search, probes, found) if again is None and found.half_width > search.precision else again


def _lower(search: SearchSettings, lowest: float) -> float | None:
    if lowest <= (1 if search.integer else _LOWEST * search.start):
        return None
    return search.rounded(lowest / 2)


def _between(search: SearchSettings, low: float, high: float, probes: Sequence[Probe]) -> float:
    """A load inside the bracket: its middle on a log scale."""
    middle = search.rounded(math.sqrt(low * high))
    if search.integer and middle in (low, high):
        return low if sum(p.load == low for p in probes) <= sum(p.load == high for p in probes) else high
    return middle


def _unconfirmed(low: float, high: float, probes: Sequence[Probe]) -> float | None:
    """The end of the bracket with fewer probes; None if both have enough."""
    seen = {end: sum(probe.load == end for probe in probes) for end in (low, high)}
    least = min(seen, key=lambda end: seen[end])
    return least if seen[least] < _CONFIRMED else None


def _overloading(search: SearchSettings, probes: Sequence[Probe], found: Estimate) -> float | None:
    """A load that certainly overloads, at most one that was observed to; None if none was observed."""
    assert found.capacity is not None
    highest = max((probe.load for probe in probes if probe.runaway), default=0.0)
    load = search.rounded(min(_OVERLOAD * found.capacity, highest))
    return load if load >= SURELY_OVER * found.capacity else None


def _refined(search: SearchSettings, probes: Sequence[Probe], found: Estimate) -> float:
    """Loads alternately below and above the crossing: two distinct loads determine the slope, which the interval
    needs."""
    assert found.capacity is not None
    spread = min(max(search.precision, found.half_width / 2), math.log(NARROW) / 2)
    side = 1 if len(probes) % 2 else -1
    return search.rounded(found.capacity * math.exp(side * spread))
