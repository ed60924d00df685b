"""Groups runs into cases: one case per load and environment. Every table, page and sentence uses this grouping.

Runs that differ in rate, concurrency, device, topology, workload or scheduler settings are not averaged, nor are two
measurements of the same plan; a policy is compared only with the baseline of its own case, and how certain the
difference is comes from paired tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist, fmean, geometric_mean, stdev
from typing import Any, Literal, TypeVar

from ebbench.analysis.environment import ENVIRONMENT, differing_names, usual_options
from ebbench.analysis.explain import Explanation, explain
from ebbench.analysis.metrics import Metrics, Slo
from ebbench.analysis.summary import Summary, several_phases, summarise
from ebbench.grouping import by_key
from ebbench.records.run import Run


@dataclass(frozen=True, repr=False)
class RunResult:
    """A run, and what is shown of it. ``phases``: a summary of each, if there are several."""

    run: Run
    summary: Summary
    explanation: Explanation
    phases: tuple[Summary, ...] = ()

    def __repr__(self) -> str:
        """What it is of, in one line: the whole tree is too long to read in a notebook."""
        summary = self.summary
        load = f"{summary.workload} under {summary.policy} on {summary.device}, seed {summary.seed}"
        return f"<RunResult: {load}{'' if summary.valid else ', INVALID'}, {self.run.path}>"

    @property
    def figures(self) -> dict[str, Any]:
        """The run's figures by the names of ``--json``: ``median_ttft_ms``, ``output_throughput``, ..."""
        return self.summary.to_dict()


def result_of(run: Run, slo: Slo | None = None, summary: Summary | None = None) -> RunResult:
    """Read what is shown of a run; ``slo`` None: by its own limits. ``summary``: if it was made already.

    Raises DataError for damaged files.
    """
    return RunResult(run, summary or summarise(run, slo), explain(run), several_phases(run, slo))


# Runs of one load in one environment, grouped by policy, with gains over the baseline.

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
    def estimated(self) -> bool:
        """Whether the client counted output tokens of a run, since the server did not."""
        return any(summary.estimated_answers for summary in self.summaries)

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
    """Relative difference to the baseline: geometric mean over the plans that both ran, and the ratios' deviation."""

    mean: float
    spread: float | None


def group_by_policy(summaries: Sequence[Summary], explanations: Sequence[Explanation] = ()) -> tuple[Group, ...]:
    """Groups in the order in which policies first appear. ``explanations`` is empty or has one entry per summary.

    Does not check that the runs have equal conditions; :func:`ebbench.analysis.cases.comparison_cases` does.
    """
    groups = []
    for policy in dict.fromkeys(summary.policy for summary in summaries):
        own = [place for place, summary in enumerate(summaries) if summary.policy == policy]
        own.sort(key=lambda place: summaries[place].seed)
        explained = tuple(explanations[place] for place in own) if explanations else ()
        groups.append(Group(policy, tuple(summaries[place] for place in own), explained))
    return tuple(groups)


def baseline_group(groups: Sequence[Group]) -> Group:
    """The group of ``v1``, else the first group."""
    return next((group for group in groups if group.policy == "v1"), groups[0])


def throughput(metrics: Metrics) -> float | None:
    """Output tokens/s over the whole run, the default figure for ranking; of prompts where answers have no tokens."""
    return metrics.input_throughput if _answers_lack_tokens(metrics) else metrics.output_throughput


def _answers_lack_tokens(metrics: Metrics) -> bool:
    return metrics.completed > 0 and not metrics.total_output_tokens


def without_tokens(groups: Sequence[Group]) -> bool:
    """Whether answers have no output tokens: embeddings and the like."""
    metrics = [summary.metrics for group in groups for summary in group.summaries if summary.metrics.completed]
    return bool(metrics) and all(map(_answers_lack_tokens, metrics))


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
    """As :func:`throughput`, inside the steady window."""
    if metrics.steady is None:
        return None
    both = _answers_lack_tokens(metrics)  # then all tokens are those of prompts
    return metrics.steady.total_token_throughput if both else metrics.steady.output_throughput


def gain(group: Group, baseline: Group, figure: Figure = throughput) -> Gain | None:
    """Relative gain of ``group`` over ``baseline`` in ``figure``, over the plans that both ran.

    The geometric mean of the ratios less 1, as in :mod:`ebbench.analysis.paired`: A over B and B over A are
    reciprocals.

    None if one of the runs is INVALID, no plan is common, or a figure is undefined.
    """
    if not (group.valid and baseline.valid):
        return None
    pairs = [(figure(ours.metrics), figure(theirs.metrics)) for ours, theirs in paired_by_plan(group, baseline)]
    ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs and theirs > 0]
    if not pairs or len(ratios) < len(pairs):
        return None
    measured = len(ratios) > 1 and not (group.copies and baseline.copies)
    mean = 0.0 if 0.0 in ratios else geometric_mean(ratios)
    return Gain(mean - 1, stdev(ratios) if measured else None)


def paired_by_plan(group: Group, baseline: Group) -> list[tuple[Summary, Summary]]:
    """Runs of the same plan, in the order of the group; a plan that was run several times gives several pairs."""
    theirs = by_key((summary.plan_hash, summary) for summary in baseline.summaries)
    pairs = []
    for summary in group.summaries:
        if waiting := theirs.get(summary.plan_hash):
            pairs.append((summary, waiting.pop(0)))
    return pairs


def ranked(groups: Sequence[Group], figure: Figure = throughput) -> list[Group]:
    """Groups that have the figure, best first."""
    scored = [(value, group) for group in groups if (value := group.mean(figure)) is not None]
    return [group for _, group in sorted(scored, key=lambda pair: -pair[0])]


def differing(summaries: Sequence[Summary]) -> list[str]:
    """Names of the settings other than the policy in which the runs differ, so that they are not comparable."""
    unlike = differing_names([summary.environment for summary in summaries])
    if len({summary.slo for summary in summaries if summary.slo}) > 1:
        unlike.append("limits (--goodput gives all runs the same)")
    seeds = by_key((summary.policy, summary.seed) for summary in summaries)
    several = len(set(map(frozenset, seeds.values()))) > 1
    mixed = len({(run.seed, run.plan_hash) for run in summaries}) > len({run.seed for run in summaries})
    return unlike + ["seeds"] * several + ["plan"] * mixed


T = TypeVar("T")

NAMES: Mapping[str, str] = {
    "max_num_seqs": "N =", "max_num_batched_tokens": "B =", "model": "", "device": "", "workload": "", "scenario": "",
    "sessions": "", "concurrency": "", "rate": "", "saturation rate": "", "burstiness": "", "speed": "", "ramp-up": "",
    "topology": "", "measurement": "", "priorities": "", "scheduling_policy": "scheduled by",
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
        return baseline_group(self.groups)

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """Summaries of all runs, grouped by policy."""
        return tuple(summary for group in self.groups for summary in group.summaries)


def comparison_cases(
    summaries: Sequence[Summary], explanations: Sequence[Explanation] = (), phases: Sequence[Summary] = ()
) -> tuple[ComparisonCase, ...]:
    """Cases in the order of their first runs; in each case the baseline comes first.

    ``explanations`` is empty or has one entry per summary.
    """
    labelled = zip(summaries, measurements(summaries), strict=True)
    conditions = [summary.conditions | ({MEASUREMENT: label} if label else {}) for summary, label in labelled]
    titled_places = partition(range(len(summaries)), conditions, [(run.seed, run.plan_hash) for run in summaries])
    firsts = [conditions[places[0]] for _, places in titled_places]
    unlike = differing_conditions(firsts)
    if len(firsts) > len({_key(of_case) for of_case in firsts}):
        unlike.append("plan")  # equal conditions were split by their plans
    cases = []
    for title, places in titled_places:
        own = [summaries[place] for place in places]
        directories = {summary.run_dir for summary in own}
        groups = group_by_policy(own, [explanations[place] for place in places] if explanations else ())
        groups = (baseline_group(groups), *_others(groups))
        own_phases = tuple(phase for phase in phases if phase.run_dir in directories)
        cases.append(ComparisonCase(title, groups, own_phases, tuple(unlike)))
    return tuple(cases)


def cases_of_results(results: Sequence[RunResult]) -> tuple[ComparisonCase, ...]:
    """The cases of runs that were read as a whole."""
    phases = [phase for result in results for phase in result.phases]
    return comparison_cases([result.summary for result in results], [result.explanation for result in results], phases)


MEASUREMENT = "measurement"
"""Condition that tells apart measurements of one plan: last week's and this week's are not repeats to average."""


def measurements(summaries: Sequence[Summary]) -> list[str]:
    """For each run the measurement it belongs to, as directory and date; empty where there is only one.

    Runs belong to several measurements if a policy ran the same plan with the same seed more than once under the same
    conditions. Those of one parent directory are one measurement, until a run of it repeats an earlier one.
    """
    labels = [""] * len(summaries)
    for places in _alike([summary.conditions for summary in summaries]):
        if len({_policy_seed_plan(summaries[place]) for place in places}) == len(places):
            continue
        rounds = _rounds(places, summaries)
        named = _places_and_dates([[summaries[place] for place in part] for part in rounds])
        for part, label in zip(rounds, named, strict=True):
            for place in part:
                labels[place] = label
    return labels


def _key(conditions: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(conditions.items()))


def _alike(conditions: Sequence[Mapping[str, str]]) -> Iterable[list[int]]:
    """The places of equal conditions, one list for each."""
    return by_key((_key(of_run), place) for place, of_run in enumerate(conditions)).values()


def _policy_seed_plan(summary: Summary) -> tuple[str, int, str]:
    return summary.policy, summary.seed, summary.plan_hash


def _rounds(places: Sequence[int], summaries: Sequence[Summary]) -> list[list[int]]:
    """``places`` by measurement, the oldest first in each directory."""
    rounds: list[list[int]] = []
    latest: dict[Path, tuple[list[int], set[tuple[str, int, str]]]] = {}  # round of a directory, and what is in it
    for place in sorted(places, key=lambda place: summaries[place].anchor_unix_ns):
        parent, key = Path(summaries[place].run_dir).parent, _policy_seed_plan(summaries[place])
        if parent not in latest or key in latest[parent][1]:
            latest[parent] = [], set()
            rounds.append(latest[parent][0])
        members, known = latest[parent]
        members.append(place)
        known.add(key)
    return rounds


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


def partition(
    items: Sequence[T], conditions: Sequence[Mapping[str, str]], plans: Sequence[tuple[int, str]]
) -> list[tuple[str, list[T]]]:
    """Split ``items`` into lists with equal conditions, each with the words that distinguish it from the others.

    ``conditions`` and ``plans`` (seed and hash) have one entry per item. If one seed has several plans under equal
    conditions, an unrecorded condition differed, and every plan becomes a list of its own.
    """
    split = [part for places in _alike(conditions) for part in _by_plan(places, plans)]
    split.sort(key=lambda part: part[0][0])
    titles = _titles([(conditions[places[0]], plan) for places, plan in split])
    return [(title, [items[place] for place in places]) for title, (places, _) in zip(titles, split, strict=True)]


def _by_plan(places: list[int], plans: Sequence[tuple[int, str]]) -> list[tuple[list[int], str]]:
    """``places`` unchanged, or, if a seed has several plans, one part per plan with the plan's hash."""
    if len({plans[place] for place in places}) == len({plans[place][0] for place in places}):
        return [(places, "")]
    return [(own, plan[:8]) for plan, own in by_key((plans[place][1], place) for place in places).items()]


def differing_conditions(conditions: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of the conditions in which the cases differ."""
    names = dict.fromkeys(name for of_run in conditions for name in of_run)
    return [name for name in names if len({of_run.get(name, "") for of_run in conditions}) > 1]


def _titles(cases: Sequence[tuple[Mapping[str, str], str]]) -> list[str]:
    """A title per case, from its conditions and plan.

    Conditions that a case does not record are left out if the titles stay distinct without them.
    """
    if len(cases) < 2:
        return [""] * len(cases)
    names = differing_conditions([conditions for conditions, _ in cases])
    for complete in (False, True):
        titles = [_title(conditions, names, plan, complete=complete) for conditions, plan in cases]
        if all(titles) and len(set(titles)) == len(titles):
            break
    return titles


def _title(conditions: Mapping[str, str], apart: Sequence[str], plan: str, *, complete: bool) -> str:
    words = []
    for name in apart:
        text = conditions.get(name, "")
        if text and text != "None":
            is_number = name not in ENVIRONMENT and text.isascii() and text.isdigit()  # a driver or a host is none
            shown = f"{int(text):,}" if is_number else text
            words.append(f"{NAMES.get(name, name)} {shown}".strip())
        elif complete:
            usual = usual_options().get(name)
            words.append(f"{name} {'not recorded' if usual is None else usual}")
    return ", ".join([*words, *([f"plan {plan}"] if plan else [])])


def by_class(case: ComparisonCase) -> list[tuple[str, tuple[Group, ...]]]:
    """The classes of requests of a case, each with its groups."""
    names = dict.fromkeys(name for summary in case.summaries for name in summary.classes)
    return [
        (name, group_by_policy([of_run.of_class(name) for of_run in case.summaries if name in of_run.classes]))
        for name in names
    ]


def by_phase(case: ComparisonCase) -> list[tuple[str, tuple[Group, ...]]]:
    """The phases of a case in order, each with its groups."""
    names = dict.fromkeys(summary.phase for summary in case.phases)
    return [(name, group_by_policy([of_phase for of_phase in case.phases if of_phase.phase == name])) for name in names]


# Whether policies differ significantly: the one rule behind every table, page and sentence that says "wins".
#
# A difference is *shown* if the Holm-adjusted p-value of a two-sided sign-flip test over pairs of runs of the same plan
# is at most ALPHA. The tests of a comparison are throughput and the median latencies of every policy against the
# baseline. Copies (repeats in virtual time with equal figures) count once: they are not new measurements.
#
# Runs repeated until the answer was clear (`--repeats auto`) were tested after every pair, which makes a fixed-n test
# wrong too often. They get p-values that hold at every test (`ebbench.analysis.statistics`).

ALPHA = 0.05
"""Probability of calling any difference shown if there is none, over all tests of a comparison."""

TESTED: Mapping[str, Figure] = {
    "output_throughput": throughput,
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
    from ebbench.analysis.statistics import anytime_p, sign_flip_p

    one_sided = anytime_p if sequential else sign_flip_p
    return min(1.0, 2 * min(one_sided(logs), one_sided([-value for value in logs])))


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
    return request_time if all_keep_up(groups) else throughput


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
    from ebbench.analysis.statistics import spread_of

    if not (mean := math.fsum(logs) / len(logs)):
        return None
    normal = NormalDist()
    level = normal.inv_cdf(1 - ALPHA / 2 / max(tests, 1))
    # The second term corrects for few pairs.
    many = ((level + normal.inv_cdf(power)) * spread_of(logs) / mean) ** 2 + level**2 / 2
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
