"""Results in sentences: which policy is ahead, by how much, how certainly, why, and caveats.

A policy *wins* if the difference is shown (:mod:`ebbench.analysis.cases`), else it *is ahead*. ``show``,
the HTML page and ``compare`` use these sentences.

Pure functions from data to lines of text without markup, so that a name cannot inject styles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ebbench.analysis.cases import (
    ALPHA,
    MEASUREMENT,
    TIE,
    ComparisonCase,
    Figure,
    Gain,
    Group,
    all_keep_up,
    baseline_group,
    deciding_figure,
    differing,
    gain,
    identical,
    log_ratios,
    p_value,
    pairs_for,
    pairs_needed,
    ranked,
    request_goodput,
    request_time,
    steady_throughput,
    stop_reason_of,
    test_count,
    throughput,
    without_tokens,
)
from ebbench.analysis.explain import CrossoverFacts, DecisionFacts, Explanation, Spread, StepKind
from ebbench.analysis.summary import Summary, named
from ebbench.analysis.validity import by_policy, told_once
from ebbench.foreign.documents import texts_beside
from ebbench.grouping import by_key
from ebbench.records.warnings import KV_CACHE, Texts, counted, listed_seeds
from ebbench.render.numbers import change, count, duration_ms, listed, micros, percent, rate, spark
from vllm_eb.policy import known_policy

_TEXTS = texts_beside(__file__)
PAIRING: Texts = {
    **_TEXTS["pairing"],
    "runs_alone": lambda runs, side, seeds: (
        f"{counted(runs, 'run')} of the {side} left out: the other side has no run of {listed_seeds(seeds)}"
    ),
}
"""Runs and pairs that are not compared."""
SKIPPED, REASONS, SAID = _TEXTS["skipped"], _TEXTS["reasons"], _TEXTS["said"]
"""Why a figure is not compared; evaluations of EB+ by their codes; whole sentences."""
MOST_PAIRS = 100
"""Larger numbers of pairs are not suggested."""


def keep_in_mind(cases: Sequence[ComparisonCase]) -> list[str]:
    """What is missing, doubts, and caveats; a doubt that holds in some cases only begins with their titles."""
    members = by_key((line, case.title) for case in cases for line in doubts(case.groups))
    told = [line if len(titles) == len(cases) else f"{'; '.join(titles)}: {line}" for line, titles in members.items()]
    groups = [group for case in cases for group in case.groups]
    return [*missing(groups), *told, *caveats(groups)]


def doubts(groups: Sequence[Group]) -> list[str]:
    """Doubts about the comparison: whole run against steady window, and too few repeats."""
    baseline = baseline_group(groups)
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
    if any(group.copies for group in groups) or all(of_run.load.replayed and of_run.virtual for of_run in summaries):
        return [SAID["no_chance"]]
    baseline, figure = baseline_group(groups), deciding_figure(groups)
    others = [group for group in groups if group is not baseline]
    same = [group for group in others if identical(group, baseline)]
    unsettled = {
        group.policy: logs
        for group in others
        if group not in same and not stop_reason_of(groups, group) and (logs := log_ratios(group, baseline, figure))
    }
    lines = _more_pairs(unsettled, baseline.policy, test_count(groups))
    if not same:
        return lines
    alike = listed([baseline.policy, *(group.policy for group in same)])
    identically = "under this load they behave identically, so repeats show no difference."
    return [f"{alike} have the same figures in every pair of runs: {identically}", *lines]


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
    for policies in filter(None, (list(within), beyond)):
        made = min(len(unsettled[policy]) for policy in policies)
        enough = max(*within.values(), made + 1) if within else 0
        many = f"about {enough} would: `--repeats {enough}`, or `--repeats auto`."
        if policies is beyond:
            many = f"more than {MOST_PAIRS} would be needed, so take them as equal, or measure longer runs."
        lines.append(
            f"{listed(policies)} against {baseline}: {made} pairs of runs do not tell the difference from chance; at "
            f"its size and spread {many}"
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


NEGLIGIBLE = 0.001
"""Kinds of steps with a smaller share of the time are not mentioned."""


def _opponents(order: Sequence[Group]) -> tuple[Group, Group]:
    """The first group, and what it is compared with: the baseline, or the second where the first is that."""
    baseline = baseline_group(order)
    return order[0], baseline if order[0] is not baseline else order[1]


def verdicts(cases: Sequence[ComparisonCase]) -> list[tuple[str, list[str], bool]]:
    """For each case its title, its verdict, and whether the difference is shown.

    A single sentence if no case has a second policy.
    """
    if len(cases) > 1 and all(len(case.groups) == 1 for case in cases):
        if cases[0].apart == (MEASUREMENT,):
            return [("", [SAID["several_measurements"]], False)]
        named = ", ".join(cases[0].apart)
        return [("", [f"No winner: these runs differ in {named}, so their figures do not compare."], False)]
    return [(case.title, *verdict(case.groups)) for case in cases]


class Verdict(NamedTuple):
    """What is said of the policies of a case. ``shown``: the difference that is said first is significant."""

    lines: list[str]
    shown: bool = False


def _tokens(groups: Sequence[Group]) -> str:
    return "prompt tokens/s" if without_tokens(groups) else "output tokens/s"


def verdict(groups: Sequence[Group]) -> Verdict:
    """Which policy wins or is ahead, by how much over the baseline, how certainly, and the effect on latency.

    Goodput decides if limits were given, latency if all policies keep up with the arrivals, else output throughput.
    There is no winner if runs differ in more than their policies.
    """
    summaries = [summary for group in groups for summary in group.summaries]
    if unequal := differing(summaries):
        return Verdict([f"No winner: these runs differ in {', '.join(unequal)}, so their figures do not compare."])
    order = ranked(groups)
    if not any(summary.metrics.completed for summary in summaries):
        return Verdict(["No policy completed a request, so there is nothing to compare."])
    invalid = _policies_that_are(groups, lambda summary: not summary.valid, "INVALID")
    if len(groups) > 1 and invalid:
        return Verdict([f"No winner: {invalid}, and an INVALID run is never compared."])
    if len(groups) == 1 and order:
        (only,) = order
        estimated = " (an estimate)" if only.estimated else ""
        whole = f"{only.policy}: {rate(only.mean(throughput))} {_tokens(order)} over the whole run{estimated}."
        return Verdict([whole, *_worst_classes(groups)])
    if len(order) < len(groups):
        nothing = "without a completed request"
        idle = _policies_that_are(groups, lambda summary: throughput(summary.metrics) is None, nothing)
        return Verdict([f"No winner: {idle}, so there is no figure to compare."])
    decided = _within_limits(groups) or (_fastest(order) if all_keep_up(order) else None)
    if decided is not None:
        return Verdict([*decided.lines, *_limits(groups)], decided.shown)
    best, reference = _opponents(order)
    lead = gain(best, reference)
    if lead is None:
        return Verdict([f"No winner: {reference.policy} put out nothing in some run."])
    if lead.mean < TIE:
        tie = f"No winner: {best.policy} and {reference.policy} differ by {percent(lead.mean)}."
        return Verdict([tie, *_runners_up(order), *_limits(groups)])
    shown = is_shown(groups, best, reference, throughput)
    steady_gain = gain(best, reference, steady_throughput)
    inside = "" if steady_gain is None else f"; inside the steady window {change(steady_gain.mean)}"
    lines = [
        f"{_leads(best, shown)}: {rate(best.mean(throughput))} {_tokens(groups)} "
        f"over the whole run{_over(lead, reference)} ({rate(reference.mean(throughput))}){inside}."
    ]
    return Verdict([*lines, *_runners_up(order), _latencies(best, reference), *_limits(groups)], shown)


WINS, AHEAD = "wins", "is ahead"


def _leads(best: Group, shown: bool) -> str:
    return f"{best.policy} {WINS if shown else AHEAD}"


def is_shown(groups: Sequence[Group], best: Group, reference: Group, figure: Figure) -> bool:
    """Whether the difference between two policies, one of them the baseline, is significant."""
    compared = best if reference is baseline_group(groups) else reference
    p = p_value(groups, compared.policy, figure)
    return p is not None and p <= ALPHA


def _policies_that_are(groups: Sequence[Group], apart: Callable[[Summary], bool], word: str) -> str:
    """Names of policies with such runs, with the seeds if other runs are not; empty without any."""
    policies = []
    for group in groups:
        seeds = [str(summary.seed) for summary in group.summaries if apart(summary)]
        if seeds:
            of = "" if len(seeds) == len(group.seeds) else f" (seed {', '.join(seeds)})"
            policies.append(f"{group.policy}{of}")
    return f"{' and '.join(policies)} {'is' if len(policies) == 1 else 'are'} {word}" if policies else ""


def _fastest(order: Sequence[Group]) -> Verdict:
    def latency(group: Group) -> float:
        return group.mean(request_time) or float("inf")

    by_latency = sorted(order, key=latency)
    (best, reference), others = _opponents(by_latency), by_latency[1:]
    keeping_up = "All policies keep up with the arrivals, so latency decides"
    if latency(others[0]) / latency(best) - 1 < TIE:
        return Verdict([f"No winner: {keeping_up[0].lower()}{keeping_up[1:]}, and it is equal."])
    compared = ", ".join(f"{duration_ms(latency(group))} under {group.policy}" for group in others)
    shown = is_shown(order, best, reference, request_time)
    lines = [
        f"{_leads(best, shown)}: a request takes {duration_ms(latency(best))} (median) against {compared}. "
        f"{keeping_up}.",
        _latencies(best, others[0]),
    ]
    return Verdict(lines, shown)


def _limits(groups: Sequence[Group]) -> list[str]:
    """How many requests met the limits, per policy; empty without limits."""
    given = {summary.slo for group in groups for summary in group.summaries}
    if len(given) > 1 or not any(given):
        return []
    [slo] = given
    met = [f"{group.policy} {percent(group.mean(lambda m: m.slo_attainment))}" for group in groups]
    return [f"Requests within {slo} ms: {', '.join(met)}.", *_worst_classes(groups)]


def _worst_classes(groups: Sequence[Group]) -> list[str]:
    """The class of which the fewest requests met their limits, per policy; empty without classes or limits."""
    worst_by_policy = []
    for group in groups:
        of_classes = (item for summary in group.summaries for item in summary.classes.items())
        shares = by_key((name, share) for name, of in of_classes if (share := of.slo_attainment) is not None)
        known = {name: fmean(values) for name, values in shares.items()}
        if len(set(known.values())) > 1:
            worst = min(known, key=lambda name: known[name])
            worst_by_policy.append(f"{group.policy} " * (len(groups) > 1) + f"{named(worst)} {percent(known[worst])}")
    line = f"Worst class, by the share of its requests within limits: {', '.join(worst_by_policy)}."
    return [line] if worst_by_policy else []


def _within_limits(groups: Sequence[Group]) -> Verdict | None:
    """The policy with the most goodput; None without limits, if no request met them, or if all are equal."""
    order = ranked(groups, request_goodput)
    if len(order) < len(groups) or not order[0].mean(request_goodput):
        return None
    best, reference = _opponents(order)
    lead = gain(best, reference, request_goodput)
    if lead is not None and lead.mean < TIE:
        return None
    by = "" if lead is None else _over(lead, reference)
    theirs = f"{rate(reference.mean(request_goodput))}" + ("" if lead else f" under {reference.policy}")
    carried = ", ".join(f"{group.policy} {rate(group.mean(throughput))}" for group in order)
    shown = is_shown(groups, best, reference, request_goodput)
    lines = [
        f"{_leads(best, shown)}: {rate(best.mean(request_goodput))} requests/s within the limits{by} ({theirs}).",
        f"{_tokens(groups).capitalize()} over the whole run: {carried}.",
        _latencies(best, reference),
    ]
    return Verdict(lines, shown)


def _over(gain_over: Gain, reference: Group) -> str:
    spread = "" if gain_over.spread is None else f" (± {percent(gain_over.spread)} between seeds)"
    return f", {change(gain_over.mean)}{spread} over {reference.policy}"


def _runners_up(order: Sequence[Group]) -> list[str]:
    if len(order) < 3:
        return []
    best = order[0]
    behind = [(group, gain(group, best)) for group in order[1:]]
    shown = [f"{group.policy} {change(gain_over.mean)}" for group, gain_over in behind if gain_over is not None]
    return [f"Against {best.policy}: {', '.join(shown)}."]


def _latencies(best: Group, reference: Group) -> str:
    def pair(name: str) -> str:
        ours = best.mean(lambda m: getattr(m, name).median)
        theirs = reference.mean(lambda m: getattr(m, name).median)
        return f"{duration_ms(ours)} (median) against {duration_ms(theirs)}"

    if without_tokens([best, reference]):
        return f"Latency beside {reference.policy}: a request takes {pair('e2el')}."
    return f"Latency beside {reference.policy}: first token after {pair('ttft')}, time per token {pair('tpot')}."


def why(explanation: Explanation) -> list[str]:
    """How one run's time divides and what its controller decided; empty without recorded steps."""
    lines = []
    if explanation.steps is not None:
        kinds = sorted(explanation.steps.kinds.items(), key=lambda item: -item[1].share)
        parts = [_kind(name, kind) for name, kind in kinds if kind.share >= NEGLIGIBLE]
        lines.append(f"Time: {'; '.join(parts)} (means over {count(explanation.steps.steps)} steps).")
        if 0 < explanation.steps.eb_share < 1:
            line = f"Mode: exclusive batches {percent(explanation.steps.eb_share)} of the time, mixed the rest"
            switches = explanation.decisions.switches if explanation.decisions else ()
            if switches:
                first = switches[0]
                times = "once" if len(switches) == 1 else f"{len(switches)} times"
                when = "at" if len(switches) == 1 else "first at"
                line += f"; switched {times}, {when} {first.time_s:.1f} s ({REASONS.get(first.reason, first.reason)})"
            lines.append(f"{line}. Over time {spark(explanation.steps.eb_timeline)} (high = exclusive).")
    if explanation.decisions is not None:
        lines += _decisions(explanation.decisions, explanation.policy)
    elif explanation.steps is not None and getattr(known_policy(explanation.policy), "kind", "") == "cadence":
        lines.append(SAID["no_prompt_held"])
    return lines


def _kind(name: str, kind: StepKind) -> str:
    holds = [counted(round(kind.mean_decode_seqs), "sequence") + " decoding"] * (kind.mean_decode_seqs >= 0.5)
    holds += [f"{count(kind.mean_prefill_tokens)} prompt tokens"] * (kind.mean_prefill_tokens >= 0.5)
    load = f" with {' and '.join(holds)}" if holds else ""
    return f"{percent(kind.share)} in {name} steps of {duration_ms(1000 * kind.mean_s)}{load}"


def _decisions(facts: DecisionFacts, policy: str) -> list[str]:
    lines = []
    if facts.k is not None and facts.n_limit is not None and facts.theta is not None:
        lines.append(_threshold(facts, facts.k, facts.n_limit, facts.theta, policy))
    if facts.crossover is not None:
        lines.append(_crossover(facts.crossover))
    elif facts.evaluations:
        lines.append(f"Crossover: never evaluated ({REASONS.get(facts.last_reason, facts.last_reason)}).")
    return lines


def _threshold(facts: DecisionFacts, k: Spread, n_limit: Spread, theta: Spread, policy: str) -> str:
    """When a refill begins; as a share of the batch, so that batches that are never full are refilled too."""
    from vllm_eb.policies.eb import EstimatingSpec

    spec, star = known_policy(policy), "*" if facts.updates else ""
    by_share = isinstance(spec, EstimatingSpec)
    slots = f"k{star} = {_value(k)} of N{star} = {_value(n_limit)} slots"
    if by_share:
        share = theta.median if facts.updates else k.median / max(n_limit.median, 1)
        line = f"Refill: when the requests waiting are {100 * share:.0f} % of the batch they would join ({slots}"
    else:
        line = f"Refill: when {slots} are idle"
    if not facts.updates:
        unchanged = "the starting value: the run ended before the first update" if spec and spec.adapts else "fixed"
        return f"{line}{')' if by_share else ''}, {unchanged}."
    line += "; " if by_share else " ("
    line += f"theta* = {theta.median:.2f}"
    if facts.theta0 is not None and facts.p0 is not None:
        line += f", theta0 = {facts.theta0.median:.2f}, completion hazard p0 = {facts.p0.median:.2g} per step"
    times = "once" if facts.updates == 1 else f"{facts.updates} times"
    return f"{line}), recomputed {times}."


def _crossover(sides: CrossoverFacts) -> str:
    winner = "exclusive" if sides.lhs > sides.rhs + sides.margin else "mixed"
    return (
        f"Crossover: a token costs {micros(sides.lhs)} more in a mixed batch (left side), exclusive phases add "
        f"{micros(sides.rhs)} (right side), margin {micros(sides.margin)}: {winner} batches, at "
        f"{count(sides.n_obs)} active sequences and decode share r = {sides.r:.2f}; exclusive ahead in "
        f"{sides.eb_ahead} of {sides.evaluations} evaluations."
    )


def _value(spread: Spread) -> str:
    if spread.low == spread.high:
        return count(spread.median)
    return f"{count(spread.median)} ({count(spread.low)}–{count(spread.high)})"


def missing(groups: Sequence[Group]) -> list[str]:
    """Requests that did not complete, one line per run that has some."""
    lines = [(summary, accounting(summary)) for group in groups for summary in group.summaries]
    return [f"{summary.policy}: {line}" for summary, line in lines if line]


def accounting(summary: Summary) -> str | None:
    """Requests that did not complete, by status; None if all completed."""
    names = {
        "failed": "failed", "timed_out": "timed out", "cancelled": "cancelled", "abandoned": "abandoned",
        "never_sent": "never sent",
    }  # fmt: skip
    counts = summary.metrics.counts
    missed = [f"{count(counts[key])} {name}" for key, name in names.items() if counts[key]]
    if not missed:
        return None
    line = f"{count(summary.metrics.completed)} of {count(summary.metrics.planned)} completed; {', '.join(missed)}."
    if not counts["abandoned"]:
        return line
    prompts, outputs = summary.metrics.abandoned_input_tokens, summary.metrics.abandoned_output_tokens
    return (
        f"{line} Abandoned requests cost the server {count(outputs)} output tokens before the clients hung up, and "
        f"{count(prompts)} prompt tokens."
    )


def caveats(groups: Sequence[Group]) -> list[str]:
    """Warnings, with their policy unless all runs share them, and reasons for INVALID.

    Warnings that differ only in numbers are merged, with the range of each number.
    """
    summaries = [summary for group in groups for summary in group.summaries]
    texts_by_run = [[warning for warning in summary.warnings if warning.code != KV_CACHE] for summary in summaries]
    invalid = [
        f"INVALID {summary.policy} (seed {summary.seed}): {'; '.join(map(str, summary.reasons))}."
        for summary in summaries
        if not summary.valid
    ]
    return [*invalid, *_memory(groups), *told_once(texts_by_run, by_policy([summary.policy for summary in summaries]))]


def _memory(groups: Sequence[Group]) -> list[str]:
    """What a full KV cache cost, one line per policy, and one remedy for all."""
    policies_by_line: dict[str, list[str]] = {}
    remedy = ""
    for group in groups:
        told = [[warning for warning in summary.warnings if warning.code == KV_CACHE] for summary in group.summaries]
        for line in told_once(told, lambda _: "", lambda warning: warning.sentence):
            policies_by_line.setdefault(line, []).append(group.policy)
        remedy = next((warning.way_out for of_run in told for warning in of_run), remedy)
    lines = [
        line if len(names) == len(groups) else f"{', '.join(names)}: {line}" for line, names in policies_by_line.items()
    ]
    return [*lines[:-1], f"{lines[-1]} {remedy}"] if lines else []
