"""The joint search over policies and token budgets: how many runs it makes, and what it never drops."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.advice.choice import AdviceQuestion, BudgetedPolicy
from ebbench.advice.simulate import FACTOR, FEWEST, budgeted_policies, search, seeds_per_round
from ebbench.analysis.metrics import Slo
from ebbench.spec.run import RunSpec, simulated

POLICIES = ("v1", "eb", "ebplus", "marginal", "delayer", "ppas", "cadence:every=16", "batchwait:iters=32,ratio=0.5",
            "eb:k=64", "eb:theta=0.5")  # fmt: skip
BUDGETS = (2048, 4096, 16384)


def question(seeds: int, policies: tuple[str, ...] = POLICIES) -> AdviceQuestion:
    spec = simulated("balanced", "v1", "h200", "qwen3-8b", 64, 8192, num_prompts=9)
    return AdviceQuestion(spec, seeds, Slo(), policies, budgets=BUDGETS)


def pair_of(cell: RunSpec) -> BudgetedPolicy:
    return BudgetedPolicy(cell.policy, cell.server.max_num_batched_tokens)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.randoms(use_true_random=False))
def test_best_reference_and_best_budget_of_v1_run_on_all_seeds(seeds: int, random: Random) -> None:
    """Seeds change every candidate's figure by the same factor, so one seed gives the same order as all seeds."""
    asked = question(seeds)
    truth = {pair: random.uniform(50, 100) for pair in budgeted_policies(asked)}
    made: set[RunSpec] = set()

    def make(_name: str, cells: Sequence[RunSpec]) -> None:
        made.update(cells)

    found = search(asked, make, lambda cell: truth[pair_of(cell)] * (1 + cell.plan.seed))
    assert max(truth, key=truth.__getitem__) in found.finalists
    assert BudgetedPolicy("v1", 8192) in found.finalists
    assert max((pair for pair in truth if pair.policy == "v1"), key=truth.__getitem__) in found.finalists
    for pair in found.finalists:
        assert {cell.plan.seed for cell in made if pair_of(cell) == pair} == set(range(seeds))
    assert len(found.finalists) + len(found.dropped) == len(truth) == 40
    most = len(truth) + 2 * (
        len(seeds_per_round(seeds)) * len(truth)
    )  # P (1 + 2 log3 S): a round adds 2 seeds for a third
    assert len(made) <= min(most, len(truth) * seeds)
    if seeds >= FACTOR:
        assert len(made) < 0.62 * len(truth) * seeds
        assert found.dropped


def test_with_one_seed_nothing_is_dropped() -> None:
    found = search(question(1), lambda _name, _cells: None, lambda _cell: 1.0)
    assert (len(found.finalists), found.dropped) == (40, ())


def test_few_policies_keep_their_best_budget_each() -> None:
    policies = POLICIES[:FEWEST]
    worst = {policy: place for place, policy in enumerate(reversed(policies))}
    found = search(question(9, policies), lambda _name, _cells: None, lambda cell: 1 + worst[cell.policy])
    assert {pair.policy for pair in found.finalists} == set(policies)
    assert any(one.policy == policies[-1] for one in found.dropped)


def test_a_budget_that_a_policy_cannot_run_at_is_left_out() -> None:
    found = budgeted_policies(question(1, ("v1", "v1:budget=4096")))
    assert BudgetedPolicy("v1:budget=4096", 2048) not in found
    assert BudgetedPolicy("v1:budget=4096", 16384) in found


def test_rounds_end_at_the_seeds_asked_for() -> None:
    assert [seeds_per_round(seeds) for seeds in (1, 2, 5, 9)] == [[1], [1, 2], [1, 3, 5], [1, 3, 9]]
