"""Token-length distributions, as TOML files and command-line options describe them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ebbench.errors import UsageError
from ebbench.foreign.documents import given_keys, not_positive

CensoredFamily = Literal["gamma", "lognormal"]
# Fits a length distribution so that its mean and spread *after* a cap equal published ones.
#
# The published statistics of capped workloads (Zhang et al. 2026, table 9) describe lengths that were already cut at
# the cap. A gamma distribution with those moments, cut again, would give shorter and less spread lengths.

Vector = npt.NDArray[np.float64]

_GRID = 2000
_LOWEST_SHARE = 1e-7  # the grid starts at this share of the cap; lengths are whole tokens anyway
_MAX_STEPS = 60


@lru_cache(maxsize=64)
def fit_censored(family: CensoredFamily, mean: float, std: float, cap: float) -> tuple[float, float]:
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
        h = 1e-5
        jacobian = np.column_stack([(miss(x + h * unit) - error) / h for unit in np.eye(2)])
        step: Vector = np.asarray(np.linalg.lstsq(jacobian, -error, rcond=None)[0], np.float64)
        x, error = _damped(miss, x, error, step)
    raise UsageError(f"no {family} cut at {cap:g} tokens has mean {mean:g} and std {std:g}; check the TOML file")


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


def censored_moments(family: CensoredFamily, mean: float, std: float, cap: float) -> tuple[float, float]:
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


def _log_density(family: CensoredFamily, mean: float, std: float, x: Vector, log_x: Vector) -> Vector:
    if family == "lognormal":
        variance = math.log1p((std / mean) ** 2)
        mu = math.log(mean) - variance / 2
        return -((log_x - mu) ** 2) / (2 * variance) - log_x - 0.5 * math.log(2 * math.pi * variance)
    shape = (mean / std) ** 2
    scale = mean / shape
    return (shape - 1) * log_x - x / scale - math.lgamma(shape) - shape * math.log(scale)


def draw_family(family: CensoredFamily, mean: float, std: float, rng: np.random.Generator, n: int) -> Vector:
    """Draw ``n`` numbers of a family with this mean and standard deviation; shape (n,)."""
    if family == "gamma":
        shape = (mean / std) ** 2
        return rng.gamma(shape, mean / shape, n)
    variance = np.log1p((std / mean) ** 2)
    return rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), n)


LONGEST = np.iinfo(np.int32).max
"""Largest length in tokens that a plan can hold."""

Family = Literal["uniform", "geometric", "gamma", "lognormal", "fixed"]
Lengths = npt.NDArray[np.int32]


class LengthSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distribution of whole token counts of at least one token.

    The variable is ``offset + family(mean - offset, std)``. ``max`` censors: larger values become ``max``. ``statistics
    = "censored"``: ``mean`` and ``std`` hold *after* censoring, and the family is fitted to give them; ``"raw"``: they
    hold before. ``spread``: half-width of ``uniform`` as a share of the mean. ``std`` is optional for ``gamma`` if
    ``shape`` is given. A key that the family does not use is refused.
    """

    family: Family
    mean: float
    std: float | None = None
    shape: float | None = None
    spread: float = 0.5
    offset: int = 0
    max: int | None = None
    statistics: Literal["raw", "censored"] = "raw"

    def __post_init__(self) -> None:
        idle = given_keys(self, (key for key in _OPTIONAL if key not in _USES[self.family]))
        if idle:
            takes = ", ".join(("mean", *_USES[self.family], "max"))
            raise ValueError(f"{idle[0]} has no effect in family '{self.family}', which uses {takes}; leave it out")
        if self.statistics == "censored" and self.max is None:
            raise ValueError("statistics 'censored' needs max, where lengths are cut")
        if not 1 <= self.mean <= LONGEST:
            raise ValueError(f"mean must be at least 1 token and at most {LONGEST:,}, not {self.mean:g}")
        if self.family == "gamma" and (self.std is None) == (self.shape is None):
            raise ValueError("a gamma distribution needs either std or shape")
        if self.family == "lognormal" and self.std is None:
            raise ValueError("a lognormal distribution needs std")
        if not 0 <= self.spread < 1:
            raise ValueError(f"spread must lie in [0, 1), not {self.spread:g}")
        if not 0 <= self.offset < self.mean:
            raise ValueError(f"offset must lie in [0, mean), not {self.offset}")
        for name in ("std", "shape", "max"):
            if problem := not_positive(name, getattr(self, name)):
                raise ValueError(problem)

    def draw(self, rng: np.random.Generator, n: int) -> Lengths:
        """Draw ``n`` lengths in tokens; shape (n,)."""
        raw = self._raw(rng, n) + self.offset
        upper = LONGEST if self.max is None else min(self.max, LONGEST)
        lengths: Lengths = np.clip(np.rint(raw), 1, upper).astype(np.int32)
        return lengths

    def _raw(self, rng: np.random.Generator, n: int) -> Vector:
        mean = self.mean - self.offset
        if self.family == "fixed":
            return np.full(n, mean)
        if self.family == "geometric":
            return rng.geometric(1.0 / max(1.0, mean), size=n).astype(np.float64)
        if self.family == "uniform":
            half = mean * self.spread
            return rng.integers(round(mean - half), round(mean + half), size=n, endpoint=True).astype(np.float64)
        return draw_family(self.family, *self._parameters(self.family), rng, n)

    def _parameters(self, family: CensoredFamily) -> tuple[float, float]:
        """Mean and standard deviation of the family itself, without offset and before censoring."""
        mean = self.mean - self.offset
        std = self.std if self.std is not None else mean / np.sqrt(self.shape or 1.0)
        if self.statistics == "raw" or self.max is None:
            return mean, float(std)
        return fit_censored(family, mean, float(std), self.max - self.offset)

    @property
    def text(self) -> str:
        """A short description for the manifest."""
        parts = [f"mean {self.mean:g}"]
        parts += [f"{key} {value:g}" for key in ("std", "shape", "offset", "max") if (value := getattr(self, key))]
        return f"{self.family}({', '.join(parts)})"


_USES: dict[Family, tuple[str, ...]] = {
    "fixed": (),
    "uniform": ("spread", "offset"),
    "geometric": ("offset",),
    "gamma": ("std", "shape", "offset", "statistics"),
    "lognormal": ("std", "offset", "statistics"),
}
_OPTIONAL = ("std", "shape", "spread", "offset", "statistics")


def length_spec(mean_tokens: float, distribution: str | None) -> LengthSpec:
    """A spec from ``--input-len``/``--output-len`` and ``--length-distribution`` (default: uniform +-50 %).

    Raises UsageError for an unknown distribution or a mean below one token.
    """
    family, _, shape = (distribution or "uniform").partition(":")
    if family not in ("uniform", "geometric", "gamma", "fixed") or (family == "gamma") != bool(shape):
        raise UsageError(
            f"unknown length distribution {distribution!r}; write uniform, geometric, gamma:SHAPE or fixed"
        )
    try:
        value = float(shape) if shape else None
        return LengthSpec(family=family, mean=mean_tokens, shape=value)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"length distribution {distribution or family!r} cannot be used: {error}") from None
