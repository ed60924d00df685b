"""Paired statistics for few pairs: exact and sequential tests, t intervals, Holm, minimum detectable effect.

A pair is one restart (or one seed) of each side. Its *loss* is the log of the factor by which the candidate is worse.
All tests are one-sided: is the loss above zero?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.installation import need

Floats = npt.NDArray[np.float64]

EXACT_PAIRS = 14
"""Up to this many pairs all 2**n sign patterns are counted; beyond, 99,999 random ones."""
RESAMPLES = 99_999
_MDE_DRAWS = 4_000
_MOST_PAIRS = 1_000


@dataclass(frozen=True)
class PairedInterval:
    """Mean loss and the two-sided paired t interval around it, in log units."""

    mean: float
    low: float
    high: float


def sign_flip_p(losses: npt.ArrayLike) -> float:
    """P-value of "the mean loss is above zero": the share of sign patterns with a mean at least as large.

    Exact if swapping the labels within a pair changes nothing (null hypothesis); does not assume normality. The
    smallest value for n pairs is 2**-n. Raises ValueError without data.
    """
    return float(sign_flip_ps(np.asarray(losses, np.float64)[np.newaxis, :])[0])


def sign_flip_ps(trials: Floats) -> Floats:
    """:func:`sign_flip_p` of every row; shape (trials, pairs) to (trials,)."""
    if trials.ndim != 2 or not trials.shape[1]:
        raise ValueError("a sign-flip test needs at least one pair")
    if trials.shape[1] <= EXACT_PAIRS:
        sums = trials @ _signs(trials.shape[1]).T
        observed = trials.sum(axis=1)
        slack = 1e-12 * np.abs(trials).sum(axis=1)  # sums that are equal except for rounding count as equal
        ps: Floats = (sums >= (observed - slack)[:, np.newaxis]).mean(axis=1)
        return ps
    result = _stats().permutation_test(
        (trials,),
        np.mean,
        permutation_type="samples",
        alternative="greater",
        axis=1,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=1_000,
        rng=np.random.default_rng(0),  # fixed seed: equal data give equal verdicts
    )
    return np.asarray(result.pvalue, np.float64)


@cache
def _signs(pairs: int) -> Floats:
    patterns = np.arange(2**pairs)[:, np.newaxis] >> np.arange(pairs) & 1
    return np.where(patterns == 1, 1.0, -1.0)


def t_quantile(share: float, freedom: float) -> float:
    """The value below which Student's t lies with the probability ``share``."""
    special = need("scipy.special", "an interval")  # a tenth of the import of scipy.stats, which takes a second
    return float(special.stdtrit(freedom, share))


def paired_t(losses: npt.ArrayLike, confidence: float = 0.95) -> PairedInterval:
    """Mean loss with its paired t interval. For one pair both bounds are infinite."""
    values = np.asarray(losses, np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return PairedInterval(mean, -math.inf, math.inf)
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    reach = t_quantile((1 + confidence) / 2, len(values) - 1) * error
    return PairedInterval(mean, mean - reach, mean + reach)


@cache
def tukey_reach(treatments: int, freedom: int, alpha: float) -> float:
    """Largest difference of any two of equal treatments, in standard errors of a difference (Tukey's test).

    It is exceeded with probability ``alpha``. Takes half a second for each pair of numbers, once.
    """
    return float(_stats().studentized_range.ppf(1 - alpha, treatments, freedom)) / math.sqrt(2)


def spread_of(losses: Sequence[float]) -> float:
    """Sample standard deviation; 0 of a single value."""
    mean = math.fsum(losses) / len(losses)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in losses) / (len(losses) - 1)) if len(losses) > 1 else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given; they control the family-wise error."""
    values, order = np.asarray(p_values, np.float64), np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(np.minimum(values[order] * np.arange(len(values), 0, -1), 1.0))
    return [float(value) for value in adjusted]


def pairs_to_pass(spread: float, margin: float, *, confidence: float = 0.95, power: float = 0.8) -> int | None:
    """Pairs after which equal sides have an interval below ``margin`` with probability ``power``; None: too many.

    ``spread``: standard deviation of the pairs' losses, assumed normal; both in log units.
    """
    if spread <= 0:
        return 2
    for pairs in range(2, _MOST_PAIRS):
        t = float(_stats().t.ppf((1 + confidence) / 2, pairs - 1)) + float(_stats().norm.ppf(power))
        if t * spread <= margin * math.sqrt(pairs):
            return pairs
    return None


def detectable_loss(
    spread: float, pairs: int, *, alpha: float, margin: float = 0.0, power: float = 0.8
) -> float | None:
    """Smallest true loss (log units) that the test would fail with probability ``power``; None: never.

    A failure requires a sign-flip p of at most ``alpha`` and an estimated loss of at least ``margin``. ``spread`` is
    the standard deviation of the pairs' losses, assumed normal. Computed by simulation with fixed draws.
    """
    if 2.0**-pairs > alpha:
        return None
    if spread <= 0:
        return margin
    units = _needed_shift(pairs, alpha, round(margin / spread, 2), power)
    return spread * units


@cache
def _needed_shift(pairs: int, alpha: float, margin: float, power: float) -> float:
    """The shift (standard deviations) detected with probability ``power``, by bisection over one set of draws."""
    draws = np.random.default_rng(12345).standard_normal(
        (_MDE_DRAWS if pairs <= 8 else max(_MDE_DRAWS >> (pairs - 8), 500), pairs)
    )

    def share_failed(shift: float) -> float:
        shifted = draws + shift
        enough = shifted.mean(axis=1) >= margin
        significant = np.zeros(len(shifted), np.bool_)
        if enough.any():
            significant[enough] = _significant(shifted[enough], alpha)
        return float(significant.mean())

    low, high = 0.0, margin + 1.0
    while share_failed(high) < power:
        high *= 2
    while high - low > 1e-3 * (1 + high):
        middle = (low + high) / 2
        low, high = (low, middle) if share_failed(middle) >= power else (middle, high)
    return high


def _significant(trials: Floats, alpha: float) -> npt.NDArray[np.bool_]:
    """Sign-flip significance; beyond ten pairs the t test replaces it, with equal power on normal data."""
    pairs = trials.shape[1]
    if pairs <= 10:
        return np.asarray(sign_flip_ps(trials) <= alpha)
    t = trials.mean(axis=1) / (trials.std(axis=1, ddof=1) / math.sqrt(pairs))
    return np.asarray(t >= _stats().t.ppf(1 - alpha, pairs - 1))


def _stats() -> Any:
    return need("scipy.stats", "a paired comparison")


# Paired statistics that remain valid if they are evaluated after every pair.
#
# A fixed-n test (above) is exact for one evaluation at n pairs. Testing after every pair and stopping at
# the first p below 5 % is wrong far more often than in 5 % of cases. Here the evidence against "the loss is symmetric
# about a value of at most `bound`" is an e-process, a product whose expectation does not grow while that is true::
#
#     E_n = mean over rates r of  prod_i (1 + tanh(r * (x_i - bound)))
#
# Given the size of a pair's loss, either sign is equally likely under the hypothesis, so each factor has mean 1, or
# at most 1 if the centre is below `bound`. This is the hypothesis of the sign-flip test; it does not assume
# normality. By Ville's inequality E_n ever reaches 1 / alpha with probability at most alpha, so `1 / max E` is a
# p-value at every n (Ramdas, Gruenwald, Vovk, Shafer: Game-theoretic statistics and safe anytime-valid inference,
# 2023). A factor is at most 2: n pairs cannot give p below 2**-n, as in the sign-flip test. The mean over rates is an
# e-process too, so no rate has to be chosen after seeing data.

RATES = (1.25, 5.0, 20.0, 80.0, 320.0, 1280.0)
"""Rates r per unit of log loss.

The best rate is loss / variance: 75 for 3 % with a spread of 2 % between pairs, 1,200 with 0.5 %, 5 for 10 % with a
spread of 14 %.
"""
_STEPS = 60


def evidence(losses: npt.ArrayLike, bound: float = 0.0) -> Floats:
    """Log of the e-value after each pair, for "the loss is above ``bound``"; shape (pairs,).

    Raises ValueError without data.
    """
    values = np.asarray(losses, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("evidence needs at least one pair")
    # 1 + tanh(z) = 2 / (1 + exp(-2 z)), whose logarithm stays finite for large negative z.
    logs = math.log(2.0) - np.logaddexp(0.0, -2.0 * np.multiply.outer(RATES, values - bound))
    sums = np.cumsum(logs, axis=1)
    result: Floats = np.exp(np.logaddexp.reduce(sums, axis=0) - math.log(len(RATES)))
    return result


def anytime_p(losses: npt.ArrayLike, bound: float = 0.0) -> float:
    """P-value of "the loss is above ``bound``", valid after every pair; ``losses`` in order of measurement."""
    return min(1.0, 1.0 / float(evidence(losses, bound).max()))


def confidence_sequence(losses: npt.ArrayLike, confidence: float = 0.95) -> PairedInterval:
    """Mean loss, and bounds that hold after all pairs simultaneously with probability ``confidence``.

    A bound is infinite with too few pairs: five or fewer at 95 %.
    """
    values = np.asarray(losses, np.float64)
    level = (1.0 - confidence) / 2.0
    return PairedInterval(float(values.mean()), _lower(values, level), -_lower(-values, level))


def _lower(values: Floats, level: float) -> float:
    """The largest bound that the loss is shown to exceed, by bisection: evidence falls as the bound rises."""
    if 2.0 ** -len(values) > level:
        return -math.inf
    high = float(values.max())
    reach = max(high - float(values.min()), 1e-6)
    low = high - reach
    while anytime_p(values, low) > level:
        reach *= 2.0
        low = high - reach
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if anytime_p(values, middle) <= level else (low, middle)
    return low
