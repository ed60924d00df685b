"""Distributions by means of equally many sorted values, so that none of the values stands in a file."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ebbench.workloads.requests import Floats

GROUP = 8
"""Fewest requests behind a number of a fitted file."""


class Points(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distribution by means of equally many sorted values, lowest first; drawn by interpolation between them."""

    means: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.means:
            raise ValueError("a distribution needs at least one value")

    def at(self, shares: Floats) -> Floats:
        """The values below which these shares of the distribution lie; shape of ``shares``."""
        places = (np.arange(len(self.means)) + 0.5) / len(self.means)
        found: Floats = np.interp(shares, places, self.means)
        return found

    def tailed_at(self, shares: Floats) -> Floats:
        """As :meth:`at`, with an exponential tail: the values of the highest group are above those of the next by
        exponential numbers, and have its mean. Without one none would be above that mean."""
        found = self.at(shares)
        count = len(self.means)
        if count > 1:
            below, mean = sum(self.means[-2:]) / 2, self.means[-1]
            highest = shares > 1 - 1 / count
            above = np.minimum(shares[highest] * count - (count - 1), 1 - 1e-9)
            found[highest] = below - (mean - below) * np.log1p(-above)
        return found


def points_of(values: Any, digits: int = 2, most: int = 48, tailed: bool = False) -> tuple[float, ...]:
    """Means of groups of sorted values for :class:`Points`, moved so that draws have the values' mean."""
    ordered = np.sort(np.asarray(values, np.float64))
    count = max(1, min(most, len(ordered) // GROUP))
    means = np.array([group.mean() for group in np.array_split(ordered, count)])
    drawn = float(means.mean())
    if tailed and count > 1:
        drawn += (means[-1] - means[-2]) / 8 / count  # tailed_at has the mean of the highest group, at less
    if drawn > 0 and (ordered >= 0).all():
        means = means * (ordered.mean() / drawn)
    return tuple(round(float(one), digits) for one in means)
