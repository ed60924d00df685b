"""Arrival processes and orders of bursty gaps; all arrival times are computed before a run.

A process is a renewal process of mean rate one in *operational* time; a curve of relative rates maps operational time
to seconds. Poisson, gamma and constant gaps can therefore be combined with any curve (steps, ramps, days).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# Random generators per subsystem: a change in one subsystem's draws does not change another's.


def substream(seed: int, name: str) -> np.random.Generator:
    """The generator of subsystem ``name`` for ``seed`` (an integer >= 0); equal arguments give equal draws."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))


# Bursts: gaps between arrivals in steps of equally many arrivals, each with its length and two figures of its gaps.
#
# In bursty traffic one pause often takes most of the time of eight requests, and the other gaps are short. Gaps that
# are drawn one by one give some steps several long pauses and others none. So gaps with the distribution of all are
# put into an order in which each step has its length and the mean root of its gaps (see `ebbench.traffic.arrivals`).
# The longest gap of a step takes what the others leave of its time, so that the others keep their lengths: many
# senders work by a clock, and one gap is then much more frequent than others. Where too little is left all are
# scaled. Last, the gaps change places within their step until it has their centre: whether its arrivals come before
# or after the pause.

Ints = npt.NDArray[np.int64]

_NO_TIME = 1e-9
"""Sum of a step's gaps, in mean gaps, below which they are taken as equal: all numbers behind them were 0."""


def step_edges(count: int, per_step: float) -> Ints:
    """Index of the first arrival of each step, and ``count`` at the end."""
    steps = int(np.ceil(count / per_step - 1e-9))
    edges: Ints = np.minimum(np.ceil(np.arange(steps + 1) * per_step - 1e-9), count).astype(np.int64)
    return edges


def values_at(means: Sequence[float], shares: Floats) -> Floats:
    """The values below which these shares of a distribution lie, from means of equally many sorted values, lowest
    first, by interpolation between them; shape of ``shares``."""
    if not len(means):
        raise ValueError("a distribution needs at least one value")
    values: Floats = np.interp(shares, (np.arange(len(means)) + 0.5) / len(means), means)
    return values


def even_shares(rng: np.random.Generator, n: int) -> Floats:
    """``n`` shares in random order, one in each of ``n`` equal parts of (0, 1): a draw without clusters."""
    shares: Floats = (rng.permutation(n) + rng.random(n)) / max(n, 1)
    return shares


def stepped_gaps(
    means: Sequence[float],
    widths: Sequence[float],
    roots: Sequence[float],
    centres: Sequence[float],
    per_step: float,
    n: int,
    rng: np.random.Generator,
) -> Floats:
    """``n`` gaps with a mean of one in each step.

    ``means``: of equally many sorted gaps, in the mean gap; ``widths``, ``roots`` and ``centres``: of the steps, which
    repeat: how long they last, the mean square root of their gaps, in the mean gap, and the centre of their gaps;
    ``per_step``: arrivals in each.
    """
    if not n:
        return np.zeros(0)
    edges = step_edges(n, per_step)
    busy_steps = np.flatnonzero(np.diff(edges))  # steps with arrivals; at low rates some have none
    starts, sizes = edges[busy_steps], np.diff(edges)[busy_steps]
    place = busy_steps % len(widths)
    # A full step is filled exactly, and the last one in proportion to its arrivals.
    ends = (busy_steps + 1) * per_step
    if starts[-1] + per_step > n:
        ends[-1] = busy_steps[-1] * per_step + sizes[-1]
    wanted = np.diff(ends, prepend=0.0)
    seconds = wanted * np.asarray(widths, np.float64)[place] / np.mean(widths)  # in mean gaps
    step = np.repeat(np.arange(len(busy_steps)), sizes)
    drawn = values_at(means, even_shares(rng, n))
    order = order_with(step, drawn, rng, means=seconds / sizes, roots=np.asarray(roots)[place])
    gaps = _with_longest(drawn[order], starts, sizes, seconds)
    totals = np.add.reduceat(gaps, starts)
    empty = totals < _NO_TIME
    gaps[empty[step]] = 1.0
    filled: Floats = gaps * (wanted / np.where(empty, sizes, totals))[step]
    return filled[order_centred(step, filled, np.asarray(centres)[place], rng)]


def _with_longest(gaps: Floats, starts: Ints, sizes: Ints, total: Floats) -> Floats:
    """The longest gap of each step replaced by what the others leave of ``total``, if it stays the longest."""
    order = np.lexsort((gaps, np.repeat(np.arange(len(sizes)), sizes)))
    ends = starts + sizes
    longest = order[ends - 1]
    second = np.where(sizes > 1, gaps[order[np.maximum(ends - 2, 0)]], 0.0)
    left = total - (np.add.reduceat(gaps, starts) - gaps[longest])
    filled = gaps.copy()
    filled[longest] = np.where(left >= second, left, gaps[longest])
    return filled


# Permutes values so that each stretch of consecutive places has a given mean, mean square root or centre.
#
# A mean alone does not say what a stretch is like: of a heavy-tailed quantity one value often makes the mean of
# eight, and the others are as usual. The mean of the square roots says whether that is so: of two stretches with one
# mean, that with the lower mean root has more of its sum in one value. The centre of a stretch says where in it its
# sum lies: of gaps, whether its requests come early or late.

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


def relative_roots(values: Any) -> Floats:
    """Square roots of the values in their mean."""
    numbers = np.asarray(values, np.float64)
    roots: Floats = np.sqrt(numbers / max(float(numbers.mean()), 1e-12))
    return roots


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

    ``stretch``: of each place. ``means``: relative ones; ``roots``: see :func:`relative_roots`. ``group``: values only
    change places within a group.
    """
    n = len(values)
    if not n:
        return np.zeros(0, np.int64)
    groups = np.zeros(n, np.int64) if group is None else group
    sizes, relative = np.asarray(values, np.float64), np.asarray(means, np.float64)
    by_size = np.lexsort((rng.random(n), sizes, groups))  # equal values in random order
    ordered, ordered_roots = sizes[by_size], relative_roots(sizes)[by_size]
    counts = np.bincount(stretch, minlength=len(relative))
    noise = _normal(stretch, counts, rng)
    mean, wanted_root = _mean_of(relative, counts, sizes), np.asarray(roots, np.float64)
    shift, spread = _Corrected(len(relative), -_FARTHEST, _FARTHEST), _Corrected(len(relative), _NARROWEST, _WIDEST)
    places, placed = np.lexsort((noise, groups)), np.empty(n)
    for _ in range(_ROUNDS):
        placed[places] = ordered
        off = [_mean_errors(mean, placed, stretch, counts, _CLOSE * float(sizes.mean()))]
        if len(wanted_root):
            placed[places] = ordered_roots
            off.insert(0, _mean_errors(wanted_root, placed, stretch, counts, _CLOSE))
        if not any(error.any() for error in off):
            break
        for corrected, by in zip((shift, spread), off, strict=False):
            corrected.correct(by)
        places = np.lexsort((shift.values[stretch] + np.exp(spread.values[stretch]) * noise, groups))
    order = np.empty(n, np.int64)
    order[places] = by_size
    return order


def stretch_centres(stretch: Int64s, values: Floats) -> Floats:
    """Where in each stretch its values lie: near 0 with all of their sum in its first place, near 1 in its last.

    ``stretch``: of each place, rising by 1 from 0.
    """
    place, _, _ = _places(stretch)
    total = np.bincount(stretch, values)
    centres: Floats = np.full(len(total), 0.5)
    np.divide(np.bincount(stretch, values * place), total, out=centres, where=total > 0)
    return centres


def order_centred(stretch: Int64s, values: Floats, centres: npt.ArrayLike, rng: np.random.Generator) -> Int64s:
    """An order (indices into ``values``) in which values change places within their stretch, so that it has its centre.

    Two places of a stretch are drawn, and their values swapped if that brings the centre nearer; and so on.
    ``stretch`` and ``centres``: see :func:`stretch_centres`.
    """
    place, starts, lengths = _places(stretch)
    order, total = np.arange(len(values)), np.bincount(stretch, values)
    off = (np.asarray(centres, np.float64) - stretch_centres(stretch, values)) * total
    for _ in range(_SWAPS):
        at = np.flatnonzero(np.abs(off) > _CLOSE_CENTRE * total)
        if not len(at):
            break
        left, right = (starts[at] + (rng.random(len(at)) * lengths[at]).astype(np.int64) for _ in range(2))
        change = (values[order[left]] - values[order[right]]) * (place[right] - place[left])
        nearer = np.abs(off[at] - change) < np.abs(off[at])
        left, right = left[nearer], right[nearer]
        order[left], order[right] = order[right], order[left]
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


def _normal(stretch: Int64s, counts: Int64s, rng: np.random.Generator) -> Floats:
    """Normal numbers: a stretch of n places gets one from each of n equal quantile ranges, in random order."""
    n = len(stretch)
    order = np.lexsort((rng.random(n), stretch))
    starts = np.cumsum(counts) - counts
    place = np.empty(n, np.int64)
    place[order] = np.arange(n) - starts[stretch[order]]
    shares = (place + rng.random(n)) / counts[stretch]
    numbers: Floats = np.sort(rng.standard_normal(n))[np.argsort(np.argsort(shares))]
    return numbers


def _mean_of(relative: Floats, counts: Int64s, values: Floats) -> Floats:
    """Mean value per stretch, such that the mean over all places is that of ``values``."""
    levels = np.where(counts > 0, relative, 0.0)
    levels /= levels.max() if levels.any() else 1.0  # sums of levels near 0 would vanish, and quotients overflow
    mean = float(levels @ counts) / len(values)
    scaled: Floats = levels * (float(values.mean()) / mean if mean > 0 else 0.0)
    return scaled


def _mean_errors(wanted: Floats, placed: Floats, stretch: Int64s, counts: Int64s, close: float) -> Floats:
    """How much too low the mean of each stretch is; 0 where it is close, or where there are no places."""
    off: Floats = wanted - np.bincount(stretch, placed, len(wanted)) / np.maximum(counts, 1)
    off[(np.abs(off) <= close) | (counts == 0)] = 0.0
    return off


Process = Literal["poisson", "gamma", "constant"]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Relative rate over time, repeated every ``period_s``, scaled to a mean of one per period.

    ``levels``: pieces of constant rate (``linear`` False) or equally spaced corners connected by lines (True).
    ``widths``: relative lengths of the pieces; empty: equally long.
    """

    levels: tuple[float, ...]
    period_s: float
    linear: bool = False
    widths: tuple[float, ...] = ()

    def seconds(self, operational: Floats) -> Floats:
        """Times (s) at which the integral of the curve reaches ``operational`` (s)."""
        time, area = self._table()
        turns = np.floor(operational / self.period_s)
        rest = operational - turns * self.period_s
        piece = np.clip(np.searchsorted(area, rest, side="right") - 1, 0, len(area) - 2)
        within = rest - area[piece]
        starts, ends, lengths = self._scaled()
        a, b = starts[piece], ends[piece]
        root = np.sqrt(np.maximum(0.0, a * a + 2 * (b - a) / lengths[piece] * within))
        denominator = a + root  # the form without cancellation: 2 * area / (a + sqrt(...))
        out: Floats = np.divide(2 * within, denominator, out=np.zeros_like(within), where=denominator > 0)
        seconds: Floats = turns * self.period_s + time[piece] + out
        return seconds

    def _scaled(self) -> tuple[Floats, Floats, Floats]:
        """Rates at the start and at the end of each piece (mean one), and the length of each piece in s."""
        levels = np.asarray(self.levels, np.float64)
        starts, ends = (levels[:-1], levels[1:]) if self.linear else (levels, levels)
        if self.widths:
            relative = np.asarray(self.widths, np.float64)
            lengths = relative * (self.period_s / relative.sum())
            mean = float(((starts + ends) / 2 * lengths).sum()) / self.period_s
        else:
            lengths = np.full(len(starts), self.period_s / len(starts))
            mean = float(((starts + ends) / 2).mean())
        scaled_starts: Floats = starts / mean
        scaled_ends: Floats = ends / mean
        return scaled_starts, scaled_ends, lengths

    def _table(self) -> tuple[Floats, Floats]:
        starts, ends, lengths = self._scaled()
        area = np.concatenate([np.zeros(1), np.cumsum((starts + ends) / 2 * lengths)]).astype(np.float64)
        area[-1] = self.period_s
        if self.widths:
            return np.concatenate([np.zeros(1), np.cumsum(lengths)]), area
        time = np.arange(len(area)).astype(np.float64) * lengths[0]
        return time, area


def arrival_times(
    process: Process,
    rate_per_s: float,
    rng: np.random.Generator,
    n: int,
    *,
    burstiness: float = 1.0,
    gaps: Sequence[float] = (),
    curve: Curve | None = None,
    even: bool = False,
    roots: Sequence[float] = (),
    centres: Sequence[float] = (),
) -> Floats:
    """Times (s) of ``n`` arrivals at mean rate ``rate_per_s``; the first arrival is one gap after zero.

    ``gaps``: means of equally many sorted gaps, drawn from by interpolation instead of from the process. ``even``: the
    gaps are scaled to a mean of exactly one, which takes the randomness out of the rate. ``roots`` and
    ``centres``: mean square roots and centres of the gaps in the steps of the curve, which then needs widths and holds
    equally many arrivals per step.
    """
    if roots and curve is not None:
        per_step = rate_per_s * curve.period_s / len(curve.levels)
        stepped = stepped_gaps(gaps, curve.widths, roots, centres, per_step, n, rng)
        return curve.seconds(np.cumsum(stepped) / rate_per_s)
    if process == "constant":
        drawn = np.ones(n)
    elif process == "poisson":
        drawn = rng.exponential(1.0, size=n)
    else:
        drawn = rng.gamma(burstiness, 1.0 / burstiness, size=n)
    if gaps:
        drawn = values_at(gaps, (rng.permutation(n) + 0.5) / max(n, 1))
    if even and n:
        drawn /= drawn.mean()
    operational = np.cumsum(drawn) / rate_per_s
    return operational if curve is None else curve.seconds(operational)


def dispersion(times_s: Sequence[float] | Floats, window_s: float) -> float:
    """Index of dispersion of counts: variance over mean of the arrivals per window; 1 for Poisson."""
    times = np.asarray(times_s)
    counts = np.bincount((times / window_s).astype(np.int64))[: math.floor(times[-1] / window_s)]
    return float(counts.var() / counts.mean())
