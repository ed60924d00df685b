"""What a comparison leaves open: chance, and differences between the whole run and its steady window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ebbench.analysis.compare.cases import ComparisonCase
from ebbench.analysis.compare.certainty import (
    deciding_figure,
    identical,
    log_ratios,
    pairs_for,
    pairs_needed,
    stop_reason_of,
    tests_of,
)
from ebbench.analysis.compare.policies import TIE, Group, baseline_of, differing, gain, steady_throughput
from ebbench.render.numbers import change, listed

MOST_PAIRS = 100
"""Larger numbers of pairs are not suggested."""
NO_CHANCE = (
    "Repeats with other seeds give the same figures here: lengths and arrivals are fixed (a replayed trace, fixed "
    "lengths) and time is virtual, so no randomness is left. Measure another trace or other requests instead."
)
"""Shown instead of advice to repeat if every seed gives the same run."""


def doubts_of(cases: Sequence[ComparisonCase]) -> list[str]:
    """The doubts of all cases; a doubt that holds in some cases only begins with their titles."""
    members: dict[str, list[str]] = {}
    for case in cases:
        for line in doubts(case.groups):
            members.setdefault(line, []).append(case.title)
    return [line if len(titles) == len(cases) else f"{'; '.join(titles)}: {line}" for line, titles in members.items()]


def doubts(groups: Sequence[Group]) -> list[str]:
    """Doubts about the comparison: whole run against steady window, and too few repeats."""
    baseline = baseline_of(groups)
    others = [group for group in groups if group is not baseline]
    lines = [line for group in others if (line := _ends_decide(group, baseline))]
    if others and not differing([summary for group in groups for summary in group.summaries]):
        lines += _repeat(groups)
    return lines


def _repeat(groups: Sequence[Group]) -> list[str]:
    """Which policies behave like the baseline, and how many repeats would tell the others from it; empty if all are
    told apart or nothing is to decide."""
    summaries = [summary for group in groups for summary in group.summaries]
    if not all(summary.valid and summary.metrics.completed for summary in summaries):
        return []
    if any(group.copies for group in groups) or all(one.load.replayed and one.virtual for one in summaries):
        return [NO_CHANCE]
    baseline, figure = baseline_of(groups), deciding_figure(groups)
    others = [group for group in groups if group is not baseline]
    same = [group for group in others if identical(group, baseline)]
    unsettled = {
        group.policy: logs
        for group in others
        if group not in same and not stop_reason_of(groups, group) and (logs := log_ratios(group, baseline, figure))
    }
    lines = [_identical([baseline.policy, *(group.policy for group in same)])] if same else []
    return lines + _more_pairs(unsettled, baseline.policy, tests_of(groups))


def _identical(policies: Sequence[str]) -> str:
    return (
        f"{listed(policies)} have the same figures in every pair of runs: under this load they behave identically, so "
        "repeats show no difference."
    )


def _more_pairs(unsettled: Mapping[str, Sequence[float]], baseline: str, tests: int) -> list[str]:
    """How many pairs would tell these policies, given by their log ratios, from the baseline."""
    fewest = pairs_needed(tests)
    if any(len(logs) < 2 for logs in unsettled.values()):
        return [
            f"One run of each policy does not tell a difference from chance. {fewest} pairs of runs are the fewest "
            f"that can: `--repeats {fewest}`, or `--repeats auto` to measure until it is clear."
        ]
    asked = {policy: pairs_for(logs, tests) for policy, logs in unsettled.items()}
    within = {policy: pairs for policy, pairs in asked.items() if pairs is not None and pairs <= MOST_PAIRS}
    beyond = [policy for policy in asked if policy not in within]
    lines = []
    if within:
        made = min(len(unsettled[policy]) for policy in within)
        enough = max(*within.values(), made + 1)
        lines.append(
            f"{listed(list(within))} against {baseline}: {made} pairs of runs do not tell the difference from chance; "
            f"at its size and spread about {enough} would: `--repeats {enough}`, or `--repeats auto`."
        )
    if beyond:
        made = min(len(unsettled[policy]) for policy in beyond)
        lines.append(
            f"{listed(beyond)} against {baseline}: {made} pairs of runs do not tell the difference from chance; at its "
            f"size and spread more than {MOST_PAIRS} would be needed, so take them as equal, or measure longer "
            "runs."
        )
    return lines


def _ends_decide(group: Group, baseline: Group) -> str | None:
    """A sentence if the whole run and its steady window clearly prefer different policies."""
    whole, steady = gain(group, baseline), gain(group, baseline, steady_throughput)
    if whole is None or steady is None or min(abs(whole.mean), abs(steady.mean)) < TIE:
        return None
    if (whole.mean > 0) == (steady.mean > 0):
        return None
    longer = "" if group.summaries[0].load.replayed else " (--num-prompts)"
    return (
        f"{group.policy}: {change(whole.mean)} over the whole run but {change(steady.mean)} while it is steady. "
        f"Filling and draining decide this run; a longer one{longer} says what lasts."
    )
