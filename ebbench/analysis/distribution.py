"""Mean, standard deviation and percentiles of a latency; a percentile is null if there are too few samples for it.

A percentile is sound if, with 99 % confidence, at least two samples lie beyond the true one; with fewer samples the
estimate is little more than the maximum. The number of samples beyond the q-quantile is Binomial(n, 1-q), so n must
satisfy ``q**n + n*(1-q)*q**(n-1) <= 0.01``: 64 samples for p90, 130 for p95, 662 for p99.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

NS_PER_MS = 1e6
QUANTILES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}
"""The upper percentiles in ascending order."""
_STATISTICS = ("mean", "median", "std", *QUANTILES)


@cache
def samples_needed(quantile: float, confidence: float = 0.99) -> int:
    """Smallest n for which at least two of n samples lie beyond ``quantile`` at ``confidence`` (both in (0, 1))."""
    n = 2
    while quantile**n + n * (1 - quantile) * quantile ** (n - 1) > 1 - confidence:
        n += 1
    return n


@dataclass(frozen=True)
class Distribution:
    """Statistics in ms. None without samples, and for a percentile with too few samples. ``std`` is the population's.

    ``estimates``: p90, p95 and p99 even with too few samples.
    """

    count: int
    mean: float | None = None
    median: float | None = None
    std: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    estimates: tuple[float, ...] = ()

    @classmethod
    def of_ns(cls, values: npt.NDArray[Any]) -> Distribution:
        """Statistics of values in ns. Percentiles interpolate linearly between order statistics."""
        if not len(values):
            return cls(0)
        shares = QUANTILES.values()
        median, *upper = (float(ms) for ms in np.percentile(values, [50, *(100 * q for q in shares)]) / NS_PER_MS)
        sound = [value if len(values) >= samples_needed(q) else None for q, value in zip(shares, upper, strict=True)]
        mean = float(np.mean(values)) / NS_PER_MS
        p90, p95, p99 = sound
        return cls(len(values), mean, median, float(np.std(values)) / NS_PER_MS, p90, p95, p99, tuple(upper))

    def items(self) -> Iterator[tuple[str, float | None]]:
        """Pairs of statistic and value, without the count."""
        return ((name, getattr(self, name)) for name in _STATISTICS)

    def estimate(self, name: str) -> float | None:
        """The percentile ``name`` (p90, p95 or p99), sound or not; None without samples."""
        return self.estimates[list(QUANTILES).index(name)] if self.estimates else None
