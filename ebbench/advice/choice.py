"""Chooses the policy to advise, with reasons that the runs support."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ebbench.advice.results import PolicyScore
from ebbench.analysis.compare.cases import TIE
from ebbench.analysis.statistics import PairedInterval, paired_t
from ebbench.records.warnings import Fact, fact

BASELINE = "v1"
SIMPLEST_FIRST = (
    BASELINE, "cadence", "ppas", "batchwait", "slochunk", "ebplus", "marginal", "eb", "v0", "delayer", "deferred",
)  # fmt: skip
"""Kinds of policies by how much they depart from vLLM's own scheduling; all others depart more."""


def own_budget(policy: str) -> int | None:
    """The token budget of vLLM's own scheduling under another budget; None for any other policy."""
    kind, _, settings = policy.partition(":")
    value = settings.removeprefix("budget=")
    return int(value) if kind == BASELINE and value.isdigit() and value != settings else None


def tuned_budget(one: PolicyScore) -> int | None:
    """The token budget of vLLM's own scheduling at another than the reference budget; None for any other candidate."""
    if one.policy == BASELINE and not one.at_reference:
        return one.max_num_batched_tokens
    return own_budget(one.policy)


def relative_gain(ours: Sequence[float], base: Sequence[float] | None) -> PairedInterval | None:
    """Mean relative gain with its paired 95 % t interval, from the logs of the ratios; None if undefined."""
    if base is None or min(base) <= 0 or min(ours) <= 0:
        return None
    found = paired_t([math.log(a / b) for a, b in zip(ours, base, strict=True)])
    return PairedInterval(*(math.expm1(value) for value in (found.mean, found.low, found.high)))


def choose(scores: Sequence[PolicyScore]) -> tuple[PolicyScore, Fact]:
    """The simplest policy that is as good as the best: behind by at most TIE, or not significantly behind.

    If v1 is significantly behind the best, a policy that may be no better than v1 is not advised instead of one that
    is.
    """
    best = scores[0]
    if best.objective <= 0:
        return _simplest(scores), fact("none_in_targets")
    equal = [one for one in scores if one is best or _ties(one, best)]
    sure = [one for one in equal if _ahead(one)] if all(one.name != BASELINE for one in equal) else []
    unsure = [one for one in equal if one not in sure]
    if sure and unsure:
        chosen = _simplest(sure)
        return chosen, fact("surely_ahead", of=BASELINE, unsure=_rivals(unsure, chosen))
    chosen = _simplest(equal)
    return chosen, _winner(scores) if len(equal) == 1 else _among(chosen, [one for one in equal if one is not chosen])


def budget_share(scores: Sequence[PolicyScore]) -> tuple[PolicyScore, float] | None:
    """The best tuned token budget, and which share of the best policy's gain over v1 it gives by itself.

    None if no budget was tried, or the best policy gains no more than TIE.
    """
    budgets = [one for one in scores if tuned_budget(one) is not None]
    gains = [one.gain.mean for one in scores if one.gain is not None]
    if not budgets or not gains or max(gains) <= TIE:
        return None
    best = max(budgets, key=lambda one: one.objective)
    return (best, max(best.gain.mean, 0.0) / max(gains)) if best.gain is not None else None


def _winner(scores: Sequence[PolicyScore]) -> Fact:
    """The reason for the best policy if no other is equal."""
    best, *others = scores
    if not others:
        return fact("only_candidate")
    if all(_surely_behind(one) for one in others):
        return fact("ahead_of_all")
    one_seed, second = len(best.values) == 1, others[0].objective
    if second <= 0:
        return fact("only_one_in_targets", one_seed=one_seed)
    return fact("ahead_by_chance", gain=best.objective / second - 1, one_seed=one_seed)


def _among(chosen: PolicyScore, others: Sequence[PolicyScore]) -> Fact:
    """The reason for the simplest of several policies that may be as good as the best.

    Those that are surely behind the chosen one are left out.
    """
    found = [(one, _against(one, chosen)) for one in others]
    level = level_budgets(chosen, [chosen, *others])
    found = [
        (one, gain) for one, gain in found if one.policy != chosen.policy or one.max_num_batched_tokens not in level
    ]
    equal = [one for one, gain in found if _is_equal(gain)]
    ahead = [one for one, gain in found if gain.low > 0 and one not in equal]
    unsure = [one for one, gain in found if gain.low <= 0 <= gain.high and one not in equal]
    rivals = {"equal": equal, "ahead": ahead, "unsure": unsure}
    named = {kind: _rivals(scores, chosen) for kind, scores in rivals.items()}
    return fact("simplest", **named, seeds=len(chosen.values), level=bool(level))


def _rivals(scores: Sequence[PolicyScore], over: PolicyScore) -> list[dict[str, Any]]:
    """The best candidate of each policy, with its gain over another and the ends of its interval (a share)."""
    best = list({one.policy: one for one in reversed(scores)}.values())[::-1]
    gains = [(one, _against(one, over)) for one in best]
    return [
        {"policy": one.policy, "name": one.name, "gain": gain.mean}
        | ({"low": gain.low, "high": gain.high} if math.isfinite(gain.high) else {})
        for one, gain in gains
    ]


def level_budgets(chosen: PolicyScore, scores: Sequence[PolicyScore]) -> list[int]:
    """Other token budgets, rising, at which the chosen policy is equal to it; none where no request met the targets."""
    if chosen.objective <= 0:
        return []
    same = [one for one in scores if one.policy == chosen.policy and one is not chosen]
    return sorted(one.max_num_batched_tokens for one in same if _is_equal(_against(one, chosen)))


def _against(one: PolicyScore, other: PolicyScore) -> PairedInterval:
    """The gain of one candidate over another; without an interval if in some run no request met the targets."""
    gain = relative_gain(one.values, other.values)
    return gain or PairedInterval(one.objective / other.objective - 1, -math.inf, math.inf)


def _is_equal(gain: PairedInterval) -> bool:
    """Whether the gain is at most TIE: its whole interval, or with one seed the measured gain."""
    known = math.isfinite(gain.high)
    return max(-gain.low, gain.high) <= TIE if known else abs(gain.mean) <= TIE


def _ahead(one: PolicyScore) -> bool:
    return one.gain is not None and one.gain.low > 0


def _surely_behind(one: PolicyScore) -> bool:
    return one.behind_best is not None and one.behind_best.high < 0


def _ties(one: PolicyScore, best: PolicyScore) -> bool:
    behind = one.behind_best
    if behind is None:  # a run in which no request met the targets has no ratio
        return one.objective >= (1 - TIE) * best.objective
    return behind.mean >= -TIE or (math.isfinite(behind.high) and behind.high >= 0)


def _simplest(scores: Sequence[PolicyScore]) -> PolicyScore:
    return min(scores, key=_rank)


def _rank(one: PolicyScore) -> tuple[int, bool, bool]:
    """Sort key: departure from vLLM's default behaviour, then without settings, then at the reference budget first."""
    kind = one.policy.partition(":")[0]
    place = SIMPLEST_FIRST.index(kind) if kind in SIMPLEST_FIRST else len(SIMPLEST_FIRST)
    return place, ":" in one.policy, not one.at_reference
