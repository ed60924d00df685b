"""``--scheduling-policy priority``: no request is preempted while one of a lower priority keeps its KV blocks, and the
simulator makes the steps of the real scheduler."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ebbench.spec.server import EngineOptions
from tests.vllm.core_engine import Engine
from tests.vllm.emulation import (
    DEVICE,
    Traffic,
    differences,
    drafting_device,
    make_plan,
    random_case,
    run_emulated,
    run_sim,
    seeds,
    with_further_limits,
    with_priorities,
)
from vllm_eb.policy import least_seqs, parse_policy

pytestmark = pytest.mark.vllm

LOW, HIGH = 5, 0  # vLLM serves small numbers first
SCENES = 40


def preempted_too_early(policy: str, seed: int) -> tuple[list[str], int]:
    """Requests preempted while others of a lower priority ran, and the number of preemptions.

    Decodes of a low priority, then long prompts of a high one, which are computed in several steps. vLLM admits a
    prompt here without asking whether all of it fits, so that a half-computed prompt may find no KV blocks.
    """
    dice = random.Random(seed)
    block_size = dice.choice((1, 4))
    engine = Engine(
        policy, blocks=dice.randint(80, 200) // block_size + 2, seqs=8, budget=dice.choice((8, 16, 40)),
        asynchronous=dice.random() < 0.5, block_size=block_size,
        further={"scheduling_policy": "priority", "scheduler_reserve_full_isl": False},
    )  # fmt: skip
    scheduler = engine.scheduler
    preempt, early, preempted = scheduler._preempt_request, [], []

    def watched(request: Any, *args: Any, **kwargs: Any) -> None:
        running = (*scheduler.running, *getattr(scheduler, "_set_aside", ()))
        preempted.append(request.request_id)
        if any(other.priority > request.priority for other in running):
            early.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = watched
    wanted = {f"low{number}": dice.randint(20, 60) for number in range(dice.randint(1, 4))}
    for name, tokens in wanted.items():
        engine.add(name, dice.randint(1, 12), tokens, priority=LOW)
    for _ in range(dice.randint(4, 20)):
        engine.turn()
    for number in range(dice.randint(1, 3)):
        name = f"high{number}"
        wanted[name] = dice.randint(1, 5)
        engine.add(name, dice.randint(20, 70), wanted[name], priority=HIGH)
        for _ in range(dice.randint(0, 3)):
            engine.turn()
    engine.run(600)
    assert dict(engine.tokens) == wanted, seed
    return early, len(preempted)


@pytest.mark.parametrize("policy", ["stock", "v0", "eb:theta=0.3", "delayer", "marginal"])
def test_the_lowest_priority_is_preempted_first(policy: str) -> None:
    seen = {seed: preempted_too_early(policy, seed) for seed in range(SCENES)}
    assert {seed: early for seed, (early, _) in seen.items() if early} == {}
    assert sum(preempted for _, preempted in seen.values()) > 10


FOLLOWED = "update_every=10,window=40"
POLICIES = (
    "v1", "v0", "cadence:every=5", "deferred:k=5", "eb:k=9", "eb:theta=0.4", f"ebplus:min_samples=8,{FOLLOWED}",
    f"marginal:{FOLLOWED}", "delayer", "ppas:cap=16", "batchwait:iters=4,ratio=0.6", "slochunk:tpot=0.01,least=8",
)  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_sim_and_emulated_are_equal(policy: str, asynchronous: bool) -> None:
    options = EngineOptions(
        max_num_seqs=18, max_num_batched_tokens=128, num_kv_blocks=34, async_scheduling=asynchronous,
        scheduling_policy="priority", scheduler_reserve_full_isl=False, warmup=3,
    )  # fmt: skip
    plan = with_priorities(make_plan(Traffic(sessions=10, turns=3, concurrency=22, rate_per_s=300.0)), 1)
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    assert sum(sim.requests["preemptions"].to_pylist()) > 0


@pytest.mark.parametrize("seed", seeds(0, 40))
def test_equal_under_random_settings(seed: int) -> None:
    plan, policy, options = random_case(seed)
    options = with_further_limits(options, seed) if seed % 3 == 0 else options
    if least_seqs(parse_policy(policy)) > options.running_limit or parse_policy(policy).orders_queue:
        policy = "v0"
    options = replace(options, scheduling_policy="priority", warmup=seed % 4)
    plan = with_priorities(plan, seed)
    assert differences(run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)) == []


@pytest.mark.parametrize("speculative", ["method=mtp,tokens=3,acceptance=0.8,0.5", "method=ngram,acceptance=0.6,0.3"])
@pytest.mark.parametrize("policy", ["v1", "eb:k=5", f"marginal:{FOLLOWED}"])
def test_equal_with_drafts(policy: str, speculative: str) -> None:
    options = EngineOptions(
        max_num_seqs=18, max_num_batched_tokens=128, num_kv_blocks=32, speculative=speculative,
        scheduling_policy="priority", scheduler_reserve_full_isl=False,
    )  # fmt: skip
    assert options.drafts is not None
    gpu = drafting_device(options.drafts.tokens)
    plan = with_priorities(make_plan(Traffic(sessions=30, concurrency=22, rate_per_s=300.0)), 2)
    sim, emulated = run_sim(plan, policy, gpu, options), run_emulated(plan, policy, gpu, options)
    assert differences(sim, emulated) == []
    assert sum(sim.requests["preemptions"].to_pylist()) > 0


def test_refused_warmup_requests_are_none_of_the_plan() -> None:
    options = EngineOptions(max_num_seqs=4, num_kv_blocks=100, warmup=3, max_num_queued_reqs=2)
    plan = make_plan(Traffic(sessions=12, rate_per_s=5.0, seed=1))
    emulated = run_emulated(plan, "v1", DEVICE, options)
    assert differences(run_sim(plan, "v1", DEVICE, options), emulated) == []
    assert "cancelled" not in emulated.requests["status"].to_pylist()
