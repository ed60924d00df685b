"""Bursts: gaps between arrivals in steps of equally many arrivals, each with its length and two figures of its gaps.

In bursty traffic one pause often takes most of the time of eight requests, and the other gaps are short. Gaps that are
drawn one by one give some steps several long pauses and others none. So gaps with the distribution of all are put into
an order in which each step has its length and the mean root of its gaps (see :mod:`ebbench.traffic.stretches`). The
longest gap of a step takes what the others leave of its time, so that the others keep their lengths: many senders work
by a clock, and one gap is then much more frequent than others. Where too little is left all are scaled. Last, the gaps
change places within their step until it has their centre: whether its arrivals come before or after the pause.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ebbench.traffic.stretches import order_centred, order_with

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NO_TIME = 1e-9
"""Sum of a step's gaps, in mean gaps, below which they are taken as equal: all numbers behind them were 0."""


def step_edges(count: int, per_step: float) -> Ints:
    """Index of the first arrival of each step, and ``count`` at the end."""
    steps = int(np.ceil(count / per_step - 1e-9))
    edges: Ints = np.minimum(np.ceil(np.arange(steps + 1) * per_step - 1e-9), count).astype(np.int64)
    return edges


def gaps_at(shares: Floats, means: Sequence[float]) -> Floats:
    """The gaps below which these shares lie, from means of equally many sorted gaps."""
    found: Floats = np.interp(shares, (np.arange(len(means)) + 0.5) / len(means), means)
    return found


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
    held = np.flatnonzero(np.diff(edges))  # steps with arrivals; at low rates some have none
    starts, sizes = edges[held], np.diff(edges)[held]
    place = held % len(widths)
    # A full step is filled exactly, and the last one in proportion to its arrivals.
    ends = (held + 1) * per_step
    if starts[-1] + per_step > n:
        ends[-1] = held[-1] * per_step + sizes[-1]
    wanted = np.diff(ends, prepend=0.0)
    seconds = wanted * np.asarray(widths, np.float64)[place] / np.mean(widths)  # in mean gaps
    step = np.repeat(np.arange(len(held)), sizes)
    drawn = gaps_at((rng.permutation(n) + rng.random(n)) / n, means)
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
    found = gaps.copy()
    found[longest] = np.where(left >= second, left, gaps[longest])
    return found
