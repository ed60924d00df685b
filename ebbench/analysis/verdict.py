"""The regression gate: pass, fail or inconclusive, from paired units.

- FAIL: for some gated figure the Holm-adjusted p is at most alpha and the estimated loss reaches the margin
- PASS: for every gated figure the upper bound of the interval lies below the margin
- INCONCLUSIVE: neither, or fewer pairs than the test needs to be able to fail, or a gated figure that only some runs
  have

A fixed number of pairs is judged by the sign-flip test and the paired t interval (``statistics.py``); pairs measured
until the verdict is known, and runs of ``ebbench run --repeats auto``, by p-values and bounds valid after every pair
(:mod:`sequential`).

Losses are log ratios, positive if the candidate is worse, so 3 % less throughput and 3 % more latency are equal losses.
Figures that are not gated are advisory: shown with the same statistics, without influence on the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Literal

from msgspec import to_builtins

from ebbench.analysis.environment import differences, listed, remedy
from ebbench.analysis.statistics import (
    anytime_p,
    confidence_sequence,
    detectable_loss,
    holm,
    paired_t,
    pairs_to_pass,
    sign_flip_p,
    spread_of,
)
from ebbench.analysis.summary import ACCEPTED_ALIKE, sets_drafts
from ebbench.analysis.units import (
    DRAFTS,
    FIGURES,
    OF_CLASSES,
    GateUnit,
    classes_among,
    is_higher_better,
    name_of,
    require_one_environment,
)
from ebbench.errors import DataError, UnknownNameError, UsageError
from ebbench.records.warnings import ABOUT_SERVER, WARM_CACHE, Fact, counted, fact, listed_seeds

Outcome = Literal["pass", "fail", "inconclusive"]
GATED = ("output_throughput", "median_ttft_ms", "median_tpot_ms")
GATED_WITHOUT_TOKENS = ("request_throughput", "median_e2el_ms")
"""Figures that are gated by default where answers have no output tokens (embeddings, rerank)."""
MAX_PAIRS = 40
"""Default number of pairs after which a sequential measurement ends without a verdict.

By then most comparisons of equal sides are decided under the noise of the first row of reports/gate.md.
"""
MIN_PAIRS = 6
"""Least pairs: with three gated figures, Holm's first step requires p <= 0.05 / 3, and 6 is the first n with 2**-n
below that. A smaller alpha requires more."""
COPIES = "copies"
"""Code of the note that pairs were left out as copies of others."""
ORDER_P = 1 / 16
"""Largest p of an order within pairs that is named as the cause of their spread: four pairs that all agree."""


@dataclass(frozen=True)
class Rules:
    """``margin`` maps a figure to the loss that matters (0.03 is 3 %); ``default_margin`` is for the others.

    ``gated``: figures that decide. ``sequential``: the pairs are judged after every one.
    """

    default_margin: float = 0.03
    margin: Mapping[str, float] = field(default_factory=dict)
    alpha: float = 0.05
    confidence: float = 0.95
    min_pairs: int = MIN_PAIRS
    gated: tuple[str, ...] = GATED
    sequential: bool = False

    def margin_of(self, figure: str) -> float:
        """The margin of a figure as a share."""
        return self.margin.get(figure, self.default_margin)


DEFAULT_RULES = Rules()


@dataclass(frozen=True)
class Pair:
    """Baseline and candidate on the same plan. ``copies``: number of other pairs left out as copies of it."""

    baseline: GateUnit
    candidate: GateUnit
    copies: int = field(default=0, kw_only=True)

    @property
    def question(self) -> tuple[object, ...]:
        """Plan and figures of both sides; if equal in virtual time, the pair is a copy."""
        figures = (*self.baseline.figures.values(), *self.candidate.figures.values())
        return (self.candidate.lengths or self.candidate.plan_hash, *figures)


@dataclass(frozen=True)
class Judged:
    """One figure. ``loss``, ``low``, ``high`` and ``detectable`` are shares (0.05: the candidate is 5 % worse)."""

    figure: str
    gated: bool
    baseline: float
    candidate: float
    losses: tuple[float, ...]
    loss: float
    low: float
    high: float
    p: float
    p_adjusted: float
    margin: float
    detectable: float | None
    outcome: Outcome


@dataclass(frozen=True)
class Verdict:
    """The gate's verdict and the data behind it. ``skipped``: figures that could not be judged, with a code of why.

    ``cause``: what explains the spread of the pairs; None if it is not known.
    """

    outcome: Outcome
    reason: Fact
    judged: tuple[Judged, ...]
    skipped: Mapping[str, str]
    pairs: tuple[Pair, ...]
    rules: Rules
    notes: tuple[Fact, ...] = ()
    cause: Fact | None = None


def pair_units(baseline: Sequence[GateUnit], candidate: Sequence[GateUnit], allowed: Sequence[str] = ()) -> list[Pair]:
    """Pair units of the same plan, in order of time if a plan was run several times.

    Raises DataError if the sides are not comparable (:func:`require_comparable`) or have no plan in common. Left out:
    plans of one side only and runs in excess of the shorter side, which :func:`left_out` names, and copies in virtual
    time, which are not measurements (repeats of one plan, and plans that differ only in token content without effect on
    any figure).
    """
    require_comparable(baseline, candidate, allowed)
    ours, theirs = _by_plan(baseline), _by_plan(candidate)
    if not ours.keys() & theirs.keys():
        raise DataError(_other_plan(len(ours), baseline, "candidate"))
    common = [plan for plan in ours if plan in theirs]
    return without_copies(
        [_with_drafts(b, c) for plan in common for b, c in zip(ours[plan], theirs[plan], strict=False)]
    )


def _with_drafts(baseline: GateUnit, candidate: GateUnit) -> Pair:
    """The pair; where one side alone drafts tokens, the other makes one per step."""
    if baseline.figures.get(DRAFTS) is None and candidate.figures.get(DRAFTS) is None:
        return Pair(baseline, candidate)
    plain = {DRAFTS: 1.0}
    sides = [
        unit if unit.figures.get(DRAFTS) is not None else replace(unit, figures={**unit.figures, **plain})
        for unit in (baseline, candidate)
    ]
    return Pair(*sides)


def drafts_apart(pairs: Sequence[Pair]) -> float:
    """Mean log ratio of tokens per step, candidate over baseline: what drafts alone can change in speed.

    0 where they are alike, and where a policy of either side sets how many tokens are drafted.
    """
    known = [(pair.baseline.figures.get(DRAFTS), pair.candidate.figures.get(DRAFTS)) for pair in pairs]
    logs = [math.log(after / before) for before, after in known if before and after]
    policies = {unit.policy for unit in units_of(pairs)}
    if len(logs) < len(pairs) or not logs or any(map(sets_drafts, policies)):
        return 0.0
    mean = math.fsum(logs) / len(logs)
    return mean if abs(mean) > math.log1p(ACCEPTED_ALIKE) else 0.0


def require_comparable(
    baseline: Sequence[GateUnit], candidate: Sequence[GateUnit], allowed: Sequence[str] = ()
) -> None:
    """Raise DataError if the sides differ in environment, if one mixes several, or if a seed has other plans."""
    require_one_environment(baseline, allowed, "baseline")
    require_one_environment(candidate, allowed, "candidate")
    sides_differ = differences(baseline[0].environment, candidate[0].environment, allowed)
    if sides_differ:
        alike = "measure both alike, or allow what is meant to differ"
        raise DataError(
            f"baseline and candidate are not comparable: {listed(sides_differ)}; {alike}: {remedy(sides_differ)}"
        )
    for ours, theirs, side in ((baseline, candidate, "candidate"), (candidate, baseline, "baseline")):
        seeds, plans = {unit.seed for unit in theirs}, {unit.plan_hash for unit in theirs}
        unlike = [unit for unit in ours if unit.plan_hash not in plans and unit.seed in seeds]
        if unlike:
            raise DataError(_other_plan(len({unit.plan_hash for unit in unlike}), unlike, side))


def _other_plan(count: int, units: Sequence[GateUnit], side: str) -> str:
    return (
        f"plan: the {side} has no run of {counted(count, 'plan')} ({listed_seeds(_seeds(units))}); "
        "measure both sides with the same seeds, requests and traffic"
    )


def _seeds(units: Sequence[GateUnit]) -> list[int]:
    return sorted({unit.seed for unit in units})


def left_out(baseline: Sequence[GateUnit], candidate: Sequence[GateUnit]) -> tuple[Fact, ...]:
    """Runs that are in no pair: of plans that only one side has, in excess of the other side's, INVALID."""
    notes = []
    for side, units, others in (("baseline", baseline, candidate), ("candidate", candidate, baseline)):
        theirs = _by_plan(others)
        lonely = [unit for unit in units if unit.plan_hash not in theirs]
        if lonely:
            notes.append(fact("runs_alone", runs=len(lonely), side=side, seeds=_seeds(lonely)))
        surplus = sum(max(len(own) - len(theirs[plan]), 0) for plan, own in _by_plan(units).items() if plan in theirs)
        if surplus:
            notes.append(fact("runs_in_excess", runs=surplus, side=side))
        if tries := sum(unit.invalid_tries for unit in units):
            notes.append(fact("runs_invalid", runs=tries, side=side))
    return tuple(notes)


def without_copies(pairs: Sequence[Pair]) -> list[Pair]:
    """One pair for each group of copies."""
    kept: list[Pair] = []
    known: dict[tuple[object, ...], int] = {}
    for pair in pairs:
        place = known.setdefault(pair.question, len(kept))
        if place == len(kept) or not pair.candidate.virtual:
            kept.append(pair)
        else:
            kept[place] = replace(kept[place], copies=kept[place].copies + 1)
    return kept


def _by_plan(units: Sequence[GateUnit]) -> dict[str, list[GateUnit]]:
    plans: dict[str, list[GateUnit]] = {}
    for unit in sorted(units, key=lambda unit: (unit.seed, unit.anchor_unix_ns)):
        units_of_plan = plans.setdefault(unit.plan_hash, [])
        if not (unit.virtual and units_of_plan):
            units_of_plan.append(unit)
    return plans


def judge(
    pairs: Sequence[Pair],
    rules: Rules = DEFAULT_RULES,
    *,
    with_detectable: bool = True,
    further_notes: Sequence[Fact] = (),
) -> Verdict:
    """Judge paired units. Raises UsageError for invalid rules.

    ``further_notes`` precede those on the pairs. ``with_detectable`` False skips the least detectable effects, which do
    not influence the verdict. Pairs with a run of ``--repeats auto`` are judged by the sequential rules.
    """
    rules = _with_figures(rules, pairs)
    _check(rules, pairs)
    rules = replace(rules, sequential=rules.sequential or repeated_until_clear(pairs))
    drafted = [DRAFTS] if measured_somewhere(DRAFTS, pairs) else []
    shown = dict.fromkeys([*rules.gated, *FIGURES, *drafted, *figures_by_class(pairs)])
    known = {figure: paired_losses(figure, pairs) for figure in shown}
    skipped = {figure: why for figure, why in known.items() if isinstance(why, str)}
    losses = {figure: losses for figure, losses in known.items() if not isinstance(losses, str)}
    gated = {figure: losses[figure] for figure in rules.gated if figure in losses}
    adjusted = _adjusted(gated, rules)
    level = rules.alpha / max(len(gated), 1) if with_detectable and not rules.sequential else None
    judged = tuple(_judged(figure, losses[figure], pairs, adjusted.get(figure), level, rules) for figure in losses)
    # A gated figure that cannot be judged leaves the verdict open if it was chosen, or if some runs have it.
    chosen = rules.gated != GATED
    partial = [name for name in rules.gated if name in skipped and (chosen or measured_somewhere(name, pairs))]
    cause = _order_cause(pairs, gated, rules)
    outcome, reason = _conclude([entry for entry in judged if entry.gated], partial, len(pairs), rules, cause)
    # Classes of requests that are worse by the gate's test, in figures that are not gated.
    watched = {figure: own for figure, own in losses.items() if ":" in figure and figure not in rules.gated}
    means = {figure: math.expm1(math.fsum(own) / len(own)) for figure, own in watched.items()}
    shown_worse = (figure for figure, p in _adjusted(watched, rules).items() if p <= rules.alpha)
    worse = {figure: means[figure] for figure in shown_worse if means[figure] >= rules.margin_of(figure)}
    notes = [*further_notes, *([fact("worse_classes", losses=worse)] if worse else []), *_notes(pairs)]
    return Verdict(outcome, reason, judged, skipped, tuple(pairs), rules, tuple(notes), cause)


def gated_by_default(units: Sequence[GateUnit]) -> tuple[str, ...]:
    """The figures that decide where none are chosen."""
    answered = any(unit.figures.get("request_throughput") for unit in units)
    return GATED_WITHOUT_TOKENS if answered and not any(unit.figures["output_throughput"] for unit in units) else GATED


def units_of(pairs: Sequence[Pair]) -> list[GateUnit]:
    """Both units of each pair."""
    return [unit for pair in pairs for unit in (pair.baseline, pair.candidate)]


def _with_figures(rules: Rules, pairs: Sequence[Pair]) -> Rules:
    return replace(rules, gated=gated_by_default(units_of(pairs))) if rules.gated == GATED else rules


def figures_by_class(pairs: Sequence[Pair]) -> list[str]:
    """Figures that are shown of each class of requests."""
    classes = classes_among(units_of(pairs))
    return [f"{name}:{figure}" for name in classes for figure in OF_CLASSES]


def worse_by_gate(pairs: Sequence[Pair]) -> dict[str, float]:
    """The gated figures in which the candidate is worse by the gate's test, with p; margins are not asked for."""
    rules = replace(_with_figures(DEFAULT_RULES, pairs), sequential=repeated_until_clear(pairs))
    known = {figure: paired_losses(figure, pairs) for figure in rules.gated}
    losses = {figure: losses for figure, losses in known.items() if not isinstance(losses, str)}
    return {figure: p for figure, p in _adjusted(losses, rules).items() if p <= rules.alpha}


def repeated_until_clear(pairs: Sequence[Pair]) -> bool:
    """Whether any run was repeated until the answer was clear (``run --repeats auto``)."""
    return any(unit.until_clear for unit in units_of(pairs))


def _p(losses: Sequence[float], rules: Rules) -> float:
    return anytime_p(losses) if rules.sequential else sign_flip_p(losses)


def _adjusted(losses: Mapping[str, Sequence[float]], rules: Rules) -> dict[str, float]:
    return dict(zip(losses, holm([_p(values, rules) for values in losses.values()]), strict=True))


def _check(rules: Rules, pairs: Sequence[Pair]) -> None:
    classes = classes_among(units_of(pairs))
    for name in (figure.rpartition(":")[0] for figure in rules.gated):
        if name and name not in classes:
            raise UnknownNameError("class of requests in these runs", name, classes)
    if unused := [figure for figure in rules.margin if figure not in rules.gated]:
        names = ", ".join(map(name_of, unused))
        raise UsageError(f"--margin names {names}, not gated here; add --metric for each, or leave the margin out")
    for margin in (rules.default_margin, *rules.margin.values()):
        if not 0 < margin < 1:
            raise UsageError(f"a margin must lie between 0 and 100 %, not {100 * margin:g}")
    if not 0 < rules.alpha < 0.5:
        raise UsageError(f"--alpha must lie between 0 and 0.5, not {rules.alpha:g}")
    if rules.min_pairs < 2:
        raise UsageError(f"at least 2 pairs are needed, not {rules.min_pairs}")


def measured_somewhere(figure: str, pairs: Sequence[Pair]) -> bool:
    """Whether any run has the figure."""
    return any(unit.figures.get(figure) is not None for unit in units_of(pairs))


def paired_losses(figure: str, pairs: Sequence[Pair]) -> tuple[float, ...] | str:
    """Log ratios, positive if the candidate is worse, or the code of why they cannot be computed."""
    if figure.endswith("request_goodput") and len({unit.slo for unit in units_of(pairs)}) > 1:
        return "limits_differ"
    losses = []
    for pair in pairs:
        before, after = pair.baseline.figures.get(figure), pair.candidate.figures.get(figure)
        if before is None or after is None:
            return "no_limits" if figure.endswith("request_goodput") else "too_few_samples"
        if before <= 0 or after <= 0:
            return "zero"
        losses.append(math.log(before / after) if is_higher_better(figure) else math.log(after / before))
    return tuple(losses)


def _judged(
    figure: str, losses: tuple[float, ...], pairs: Sequence[Pair], p_adjusted: float | None, level: float | None,
    rules: Rules,
) -> Judged:  # fmt: skip
    p = _p(losses, rules)
    interval = (confidence_sequence if rules.sequential else paired_t)(losses, rules.confidence)
    gated, margin = p_adjusted is not None, rules.margin_of(figure)
    adjusted = p if p_adjusted is None else p_adjusted
    detectable, least = None, math.log1p(margin)
    if level is not None:
        detectable = detectable_loss(spread_of(losses), len(losses), alpha=level, margin=least)
    outcome: Outcome = "pass" if interval.high < least else "inconclusive"
    if adjusted <= rules.alpha and interval.mean >= least:
        outcome = "fail"
    return Judged(
        figure=figure,
        gated=gated,
        # The geometric means, which correspond to the mean log ratio.
        baseline=geometric_mean(value for pair in pairs if (value := pair.baseline.figures[figure])),
        candidate=geometric_mean(value for pair in pairs if (value := pair.candidate.figures[figure])),
        losses=losses,
        loss=math.expm1(interval.mean),
        low=_share(interval.low),
        high=_share(interval.high),
        p=p,
        p_adjusted=adjusted,
        margin=margin,
        detectable=None if detectable is None else math.expm1(detectable),
        outcome=outcome,
    )


def _conclude(
    gated: Sequence[Judged], partial: Sequence[str], pairs: int, rules: Rules, cause: Fact | None
) -> tuple[Outcome, Fact]:
    """The verdict and its reason. ``cause``: what explains the spread of the pairs, if it is known."""
    if not gated:
        return "inconclusive", fact("nothing_gated")
    needed = pairs_needed(rules, len(gated))
    if pairs < needed:
        return "inconclusive", fact("too_few_pairs", pairs=pairs, needed=needed)
    failed = [entry for entry in gated if entry.outcome == "fail"]
    if failed:
        return "fail", fact("worse", losses={entry.figure: entry.loss for entry in failed})
    open_ones = [entry for entry in gated if entry.outcome == "inconclusive"]
    if open_ones:
        bounds = {entry.figure: {"up_to": entry.high, "margin": entry.margin} for entry in open_ones}
        why = {"enough_pairs": _enough_pairs(open_ones, rules)} if cause is None else {"cause": to_builtins(cause)}
        return "inconclusive", fact("undecided", bounds=bounds, **why)
    if partial:
        return "inconclusive", fact("not_in_every_run", figures=list(partial))
    return "pass", fact("none_worse", at_most=max(*(entry.high for entry in gated), 0.0))


def pairs_needed(rules: Rules, figures: int) -> int:
    """Least number of pairs with which that many gated figures can fail."""
    return max(rules.min_pairs, math.ceil(math.log2(figures / rules.alpha)))


def _enough_pairs(open_ones: Sequence[Judged], rules: Rules) -> int | None:
    """Estimated number of pairs needed for a verdict if the sides are equal, from the observed spread; None: it is too
    large for the margin."""
    counts = [
        pairs_to_pass(spread_of(entry.losses), math.log1p(entry.margin), confidence=rules.confidence)
        for entry in open_ones
    ]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return max(*known, len(open_ones[0].losses) + 1)


def _order_cause(pairs: Sequence[Pair], losses: Mapping[str, Sequence[float]], rules: Rules) -> Fact | None:
    """That the second run of a pair was better or worse than the first on either side; None if it was not.

    The sides must have taken turns to be first. Losses that follow the order more than the sides, and by more than the
    margin, are tested like a difference between the sides.
    """
    second = [1 if pair.candidate.anchor_unix_ns > pair.baseline.anchor_unix_ns else -1 for pair in pairs]
    if any(pair.baseline.virtual for pair in pairs) or len(set(second)) < 2:
        return None
    found: dict[str, dict[str, float]] = {"second_better": {}, "second_worse": {}}
    for figure, values in losses.items():
        turned = [sign * value for sign, value in zip(second, values, strict=True)]
        mean = math.fsum(turned) / len(turned)
        follows = abs(mean) > max(abs(math.fsum(values) / len(values)), math.log1p(rules.margin_of(figure)))
        if follows and sign_flip_p([value * math.copysign(1.0, mean) for value in turned]) <= ORDER_P:
            found["second_better" if mean < 0 else "second_worse"][figure] = abs(math.expm1(mean))
    return next((fact(code, by=by) for code, by in found.items() if by), None)


def _notes(pairs: Sequence[Pair]) -> tuple[Fact, ...]:
    notes = []
    policies = dict.fromkeys(unit.policy for unit in units_of(pairs))
    if len(policies) > 1:
        notes.append(fact("policies_differ", policies=list(policies)))
    sides = ((pair.baseline.environment, pair.candidate.environment) for pair in pairs)
    if unlike := dict.fromkeys(difference for both in sides for difference in differences(*both)):
        notes.append(fact("sides_differ", differences=[difference._asdict() for difference in unlike]))
    if drafts := drafts_apart(pairs):
        notes.append(fact("drafts_apart", tokens_per_step=math.expm1(drafts)))
    if repeated_until_clear(pairs):
        notes.append(fact("repeated_until_clear"))
    if copies := sum(pair.copies for pair in pairs):
        notes.append(fact(COPIES, pairs=copies))
    real = [pair for pair in pairs if not pair.baseline.virtual]
    before = [pair.baseline.anchor_unix_ns for pair in real]
    after = [pair.candidate.anchor_unix_ns for pair in real]
    if len(real) > 1 and (max(before) < min(after) or max(after) < min(before)):
        notes.append(fact("not_interleaved"))
    return (*notes, *_about_server(real))


def _about_server(pairs: Sequence[Pair]) -> list[Fact]:
    """Why a server's figures are not of what was asked for; of its cache, what it means for the two sides."""
    notes: list[Fact] = []
    codes = set(ABOUT_SERVER)
    # The server that met the prompts of every pair twice in the same order, without its cache emptied.
    servers = {
        pair.candidate.server if pair.candidate.server == pair.baseline.server else ""
        for pair in pairs
        if pair.candidate.cache_unknown and pair.baseline.cache_unknown
    }
    orders = {pair.candidate.anchor_unix_ns > pair.baseline.anchor_unix_ns for pair in pairs}
    if len(servers) == len(orders) == 1 and (server := servers.pop()):
        codes.remove(WARM_CACHE)
        side = "candidate" if pairs[0].candidate.anchor_unix_ns > pairs[0].baseline.anchor_unix_ns else "baseline"
        notes.append(fact("cache_warm_for_second", side=side, server=server))
    return notes + [warning for unit in units_of(pairs) for warning in unit.about_server if warning.code in codes]


def _share(log_loss: float) -> float:
    return math.expm1(min(log_loss, 700.0)) if math.isfinite(log_loss) else log_loss
