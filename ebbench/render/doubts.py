"""What a comparison leaves open: chance, and differences between the whole run and its steady window."""

from __future__ import annotations

from collections.abc import Sequence

from ebbench.analysis.compare.cases import ComparisonCase
from ebbench.analysis.compare.certainty import (
    TESTED,
    deciding_figure,
    log_ratios,
    pairs_for,
    pairs_needed,
    stop_reason,
    tests_of,
)
from ebbench.analysis.compare.policies import TIE, Group, baseline_of, differing, gain, steady_throughput
from ebbench.render.numbers import change

MOST_PAIRS = 100
"""Larger numbers of pairs are not suggested."""
SAME_FIGURES = (
    "The policies have the same figures in every pair of runs: under this load they behave identically, so repeats "
    "show no difference."
)
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
    """How many repeats would make the difference significant; empty if there are enough or nothing is to decide."""
    summaries = [summary for group in groups for summary in group.summaries]
    if not all(summary.valid and summary.metrics.completed for summary in summaries):
        return []
    if any(group.copies for group in groups) or all(one.load.replayed and one.virtual for one in summaries):
        return [NO_CHANCE]
    if stop_reason(groups):
        return []
    tests, figure, baseline = tests_of(groups), deciding_figure(groups), baseline_of(groups)
    known = [log_ratios(group, baseline, figure) or [] for group in groups if group is not baseline]
    if _same_figures(groups):
        return [SAME_FIGURES]
    made, fewest = min(map(len, known)), pairs_needed(tests)
    if made < 2:
        return [
            f"One run of each policy does not tell a difference from chance. {fewest} pairs of runs are the fewest "
            f"that can: `--repeats {fewest}`, or `--repeats auto` to measure until it is clear."
        ]
    asked = max((pairs_for(logs, tests) or fewest) for logs in known)
    if asked > MOST_PAIRS:
        return [
            f"{made} pairs of runs do not tell the difference from chance; at its size and spread more than "
            f"{MOST_PAIRS} would be needed, so take the policies as equal, or measure longer runs."
        ]
    return [
        f"{made} pairs of runs do not tell the difference from chance; at its size and spread about "
        f"{max(asked, made + 1)} would: `--repeats {max(asked, made + 1)}`, or `--repeats auto`."
    ]


def _same_figures(groups: Sequence[Group]) -> bool:
    """Whether every pair of runs agrees in every tested figure: the policies behaved identically."""
    baseline = baseline_of(groups)
    logs = [
        log_ratios(group, baseline, figure) for group in groups if group is not baseline for figure in TESTED.values()
    ]
    return all(found is not None and not any(found) for found in logs)


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
