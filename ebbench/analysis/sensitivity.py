"""Sensitivity of throughput to the scheduler's configuration: best cell, CV, range ratio, B-Sens, N-Sens.

Over a grid of token budgets B and batch sizes N (Zhang et al. 2026, appendix F.1): CV is the standard deviation over
the mean of all cells; the range ratio is the largest over the smallest; B-Sens is the mean over N of the CV across B,
N-Sens the mean over B of the CV across N. Standard deviations are those of the population.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ebbench.analysis.cases import TIE
from ebbench.analysis.statistics import tukey_reach

# The noise between seeds of several treatments, and which differences go beyond it.
#
# Every treatment (a policy with its configuration) ran the same plans, one per seed. The noise
# is the residual of a figure's logarithm without the effects of treatment and seed, pooled over all treatments: two
# seeds of a grid of eight have seven degrees of freedom.

T = TypeVar("T", bound=Hashable)
ALPHA = 0.05
"""Probability of taking any treatment for worse than the best if all are equal."""


def least_difference(values: Mapping[T, Mapping[int, float]]) -> float | None:
    """Smallest relative difference of two treatments that goes beyond noise, at least TIE.

    ``values``: a figure by treatment and seed. None if it is not known: fewer than two treatments or common seeds, or a
    figure of 0.
    """
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in values.values()))) if values else []
    if len(values) < 2 or len(seeds) < 2:
        return None
    grid = np.array([[by_seed[seed] for seed in seeds] for by_seed in values.values()], float)
    if not (grid > 0).all():
        return None
    logs = np.log(grid)
    residuals = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0, keepdims=True) + logs.mean()
    freedom = (len(values) - 1) * (len(seeds) - 1)
    spread = math.sqrt(float((residuals**2).sum()) / freedom)
    reach = tukey_reach(len(values), freedom, ALPHA) * spread * math.sqrt(2 / len(seeds)) if spread else 0.0
    return max(TIE, math.expm1(reach))


@dataclass(frozen=True)
class Sensitivity:
    """Shares (0.05 is 5 %) except ``range_ratio``; None if the grid has holes or only one value on an axis.

    ``best_budget`` and ``best_size``: B and N of the best cell; None for a server at a URL, which has its own.
    """

    best_budget: int | None
    best_size: int | None
    best: float
    cells: int
    expected: int
    cv: float | None
    range_ratio: float | None
    b_sens: float | None
    n_sens: float | None


def sensitivity(throughput: Mapping[tuple[int, int], float]) -> Sensitivity:
    """Sensitivity of a grid ``(B, N) -> throughput``. Raises ValueError for an empty one."""
    if not throughput:
        raise ValueError("no cell to judge")
    budgets, sizes = (sorted({pair[axis] for pair in throughput}) for axis in (0, 1))
    best = max(throughput, key=lambda pair: (throughput[pair], -pair[0], -pair[1]))
    expected = len(budgets) * len(sizes)
    whole = len(throughput) == expected and min(throughput.values()) > 0
    grid = np.array([[throughput.get((b, n), np.nan) for n in sizes] for b in budgets])
    return Sensitivity(
        best_budget=best[0],
        best_size=best[1],
        best=throughput[best],
        cells=len(throughput),
        expected=expected,
        cv=_cv(grid) if whole and expected > 1 else None,
        range_ratio=float(grid.max() / grid.min()) if whole and expected > 1 else None,
        b_sens=float(np.mean([_cv(grid[:, column]) for column in range(len(sizes))]))
        if whole and len(budgets) > 1
        else None,
        n_sens=float(np.mean([_cv(grid[row]) for row in range(len(budgets))])) if whole and len(sizes) > 1 else None,
    )


def _cv(values: np.ndarray) -> float:
    return float(values.std() / values.mean())
