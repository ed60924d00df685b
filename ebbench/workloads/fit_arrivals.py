"""Fits arrivals: a rate curve and the gaps after it, or, of bursty traffic, steps of equally many sessions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbench.traffic.step_gaps import step_edges
from ebbench.traffic.stretches import centres_of, roots_of
from ebbench.workloads.fitted import Arrivals
from ebbench.workloads.points import GROUP, points_of
from ebbench.workloads.requests import Floats

_MOST_GAPS = 400
_STEP, _MOST_STEPS = 50, 120
"""Requests per step of the rate curve in the mean, at least, and most steps."""
_BURSTY, _MOST_STEPS_OF_BURSTS = 0.5, 1200
"""Burstiness below which steps hold equally many sessions, and most steps then."""
_SHORTEST_STEP_S = 1e-6
_TICK_JITTER = 0.01


def fit_arrivals(times: Floats) -> Arrivals | None:
    """Rate curve and burstiness of sessions that start at ``times`` (s, rising)."""
    count, span = len(times), float(times[-1] - times[0])
    if count < 2 or span <= 0:
        return None
    period = span * count / (count - 1)
    steps = max(1, min(_MOST_STEPS, count // _STEP))
    tick = _tick(times)
    if tick is not None:
        steps = max(1, min(steps, int(period / (2 * tick))))
    starts = times - times[0]
    counts = np.histogram(starts, bins=steps, range=(0.0, period))[0]
    burstiness, gaps = _residual(starts, counts, period, tick)
    if burstiness < _BURSTY and tick is None and count >= 4 * GROUP:
        return _bursty(starts, period, burstiness)
    return Arrivals(
        rate=round(count / period, 6),
        period_s=round(period, 6),
        burstiness=round(burstiness, 4),
        gaps=gaps,
        levels=_levels(counts, burstiness),
        tick_s=tick,
    )


def _bursty(starts: Floats, period: float, burstiness: float) -> Arrivals:
    """Arrivals by steps of equally many sessions, so that the curve is fine where the rate is high."""
    count = len(starts)
    gaps = np.diff(starts, prepend=starts[-1] - period)  # the first follows the last of the period before
    per_step = count / min(_MOST_STEPS_OF_BURSTS, count // GROUP)
    edges = step_edges(count, per_step)
    widths = np.maximum(np.add.reduceat(gaps, edges[:-1]), _SHORTEST_STEP_S)
    roots = np.add.reduceat(roots_of(gaps), edges[:-1]) / np.diff(edges)
    centres = centres_of(np.repeat(np.arange(len(widths)), np.diff(edges)), gaps)
    return Arrivals(
        rate=round(count / period, 6),
        period_s=round(period, 6),
        burstiness=round(burstiness, 4),
        gaps=points_of(gaps / gaps.mean(), 6, _MOST_GAPS),
        steps_s=tuple(round(float(width), 6) for width in widths),
        step_roots=tuple(round(float(root), 4) for root in roots),
        step_centres=tuple(round(float(centre), 3) for centre in centres),
    )


def _levels(counts: Any, burstiness: float) -> tuple[float, ...]:
    """Relative rates per step. What the randomness of the counts adds to their variance is taken out again."""
    if len(counts) < 2:
        return ()
    relative = counts / counts.mean()
    noise = min(1.0, 1.0 / burstiness) / counts.mean()
    kept = np.sqrt(max(0.0, 1.0 - noise / max(float(relative.var()), 1e-12)))
    return tuple(round(float(level), 4) for level in np.maximum(0.0, 1.0 + kept * (relative - 1.0)))


def _tick(times: Floats) -> float | None:
    """The clock's step, if at least a third of the gaps are 0 and the others multiples of one number."""
    gaps = np.diff(times)
    rising = gaps[gaps > 1e-9]
    if len(rising) == 0 or len(rising) > 2 / 3 * len(gaps):
        return None
    step = float(np.median(rising))
    multiples = rising / step
    near = np.abs(multiples - np.rint(multiples)) < _TICK_JITTER
    return round(step, 6) if near.all() and multiples.min() > 0.5 else None


def _residual(times: Floats, counts: Any, period: float, tick: float | None) -> tuple[float, tuple[float, ...]]:
    """Gamma shape of the gaps after the rate curve is taken out, and their distribution where no gamma has it.

    With a coarse clock: the shape that gives the dispersion of the counts per tick.
    """
    curve = np.concatenate([[0.0], np.cumsum(counts)])
    places = np.linspace(0.0, period, len(counts) + 1)
    if tick is not None:
        found = np.bincount(np.rint(times / tick).astype(int))
        expected = np.diff(np.interp(np.arange(len(found) + 1) * tick, places, curve))
        variation = float(((found - expected) ** 2).sum() / max(expected.sum(), 1e-12))
        return _shape(variation), ()
    gaps = np.diff(np.interp(times, places, curve))  # mean gap of 1
    gaps /= max(gaps.mean(), 1e-12)
    return _shape(float(gaps.var())), points_of(gaps, 6, _MOST_GAPS)


def _shape(variation: float) -> float:
    return float(np.clip(1.0 / max(variation, 1e-3), 0.02, 50.0))
