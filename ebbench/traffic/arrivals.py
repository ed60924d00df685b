"""Arrival processes; all arrival times are computed before a run.

A process is a renewal process of mean rate one in *operational* time; a curve of relative rates maps operational time
to seconds. Poisson, gamma and constant gaps can therefore be combined with any curve (steps, ramps, days).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ebbench.traffic.step_gaps import gaps_at, stepped_gaps

Process = Literal["poisson", "gamma", "constant"]
Floats = npt.NDArray[np.float64]


def unit_gaps(process: Process, burstiness: float, rng: np.random.Generator, n: int) -> Floats:
    """``n`` gaps with mean one. ``burstiness``: shape of the gamma distribution; 1 is Poisson, below 1 is burstier."""
    if process == "constant":
        return np.ones(n)
    if process == "poisson":
        return rng.exponential(1.0, size=n)
    return rng.gamma(burstiness, 1.0 / burstiness, size=n)


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
        seconds: Floats = turns * self.period_s + time[piece] + self._inverse(piece, within)
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

    def _inverse(self, piece: npt.NDArray[np.intp], within: Floats) -> Floats:
        """Time into a piece at which its area reaches ``within``: root of ``a t + (b-a) t^2/(2 w) = within``."""
        starts, ends, lengths = self._scaled()
        a, b = starts[piece], ends[piece]
        root = np.sqrt(np.maximum(0.0, a * a + 2 * (b - a) / lengths[piece] * within))
        denominator = a + root  # the form without cancellation: 2 * area / (a + sqrt(...))
        out: Floats = np.divide(2 * within, denominator, out=np.zeros_like(within), where=denominator > 0)
        return out


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
    drawn = unit_gaps(process, burstiness, rng, n)
    if gaps:
        drawn = gaps_at((rng.permutation(n) + 0.5) / max(n, 1), gaps)
    if even and n:
        drawn /= drawn.mean()
    operational = np.cumsum(drawn) / rate_per_s
    return operational if curve is None else curve.seconds(operational)


def dispersion(times_s: Sequence[float] | Floats, window_s: float) -> float:
    """Index of dispersion of counts: variance over mean of the arrivals per window; 1 for Poisson."""
    times = np.asarray(times_s)
    counts = np.bincount((times / window_s).astype(np.int64))[: math.floor(times[-1] / window_s)]
    return float(counts.var() / counts.mean())
