"""Chooses the policy to advise, with reasons that the runs support."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebbench.advice.results import PolicyScore
from ebbench.analysis.compare.policies import TIE
from ebbench.analysis.statistics import PairedInterval, paired_t
from vllm_eb.policy import policy_class

BASELINE = "v1"


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


def choose(scores: Sequence[PolicyScore]) -> tuple[PolicyScore, str]:
    """The simplest policy that is as good as the best: behind by at most TIE, or not significantly behind.

    If v1 is significantly behind the best, a policy that may be no better than v1 is not advised instead of one that
    is.
    """
    best = scores[0]
    if best.objective <= 0:
        reason = "no request met the targets under any candidate, so they do not decide, and it is the simplest"
        return _simplest(scores), f"{reason}; loosen --goodput or reduce the traffic"
    equal = [one for one in scores if one is best or _ties(one, best)]
    if all(one.name != BASELINE for one in equal) and (sure := [one for one in equal if _ahead(one)]):
        unsure = [one.name for one in equal if one not in sure]
        if unsure:
            reason = f"it is surely ahead of {BASELINE}; {_listed(unsure)} may be as good, less certainly"
            return _simplest(sure), reason
    chosen = _simplest(equal)
    return chosen, _winner(scores) if len(equal) == 1 else _among([one for one in equal if one is not chosen])


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


def _winner(scores: Sequence[PolicyScore]) -> str:
    """The reason for the best policy if no other is equal."""
    best, *others = scores
    if not others:
        return "it is the only candidate"
    if all(_surely_behind(one) for one in others):
        return "it is ahead of every other candidate by more than chance and half a per cent"
    doubt = f"{_why_unsure(best)}: chance is not ruled out"
    second = others[0].objective
    if second <= 0:
        return f"it is the only candidate under which a request met the targets ({doubt})"
    return f"it is ahead of every other candidate by {100 * (best.objective / second - 1):.1f} % or more ({doubt})"


def _among(others: Sequence[PolicyScore]) -> str:
    """The reason for the simplest of several equal policies."""
    verb = "are" if len(others) > 1 else "is"
    within = "chance or half a per cent" if len(others[0].values) > 1 else "half a per cent (one seed)"
    return f"{_listed([one.name for one in others])} {verb} equal to it within {within}, and it is the simplest"


def _why_unsure(score: PolicyScore) -> str:
    return "one seed" if len(score.values) == 1 else "in some runs no request met the targets"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


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
    return policy_class(one.policy.partition(":")[0]).departure, ":" in one.policy, not one.at_reference
