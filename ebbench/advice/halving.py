"""Searches policies and token budgets together within a bounded number of runs: successive halving.

Every pair of a policy and a budget runs on the first seed. The better third goes on to three seeds, the better third of
those to nine, and so on up to the number of seeds asked for (Karnin, Koren and Somekh, "Almost optimal exploration in
multi-armed bandits", 2013, with a third instead of a half, as in Hyperband, Li et al. 2018). With P pairs and S seeds
that is at most about P (1 + log3 S) runs where a full grid takes P S.

Halving suits this problem because all pairs run on the same plans. The variance between seeds, which is common to all,
does not enter the comparison, so one seed ranks them nearly as all seeds do, and the seeds go to those pairs that are
close to the best. A model-based search (Bayesian optimisation) would need a distance between policies, which have none.
Runs of one round do not depend on one another, so all cores are busy.

These pairs are never dropped: the reference, with which all gains are compared; the best budget of vLLM's own
scheduling, so that the gain of a tuned budget alone is known as precisely as that of the best policy; and, among few
policies, the best budget of each, since users want to see the policies that they named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ebbench.advice.candidates import candidate
from ebbench.advice.choice import BASELINE
from ebbench.advice.results import AdviceQuestion, BudgetedPolicy, DroppedPolicy
from ebbench.engines.checks import check_options
from ebbench.errors import UsageError
from ebbench.spec.run import RunSpec
from vllm_eb.policy import parse_policy

FACTOR = 3
"""Ratio of seeds between rounds, and of the pairs before a round to those after it."""
FEWEST = 8
"""So many pairs reach the last round; of so many policies or fewer, each keeps its best budget."""

Make = Callable[[str, Sequence[RunSpec]], None]
"""Carries out the runs of a round, named by a text."""


@dataclass(frozen=True)
class SearchResult:
    """Pairs that ran on all seeds, and those that were dropped before, best first."""

    finalists: tuple[BudgetedPolicy, ...]
    dropped: tuple[DroppedPolicy, ...]


def pairs_of(question: AdviceQuestion) -> list[BudgetedPolicy]:
    """All pairs that a server can run; the reference budget with every policy comes first."""
    found = [BudgetedPolicy(policy, question.max_num_batched_tokens) for policy in question.policies]
    for budget in question.budgets:
        found += [BudgetedPolicy(policy, budget) for policy in question.policies if _valid(question, policy, budget)]
    return list(dict.fromkeys(found))


def _valid(question: AdviceQuestion, policy: str, budget: int) -> bool:
    """Whether the policy's settings fit the budget."""
    try:
        check_options(candidate(question, policy, 0, budget).server, [parse_policy(policy)])
    except UsageError:
        return False
    return True


def rounds_of(seeds: int) -> list[int]:
    """Seeds on which the pairs of each round have run at its end: 1, 3, 9, ... and the number asked for."""
    found = [1]
    while found[-1] < seeds:
        found.append(min(seeds, FACTOR * found[-1]))
    return found


def search(question: AdviceQuestion, make: Make, objective: Callable[[RunSpec], float]) -> SearchResult:
    """Carry out the rounds. ``objective``: the figure of a finished run that decides, larger is better."""
    left, dropped = pairs_of(question), []
    rounds = rounds_of(question.seeds)
    for index, seeds in enumerate(rounds):
        cells = {pair: _cells(question, pair, seeds) for pair in left}
        name = f"candidates, round {index + 1} of {len(rounds)}" if len(rounds) > 1 else "candidates"
        make(name, [cell for seed in range(seeds) for pair in left if (cell := cells[pair][seed])])
        values = {pair: sum(map(objective, cells[pair])) / seeds for pair in left}
        if seeds == question.seeds:
            break
        best = max(values.values())
        kept = _kept(question, values)
        dropped += [
            DroppedPolicy(*pair, seeds, values[pair] / best - 1 if best > 0 else 0.0)
            for pair in left
            if pair not in kept
        ]
        left = [pair for pair in left if pair in kept]
    return SearchResult(tuple(left), tuple(sorted(dropped, key=lambda one: (-one.seeds, -one.behind_best))))


def _cells(question: AdviceQuestion, pair: BudgetedPolicy, seeds: int) -> list[RunSpec]:
    return [candidate(question, pair.policy, seed, pair.max_num_batched_tokens) for seed in range(seeds)]


def _kept(question: AdviceQuestion, values: Mapping[BudgetedPolicy, float]) -> set[BudgetedPolicy]:
    """The pairs that go on to the next round."""
    ranked = sorted(values, key=lambda pair: -values[pair])  # stable: the reference budget first among equals
    kept = set(ranked[: max(-(-len(ranked) // FACTOR), FEWEST)])
    of_reference = BASELINE if BASELINE in question.policies else question.policies[0]
    always = [pair for pair in ranked if pair == (of_reference, question.max_num_batched_tokens)]
    shown = question.policies if len(question.policies) <= FEWEST else (BASELINE,)
    always += [pair for policy in shown for pair in [pair for pair in ranked if pair.policy == policy][:1]]
    return kept | set(always)
