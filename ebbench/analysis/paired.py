"""Compares runs paired by plan: how much better or worse each policy is than the baseline, with confidence intervals.

Runs of different load or environment are different cases (:mod:`ebbench.analysis.cases`), each with its own
comparison.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean

from ebbench.analysis.cases import ALPHA, TIE, alike, pairs_needed, partition, two_sided_p
from ebbench.analysis.environment import differences, listed, remedy
from ebbench.analysis.statistics import confidence_sequence, detectable_loss, holm, paired_t, spread_of
from ebbench.analysis.units import DRAFTS, FIGURES, GateUnit, load_units
from ebbench.analysis.verdict import (
    Pair,
    drafts_apart,
    figures_by_class,
    gated_by_default,
    left_out,
    measured_somewhere,
    pair_units,
    paired_losses,
    repeated_until_clear,
    units_of,
    worse_by_gate,
)
from ebbench.errors import DataError, check_known
from ebbench.grouping import by_key
from ebbench.records.warnings import Fact

THROUGHPUT, GOODPUT, REQUEST_TIME = "output_throughput", "request_goodput", "median_e2el_ms"
"""Figures that can decide a comparison."""


@dataclass(frozen=True)
class Contrast:
    """One figure of one policy against the baseline. ``change``, ``low``, ``high`` and ``detectable`` are shares.

    ``p_adjusted`` is two-sided and Holm-adjusted over throughput and medians of all policies (goodput and request time
    count as one more test if they decide); None for advisory figures and for a single pair. ``identical``: both
    sides have the same value in every pair.
    """

    figure: str
    baseline: float
    value: float
    change: float
    low: float | None
    high: float | None
    p: float | None
    p_adjusted: float | None
    detectable: float | None
    identical: bool = False


@dataclass(frozen=True)
class PolicyContrasts:
    """A policy with its figures against the baseline. ``pairs``: the pairs compared. ``skipped``: figures that only
    some runs have or that cannot be compared, with the reason.

    ``deciding``: the figure that decides which is better, by the rule of ``show``
    (:func:`ebbench.analysis.cases.deciding_figure`). ``worse``: figures in which the gate's one-sided test
    finds the policy worse, with its p-value. ``left_out``: runs that are in no pair.
    ``drafts``: change in tokens per step by what was accepted of drafts, as a share; 0 where alike.
    """

    label: str
    pairs: tuple[Pair, ...]
    contrasts: tuple[Contrast, ...]
    skipped: Mapping[str, str]
    deciding: str = THROUGHPUT
    worse: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[Fact, ...] = ()
    drafts: float = 0.0

    @property
    def identical(self) -> bool:
        """Whether the policy has the baseline's throughput and median latencies in every pair."""
        gated = gated_by_default(units_of(self.pairs))
        tested = [contrast for contrast in self.contrasts if contrast.figure in gated]
        return len(tested) == len(gated) and all(contrast.identical for contrast in tested)


@dataclass(frozen=True)
class PairedComparison:
    """The baseline, its runs, and the other policies. ``title`` distinguishes the case from other cases."""

    baseline: str
    units: tuple[GateUnit, ...]
    others: tuple[PolicyContrasts, ...]
    title: str = ""


@dataclass(frozen=True)
class Compared:
    """One comparison per load and environment. ``alone``: cases without a second policy or without a baseline."""

    comparisons: tuple[PairedComparison, ...]
    alone: tuple[str, ...] = ()


def load_groups(arguments: Sequence[tuple[Path, Sequence[Path]]]) -> dict[str, list[GateUnit]]:
    """Units by policy, in the order given; a policy that several arguments name is one group per argument.

    An argument is what the user calls it, a directory or a name, and its runs, or directories of them. Raises DataError
    if a run is missing, damaged or INVALID.
    """
    by_place = by_key(
        ((unit.policy, place), unit) for place, (_, paths) in enumerate(arguments) for unit in load_units(paths)
    )
    # Arguments that hold different plans of one policy are merged; if a plan occurs twice, they stay separate groups.
    groups: dict[str, list[GateUnit]] = {}
    for (policy, place), units in by_place.items():
        before = groups.get(policy, [])
        repeated = {unit.plan_hash for unit in before} & {unit.plan_hash for unit in units}
        label = policy if not repeated else _label(policy, arguments[place][0], groups)
        groups.setdefault(label, []).extend(units)
    return groups


def _label(policy: str, path: Path, taken: Collection[str]) -> str:
    """The policy with the shortest unique end of the path; with a number if the same path is given twice."""
    parts = path.resolve().parts
    ends = ["/".join(parts[-length:]) for length in range(1, len(parts) + 1)]
    numbered = (f"{ends[0]}, {number}" for number in itertools.count(2))
    return next(label for end in itertools.chain(ends, numbered) if (label := f"{policy} ({end})") not in taken)


def compare_cases(
    groups: Mapping[str, Sequence[GateUnit]], baseline: str | None = None, allowed: Sequence[str] = ()
) -> Compared:
    """:func:`compare` for every load and environment among the units.

    Raises DataError if no case has two policies.
    """
    members = [(label, unit) for label, units in groups.items() for unit in units]
    conditions = [_conditions(unit, allowed) for _, unit in members]
    parts = partition(members, conditions, [(unit.seed, unit.plan_hash) for _, unit in members])
    comparisons, alone = [], []
    for title, part in parts:
        units_by_label = by_key(part)
        if len(units_by_label) < 2 or (baseline is not None and baseline in groups and baseline not in units_by_label):
            alone.append(f"{title or 'these runs'}: only {', '.join(units_by_label)}")
        else:
            comparisons.append(replace(compare(units_by_label, baseline, allowed), title=title))
    if not comparisons:
        return Compared((compare(groups, baseline, allowed),))
    return Compared(tuple(comparisons), tuple(alone))


def _conditions(unit: GateUnit, allowed: Sequence[str]) -> dict[str, str]:
    options = json.loads(unit.environment.get("options") or "{}") if "options" in allowed else {}
    given = unit.conditions or {**unit.environment, "load": unit.load}
    return {name: text for name, text in given.items() if name not in allowed and name not in options}


def compare(
    groups: Mapping[str, Sequence[GateUnit]], baseline: str | None = None, allowed: Sequence[str] = ()
) -> PairedComparison:
    """Compare every group with the baseline (default: ``v1``, else the first).

    Raises DataError if there are fewer than two groups or if the runs differ in environment or plan (the message names
    the keys), UnknownNameError for an unknown baseline.
    """
    if len(groups) < 2:
        raise DataError(_why_alone(groups, allowed))
    chosen = baseline or ("v1" if "v1" in groups else next(iter(groups)))
    check_known("baseline", chosen, groups)
    others = {label: units for label, units in groups.items() if label != chosen}
    base = groups[chosen]
    contrasts = [
        replace(_policy_contrasts(label, pair_units(base, units, allowed)), left_out=left_out(base, units))
        for label, units in others.items()
    ]
    return PairedComparison(chosen, tuple(groups[chosen]), tuple(_adjusted(contrasts)))


def _why_alone(groups: Mapping[str, Sequence[GateUnit]], allowed: Sequence[str]) -> str:
    """Why nothing can be compared: runs of one policy differ in environment or plan, or there is only one policy."""
    only, units = next(iter(groups.items()), ("nothing", ()))
    for unit in units[1:]:
        unlike = differences(units[0].environment, unit.environment, allowed)
        if unlike:
            return f"{units[0].run} and {unit.run} are not comparable: {listed(unlike)}; {remedy(unlike)} allows it"
    several = len({unit.plan_hash for unit in units}) > 1
    plans = f", whose {len(units)} runs have different plans (plan: seeds or requests differ)" if several else ""
    return f"a comparison needs runs of two policies or more on the same plans; found only {only}{plans}"


def _policy_contrasts(label: str, pairs: Sequence[Pair]) -> PolicyContrasts:
    gated = gated_by_default(units_of(pairs))
    shown = dict.fromkeys([*gated, *FIGURES, DRAFTS, *figures_by_class(pairs)])
    figures = [figure for figure in shown if measured_somewhere(figure, pairs)]
    losses_by_figure = {figure: paired_losses(figure, pairs) for figure in figures}
    skipped = {figure: losses for figure, losses in losses_by_figure.items() if isinstance(losses, str)}
    contrasts = [_contrast(figure, pairs) for figure in losses_by_figure if figure not in skipped]
    deciding = _deciding(contrasts, pairs)
    if deciding == REQUEST_TIME and deciding not in gated:
        contrasts.append(_contrast(deciding, pairs))
    worse, drafts = worse_by_gate(pairs), math.expm1(drafts_apart(pairs))
    return PolicyContrasts(label, tuple(pairs), tuple(contrasts), skipped, deciding, worse, drafts=drafts)


def _deciding(contrasts: Sequence[Contrast], pairs: Sequence[Pair]) -> str:
    """Goodput if limits were given and it differs, request time if both keep up with the arrivals, else throughput."""
    if any(contrast.figure == GOODPUT and abs(contrast.change) >= TIE for contrast in contrasts):
        return GOODPUT
    sides = [[pair.baseline.steady_rate for pair in pairs], [pair.candidate.steady_rate for pair in pairs]]
    known = [[rate for rate in side if rate is not None] for side in sides]
    if all(len(side) == len(pairs) for side in known) and alike([math.fsum(side) / len(side) for side in known]):
        return THROUGHPUT if isinstance(paired_losses(REQUEST_TIME, pairs), str) else REQUEST_TIME
    return gated_by_default(units_of(pairs))[0]


def _contrast(figure: str, pairs: Sequence[Pair]) -> Contrast:
    known = _values(figure, pairs)
    logs = [math.log(after / before) for before, after in known]
    several = len(logs) > 1
    sequential = repeated_until_clear(pairs)
    interval = confidence_sequence(logs) if sequential and several else paired_t(logs)
    return Contrast(
        figure=figure,
        baseline=geometric_mean(before for before, _ in known),
        value=geometric_mean(after for _, after in known),
        change=math.expm1(interval.mean),
        low=math.expm1(interval.low) if math.isfinite(interval.low) else None,
        high=math.expm1(interval.high) if math.isfinite(interval.high) else None,
        p=two_sided_p(logs, sequential=sequential),
        p_adjusted=None,
        detectable=None,
        identical=not any(logs),
    )


def _adjusted(others: Sequence[PolicyContrasts]) -> list[PolicyContrasts]:
    """Apply Holm over all deciding figures of all policies, and add the effect detectable at the resulting level."""
    tested = [(c, k) for c in others for k in c.contrasts if _decisive(c, k)]
    adjusted = iter(holm([contrast.p for _, contrast in tested if contrast.p is not None]))
    level = ALPHA / 2 / max(len(tested), 1)

    def leveled(policy: PolicyContrasts, contrast: Contrast) -> Contrast:
        if _decisive(policy, contrast):
            p_adjusted = next(adjusted)
            logs = [math.log(after / before) for before, after in _values(contrast.figure, policy.pairs)]
            smallest = detectable_loss(spread_of(logs), len(logs), alpha=level)
            detectable = None if smallest is None else math.expm1(smallest)
            return replace(contrast, p_adjusted=p_adjusted, detectable=detectable)
        if contrast.figure == policy.deciding and contrast.p is not None:  # Bonferroni for one more test
            return replace(contrast, p_adjusted=min(1.0, contrast.p * (len(tested) + 1)))
        return contrast

    return [replace(policy, contrasts=tuple(leveled(policy, c) for c in policy.contrasts)) for policy in others]


def _decisive(policy: PolicyContrasts, contrast: Contrast) -> bool:
    """Whether the figure decides: throughput and median latencies do; tails and goodput are only shown."""
    return contrast.p is not None and contrast.figure in gated_by_default(units_of(policy.pairs))


def pairs_needed_by(comparison: PairedComparison) -> int:
    """Least number of pairs with which the comparison can show a difference."""
    tests = sum(
        contrast.figure in gated_by_default(units_of(c.pairs)) for c in comparison.others for contrast in c.contrasts
    )
    return pairs_needed(tests)


def _values(figure: str, pairs: Sequence[Pair]) -> list[tuple[float, float]]:
    values = [(pair.baseline.figures[figure], pair.candidate.figures[figure]) for pair in pairs]
    return [(before, after) for before, after in values if before and after]
