"""Runs of the candidate policies, checked before the first one starts, and the load that they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.advice.choice import BASELINE, AdviceQuestion, BudgetedPolicy, ExpectedLoad
from ebbench.analysis.metrics import Slo, parse_slo
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_VLLM
from ebbench.config.topology import TopologySpec
from ebbench.devices.capacity import batch_limits
from ebbench.devices.profiles import find_profile
from ebbench.engines.base import check_counts, check_fits, check_options, check_tp
from ebbench.engines.setup import resolve_topology
from ebbench.errors import UsageError
from ebbench.hazard import analyse_lengths
from ebbench.records.plan import Plan
from ebbench.runs.prepare import checked_server, device_of, each_once, parse_policies, plan_of
from ebbench.runs.store import RunStore
from ebbench.spec.commands import OF_A_SERVER, OF_TRAFFIC, AdviceCommand, asked_of
from ebbench.spec.run import OF_LABELS, RunSpec, simulated
from ebbench.spec.server import EngineOptions, version_defaults
from ebbench.workloads.options import is_recorded, recorded_file, scenario_meant
from ebbench.workloads.trace import read_trace
from vllm_eb.policy import parse_policy

DEFAULT_PROMPTS, MOST_OF_A_LOG = 3000, 10_000
"""Requests per run: of a workload, and most of a log, of whose further requests each seed takes another part."""
TRIED = ("batchwait:iters=32,ratio=0.5", "cadence:every=16", "delayer", "eb", "ebplus", "marginal", "ppas")
"""Policies that are tried beside v1: TensorRT-LLM's batch wait has no default, cadences of 8 to 32 differ little."""
SMALLER_BUDGETS = (2048, 4096, 8192)
"""Token budgets of v1: which is best moves with the load (P-PAS, arXiv 2608.15171)."""

TRIED_BUDGETS = (8192, 2048, 4096, 16384)
"""Token budgets to try; the first is the reference: that of vLLM's own on data-centre GPUs is 8,192 or 16,384."""


def advice_question(given: Mapping[str, Any]) -> AdviceQuestion:
    """The question, checked. ``given``: settings of a run and of :class:`AdviceCommand`, by name. Raises UsageError."""
    asked, settings = asked_of(AdviceCommand, given)
    counted = {name: settings.get(name) for name in ("max_concurrency", "request_rate")}
    check_counts(seeds=asked.seeds, num_prompts=asked.num_prompts, **counted)
    slo = parse_slo([asked.goodput] if asked.goodput else [])
    each_once("--max-num-batched-tokens", asked.max_num_batched_tokens)
    device = settings.get("device") or DEFAULT_DEVICE
    chosen = batch_limits(find_profile(device), settings.get("vllm_version") or DEFAULT_VLLM)
    seqs = settings.get("max_num_seqs", chosen.max_num_seqs)
    budgets = asked.max_num_batched_tokens or default_budgets(seqs, chosen.max_num_batched_tokens)
    model, workload = checked_server(settings), settings["workload"]
    scenario = scenario_meant(workload, settings.get("scenario"), counted["request_rate"], None)
    spec = simulated(
        workload, BASELINE, device, model, seqs, budgets[0], scenario, weight=2.0, in_front=True,
        **plan_arguments(workload, asked.num_prompts, settings),
    )  # fmt: skip
    policies = tuple(policy.name for policy in parse_policies(asked.policy)) or default_policies(slo, budgets, seqs)
    served = spec.changed(**_of_server(settings), **_topology(asked, settings))
    return checked(AdviceQuestion(served, asked.seeds, slo, policies, budgets=tuple(budgets[1:])))


def _topology(asked: AdviceCommand, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The topology, or what a number of GPUs means, and the link, if they are given. Raises UsageError."""
    topology, tp, link = asked.topology, asked.tp, settings.get("link")
    if topology is None:
        check_tp(tp, link)
        topology = f"tp={tp}" if tp > 1 else None
    elif tp > 1:
        raise UsageError(f"--topology has the GPUs of each engine: leave out --tp {tp}, and write tp= there")
    return {"topology": topology, "link": link}


def _of_server(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The server's other settings, and labels: those that are given, and what is off in the version of vLLM."""
    left_out = ("assume_decoder", "max_model_len")  # in the model's name, and in the plan
    own = {name: settings[name] for name in (*OF_A_SERVER, *OF_LABELS) if name in settings and name not in left_out}
    return version_defaults(settings.get("vllm_version")) | own


def plan_arguments(workload: str, num_prompts: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the plan except workload, scenario and seed."""
    given = {name: settings[name] for name in OF_TRAFFIC if name in settings and name != "scenario"}
    longest = settings.get("max_model_len", EngineOptions.max_model_len)
    given = {"source": "profile", **given, "max_model_len": longest}
    if not is_recorded(workload):
        return given | {"num_prompts": num_prompts or DEFAULT_PROMPTS}
    asked = num_prompts or _most(workload, settings.get("columns"))
    return given | {"num_prompts": asked, "source": "auto", "redraw": True}


def _most(workload: str, columns: str | None) -> int:
    path = recorded_file(workload)
    assert path is not None  # the caller asked for a log
    return min(read_trace(path, columns).requests.sessions, MOST_OF_A_LOG)


def default_budgets(max_num_seqs: int, chosen: int = TRIED_BUDGETS[0]) -> tuple[int, ...]:
    """Token budgets to try with every policy, that of the reference first, which is ``chosen`` by vLLM on the device.

    vLLM refuses a budget below its sequences.
    """
    fit = tuple(budget for budget in dict.fromkeys((chosen, *TRIED_BUDGETS)) if budget >= max_num_seqs)
    return fit or (max_num_seqs,)


def default_policies(slo: Slo, budgets: Sequence[int], max_num_seqs: int) -> tuple[str, ...]:
    """The policies that are tried unless others are asked for; those that keep targets get the TTFT and TPOT targets.

    Where only one token budget is tried, smaller budgets of v1 are candidates as far as they hold the sequences; of
    several ones each is tried with every policy anyway.
    """
    targets_s = {name: limit / 1e3 for name, limit in slo.limits().items() if name in ("ttft", "tpot")}
    most = budgets[0] if len(budgets) == 1 else 0
    named = [*TRIED]
    if targets_s:
        named.insert(named.index("marginal") + 1, f"marginal:{','.join(f'{k}={v:g}' for k, v in targets_s.items())}")
    if "tpot" in targets_s:
        named.append(f"slochunk:tpot={targets_s['tpot']:g}")
    named += [f"{BASELINE}:budget={budget}" for budget in SMALLER_BUDGETS if max_num_seqs <= budget < most]
    return (BASELINE, *named)


def candidate(question: AdviceQuestion, policy: str, seed: int, budget: int | None = None) -> RunSpec:
    """The cell of one policy and seed; ``budget`` None: at the reference budget."""
    return question.spec.changed(policy=policy, seed=seed, max_num_batched_tokens=budget or question.budget)


def candidates(question: AdviceQuestion, pair: BudgetedPolicy, seeds: int | None = None) -> list[RunSpec]:
    """The cells of a policy at a budget on so many seeds, by default on all of them."""
    asked = range(question.seeds if seeds is None else seeds)
    return [candidate(question, pair.policy, seed, pair.max_num_batched_tokens) for seed in asked]


def topology_asked(question: AdviceQuestion) -> TopologySpec | None:
    """The topology given, else the scenario's; None for one GPU. Raises UsageError if it cannot be read."""
    cluster = question.spec.cluster
    return resolve_topology(cluster.topology, question.spec.plan.scenario, cluster.link)


def engine_count(question: AdviceQuestion) -> int:
    """Number of engines among which the requests are shared, each with a scheduler of its own.

    Raises UsageError for separated pools, whose engines have nothing for a policy to decide, and for a topology that
    cannot be read.
    """
    layout = topology_asked(question)
    if layout is None:
        return 1
    if layout.disaggregated:
        topology = question.spec.cluster.topology or layout.label
        run = f"ebbench run {question.spec.plan.workload} --topology {topology} --policy v1"
        raise UsageError(
            f"topology {layout.label} separates prefill from decode, so there is nothing for a policy to decide; "
            f"compare it with others by `{run}`"
        )
    return sum(pool.units for pool in layout.pools)


def checked(question: AdviceQuestion) -> AdviceQuestion:
    """The question after checks; reduced to one seed if every seed gives the same plan.

    Raises UsageError for names, scheduler settings and requests that cannot be run, and what build_plan raises.
    """
    engine_count(question)
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


def alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans have the same lengths and times, so that their simulated runs are equal."""
    if (plan.phases, plan.max_concurrency) != (other.phases, other.max_concurrency) or len(plan) != len(other):
        return False
    asked = ["session", "turn", "phase", "arrival_ns", "input_tokens", "output_tokens", "hash_ids"]
    same: bool = plan.table.select(asked).equals(other.table.select(asked))
    return same and bool((_streams(plan) == _streams(other)).all())


def _streams(plan: Plan) -> npt.NDArray[np.int64]:
    """Content streams numbered from the first: a seed only shifts them, so that prefixes of other seeds are not
    cached."""
    content = plan.table["content"].to_numpy()
    return np.asarray(content - content[:1], np.int64)


def expected_load(question: AdviceQuestion, store: RunStore) -> ExpectedLoad:
    """Lengths and hazard of the first plan, and the number of open requests. Raises what build_plan raises."""
    plan = plan_of(candidate(question, BASELINE, 0))
    outputs = plan.table["output_tokens"].to_numpy()
    fit = analyse_lengths(outputs).censored
    mu_o, mu_l = float(outputs.mean()), float(plan.table["input_tokens"].to_numpy().mean())
    levels = [phase.max_concurrency for phase in plan.phases]
    concurrency = max(levels) if plan.closed_loop else _mean_open_requests(question, store)
    return ExpectedLoad(
        mu_l, mu_o, fit.p0 if fit else 1 / mu_o, fit.eta if fit else 0.0,
        min(concurrency, plan.max_concurrency or concurrency), open_loop=not plan.closed_loop,
        source=str(plan.facts.get("source", "the plan")),
    )  # fmt: skip


def _mean_open_requests(question: AdviceQuestion, store: RunStore) -> int:
    """Mean number of open requests in the candidates' runs, under v1 if it is one: rate times residence time
    (Little)."""
    policy = BASELINE if BASELINE in question.policies else question.policies[0]
    cells = [candidate(question, policy, seed) for seed in range(question.seeds)]
    means = [figure(store, cell, "request_throughput") * figure(store, cell, "mean_e2el_ms") / 1e3 for cell in cells]
    return max(1, round(sum(means) / len(means)))


def figure(store: RunStore, cell: RunSpec, key: str) -> float:
    """A figure of a finished run. Raises UsageError if it is undefined."""
    measured = store.get(cell)
    value = None if measured is None else measured.get(key)
    if value is None:
        raise UsageError(f"the run of {cell.policy} gave no {key}; use more requests (--num-prompts)")
    return value
