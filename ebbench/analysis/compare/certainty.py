"""How surely policies differ: one rule for every table, page and sentence that says "wins".

A difference is *shown* when the Holm-adjusted p-value of a two-sided sign-flip test over pairs of runs of the same plan
is at most ALPHA. The tests of a comparison are throughput and the median latencies of every policy against the
baseline. Copies (repeats in virtual time that agree in every figure) count once: they were not measured again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from ebbench.analysis.compare.policies import Figure, Group, baseline_of, output_throughput, paired_by_plan
from ebbench.analysis.metrics import Metrics
from ebbench.analysis.statistics import holm, sign_flip_p

ALPHA = 0.05
"""Chance of calling any difference shown where there is none, over all tests of a comparison."""

TESTED: Mapping[str, Figure] = {
    "output_throughput": output_throughput,
    "median_ttft_ms": lambda metrics: metrics.ttft.median,
    "median_tpot_ms": lambda metrics: metrics.tpot.median,
}
"""The figures that are tested, by their names in :mod:`ebbench.analysis.gate`."""

Name = TypeVar("Name", bound=Hashable)


def two_sided_p(logs: Sequence[float]) -> float | None:
    """P-value of "the mean log ratio is zero"; None for a single pair, which says nothing about chance."""
    if len(logs) < 2:
        return None
    return min(1.0, 2 * min(sign_flip_p(logs), sign_flip_p([-value for value in logs])))


def adjusted(tests: Mapping[Name, Sequence[float]]) -> dict[Name, float]:
    """Holm-adjusted two-sided p-values of the log ratios of each test; tests with a single pair are left out."""
    found = {name: p for name, logs in tests.items() if (p := two_sided_p(logs)) is not None}
    return dict(zip(found, holm(list(found.values())), strict=True))


def pairs_needed(tests: int, alpha: float = ALPHA) -> int:
    """Pairs from which on any of so many tests can be shown: the smallest two-sided p, 2**(1-n), times the tests must
    fall to ``alpha``."""
    return 1 + math.ceil(math.log2(max(tests, 1) / alpha))


def p_of(groups: Sequence[Group], policy: str, figure: Figure) -> float | None:
    """The adjusted p-value for ``policy`` against the baseline of ``groups``; None where no test is possible.

    A figure that is not among TESTED is one test more than those, adjusted by Bonferroni.
    """
    tests = {
        (group.policy, name): logs
        for group in _others(groups)
        for name, tested in TESTED.items()
        if (logs := log_ratios(group, baseline_of(groups), tested)) is not None
    }
    name = next((name for name, tested in TESTED.items() if tested is figure), None)
    if name is not None:
        return adjusted(tests).get((policy, name))
    group = next(group for group in groups if group.policy == policy)
    logs = log_ratios(group, baseline_of(groups), figure)
    p = None if logs is None else two_sided_p(logs)
    return None if p is None else min(1.0, p * (len(tests) + 1))


def tests_of(groups: Sequence[Group]) -> int:
    """How many tests a comparison of these policies is."""
    return len(TESTED) * (len(groups) - 1)


def log_ratios(group: Group, baseline: Group, figure: Figure) -> list[float] | None:
    """Log of the figure over the baseline's, one per pair of runs that is no copy; None where one is undefined."""
    pairs: dict[object, tuple[float | None, float | None]] = {}
    for place, (ours, theirs) in enumerate(paired_by_plan(group, baseline)):
        copied = _figures(ours.metrics) + _figures(theirs.metrics)
        pairs.setdefault(copied if ours.virtual else place, (figure(ours.metrics), figure(theirs.metrics)))
    if not pairs or any(not before or not after for after, before in pairs.values()):
        return None
    return [math.log(after / before) for after, before in pairs.values() if after and before]


def _others(groups: Sequence[Group]) -> list[Group]:
    baseline = baseline_of(groups)
    return [group for group in groups if group is not baseline]


def _figures(metrics: Metrics) -> tuple[float | None, ...]:
    return tuple(figure(metrics) for figure in TESTED.values())
