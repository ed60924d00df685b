"""Online estimation of the completion hazard ``h(t) = p0 + eta*t`` (Zhang et al. 2026, section 3.4, Algorithm 1).

``t`` counts output tokens from 1. Two estimators with one interface: SlidingHazard as published, and CensoredHazard,
which also uses requests that are still running. Lengths and ages are in tokens, ``p0`` per token, ``eta`` per token
squared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[int] | NDArray[np.int64]
MIN_SURVIVORS = 5  # with fewer survivors at t, h(t) is too noisy
_QUANTILES = (0.05, 0.95)
_MIN_RANGE = 10  # tokens; the published fit always spans at least this range
_SLOPE_NOISE = 1.645  # CensoredHazard ignores a slope of fewer standard errors (one-sided 5 %)


@dataclass(frozen=True)
class HazardEstimate:
    """Linear hazard ``p0 + eta*t``, mean output length in tokens, and the number of completions used.

    ``survival``: share of the answers that are longer than 0, 1, 2, ... tokens.
    """

    p0: float
    eta: float
    mean: float
    samples: int
    survival: NDArray[np.float64] = field(default_factory=lambda: np.ones(1), compare=False, repr=False)


def empirical_hazard(
    lengths: Lengths, censored: Lengths = (), delayed: Lengths = ()
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """``(t, h, survivors)`` for t from 1 to the largest value given: ``h(t) = #(O = t) / #(at risk at t)``.

    ``censored``: ages of running requests, at risk up to their age, without event. ``delayed``: ages at which requests
    came under observation, not at risk up to that age (each such request must also be in one of the other two).
    """
    ended, at_risk = _events_and_risk(lengths, censored, delayed)
    t = np.arange(1, len(ended) + 1)
    return t, ended / np.maximum(at_risk, 1), at_risk


class SlidingHazard:
    """The published estimator: the last ``window`` completions, without running requests.

    Weighted least squares with the survivors as weights, up to the 95th percentile (section 3.4). After the authors'
    code, not the paper: from the 5th percentile on, points with fewer than five survivors dropped, then ``eta >= 0``
    and ``p0 >= 1/mean``, each clamped separately. It is biased whenever completions are not a
    representative sample of the requests: short ones complete first after a start, long ones last in a drain.
    """

    def __init__(self, window: int = 500, min_samples: int = 30) -> None:
        self._lengths: deque[int] = deque(maxlen=window)
        self._min_samples = min_samples

    def observe(self, output_tokens: int) -> None:
        """Record a completion after ``output_tokens`` tokens."""
        self._lengths.append(output_tokens)

    def estimate(self, running_ages: Lengths = ()) -> HazardEstimate | None:
        """Fit the window. ``running_ages`` is part of the interface and not used."""
        n = len(self._lengths)
        if n < self._min_samples:
            return None
        lengths = np.fromiter(self._lengths, dtype=np.int64, count=n)
        t, h, survivors = empirical_hazard(lengths)
        ordered = np.sort(lengths)
        first, last = (int(ordered[int(n * q)]) for q in _QUANTILES)
        keep = slice(first - 1, max(last, first + _MIN_RANGE))
        line = _weighted_line(t[keep], h[keep], survivors[keep])
        mean = float(lengths.mean())
        p0, eta = (line.intercept, line.slope) if line is not None else (1.0 / mean, 0.0)
        return HazardEstimate(min(max(p0, 1.0 / mean), 1.0), max(eta, 0.0), mean, n, survivors / n)


class CensoredHazard:
    """Occurrence/exposure estimate from completions and running requests.

    Between two calls of ``estimate`` the number of requests that generated their t-th token is ``#(completed, O >= t) +
    #(running now, age >= t) - #(running before, age >= t)``, without tracking identities. Events over that exposure are
    unbiased at every t for any arrival process (delayed entry and right censoring). The window begins at the newest
    call that leaves at least ``window`` completions. A request that leaves unobserved no longer counts after its exit,
    but its tokens from before the start of the window are missed.
    """

    def __init__(self, window: int = 500, min_samples: int = 30) -> None:
        self._window = window
        self._min_samples = min_samples
        self._lengths: deque[int] = deque()
        self._dropped = 0  # completions dropped from the window
        self._snapshots: deque[tuple[int, NDArray[np.int64]]] = deque([(0, _as_array(()))])

    def observe(self, output_tokens: int) -> None:
        """Record a completion after ``output_tokens`` tokens."""
        self._lengths.append(output_tokens)

    def estimate(self, running_ages: Lengths = ()) -> HazardEstimate | None:
        """Fit the window, with the tokens generated so far by every unfinished request that has begun."""
        ages = _as_array(running_ages)
        before = self._advance(ages)
        n = len(self._lengths)
        if n < self._min_samples:
            return None
        lengths = np.fromiter(self._lengths, dtype=np.int64, count=n)
        t, h, at_risk = empirical_hazard(lengths, ages, before)
        return _censored_fit(t, h, at_risk, n)

    def _advance(self, ages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Record the running ages and move the start of the window; returns the ages running at that start."""
        seen = self._dropped + len(self._lengths)
        while len(self._snapshots) > 1 and seen - self._snapshots[1][0] >= self._window:
            self._snapshots.popleft()
        start, before = self._snapshots[0]
        while self._dropped < start:
            self._lengths.popleft()
            self._dropped += 1
        if self._snapshots[-1][0] < seen:
            self._snapshots.append((seen, ages))
        return before


def _censored_fit(
    t: NDArray[np.int64], h: NDArray[np.float64], at_risk: NDArray[np.int64], samples: int
) -> HazardEstimate:
    """The published fit over the same share of the distribution, with percentiles from the survival curve.

    A slope within its standard error is taken as zero and the hazard as events over exposure. Clamping only eta would
    keep an intercept fitted with a slope that is not used, and a noisy slope extrapolates badly early on.
    """
    rate = float(h @ at_risk) / float(at_risk.sum())
    survival = _survival(h, at_risk, np.full(len(h), rate))
    first, last = (int(np.searchsorted(-survival, q - 1.0)) for q in _QUANTILES)
    keep = slice(first, max(last + 1, first + _MIN_RANGE))
    line = _weighted_line(t[keep], h[keep], at_risk[keep])
    rising = line is not None and line.slope > _SLOPE_NOISE * math.sqrt(rate / line.spread)
    p0, eta = (line.intercept, line.slope) if line is not None and rising else (rate, 0.0)
    line_h = np.clip(p0 + eta * t, 0.0, 1.0)
    longer = _survival(h, at_risk, line_h)
    # The product-limit mean, completed by the fitted line where too few were at risk and beyond the last token.
    tail = float(longer[-1]) * _mean_residual(max(float(line_h[-1]), rate), eta)
    mean = 1.0 + float(longer[:-1].sum()) + tail
    return HazardEstimate(min(max(p0, 1.0 / mean), 1.0), eta, mean, samples, np.concatenate([[1.0], longer]))


def _mean_residual(hazard: float, eta: float) -> float:
    """Mean remaining tokens at hazard ``hazard`` that grows by ``eta`` per token (Mills ratio)."""
    x = hazard / math.sqrt(2.0 * eta) if eta > 0.0 else math.inf
    if x > 5.0:  # asymptotic series of exp(x**2)*erfc(x), accurate to 1 % from here on
        return (1.0 - 0.5 / (x * x)) / hazard
    return math.sqrt(math.pi / (2.0 * eta)) * math.exp(x * x) * math.erfc(x)


def _survival(h: NDArray[np.float64], at_risk: NDArray[np.int64], fallback: NDArray[np.float64]) -> NDArray[np.float64]:
    """Product-limit survival beyond t = 1, 2, ...; ``fallback``: the hazard where too few were at risk."""
    survival: NDArray[np.float64] = (1.0 - np.where(at_risk >= MIN_SURVIVORS, h, fallback)).cumprod()
    return survival


def _events_and_risk(
    lengths: Lengths, censored: Lengths, delayed: Lengths
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    done, running, before = _as_array(lengths), _as_array(censored), _as_array(delayed)
    if len(done) and done.min() < 1:
        raise ValueError("an output length must be at least 1 token")
    size = 1 + max(int(done.max(initial=0)), int(running.max(initial=0)))
    ended = np.bincount(done, minlength=size)
    leaving = ended + np.bincount(running, minlength=size)
    leaving -= np.bincount(np.minimum(before, size - 1), minlength=size)
    at_risk = np.cumsum(leaving[::-1])[::-1]
    # Ages that decrease between two calls (an error of the caller) must not give a hazard above one.
    return ended[1:].astype(np.int64), np.maximum(at_risk, ended)[1:].astype(np.int64)


class _Line(NamedTuple):
    intercept: float
    slope: float
    spread: float  # weighted sum of squares of t; the slope's variance is hazard/spread


def _weighted_line(t: NDArray[np.int64], h: NDArray[np.float64], survivors: NDArray[np.int64]) -> _Line | None:
    """Least squares of h over t with the survivors as weights; None if they do not determine a line."""
    weight = np.where(survivors >= MIN_SURVIVORS, survivors, 0).astype(np.float64)
    total = float(weight.sum())
    if total <= 0.0:
        return None
    t_mean = float(weight @ t) / total
    h_mean = float(weight @ h) / total
    centred = t - t_mean
    spread = float(weight @ (centred * centred))
    if spread <= 0.0:
        return None
    slope = float((weight * centred) @ h) / spread
    return _Line(h_mean - slope * t_mean, slope, spread)


def _as_array(values: Lengths) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)
