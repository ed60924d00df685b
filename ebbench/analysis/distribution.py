"""Mean, spread and percentiles of a latency, with percentiles withheld where the sample cannot carry them.

A percentile is given only when, with 99 % confidence, at least two samples lie beyond the true one; below that
the estimate is little more than the largest sample. The count beyond the q-quantile is Binomial(n, 1-q), so n
must satisfy ``q**n + n*(1-q)*q**(n-1) <= 0.01``: 64 samples for p90, 130 for p95, 662 for p99.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

NS_PER_MS = 1e6
_QUANTILES = (0.90, 0.95, 0.99)


@cache
def samples_needed(quantile: float, confidence: float = 0.99) -> int:
    """Smallest n with at least two of n samples beyond ``quantile`` at ``confidence`` (both in (0, 1))."""
    n = 2
    while quantile**n + n * (1 - quantile) * quantile ** (n - 1) > 1 - confidence:
        n += 1
    return n


@dataclass(frozen=True)
class Distribution:
    """Milliseconds. None where there are no samples, or too few for a percentile. ``std`` is the population's."""

    count: int
    mean: float | None = None
    median: float | None = None
    std: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of_ns(cls, values: npt.NDArray[Any]) -> Distribution:
        """Summarise nanoseconds. Percentiles interpolate linearly between order statistics."""
        if not len(values):
            return cls(0)
        median, *upper = np.percentile(values, [50, *(100 * q for q in _QUANTILES)]) / NS_PER_MS
        carried = [
            float(value) if len(values) >= samples_needed(q) else None
            for q, value in zip(_QUANTILES, upper, strict=True)
        ]
        mean = float(np.mean(values)) / NS_PER_MS
        return cls(len(values), mean, float(median), float(np.std(values)) / NS_PER_MS, *carried)

    def items(self) -> Iterator[tuple[str, float | None]]:
        """Pairs of statistic and value, without the count."""
        return ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "count")
