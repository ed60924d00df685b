"""The noise between seeds of several treatments, and which differences go beyond it.

Every treatment (a policy with its configuration) ran the same plans, one per seed. What a treatment and a seed do to
the logarithm of a figure is taken out; what is left is the noise, pooled over all treatments, so that two seeds of a
grid of eight have seven degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

from ebbench.analysis.compare.policies import TIE
from ebbench.analysis.statistics import tukey_reach

T = TypeVar("T", bound=Hashable)
ALPHA = 0.05
"""Probability of taking any treatment for worse than the best if all are equal."""


def least_difference(values: Mapping[T, Mapping[int, float]]) -> float | None:
    """Smallest relative difference of two treatments that goes beyond noise, at least TIE.

    ``values``: a figure by treatment and seed. None if it is not known: fewer than two treatments or common seeds, or a
    figure of 0.
    """
    seeds = sorted(set.intersection(*(set(one) for one in values.values()))) if values else []
    if len(values) < 2 or len(seeds) < 2:
        return None
    grid = np.array([[one[seed] for seed in seeds] for one in values.values()], float)
    if not (grid > 0).all():
        return None
    logs = np.log(grid)
    rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0, keepdims=True) + logs.mean()
    freedom = (len(values) - 1) * (len(seeds) - 1)
    spread = math.sqrt(float((rest**2).sum()) / freedom)
    reach = tukey_reach(len(values), freedom, ALPHA) * spread * math.sqrt(2 / len(seeds)) if spread else 0.0
    return max(TIE, math.expm1(reach))
