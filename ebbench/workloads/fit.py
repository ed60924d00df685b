"""Fits a length distribution so that its mean and spread *after* a cap equal published ones.

The published statistics of capped workloads (Zhang et al. 2026, table 9) describe lengths that were already cut at the
cap. A gamma distribution with those moments, cut again, would give shorter and less spread lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from ebbench.errors import UsageError

Family = Literal["gamma", "lognormal"]
Vector = npt.NDArray[np.float64]

_GRID = 2000
_LOWEST_SHARE = 1e-7  # the grid starts at this share of the cap; lengths are whole tokens anyway
_MAX_STEPS = 60


@lru_cache(maxsize=64)
def fit_censored(family: Family, mean: float, std: float, cap: float) -> tuple[float, float]:
    """Mean and std of the uncapped distribution whose values, cut at ``cap``, have ``mean`` and ``std`` (tokens).

    Damped Newton in (log mean, log std). Raises UsageError if no such distribution exists.
    """
    x: Vector = np.array([math.log(mean), math.log(std)])
    target = np.array([mean, std])

    def miss(point: Vector) -> Vector:
        off: Vector = np.array(censored_moments(family, math.exp(point[0]), math.exp(point[1]), cap)) - target
        return off

    error = miss(x)
    for _ in range(_MAX_STEPS):
        if np.max(np.abs(error) / target) < 1e-6:
            return float(math.exp(x[0])), float(math.exp(x[1]))
        x, error = _damped(miss, x, error, _newton_step(miss, x, error))
    raise UsageError(f"no {family} cut at {cap:g} tokens has mean {mean:g} and std {std:g}; check the TOML file")


def _newton_step(miss: Callable[[Vector], Vector], x: Vector, error: Vector) -> Vector:
    h = 1e-5
    jacobian = np.column_stack([(miss(x + h * unit) - error) / h for unit in np.eye(2)])
    step: Vector = np.asarray(np.linalg.lstsq(jacobian, -error, rcond=None)[0], np.float64)
    return step


def _damped(miss: Callable[[Vector], Vector], x: Vector, error: Vector, step: Vector) -> tuple[Vector, Vector]:
    """The point after the step, halved until the error decreases, and its error."""
    scale = min(1.0, 0.5 / max(1e-12, float(np.max(np.abs(step)))))
    for _ in range(20):
        candidate = x + scale * step
        new = miss(candidate)
        if np.linalg.norm(new) < np.linalg.norm(error):
            return candidate, new
        scale /= 2
    return x, error


def censored_moments(family: Family, mean: float, std: float, cap: float) -> tuple[float, float]:
    """Mean and std of ``min(X, cap)`` for X of ``family`` with the given mean and std, by quadrature in log x."""
    log_x = np.linspace(math.log(cap * _LOWEST_SHARE), math.log(cap), _GRID)
    x = np.exp(log_x)
    density = np.exp(_log_density(family, mean, std, x, log_x) + log_x)
    weight = np.full(_GRID, log_x[1] - log_x[0])
    weight[[0, -1]] /= 2
    mass = density * weight
    above = max(0.0, 1.0 - float(mass.sum()))
    first = float(mass @ x) + above * cap
    second = float(mass @ (x * x)) + above * cap * cap
    return first, math.sqrt(max(0.0, second - first * first))


def _log_density(family: Family, mean: float, std: float, x: Vector, log_x: Vector) -> Vector:
    if family == "lognormal":
        variance = math.log1p((std / mean) ** 2)
        mu = math.log(mean) - variance / 2
        return -((log_x - mu) ** 2) / (2 * variance) - log_x - 0.5 * math.log(2 * math.pi * variance)
    shape = (mean / std) ** 2
    scale = mean / shape
    return (shape - 1) * log_x - x / scale - math.lgamma(shape) - shape * math.log(scale)
