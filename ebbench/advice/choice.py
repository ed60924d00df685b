"""Chooses the policy to advise, with reasons that the runs support."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ebbench.advice.results import PolicyScore
from ebbench.analysis.compare.cases import TIE
from ebbench.analysis.statistics import PairedInterval, paired_t
from ebbench.render.numbers import change, listed

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
    sure = [one for one in equal if _ahead(one)] if all(one.name != BASELINE for one in equal) else []
    unsure = [one for one in equal if one not in sure]
    if sure and unsure:
        chosen = _simplest(sure)
        named = _with_gains(unsure, chosen)
        return chosen, f"it is surely ahead of {BASELINE}; {named} may be as good, less certainly"
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


def _among(chosen: PolicyScore, others: Sequence[PolicyScore]) -> str:
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
    seeds = len(chosen.values)
    parts = []
    if equal:
        names, doubt = _some(equal, lambda one: one.policy), " (one seed)" if seeds == 1 else ""
        parts.append(f"{names} {_are(equal)} equal to it within half a per cent{doubt}")
    if ahead:
        parts.append(f"{_with_gains(ahead, chosen)} {_are(ahead)} ahead of it")
    if unsure:
        parts.append(
            f"{_with_gains(unsure, chosen)} cannot be told from it with {seeds} seed{'s' if seeds > 1 else ''}"
        )
    if not parts and level:
        return f"no other policy may be as good{' (one seed)' if seeds == 1 else ''}"
    return f"{'; '.join(parts)}, and it is the simplest" if parts else "it is the simplest that may be the best"


def level_budgets(chosen: PolicyScore, scores: Sequence[PolicyScore]) -> list[int]:
    """Other token budgets, rising, at which the chosen policy is equal to it; none where no request met the targets."""
    if chosen.objective <= 0:
        return []
    same = [one for one in scores if one.policy == chosen.policy and one is not chosen]
    return sorted(one.max_num_batched_tokens for one in same if _is_equal(_against(one, chosen)))


MOST_NAMED = 3
"""Of more policies only the number is given."""


def _with_gains(scores: Sequence[PolicyScore], over: PolicyScore) -> str:
    """``eb -19.9 % (-48.6 to +24.9) and marginal +0.1 % (-0.3 to +0.6)``."""
    return _some(scores, lambda one: f"{one.name} {_shown(_against(one, over))}")


def _some(scores: Sequence[PolicyScore], text: Callable[[PolicyScore], str]) -> str:
    """The best candidate of each policy, at most MOST_NAMED of them, and how many others there are."""
    best = list({one.policy: one for one in reversed(scores)}.values())[::-1]
    left = len(best) - MOST_NAMED
    shown = best if left < 2 else best[:MOST_NAMED]
    return listed([*map(text, shown), *([f"{left} other policies"] if left >= 2 else [])])


def _are(scores: Sequence[PolicyScore]) -> str:
    return "are" if len({one.policy for one in scores}) > 1 else "is"


def _against(one: PolicyScore, other: PolicyScore) -> PairedInterval:
    """The gain of one candidate over another; without an interval if in some run no request met the targets."""
    gain = relative_gain(one.values, other.values)
    return gain or PairedInterval(one.objective / other.objective - 1, -math.inf, math.inf)


def _is_equal(gain: PairedInterval) -> bool:
    """Whether the gain is at most TIE: its whole interval, or with one seed the measured gain."""
    known = math.isfinite(gain.high)
    return max(-gain.low, gain.high) <= TIE if known else abs(gain.mean) <= TIE


def _shown(gain: PairedInterval) -> str:
    bounds = f" ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})" if math.isfinite(gain.high) else ""
    return f"{change(gain.mean)}{bounds}"


def _why_unsure(score: PolicyScore) -> str:
    return "one seed" if len(score.values) == 1 else "in some runs no request met the targets"


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
