"""Whether policies differ significantly: the one rule behind every table, page and sentence that says "wins".

A difference is *shown* if the Holm-adjusted p-value of a two-sided sign-flip test over pairs of runs of the same plan
is at most ALPHA. The tests of a comparison are throughput and the median latencies of every policy against the
baseline. Copies (repeats in virtual time with equal figures) count once: they are not new measurements.

Runs repeated until the answer was clear (``--repeats auto``) were tested after every pair, which makes a fixed-n test
wrong too often. They get p-values that hold at every test (:mod:`ebbench.analysis.statistics`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import Literal, TypeVar

from ebbench.analysis.cases import (
    TIE,
    Figure,
    Group,
    all_keep_up,
    baseline_group,
    output_throughput,
    paired_by_plan,
    request_goodput,
    request_time,
)
from ebbench.analysis.metrics import Metrics

ALPHA = 0.05
"""Probability of calling any difference shown if there is none, over all tests of a comparison."""

TESTED: Mapping[str, Figure] = {
    "output_throughput": output_throughput,
    "median_ttft_ms": lambda metrics: metrics.ttft.median,
    "median_tpot_ms": lambda metrics: metrics.tpot.median,
}
"""The tested figures, by their names in :mod:`ebbench.gate`."""

Name = TypeVar("Name", bound=Hashable)


def two_sided_p(logs: Sequence[float], *, sequential: bool = False) -> float | None:
    """P-value of "the mean log ratio is zero"; None for a single pair.

    ``sequential``: the pairs, in order of measurement, were tested after each.
    """
    if len(logs) < 2:
        return None
    from ebbench.analysis.statistics import anytime_p_two_sided, sign_flip_p

    if sequential:
        return anytime_p_two_sided(logs)
    return min(1.0, 2 * min(sign_flip_p(logs), sign_flip_p([-value for value in logs])))


def adjusted(tests: Mapping[Name, Sequence[float]], *, sequential: bool = False) -> dict[Name, float]:
    """Holm-adjusted two-sided p-values of the log ratios of each test; tests with a single pair are left out."""
    from ebbench.analysis.statistics import holm

    p_values = {name: p for name, logs in tests.items() if (p := two_sided_p(logs, sequential=sequential)) is not None}
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))


def pairs_needed(tests: int, alpha: float = ALPHA) -> int:
    """Least number of pairs with which any of ``tests`` tests can be significant: the smallest two-sided p, 2**(1-n),
    times ``tests`` must be at most ``alpha``."""
    return 1 + math.ceil(math.log2(max(tests, 1) / alpha))


def p_value(groups: Sequence[Group], policy: str, figure: Figure) -> float | None:
    """The adjusted p-value for ``policy`` against the baseline of ``groups``; None if no test is possible.

    A figure that is not in TESTED counts as one more test, adjusted by Bonferroni.
    """
    tests = {
        (group.policy, name): logs
        for group in _others(groups)
        for name, tested in TESTED.items()
        if (logs := log_ratios(group, baseline_group(groups), tested)) is not None
    }
    name = next((name for name, tested in TESTED.items() if tested is figure), None)
    if name is not None:
        return adjusted(tests, sequential=repeated_until_clear(groups)).get((policy, name))
    group = next(group for group in groups if group.policy == policy)
    logs = log_ratios(group, baseline_group(groups), figure)
    p = None if logs is None else two_sided_p(logs, sequential=repeated_until_clear(groups))
    return None if p is None else min(1.0, p * (len(tests) + 1))


def repeated_until_clear(groups: Sequence[Group]) -> bool:
    """Whether any of the runs was repeated until the answer was clear."""
    return any(summary.until_clear for group in groups for summary in group.summaries)


def deciding_figure(groups: Sequence[Group]) -> Figure:
    """The figure that decides: goodput if limits were given and met, request time if all policies keep up with the
    arrivals, else output throughput."""
    if all(group.mean(request_goodput) for group in groups):
        return request_goodput
    return request_time if all_keep_up(groups) else output_throughput


StopReason = Literal["", "shown", "equal", "copies"]


def stop_reason(groups: Sequence[Group]) -> StopReason:
    """Why more pairs would not help, "" if they may: every difference to the baseline is "shown", all are within TIE
    of it ("equal"), or the runs are "copies" of each other."""
    if any(group.copies for group in groups):
        return "copies"
    reasons = {stop_reason_of(groups, group) for group in _others(groups)}
    if not reasons or "" in reasons:
        return ""
    return "shown" if "shown" in reasons else "equal"


def stop_reason_of(groups: Sequence[Group], group: Group) -> StopReason:
    """Why more pairs would not help one policy: its difference to the baseline is "shown" or it is "equal" to it."""
    figure = deciding_figure(groups)
    logs = log_ratios(group, baseline_group(groups), figure)
    if logs is None or len(logs) < 2:
        return ""
    p = p_value(groups, group.policy, figure)
    if p is not None and p <= ALPHA:
        return "shown"
    from ebbench.analysis.statistics import confidence_sequence

    bounds = confidence_sequence(logs, 1 - ALPHA / (len(groups) - 1))
    return "equal" if -math.log1p(TIE) < bounds.low and bounds.high < math.log1p(TIE) else ""


def identical(group: Group, baseline: Group) -> bool:
    """Whether every pair of runs agrees in every tested figure: the two policies behaved identically."""
    logs = [log_ratios(group, baseline, figure) for figure in TESTED.values()]
    return all(ratios is not None and not any(ratios) for ratios in logs)


def pairs_for(logs: Sequence[float], tests: int, power: float = 0.8) -> int | None:
    """Approximate number of pairs that show a difference of the observed size and spread with probability ``power``.

    Normal approximation at the level alpha / tests, at least :func:`pairs_needed`. None if the spread is unknown or the
    observed difference is zero.
    """
    if len(logs) < 2 or not any(logs):
        return None
    mean = math.fsum(logs) / len(logs)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    if not mean:
        return None
    normal = NormalDist()
    level = normal.inv_cdf(1 - ALPHA / 2 / max(tests, 1))
    many = (
        (level + normal.inv_cdf(power)) * spread / mean
    ) ** 2 + level**2 / 2  # the second term corrects for few pairs
    return max(pairs_needed(tests), math.ceil(many))


def test_count(groups: Sequence[Group]) -> int:
    """Number of tests in a comparison of these policies."""
    return len(TESTED) * (len(groups) - 1)


def log_ratios(group: Group, baseline: Group, figure: Figure) -> list[float] | None:
    """Log of the figure over the baseline's, per pair of runs without copies; None if one is undefined."""
    pairs: dict[object, tuple[float | None, float | None]] = {}
    for place, (ours, theirs) in enumerate(paired_by_plan(group, baseline)):
        copied = _figures(ours.metrics) + _figures(theirs.metrics)
        pairs.setdefault(copied if ours.virtual else place, (figure(ours.metrics), figure(theirs.metrics)))
    if not pairs or any(not before or not after for after, before in pairs.values()):
        return None
    return [math.log(after / before) for after, before in pairs.values() if after and before]


def _others(groups: Sequence[Group]) -> list[Group]:
    baseline = baseline_group(groups)
    return [group for group in groups if group is not baseline]


def _figures(metrics: Metrics) -> tuple[float | None, ...]:
    return tuple(figure(metrics) for figure in TESTED.values())
