"""Bursts: gaps between arrivals that depend on the step of a rate curve and on their rank in it.

In bursty traffic one pause often takes most of the time of eight requests, and the other gaps are short. Gaps that are
drawn one by one give some steps several long pauses and others none. So each step gets one gap of each rank, in random
order. The longest gap of a step takes what the others leave of its time, so that the others keep their lengths: many
senders work by a clock, and one gap is then much more frequent than others. Where too little is left all are scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NO_TIME = 1e-9
"""Sum of a step's gaps, in mean gaps, below which they are taken as equal: all numbers behind them were 0."""


class StepGaps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gaps of steps that last at most ``width`` (in the unit of the curve's widths); the last entry has all others.

    ``gaps_by_rank``: from the shortest gap of a step to its longest, means of equally many sorted gaps of that rank, in
    the mean gap of all steps. A step with more gaps than ranks has several gaps per rank. ``by_rank``: what files
    of earlier versions have, in the mean gap of each step; refused.
    """

    width: float
    gaps_by_rank: tuple[tuple[float, ...], ...] = ()
    by_rank: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.by_rank:
            raise ValueError("by_rank is in the unit of an earlier version; fit the workload to the log again")
        if not self.gaps_by_rank or not all(self.gaps_by_rank):
            raise ValueError("gaps_by_rank needs at least one rank, and each rank at least one gap")


def rank_of(place: Ints, size: Ints, ranks: int) -> Ints:
    """The rank, 0 to ``ranks - 1``, of the gap at sorted ``place`` in a step of ``size`` gaps."""
    spread = np.rint(place * (ranks - 1) / np.maximum(size - 1, 1)).astype(np.int64)
    rank: Ints = np.where(size > ranks, place * ranks // np.maximum(size, 1), spread).astype(np.int64)
    return rank


def step_edges(count: int, per_step: float) -> Ints:
    """Index of the first arrival of each step, and ``count`` at the end."""
    steps = int(np.ceil(count / per_step - 1e-9))
    edges: Ints = np.minimum(np.ceil(np.arange(steps + 1) * per_step - 1e-9), count).astype(np.int64)
    return edges


def stepped_gaps(
    kinds: Sequence[StepGaps], widths: Sequence[float], per_step: float, n: int, rng: np.random.Generator
) -> Floats:
    """``n`` gaps with a mean of one in each step.

    ``widths``: of the steps, which repeat; ``per_step``: arrivals in each.
    """
    if not n:
        return np.zeros(0)
    edges = step_edges(n, per_step)
    held = np.flatnonzero(np.diff(edges))  # steps with arrivals; at low rates some have none
    starts, sizes = edges[held], np.diff(edges)[held]
    width = np.asarray(widths, np.float64)[held % len(widths)]
    gaps = _drawn(kinds, width, starts, sizes, rng)
    # A full step is filled exactly, and the last one in proportion to its arrivals.
    ends = (held + 1) * per_step
    if starts[-1] + per_step > n:
        ends[-1] = held[-1] * per_step + sizes[-1]
    wanted = np.diff(ends, prepend=0.0)
    gaps = _with_longest(gaps, starts, sizes, wanted * width / np.mean(widths))
    step = np.repeat(np.arange(len(held)), sizes)
    totals = np.add.reduceat(gaps, starts)
    empty = totals < _NO_TIME
    gaps[empty[step]] = 1.0
    filled: Floats = gaps * (wanted / np.where(empty, sizes, totals))[step]
    return filled


def _drawn(kinds: Sequence[StepGaps], width: Floats, starts: Ints, sizes: Ints, rng: np.random.Generator) -> Floats:
    """Gaps of each step in random order, drawn by the kind of the step and the rank of the gap."""
    n = int(sizes.sum())
    step = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = np.lexsort((rng.random(n), step))
    place = np.empty(n, np.int64)
    place[shuffled] = np.arange(n) - starts[step]
    bounds = [kind.width for kind in kinds[:-1]]
    kind_of = np.searchsorted(bounds, width)[step]
    gaps = np.empty(n)
    for index, kind in enumerate(kinds):
        rank = rank_of(place, sizes[step], len(kind.gaps_by_rank))
        for at, means in enumerate(kind.gaps_by_rank):
            rows = np.flatnonzero((kind_of == index) & (rank == at))
            shares = (rng.permutation(len(rows)) + rng.random(len(rows))) / max(len(rows), 1)
            gaps[rows] = np.interp(shares, (np.arange(len(means)) + 0.5) / len(means), means)
    return gaps


def _with_longest(gaps: Floats, starts: Ints, sizes: Ints, total: Floats) -> Floats:
    """The longest gap of each step replaced by what the others leave of ``total``, if it stays the longest."""
    order = np.lexsort((gaps, np.repeat(np.arange(len(sizes)), sizes)))
    ends = starts + sizes
    longest = order[ends - 1]
    second = np.where(sizes > 1, gaps[order[np.maximum(ends - 2, 0)]], 0.0)
    left = total - (np.add.reduceat(gaps, starts) - gaps[longest])
    found = gaps.copy()
    found[longest] = np.where(left >= second, left, gaps[longest])
    return found
