"""Runs of one load in one environment, grouped by policy, with gains over the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ebbench.analysis.environment import differing_names
from ebbench.analysis.explain import Explanation
from ebbench.analysis.metrics import Metrics
from ebbench.analysis.summary import Summary

Figure = Callable[[Metrics], float | None]

TIE = 0.005
"""Policies within this relative difference are called equal: too small to act on."""


@dataclass(frozen=True)
class Group:
    """All runs of one policy, one per seed, in the order of the seeds. ``explanations`` is empty or has one per run."""

    policy: str
    summaries: tuple[Summary, ...]
    explanations: tuple[Explanation, ...]

    def values(self, figure: Figure) -> list[float] | None:
        """A figure of every run; None if a run lacks it."""
        values = [figure(summary.metrics) for summary in self.summaries]
        return None if any(value is None for value in values) else [v for v in values if v is not None]

    def mean(self, figure: Figure) -> float | None:
        """Mean over the runs."""
        values = self.values(figure)
        return fmean(values) if values else None

    def spread(self, figure: Figure) -> float | None:
        """Sample standard deviation over the runs; None for a single run and for copies."""
        values = self.values(figure)
        return stdev(values) if values and len(values) > 1 and not self.copies else None

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each run."""
        return tuple(summary.seed for summary in self.summaries)

    @property
    def copies(self) -> bool:
        """Whether several runs agree in every figure, as repeats in virtual time do if the seed changes nothing."""
        first, *others = self.summaries
        return bool(others) and all(other.metrics == first.metrics for other in others)

    @property
    def valid(self) -> bool:
        """Whether every run is valid."""
        return all(summary.valid for summary in self.summaries)


@dataclass(frozen=True)
class Gain:
    """Relative difference to the baseline: mean over the plans that both ran, and its standard deviation."""

    mean: float
    spread: float | None


def group_by_policy(summaries: Sequence[Summary], explanations: Sequence[Explanation] = ()) -> tuple[Group, ...]:
    """Groups in the order in which policies first appear. ``explanations`` is empty or has one entry per summary.

    Does not check that the runs have equal conditions; :func:`ebbench.analysis.compare.cases.cases_of` does.
    """
    policies = dict.fromkeys(summary.policy for summary in summaries)
    return tuple(_group(policy, summaries, explanations) for policy in policies)


def _group(policy: str, summaries: Sequence[Summary], explanations: Sequence[Explanation]) -> Group:
    own = [place for place, summary in enumerate(summaries) if summary.policy == policy]
    own.sort(key=lambda place: summaries[place].seed)
    explained = tuple(explanations[place] for place in own) if explanations else ()
    return Group(policy, tuple(summaries[place] for place in own), explained)


def baseline_of(groups: Sequence[Group]) -> Group:
    """The group of ``v1``, else the first group."""
    return next((group for group in groups if group.policy == "v1"), groups[0])


def output_throughput(metrics: Metrics) -> float | None:
    """Output tokens/s over the whole run, the default figure for ranking."""
    return metrics.output_throughput


def request_goodput(metrics: Metrics) -> float | None:
    """Requests/s that met the limits; None if no limits were given."""
    return metrics.request_goodput


def request_time(metrics: Metrics) -> float | None:
    """Median end-to-end latency in ms."""
    return metrics.e2el.median


def all_keep_up(groups: Sequence[Group]) -> bool:
    """Whether requests arrive at fixed times and all policies carry the same load in the steady window.

    The arrivals then determine the throughput, so that latency decides.
    """
    if not all(summary.open_loop for group in groups for summary in group.summaries):
        return False
    return alike([group.mean(steady_throughput) for group in groups])


def alike(rates: Sequence[float | None]) -> bool:
    """Whether all rates are known and within TIE of each other."""
    known = [value for value in rates if value]
    return len(known) == len(rates) and max(known) / min(known) - 1 < TIE


def steady_throughput(metrics: Metrics) -> float | None:
    """Output tokens/s inside the steady window."""
    return metrics.steady.output_throughput if metrics.steady else None


def gain(group: Group, baseline: Group, figure: Figure = output_throughput) -> Gain | None:
    """Relative gain of ``group`` over ``baseline`` in ``figure``, over the plans that both ran.

    None if one of the runs is INVALID, no plan is common, or a figure is undefined.
    """
    if not (group.valid and baseline.valid):
        return None
    pairs = paired_by_plan(group, baseline)
    ours, theirs = [figure(one.metrics) for one, _ in pairs], [figure(other.metrics) for _, other in pairs]
    if not pairs or None in ours or any(not value or value <= 0 for value in theirs):
        return None
    ratios = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]  # type: ignore[operator]  # no None left
    measured = len(ratios) > 1 and not (group.copies and baseline.copies)
    return Gain(fmean(ratios), stdev(ratios) if measured else None)


def paired_by_plan(group: Group, baseline: Group) -> list[tuple[Summary, Summary]]:
    """Runs of the same plan, in the order of the group; a plan that was run several times gives several pairs."""
    theirs: dict[str, list[Summary]] = {}
    for summary in baseline.summaries:
        theirs.setdefault(summary.plan_hash, []).append(summary)
    pairs = []
    for summary in group.summaries:
        if waiting := theirs.get(summary.plan_hash):
            pairs.append((summary, waiting.pop(0)))
    return pairs


def ranked(groups: Sequence[Group], figure: Figure = output_throughput) -> list[Group]:
    """Groups that have the figure, best first."""
    scored = [(value, group) for group in groups if (value := group.mean(figure)) is not None]
    return [group for _, group in sorted(scored, key=lambda pair: -pair[0])]


def differing(summaries: Sequence[Summary]) -> list[str]:
    """Names of the settings other than the policy in which the runs differ, so that they are not comparable."""
    found = differing_names([summary.environment for summary in summaries])
    if len({summary.slo for summary in summaries if summary.slo}) > 1:
        found.append("limits (--goodput gives all runs the same)")
    return found + _differing_plans(summaries)


def _differing_plans(summaries: Sequence[Summary]) -> list[str]:
    """Names of seeds or plans that not all policies ran."""
    plans: dict[str, set[tuple[int, str]]] = {}
    for summary in summaries:
        plans.setdefault(summary.policy, set()).add((summary.seed, summary.plan_hash))
    several = len({frozenset(seed for seed, _ in held) for held in plans.values()}) > 1
    found = set().union(*plans.values())
    mixed = len(found) > len({seed for seed, _ in found})
    return ["seeds"] * several + ["plan"] * mixed
