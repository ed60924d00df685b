"""Puts values into an order in which stretches of places have given figures; the values stay as they are.

A mean alone does not say what a stretch is like: of a heavy-tailed quantity one value often makes the mean of eight,
and the others are as usual. The mean of the square roots says whether that is so: of two stretches with one mean, that
with the lower mean root has more of its sum in one value. The centre of a stretch says where in it its sum lies: of
gaps, whether its requests come early or late.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

_ROUNDS = 100
"""Most corrections of the order."""
_FIRST_MOVE, _LEAST_MOVE, _GROWTH = 0.1, 0.002, 1.2
"""The first correction, which is the largest, and the least, in standard deviations of the scores; their growth."""
_FARTHEST, _NARROWEST, _WIDEST = 40.0, -3.0, 2.0
"""Largest shift of a stretch's scores, and least and largest logarithm of their spread."""
_CLOSE = 0.002
"""Error left, in the mean of all values."""
_SWAPS, _CLOSE_CENTRE = 100, 0.005
"""Pairs that are tried per stretch to bring its centre into place; error left, in the length of the stretch."""


def roots_of(values: Any) -> Floats:
    """Square roots of the values in their mean."""
    held = np.asarray(values, np.float64)
    found: Floats = np.sqrt(held / max(float(held.mean()), 1e-12))
    return found


def order_with(
    stretch: Int64s,
    values: Any,
    rng: np.random.Generator,
    *,
    means: npt.ArrayLike,
    roots: npt.ArrayLike = (),
    group: Int64s | None = None,
) -> Int64s:
    """An order (indices into ``values``) in which the places of each stretch have its mean and its mean root.

    Each place gets a score: a normal number, times a spread and plus a shift per stretch; the largest value goes to the
    place with the highest score, and so on (a Gaussian copula of value and place). The shifts are corrected in rounds
    until the mean roots fit, and the spreads until the means fit; without ``roots`` the shifts until the means fit.
    Both hold as far as the values allow. Values of one stretch are in random order.

    ``stretch``: of each place. ``means``: relative ones; ``roots``: see :func:`roots_of`. ``group``: values only change
    places within a group.
    """
    n = len(values)
    if not n:
        return np.zeros(0, np.int64)
    groups = np.zeros(n, np.int64) if group is None else group
    sizes, relative = np.asarray(values, np.float64), np.asarray(means, np.float64)
    by_size = np.lexsort((rng.random(n), sizes, groups))  # equal values in random order
    ordered, ordered_roots = sizes[by_size], roots_of(sizes)[by_size]
    held = np.bincount(stretch, minlength=len(relative))
    noise = _normal(stretch, held, rng)
    mean, wanted_root = _mean_of(relative, held, sizes), np.asarray(roots, np.float64)
    shift, spread = _Corrected(len(relative), -_FARTHEST, _FARTHEST), _Corrected(len(relative), _NARROWEST, _WIDEST)
    places, placed = np.lexsort((noise, groups)), np.empty(n)
    for _ in range(_ROUNDS):
        placed[places] = ordered
        off = [_off(mean, placed, stretch, held, _CLOSE * float(sizes.mean()))]
        if len(wanted_root):
            placed[places] = ordered_roots
            off.insert(0, _off(wanted_root, placed, stretch, held, _CLOSE))
        if not any(one.any() for one in off):
            break
        for corrected, by in zip((shift, spread), off, strict=False):
            corrected.correct(by)
        places = np.lexsort((shift.values[stretch] + np.exp(spread.values[stretch]) * noise, groups))
    found = np.empty(n, np.int64)
    found[places] = by_size
    return found


def centres_of(stretch: Int64s, values: Floats) -> Floats:
    """Where in each stretch its values lie: near 0 with all of their sum in its first place, near 1 in its last.

    ``stretch``: of each place, rising by 1 from 0.
    """
    place, _, _ = _places(stretch)
    total = np.bincount(stretch, values)
    found: Floats = np.full(len(total), 0.5)
    np.divide(np.bincount(stretch, values * place), total, out=found, where=total > 0)
    return found


def order_centred(stretch: Int64s, values: Floats, centres: npt.ArrayLike, rng: np.random.Generator) -> Int64s:
    """An order (indices into ``values``) in which values change places within their stretch, so that it has its centre.

    Two places of a stretch are drawn, and their values swapped if that brings the centre nearer; and so on.
    ``stretch`` and ``centres``: see :func:`centres_of`.
    """
    place, starts, lengths = _places(stretch)
    order, total = np.arange(len(values)), np.bincount(stretch, values)
    off = (np.asarray(centres, np.float64) - centres_of(stretch, values)) * total
    for _ in range(_SWAPS):
        at = np.flatnonzero(np.abs(off) > _CLOSE_CENTRE * total)
        if not len(at):
            break
        one, other = (starts[at] + (rng.random(len(at)) * lengths[at]).astype(np.int64) for _ in range(2))
        change = (values[order[one]] - values[order[other]]) * (place[other] - place[one])
        nearer = np.abs(off[at] - change) < np.abs(off[at])
        one, other = one[nearer], other[nearer]
        order[one], order[other] = order[other], order[one]
        off[at[nearer]] -= change[nearer]
    return order


def _places(stretch: Int64s) -> tuple[Floats, Int64s, Int64s]:
    """Middle of each place in its stretch, in the stretch's length; first place and number of places per stretch."""
    lengths = np.bincount(stretch)
    starts = np.cumsum(lengths) - lengths
    shares: Floats = (np.arange(len(stretch)) - starts[stretch] + 0.5) / lengths[stretch]
    return shares, starts, lengths


class _Corrected:
    """A number per stretch, moved in rounds towards where a figure of the stretch is no longer off.

    The move of a stretch grows while it is off on the same side, and halves when it changes sides.
    """

    def __init__(self, count: int, least: float, most: float) -> None:
        self.values = np.zeros(count)
        self._move, self._before = np.full(count, _FIRST_MOVE), np.zeros(count)
        self._least, self._most = least, most

    def correct(self, off: Floats) -> None:
        """``off``: by how much the figure is too low."""
        turned = off * self._before
        self._move *= np.where(turned < 0, 0.5, np.where(turned > 0, _GROWTH, 1.0))
        self._move = np.clip(self._move, _LEAST_MOVE, _FIRST_MOVE)
        self.values = np.clip(self.values + np.sign(off) * self._move, self._least, self._most)
        self._before = off


def _normal(stretch: Int64s, held: Int64s, rng: np.random.Generator) -> Floats:
    """Normal numbers in random order, of each stretch one in each of as many equal parts of the distribution."""
    n = len(stretch)
    order = np.lexsort((rng.random(n), stretch))
    starts = np.cumsum(held) - held
    place = np.empty(n, np.int64)
    place[order] = np.arange(n) - starts[stretch[order]]
    shares = (place + rng.random(n)) / held[stretch]
    numbers: Floats = np.sort(rng.standard_normal(n))[np.argsort(np.argsort(shares))]
    return numbers


def _mean_of(relative: Floats, held: Int64s, values: Floats) -> Floats:
    """Mean value per stretch, such that the mean over all places is that of ``values``."""
    found = np.where(held > 0, relative, 0.0)
    found /= found.max() if found.any() else 1.0  # sums of levels near 0 would vanish, and quotients overflow
    mean = float(found @ held) / len(values)
    scaled: Floats = found * (float(values.mean()) / mean if mean > 0 else 0.0)
    return scaled


def _off(wanted: Floats, placed: Floats, stretch: Int64s, held: Int64s, close: float) -> Floats:
    """By how much the mean of each stretch is too low; 0 where it is close, or where there are no places."""
    off: Floats = wanted - np.bincount(stretch, placed, len(wanted)) / np.maximum(held, 1)
    off[(np.abs(off) <= close) | (held == 0)] = 0.0
    return off
