"""Types of a capacity search: its requirements, the counts of one probe, and the estimated capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Requirement:
    """``share`` of the requests must meet the limits named ``name`` (``ttft``, ``tpot``, ``ttft tpot``, ...)."""

    name: str
    share: float


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
    above capacity and is not used in fits.
    """

    load: float
    seed: int
    counts: tuple[MetCounts, ...]
    runaway: bool = False
    failed: str = ""
    served_per_s: float | None = None

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
    None if no probed load met the requirements; ``high`` is infinite if every one did.
    """

    capacity: float | None
    low: float
    high: float
    limited_by: str
    fitted: bool

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
    """

    requirements: tuple[Requirement, ...]
    start: float
    precision: float = 0.02
    integer: bool = False
    most: float = math.inf

    @property
    def waiting_counts(self) -> bool:
        """Whether a requirement limits the wait for the first token, which an overloaded system misses in the end."""
        return any(metric != "tpot" for each in self.requirements for metric in each.name.split())

    def rounded(self, load: float) -> float:
        """The load rounded to one that can be run."""
        load = min(load, self.most)
        return float(max(1, round(load))) if self.integer else load
