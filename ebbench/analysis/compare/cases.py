"""Groups runs into cases: one case per load and environment. Every table, page and sentence uses this grouping.

Runs that differ in rate, concurrency, device, topology, workload or scheduler settings are not averaged, nor are two
measurements of the same plan; a policy is compared only with the baseline of its own case.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from ebbench.analysis.compare.policies import Group, baseline_of, group_by_policy
from ebbench.analysis.explain import Explanation
from ebbench.analysis.summary import Summary

T = TypeVar("T")

NAMES: Mapping[str, str] = {
    "max_num_seqs": "N =", "max_num_batched_tokens": "B =", "model": "", "device": "", "workload": "", "scenario": "",
    "sessions": "", "concurrency": "", "rate": "", "saturation rate": "", "burstiness": "", "speed": "", "ramp-up": "",
    "topology": "", "measurement": "",
}  # fmt: skip
"""Words before a value in the title of a case; other conditions are named as they are stored."""


@dataclass(frozen=True)
class ComparisonCase:
    """The runs of one load in one environment, one group per policy.

    ``title`` names what distinguishes the case from the other cases (empty for a single case); ``apart`` has the names
    of these conditions. ``phases`` holds a summary per phase of each run whose plan has several phases.
    """

    title: str
    groups: tuple[Group, ...]
    phases: tuple[Summary, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def baseline(self) -> Group:
        """The group that the others are compared with."""
        return baseline_of(self.groups)

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """Summaries of all runs, grouped by policy."""
        return tuple(summary for group in self.groups for summary in group.summaries)


def cases_of(
    summaries: Sequence[Summary], explanations: Sequence[Explanation] = (), phases: Sequence[Summary] = ()
) -> tuple[ComparisonCase, ...]:
    """Cases in the order of their first runs; in each case the baseline comes first.

    ``explanations`` is empty or has one entry per summary.
    """
    labels = measurements(summaries)
    conditions = [
        {**summary.conditions, **({MEASUREMENT: label} if label else {})}
        for summary, label in zip(summaries, labels, strict=True)
    ]
    held = partition(range(len(summaries)), conditions, [(summary.seed, summary.plan_hash) for summary in summaries])
    first_of = [places[0] for _, places in held]
    apart = differing_conditions([conditions[place] for place in first_of])
    if len(held) > len({tuple(sorted(conditions[place].items())) for place in first_of}):
        apart.append("plan")  # equal conditions were split by their plans
    cases = []
    for title, places in held:
        own = [summaries[place] for place in places]
        directories = {summary.run_dir for summary in own}
        groups = _baseline_first(
            group_by_policy(own, [explanations[place] for place in places] if explanations else ())
        )
        cases.append(
            ComparisonCase(
                title, groups, tuple(phase for phase in phases if phase.run_dir in directories), tuple(apart)
            )
        )
    return tuple(cases)


MEASUREMENT = "measurement"
"""Condition that tells apart measurements of one plan: last week's and this week's are not repeats to average."""


def measurements(summaries: Sequence[Summary]) -> list[str]:
    """For each run the measurement it belongs to, as directory and date; empty where there is only one.

    Runs belong to several measurements if a policy ran the same plan with the same seed more than once under the same
    conditions. Those of one parent directory are one measurement, until a run of it repeats an earlier one.
    """
    members: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, summary in enumerate(summaries):
        members.setdefault(tuple(sorted(summary.conditions.items())), []).append(place)
    labels = [""] * len(summaries)
    for places in members.values():
        if len({_asked(summaries[place]) for place in places}) == len(places):
            continue
        rounds = _rounds(places, summaries)
        named = _places_and_dates([[summaries[place] for place in part] for part in rounds])
        for part, label in zip(rounds, named, strict=True):
            for place in part:
                labels[place] = label
    return labels


def _asked(summary: Summary) -> tuple[str, int, str]:
    """What a run of another measurement has in common with this one."""
    return summary.policy, summary.seed, summary.plan_hash


def _rounds(places: Sequence[int], summaries: Sequence[Summary]) -> list[list[int]]:
    """``places`` by measurement, the oldest first in each directory."""
    rounds: dict[tuple[Path, int], list[int]] = {}
    for place in sorted(places, key=lambda place: summaries[place].anchor_unix_ns):
        parent = Path(summaries[place].run_dir).parent
        number = next(
            number
            for number in itertools.count()
            if (parent, number + 1) not in rounds
            and _asked(summaries[place]) not in {_asked(summaries[one]) for one in rounds.get((parent, number), ())}
        )
        rounds.setdefault((parent, number), []).append(place)
    return list(rounds.values())


def _places_and_dates(rounds: Sequence[Sequence[Summary]]) -> list[str]:
    """Per measurement its directory, which is the run's own if it is alone, and when it began; all different."""
    places = [Path(runs[0].run_dir).resolve() for runs in rounds]
    parts = [(place if len(runs) == 1 else place.parent).parts for place, runs in zip(places, rounds, strict=True)]
    begun = [datetime.fromtimestamp(min(run.anchor_unix_ns for run in runs) / 1e9, UTC) for runs in rounds]
    labels: list[str] = []
    for length in range(1, max(map(len, parts)) + 1):
        ends = zip(parts, begun, strict=True)
        labels = [f"{'/'.join(part[-length:])} of {when:%Y-%m-%d %H:%M}" for part, when in ends]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label}, number {number}" for number, label in enumerate(labels, start=1)]


def _baseline_first(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    baseline = baseline_of(groups)
    return (baseline, *(group for group in groups if group is not baseline))


def partition(
    items: Sequence[T],
    conditions: Sequence[Mapping[str, str]],
    plans: Sequence[tuple[int, str]],
    allowed: Sequence[str] = (),
) -> list[tuple[str, list[T]]]:
    """Split ``items`` into lists with equal conditions, each with the words that distinguish it from the others.

    ``conditions`` and ``plans`` (seed and hash) have one entry per item; ``allowed`` names conditions that may differ.
    If one seed has several plans under equal conditions, an unrecorded condition differed, and every plan becomes a
    list of its own.
    """
    compared = [{name: text for name, text in each.items() if name not in allowed} for each in conditions]
    members: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, each in enumerate(compared):
        members.setdefault(tuple(sorted(each.items())), []).append(place)
    split = [part for places in members.values() for part in _by_plan(places, plans)]
    split.sort(key=lambda part: part[0][0])
    titles = _titles([(compared[places[0]], plan) for places, plan in split])
    return [(title, [items[place] for place in places]) for title, (places, _) in zip(titles, split, strict=True)]


def _by_plan(places: list[int], plans: Sequence[tuple[int, str]]) -> list[tuple[list[int], str]]:
    """``places`` unchanged, or, if a seed has several plans, one part per plan with the plan's hash."""
    if len({plans[place] for place in places}) == len({plans[place][0] for place in places}):
        return [(places, "")]
    parts: dict[str, list[int]] = {}
    for place in places:
        parts.setdefault(plans[place][1], []).append(place)
    return [(own, plan[:8]) for plan, own in parts.items()]


def differing_conditions(conditions: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of the conditions in which the cases differ."""
    names = dict.fromkeys(name for each in conditions for name in each)
    return [name for name in names if len({each.get(name, "") for each in conditions}) > 1]


def _titles(cases: Sequence[tuple[Mapping[str, str], str]]) -> list[str]:
    """A title per case, from its conditions and plan.

    Conditions that a case does not record are left out if the titles stay distinct without them.
    """
    if len(cases) < 2:
        return [""] * len(cases)
    apart = differing_conditions([conditions for conditions, _ in cases])
    for complete in (False, True):
        titles = [_title(conditions, apart, plan, complete=complete) for conditions, plan in cases]
        if all(titles) and len(set(titles)) == len(titles):
            break
    return titles


def _title(conditions: Mapping[str, str], apart: Sequence[str], plan: str, *, complete: bool) -> str:
    words = [_worded(name, conditions.get(name, ""), complete=complete) for name in apart]
    return ", ".join([*(word for word in words if word), *([f"plan {plan}"] if plan else [])])


def _worded(name: str, text: str, *, complete: bool) -> str:
    if not text or text == "None":
        return f"{name} not recorded" if complete else ""
    return f"{NAMES.get(name, name)} {text}".strip()


def by_phase(case: ComparisonCase) -> list[tuple[str, tuple[Group, ...]]]:
    """The phases of a case in order, each with its groups."""
    names = dict.fromkeys(summary.phase for summary in case.phases)
    return [(name, group_by_policy([one for one in case.phases if one.phase == name])) for name in names]
