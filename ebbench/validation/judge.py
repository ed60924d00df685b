"""Predicted against measured figures: errors, the noise of the measurement, and one verdict.

Every setting (policy and load) is measured in several rounds and predicted for the same requests. Errors are log ratios
of predicted to measured. The noise of one measurement, sigma, is the standard deviation of a setting's errors over its
rounds, but at least the typical one of all settings, since a few rounds can agree by chance. Every round has step times
of its own, so the machine's speed at their time is part of sigma: the mean error over n rounds has an uncertainty of
``t sigma / sqrt(n)``. Student's t has the degrees of freedom of :func:`error_freedom`, since a machine that is slower
in one round is slower for all settings. A limit is kept if three of four settings keep it with the uncertainty added,
exceeded if they do not keep it with the uncertainty subtracted, else undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Literal

import numpy as np

from ebbench.analysis.statistics import t_quantile
from ebbench.grouping import by_key

THROUGHPUT, TTFT, TPOT = "output_throughput", "median_ttft_ms", "median_tpot_ms"
METRICS: Mapping[str, str] = {THROUGHPUT: "throughput", TTFT: "TTFT", TPOT: "TPOT"}
"""Judged figures by their key in a run's summary, and their names."""
FIGURE_LIMITS: Mapping[str, float] = {THROUGHPUT: 0.05, TPOT: 0.05, TTFT: 0.15}
"""Largest error of three of four settings at which absolute figures can be used."""
CHOICE_LIMIT = 0.25
"""Largest such error of throughput at which choices between policies can be used."""
SMALLEST_GAIN = 0.02
"""The direction of a smaller measured gain is not judged."""
NO_GAIN = 0.0005
"""A smaller predicted gain has no direction: it is shown as 0.0 %."""
WRONG_SHARE = 0.2
"""Share of wrong directions above which choices cannot be used."""
FEWEST_ROUNDS = 2

Word = Literal["figures", "choices", "neither", "undecided"]


@dataclass(frozen=True)
class Observation:
    """One run, predicted and measured. ``predicted`` and ``measured``: figures by the keys of METRICS; None: unknown.

    ``valid`` False: the measured run is INVALID and not judged.
    """

    policy: str
    load: int
    round: int
    predicted: Mapping[str, float | None]
    measured: Mapping[str, float | None]
    valid: bool = True


@dataclass(frozen=True)
class Error:
    """One metric of one policy at one load: means over the rounds, and the range of the measured values.

    ``error``: relative error of the prediction (0.05: 5 % too high). ``uncertainty``: of the error, from noise.
    ``typical_noise``: standard deviation of one measurement of this metric, typical of all settings.
    """

    policy: str
    load: int
    metric: str
    rounds: int
    predicted: float
    measured: float
    lowest: float
    highest: float
    error: float
    uncertainty: float
    typical_noise: float


@dataclass(frozen=True)
class GainPrediction:
    """Gain in throughput of a policy over the first one at one load, predicted and measured, as shares.

    ``uncertainty``: of the measured gain; the intervals of all gains together hold with 95 %. ``right``: whether the
    direction was predicted; None: too close to tell.
    """

    policy: str
    load: int
    predicted: float
    measured: float
    uncertainty: float
    right: bool | None


@dataclass(frozen=True)
class MetricVerdict:
    """Errors of one metric over all settings. ``within_limit`` None: undecided because of noise."""

    metric: str
    median_error: float
    worst_error: float
    bias: float
    noise: float
    within_limit: bool | None


@dataclass(frozen=True)
class Judgement:
    """All comparisons, and the verdict.

    ``word``: what simulated results can be used for on this machine; ``sentence``: the same with its reasons.
    """

    errors: tuple[Error, ...]
    gains: tuple[GainPrediction, ...]
    word: Word
    sentence: str
    metrics: tuple[MetricVerdict, ...]
    directions_right: int
    directions_clear: int


def judge(observations: Sequence[Observation], baseline: str) -> Judgement:
    """Compare valid runs; ``baseline`` is the policy whose throughput gains are relative to."""
    sound = [observation for observation in observations if observation.valid]
    errors = tuple(error for metric in METRICS for error in _errors(sound, metric))
    gains = tuple(_gains(sound, baseline))
    by_metric = ((metric, [error for error in errors if error.metric == metric]) for metric in METRICS)
    metrics = tuple(_metric_verdict(metric, of_metric) for metric, of_metric in by_metric if of_metric)
    clear = [gain for gain in gains if gain.right is not None]
    right = sum(bool(gain.right) for gain in clear)
    word, reason = _word(errors, metrics, right, len(clear))
    figures = "; ".join(
        f"{METRICS[of.metric]} {100 * of.median_error:.1f} % off in the median, {100 * of.worst_error:.1f} % at worst"
        for of in metrics
    )
    directions = f"direction of the gain right in {right} of {len(clear)} clear cases"
    if not clear:
        known = any(math.isfinite(gain.uncertainty) for gain in gains)
        directions = "no gain was large enough to have a direction" if known else "no gain was measured twice"
    sentence = "; ".join(part for part in (_MEANING[word] + reason, figures, directions) if part)
    return Judgement(errors, gains, word, sentence, metrics, right, len(clear))


def _errors(observations: Sequence[Observation], metric: str) -> list[Error]:
    pairs: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
    for observation in observations:
        predicted, measured = observation.predicted.get(metric), observation.measured.get(metric)
        if predicted and measured:
            pairs.setdefault((observation.policy, observation.load), {})[observation.round] = (predicted, measured)
    logs = [{number: math.log(ours / real) for number, (ours, real) in rounds.items()} for rounds in pairs.values()]
    groups = [list(by_round.values()) for by_round in logs]
    typical, sigmas = noise_between_rounds(groups)
    t = interval_factor(error_freedom(logs))
    errors = []
    for ((policy, load), rounds), values, sigma in zip(pairs.items(), groups, sigmas, strict=True):
        expected, observed = zip(*rounds.values(), strict=True)
        figures = len(values), mean(expected), mean(observed), min(observed), max(observed), math.expm1(mean(values))
        errors.append(Error(policy, load, metric, *figures, t * sigma / math.sqrt(len(values)), typical))
    return errors


def noise_between_rounds(groups: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
    """The typical standard deviation within groups, and that of each group, at least the typical one.

    The typical one is the median over groups, divided by the median of a standard deviation of as many values of
    deviation 1 (Wilson and Hilferty's approximation). Infinite if no group has two values.
    """
    own = [stdev(values) if len(values) > 1 else 0.0 for values in groups]
    repeated = [(value, len(values) - 1) for value, values in zip(own, groups, strict=True) if len(values) > 1]
    scaled = [value / (1.0 - 2.0 / (9.0 * degrees)) ** 1.5 for value, degrees in repeated]
    typical = median(scaled) if scaled else math.inf
    return typical, [max(value, typical) for value in own]


def freedom(groups: Sequence[Sized]) -> int:
    """Degrees of freedom of the noise within groups: the number of values less the number of groups."""
    return sum(len(values) - 1 for values in groups)


def error_freedom(groups: Sequence[Mapping[int, float]]) -> float:
    """Degrees of freedom of the noise within groups of values by round, where a part of it is common to all groups.

    Variances of the common part, from the means over the groups, and of the rest have different degrees of freedom;
    those of their sum are Satterthwaite's. Three rounds of eight settings have 16 without a common part, 2 if all is
    common.
    """
    apart = freedom(groups)
    offsets = by_key((number, value - mean(values.values())) for values in groups for number, value in values.items())
    rounds, settings = len(offsets), len(groups)
    within = sum(offset**2 for of_round in offsets.values() for offset in of_round) / max(apart, 1)
    if rounds < FEWEST_ROUNDS or settings < 2 or not within:
        return apart
    of_means = sum(mean(of_round) ** 2 for of_round in offsets.values()) / (rounds - 1)
    common = min(max((settings * of_means / within - 1.0) / (settings - 1), 0.0), 1.0)
    return 1.0 / (common**2 / (rounds - 1) + (1.0 - common) ** 2 / apart)


def interval_factor(degrees: float, together: int = 1) -> float:
    """Standard errors to either side that cover a mean with 95 %: Student's t; infinite without degrees of freedom.

    ``together``: number of means that are covered at the same time (Bonferroni). The noise of two rounds in two
    settings is itself known so badly that it takes 4.3; with many settings it takes 2.
    """
    return t_quantile(1.0 - 0.025 / together, degrees) if degrees else math.inf


def _gains(observations: Sequence[Observation], baseline: str) -> Iterable[GainPrediction]:
    base = {(observed.load, observed.round): observed for observed in observations if observed.policy == baseline}
    logs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for observation in observations:
        against = base.get((observation.load, observation.round))
        if observation.policy == baseline or against is None:
            continue
        sides = (observation.predicted, against.predicted, observation.measured, against.measured)
        known = [value for side in sides if (value := side.get(THROUGHPUT))]
        if len(known) == len(sides):
            pair = math.log(known[0] / known[1]), math.log(known[2] / known[3])
            logs.setdefault((observation.policy, observation.load), []).append(pair)
    measured_gains = [[measured for _, measured in pairs] for pairs in logs.values()]
    _, sigmas = noise_between_rounds(measured_gains)
    t = interval_factor(freedom(measured_gains), len(measured_gains))
    for ((policy, load), pairs), sigma in zip(logs.items(), sigmas, strict=True):
        predicted_gain, measured_gain = (mean(part) for part in zip(*pairs, strict=True))
        uncertainty = t * sigma / math.sqrt(len(pairs))
        clear = abs(measured_gain) > max(uncertainty, SMALLEST_GAIN)
        foreseen = abs(predicted_gain) >= NO_GAIN and predicted_gain * measured_gain > 0
        right = foreseen if clear else None
        yield GainPrediction(policy, load, math.expm1(predicted_gain), math.expm1(measured_gain), uncertainty, right)


_MEANING: Mapping[Word, str] = {
    "figures": "Simulated figures can be used as they are",
    "choices": "Simulated choices between policies can be used, absolute figures cannot",
    "neither": "Simulated results cannot be used on this machine",
    "undecided": "Undecided",
}


def _metric_verdict(metric: str, errors: Sequence[Error]) -> MetricVerdict:
    signed = [error.error for error in errors]
    sizes, kept = list(map(abs, signed)), _keeps(errors, FIGURE_LIMITS[metric])
    return MetricVerdict(metric, median(sizes), max(sizes), float(np.median(signed)), errors[0].typical_noise, kept)


def _keeps(errors: Sequence[Error], limit: float) -> bool | None:
    """Whether three of four settings keep the limit; None if noise leaves it undecided."""
    place = math.ceil(0.75 * len(errors)) - 1  # of the smallest value that at least three of four do not exceed
    if sorted(abs(error.error) + error.uncertainty for error in errors)[place] <= limit:
        return True
    return False if sorted(abs(error.error) - error.uncertainty for error in errors)[place] > limit else None


def _word(errors: Sequence[Error], metrics: Sequence[MetricVerdict], right: int, clear: int) -> tuple[Word, str]:
    """The verdict's word, and its reason as text that follows the word's meaning."""
    throughput = [error for error in errors if error.metric == THROUGHPUT]
    if not throughput or max(error.rounds for error in throughput) < FEWEST_ROUNDS:
        return "undecided", ": no setting was measured twice, so the noise of this machine is unknown"
    wrong = clear - right
    if wrong > WRONG_SHARE * clear:
        return "neither", f": {wrong} of {clear} directions of gains were wrong"
    coarse = _keeps(throughput, CHOICE_LIMIT)
    if coarse is False:
        return "neither", f": throughput is more than {100 * CHOICE_LIMIT:.0f} % off"
    kept = [metric_verdict.within_limit for metric_verdict in metrics]
    if all(kept):
        return "figures", f", though {wrong} of {clear} directions of gains were wrong" if wrong else ""
    beyond = ", ".join(METRICS[of.metric] for of in metrics if of.within_limit is False)
    if beyond and coarse:
        untested = "" if clear else ", and no gain was clear enough to test a direction"
        return "choices" if clear else "undecided", f": {beyond} beyond the limit{untested}"
    noise = max(metric_verdict.noise for metric_verdict in metrics)
    return "undecided", (
        f": rounds of the same run differ by up to {100 * noise:.0f} % (standard deviation), too much to decide; "
        "give more --rounds, which continue this measurement, on an idle machine"
    )
