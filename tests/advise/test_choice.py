"""Choice of a policy: the stated reason is supported by the intervals of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ebbench.advice import choice
from ebbench.advice.choice import PolicyScore, budget_share, level_budgets, relative_gain
from ebbench.advice.sentences import REASONS
from ebbench.analysis.statistics import PairedInterval


def choose(scores: Sequence[PolicyScore]) -> tuple[PolicyScore, str]:
    """The choice, with its reason in words."""
    chosen, reason = choice.choose(scores)
    return chosen, reason.worded(REASONS)


def score(policy: str, objective: float, low: float, high: float) -> PolicyScore:
    behind = PairedInterval((low + high) / 2, low, high)
    return PolicyScore(policy, objective, (objective, objective), None, behind, None, 1.0, 1.0, objective, 8192)


def one_seed(policy: str, objective: float, best: float) -> PolicyScore:
    return of_runs(policy, (objective,), (best,))


def of_runs(policy: str, values: tuple[float, ...], best: tuple[float, ...]) -> PolicyScore:
    """The gain as the command computes it: undefined if no request of a run met the targets."""
    mean = sum(values) / len(values)
    return PolicyScore(policy, mean, values, None, relative_gain(values, best), None, 1.0, 1.0, mean, 8192)


def test_a_clear_winner_is_chosen() -> None:
    chosen, reason = choose([score("eb", 110, 0, 0), score("v1", 100, -0.10, -0.08)])
    assert chosen.policy == "eb"
    assert "ahead of every other" in reason


def test_the_simplest_of_equally_good_policies_is_chosen() -> None:
    scores = [score("eb", 100.2, 0, 0), score("ebplus", 100.1, -0.01, 0.008), score("v1", 90, -0.12, -0.08)]
    chosen, reason = choose(scores)
    assert chosen.policy == "ebplus"
    assert reason == "eb is equal to it within half a per cent, and it is the simplest"


def test_only_what_is_surely_as_good_is_called_equal() -> None:
    """One that may be 20 % slower was called equal, since two seeds do not show that it is."""
    best = (100.2, 99.9)
    seen = {"marginal": best, "v1": (100.0, 100.0), "ebplus": (95.0, 66.0)}
    scores = [of_runs(policy, values, best) for policy, values in seen.items()]
    noisy = replace(scores[2], behind_best=PairedInterval(-0.2, -0.5, 0.3))
    again = [replace(scores[1], max_num_batched_tokens=budget, at_reference=False) for budget in (4096, 16384)]
    chosen, reason = choose([*scores[:2], *again, noisy])
    assert chosen is scores[1]
    assert level_budgets(chosen, [*scores[:2], *again, noisy]) == [4096, 16384]
    assert reason == (
        "marginal +0.0 % (-1.8 to +2.0) and ebplus -20.8 % (-92.2 to +700.9) cannot be told from it with 2 seeds, and "
        "it is the simplest"
    )


def test_of_many_candidates_each_policy_is_named_once() -> None:
    best = (100.0, 100.0)
    tuned = [replace(of_runs("eb", best, best), max_num_batched_tokens=b, at_reference=False) for b in range(1, 6)]
    _, reason = choose([*tuned, of_runs("v0", best, best), of_runs("v1", best, best)])
    assert reason.startswith("eb and v0 are equal to it within half a per cent")
    many = [of_runs(policy, best, best) for policy in ("eb", "ebplus", "marginal", "ppas", "v0", "v1")]
    assert choose(many)[1].startswith("eb, ebplus, marginal and 2 other policies are equal to it")


def test_a_budget_that_only_chance_may_separate_is_not_called_level() -> None:
    best = (100.0, 100.0)
    v1 = of_runs("v1", best, best)
    at = [replace(of_runs("v1", values, best), max_num_batched_tokens=budget, at_reference=False)
          for budget, values in ((2048, best), (4096, (110.0, 91.0)), (16384, (99.9, 100.1)))]  # fmt: skip
    assert level_budgets(v1, [v1, *at]) == [2048]


def test_one_that_is_surely_ahead_by_little_is_said_to_be() -> None:
    best = (100.40, 100.44)
    chosen, reason = choose([of_runs("eb", best, best), of_runs("v1", (100.0, 100.0), best)])
    assert (chosen.policy, reason) == ("v1", "eb +0.4 % (+0.2 to +0.7) is ahead of it, and it is the simplest")


def test_a_sure_gain_is_chosen_over_one_that_may_be_zero() -> None:
    sure = replace(score("marginal", 115, 0, 0), gain=PairedInterval(0.15, 0.14, 0.16))
    noisy = replace(score("ebplus", 100, -0.3, 0.1), gain=PairedInterval(0.0, -0.15, 0.16))
    behind = score("v1", 100, -0.14, -0.12)
    chosen, reason = choose([sure, noisy, behind])
    assert chosen.policy == "marginal"
    assert reason == "it is surely ahead of v1; ebplus -13.0 % (-13.0 to -13.0) may be as good, less certainly"
    # Equal gains, equally certain: the simpler policy is chosen.
    also = replace(score("ebplus", 114.8, -0.01, 0.005), gain=PairedInterval(0.148, 0.13, 0.16))
    assert choose([sure, also, behind])[0].policy == "ebplus"


def test_one_seed_gives_no_certainty_but_half_a_per_cent() -> None:
    """Without an interval only a difference within half a per cent counts as none."""
    one = one_seed("v1", 90, 100)
    chosen, reason = choose([one_seed("eb", 100, 100), one])
    assert chosen.policy == "eb"
    assert reason == ("it is ahead of every other candidate by 11.1 % or more (one seed: chance is not ruled out)")
    chosen, reason = choose([one_seed("eb", 100, 100), one_seed("v1", 99.7, 100)])
    assert chosen.policy == "v1"
    assert reason == "eb is equal to it within half a per cent (one seed), and it is the simplest"


def test_gains_are_paired() -> None:
    """Seeds differ by a factor of two, the gain is 10 % in each: the interval must be narrow."""
    found = relative_gain([110, 220, 440.0], [100, 200, 400.0])
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.high - found.low < 1e-9
    assert relative_gain([1.0], None) is None
    assert relative_gain([1.0], [0.0]) is None


def test_v1_is_chosen_where_no_request_meets_the_targets() -> None:
    nothing = (0.0, 0.0, 0.0)
    chosen, reason = choose([of_runs("eb", nothing, nothing), of_runs("v1", nothing, nothing)])
    assert chosen.policy == "v1"
    assert reason == (
        "no request met the targets under any candidate, so they do not decide, and it is the simplest; "
        "loosen --goodput or reduce the traffic"
    )


@pytest.mark.parametrize(
    ("v1", "chosen", "reason"),
    [
        ((4.0, 0.0), "eb", "it is ahead of every other candidate by 50.0 % or more (in some runs no request met"),
        ((0.0, 0.0), "eb", "it is the only candidate under which a request met the targets (in some runs no"),
        ((6.0, 0.0), "v1", "eb is equal to it within half a per cent, and it is the simplest"),
    ],
)
def test_seeds_with_zero_goodput_are_compared_by_difference(v1: tuple[float, ...], chosen: str, reason: str) -> None:
    best = (6.0, 0.0)
    found, why = choose([of_runs("eb", best, best), of_runs("v1", v1, best)])
    assert (found.policy, why.startswith(reason)) == (chosen, True), why


def test_a_reason_is_a_code_with_the_gains_it_rests_on() -> None:
    best = (100.40, 100.44)
    _, reason = choice.choose([of_runs("eb", best, best), of_runs("v1", (100.0, 100.0), best)])
    assert (reason.code, reason.values["equal"], reason.values["seeds"]) == ("simplest", [], 2)
    [ahead] = reason.values["ahead"]
    assert (ahead["policy"], round(ahead["gain"], 3)) == ("eb", 0.004)
    assert ahead["low"] < ahead["gain"] < ahead["high"]


def test_a_single_candidate_is_not_called_ahead() -> None:
    assert choose([of_runs("eb", (1.0, 2.0), (1.0, 2.0))])[1] == "it is the only candidate"


def test_v1_at_another_budget_is_chosen_over_an_equally_good_policy() -> None:
    tuned = replace(score("v1", 100.2, -0.01, 0.008), max_num_batched_tokens=2048, at_reference=False)
    tuned = replace(tuned, gain=PairedInterval(0.099, 0.08, 0.12))
    eb = replace(score("eb", 100.3, 0, 0), gain=PairedInterval(0.1, 0.08, 0.12))
    v1 = replace(score("v1", 91, -0.12, -0.08), gain=PairedInterval(0.0, 0.0, 0.0))
    chosen, _ = choose([eb, tuned, v1])
    assert chosen is tuned
    found = budget_share([eb, tuned, v1])
    assert found is not None
    assert found[0] is tuned
    assert found[1] == pytest.approx(0.99)
