"""Runs of the candidate policies, checked before the first one starts, and the load that they carry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ebbench.advice.choice import BASELINE, AdviceQuestion, ExpectedLoad
from ebbench.config.topology import TopologySpec
from ebbench.engines.checks import check_fits, check_options
from ebbench.engines.setup import topology_of
from ebbench.errors import UsageError
from ebbench.hazard import analyse_lengths
from ebbench.records.plan import Plan
from ebbench.runs.prepare import device_of, plan_of
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated
from vllm_eb.policy import parse_policy


def candidate(question: AdviceQuestion, policy: str, seed: int, budget: int | None = None) -> RunSpec:
    """The cell of one policy and seed; ``budget`` None: at the reference budget."""
    cell = simulated(
        question.workload, policy, question.device, question.model, question.max_num_seqs,
        question.max_num_batched_tokens if budget is None else budget, question.scenario, weight=2.0, seed=seed,
        front_end_ms=None, **question.plan,
    )  # fmt: skip
    return cell.changed(**question.server)


def topology_asked(question: AdviceQuestion) -> TopologySpec | None:
    """The topology given, else the scenario's; None for one GPU. Raises UsageError if it cannot be read."""
    return topology_of(question.server.get("topology"), question.scenario, question.server.get("link"))


def engines_of(question: AdviceQuestion) -> int:
    """Number of engines among which the requests are shared, each with a scheduler of its own.

    Raises UsageError for separated pools, whose engines have nothing for a policy to decide, and for a topology that
    cannot be read.
    """
    found = topology_asked(question)
    if found is None:
        return 1
    if found.disaggregated:
        topology = question.server.get("topology", found.label)
        run = f"ebbench run {question.workload} --topology {topology} --policy v1"
        raise UsageError(
            f"topology {found.label} separates prefill from decode, so there is nothing for a policy to decide; "
            f"compare it with others by `{run}`"
        )
    return sum(pool.units for pool in found.pools)


def checked(question: AdviceQuestion) -> AdviceQuestion:
    """The question after checks; reduced to one seed if every seed gives the same plan.

    Raises UsageError for names, scheduler settings and requests that cannot be run, and what build_plan raises.
    """
    engines_of(question)
    first = candidate(question, BASELINE, 0)
    check_options(first.server, [parse_policy(policy) for policy in question.policies])
    for budget in question.budgets:
        check_options(candidate(question, BASELINE, 0, budget).server, [parse_policy(BASELINE)])
    device = device_of(first)
    plans = [plan_of(candidate(question, BASELINE, seed)) for seed in range(min(question.seeds, 2))]
    for plan in plans:
        check_fits(plan, device, first.server)
    if len(plans) == 2 and alike(*plans):
        return replace(question, seeds=1, seeds_alike=True)
    return question


def alike(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same lengths and times, so that their simulated runs are equal."""
    if (one.phases, one.max_concurrency) != (other.phases, other.max_concurrency) or len(one) != len(other):
        return False
    asked = ["session", "turn", "phase", "arrival_ns", "input_tokens", "output_tokens", "hash_ids"]
    same: bool = one.table.select(asked).equals(other.table.select(asked))
    return same and bool((_streams(one) == _streams(other)).all())


def _streams(plan: Plan) -> npt.NDArray[np.int64]:
    """Content streams numbered from the first: a seed only shifts them, so that prefixes of other seeds are not
    cached."""
    content = plan.table["content"].to_numpy()
    return np.asarray(content - content[:1], np.int64)


def load_of(question: AdviceQuestion, store: RunStore) -> ExpectedLoad:
    """Lengths and hazard of the first plan, and the number of open requests. Raises what build_plan raises."""
    plan = plan_of(candidate(question, BASELINE, 0))
    outputs = plan.table["output_tokens"].to_numpy()
    fit = analyse_lengths(outputs).censored
    mu_o, mu_l = float(outputs.mean()), float(plan.table["input_tokens"].to_numpy().mean())
    concurrency = max(phase.max_concurrency for phase in plan.phases) if plan.closed_loop else _seen(question, store)
    return ExpectedLoad(
        mu_l, mu_o, fit.p0 if fit else 1 / mu_o, fit.eta if fit else 0.0,
        min(concurrency, plan.max_concurrency or concurrency), open_loop=not plan.closed_loop,
        source=str(plan.facts.get("source", "the plan")),
    )  # fmt: skip


def _seen(question: AdviceQuestion, store: RunStore) -> int:
    """Mean number of open requests in the candidates' runs, under v1 if it is one: rate times residence time
    (Little)."""
    policy = BASELINE if BASELINE in question.policies else question.policies[0]
    cells = [candidate(question, policy, seed) for seed in range(question.seeds)]
    means = [figure(store, cell, "request_throughput") * figure(store, cell, "mean_e2el_ms") / 1e3 for cell in cells]
    return max(1, round(sum(means) / len(means)))


def figure(store: RunStore, cell: RunSpec, key: str) -> float:
    """A figure of a finished run. Raises UsageError if it is undefined."""
    found = store.get(cell)
    value = None if found is None else found.get(key)
    if value is None:
        raise UsageError(f"the run of {cell.policy} gave no {key}; use more requests (--num-prompts)")
    return value
