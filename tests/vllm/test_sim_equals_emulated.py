"""``sim`` and the real vLLM core agree row by row: steps, decisions and request times, to the nanosecond."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ebbench.devices.loader import load_device
from ebbench.runs.prepare import plan_of
from ebbench.spec.run import simulated
from ebbench.spec.server import EngineOptions
from tests.vllm.emulation import (
    DEVICE,
    Traffic,
    differences,
    make_plan,
    random_case,
    run_emulated,
    run_sim,
    seeds,
    with_further_limits,
)
from vllm_eb.policy import least_seqs, parse_policy
from vllm_eb.refills import cheapest_size

pytestmark = pytest.mark.vllm

ONLINE = "update_every=10,min_samples=8,window=40"
FOLLOWED = "update_every=10,window=40"
POLICIES = (
    "v1", "v0", "cadence:every=5", "deferred:k=5", "eb:k=9", "eb:theta=0.4", f"eb:{ONLINE}",
    f"ebplus:margin=-1,sticky=-1,{ONLINE}", f"ebplus:{ONLINE}",
    f"marginal:{FOLLOWED}", f"marginal:ttft=0.2,tpot=0.01,{FOLLOWED}",
    "v1:budget=24", "v1:order=shortest", "cadence:every=5,escape=off", "delayer", "ppas:cap=16",
    "batchwait:iters=4,ratio=0.6", "slochunk:tpot=0.01,least=8",
)  # fmt: skip
KV = {"tight": 34, "loose": 4000}
BUDGET = {"small": 48, "large": 4096}


def settings_of_policies() -> list[Any]:
    """All policies with all settings. `make test` has a quarter: under every policy each two values of two settings
    together, and each setting under four policies; the rest is for `make nightly`."""
    found = []
    for number, policy in enumerate(POLICIES):
        for a, b, c, d, e in itertools.product((0, 1), repeat=5):
            often = (a ^ b ^ d) + 2 * (a ^ c ^ e) == number % 4
            values = list(KV)[a], list(BUDGET)[b], (1, 3)[c], (None, 60.0)[d], (True, False)[e]
            found.append(pytest.param(policy, *values, marks=[] if often else pytest.mark.nightly))
    return found


@pytest.mark.parametrize(("policy", "kv", "budget", "turns", "rate", "asynchronous"), settings_of_policies())
def test_sim_and_emulated_are_equal_step_by_step(
    policy: str, kv: str, budget: str, turns: int, rate: float | None, asynchronous: bool
) -> None:
    traffic = Traffic(sessions=28 if turns == 1 else 10, turns=turns, concurrency=22, rate_per_s=rate, seed=turns)
    options = EngineOptions(
        max_num_seqs=18,
        max_num_batched_tokens=BUDGET[budget],
        num_kv_blocks=KV[kv],
        async_scheduling=asynchronous,
    )
    plan = make_plan(traffic)
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    assert emulated.requests["status"].to_pylist() == ["ok"] * len(plan)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "v0"])
@pytest.mark.parametrize(
    ("kv", "rate", "asynchronous", "warmup"),
    [("loose", None, True, 30), ("tight", None, True, 7), ("loose", 60.0, True, 30), ("tight", 60.0, False, 1)],
)
def test_equal_after_a_warmup(policy: str, kv: str, rate: float | None, asynchronous: bool, warmup: int) -> None:
    options = EngineOptions(
        max_num_seqs=18,
        max_num_batched_tokens=BUDGET["large"],
        num_kv_blocks=KV[kv],
        async_scheduling=asynchronous,
        warmup=warmup,
    )
    plan = make_plan(Traffic(sessions=28, concurrency=22, rate_per_s=rate, seed=5))
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    assert emulated.requests["status"].to_pylist() == ["ok"] * len(plan)


def lone_requests_uncapped() -> bool:
    """Whether vLLM lifts the cap on long prompts for a request that is alone (after 0.29)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return "num_eligible_reqs" in Scheduler.schedule.__code__.co_varnames


@pytest.mark.parametrize("seed", seeds(0, 60))
def test_equal_under_random_settings(seed: int) -> None:
    plan, policy, options = random_case(seed)
    if options.long_prefill_token_threshold and not lone_requests_uncapped():
        pytest.skip("this vLLM holds a lone request to long_prefill_token_threshold too; the simulator follows 0.32")
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []


LIMITS: dict[str, dict[str, Any]] = {
    "active": {"max_num_active_seqs": 7},
    "threshold": {"long_prefill_token_threshold": 9},
    "adaptive": {"long_prefill_token_threshold": 3, "long_prefill_token_threshold_adaptive": True},
    "first chunk": {"scheduler_reserve_full_isl": False},
    "requests": {"max_num_queued_reqs": 6},
    "tokens": {"max_num_queued_tokens": 200},
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("policy", ["v1", "v0", "eb:k=5", "batchwait:iters=4,ratio=0.6", f"marginal:{FOLLOWED}"])
@pytest.mark.parametrize(
    ("kv", "turns", "rate", "asynchronous"),
    [("tight", 1, None, True), ("tight", 1, 300.0, False), ("loose", 3, 300.0, True)],
)
def test_equal_under_vllms_further_limits(
    limit: str, policy: str, kv: str, turns: int, rate: float | None, asynchronous: bool
) -> None:
    given = LIMITS[limit]
    if missing := [name for name in given if not knows_option(name)]:
        pytest.skip(f"this vLLM has no {missing[0]}")
    options = EngineOptions(
        max_num_seqs=18,
        max_num_batched_tokens=48,
        num_kv_blocks=KV[kv],
        async_scheduling=asynchronous,
        **given,
    )
    plan = make_plan(Traffic(sessions=28 if turns == 1 else 10, turns=turns, concurrency=22, rate_per_s=rate, seed=3))
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    if policy == "v1" and (limit, kv) != ("first chunk", "loose"):
        usual = run_sim(
            plan, policy, DEVICE, replace(options, **{name: getattr(EngineOptions, name) for name in given})
        )
        assert differences(sim, usual) != []


def test_marginal_is_equal_where_prompts_are_cheapest_in_small_steps() -> None:
    gpu = load_device("l40s", "qwen3-8b")
    assert cheapest_size(gpu.calibration.costs, 8192) is not None
    plan = make_plan(Traffic(sessions=40, concurrency=30, max_input=4000, max_output=30, seed=2))
    options = EngineOptions(max_num_seqs=24, max_num_batched_tokens=8192, num_kv_blocks=4000)
    for policy in (f"marginal:{FOLLOWED}", f"marginal:ttft=5,tpot=0.1,{FOLLOWED}"):
        sim, emulated = run_sim(plan, policy, gpu, options), run_emulated(plan, policy, gpu, options)
        assert differences(sim, emulated) == []
        tokens = [tokens for tokens in sim.steps["prefill_tokens"].to_pylist() if tokens]
        assert sum(tokens) / len(tokens) < 4096, "prompts were computed in steps as large as the budget allows"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_marginal_is_equal_on_answers_of_one_length(asynchronous: bool) -> None:
    cell = simulated(
        "balanced", "v1", "h200", "qwen3-8b", 64, 4096, length_distribution="fixed", input_len=512, output_len=24,
        num_prompts=96, max_concurrency=32,
    )  # fmt: skip
    gpu, plan = load_device("h200", "qwen3-8b"), plan_of(cell)
    options = EngineOptions(
        max_num_seqs=64, max_num_batched_tokens=4096, num_kv_blocks=4000, async_scheduling=asynchronous,
        front_end_ms=0.0,  # with time in front of the engine the next requests come too late to be mixed in
    )  # fmt: skip
    sim, emulated = run_sim(plan, "marginal", gpu, options), run_emulated(plan, "marginal", gpu, options)
    assert differences(sim, emulated) == []
    assert "mixed_costs_less" in sim.decisions["reason"].to_pylist()


@pytest.mark.parametrize("order", ["fcfs", "shortest"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_marginal_is_equal_after_estimates_of_the_mean_answer(asynchronous: bool, order: str) -> None:
    """Memory bounds admissions, and more answers end than its first estimate of their survival curve needs."""
    plan = make_plan(Traffic(sessions=120, concurrency=40, max_input=60, max_output=60, seed=4))
    options = EngineOptions(
        max_num_seqs=36, max_num_batched_tokens=512, num_kv_blocks=90, async_scheduling=asynchronous
    )
    policy = f"marginal:window=30,update_every=10,order={order}"
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    assert sum(sim.steps["preemptions"].to_pylist()) > 0


def knows_option(name: str) -> bool:
    from vllm.engine.arg_utils import EngineArgs

    return hasattr(EngineArgs, name)


@pytest.mark.parametrize("seed", seeds(200, 240))
def test_equal_under_random_further_limits(seed: int) -> None:
    plan, policy, options = random_case(seed)
    options = with_further_limits(options, seed)
    if least_seqs(parse_policy(policy)) > options.running_limit:
        policy = "v0"
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []


@pytest.mark.parametrize("seed", range(100, 106))
def test_equal_behind_a_front_end(seed: int) -> None:
    plan, policy, options = random_case(seed)
    options = replace(options, front_end_ms=1.0 + seed % 7, warmup=seed % 5, long_prefill_token_threshold=0)
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    off = run_sim(plan, policy, DEVICE, replace(options, front_end_ms=0.0))
    assert sim.requests["first_token_ns"].to_pylist() != off.requests["first_token_ns"].to_pylist()


@pytest.mark.parametrize("seed", range(100, 112))
def test_equal_behind_an_api_server(seed: int) -> None:
    """Requests enter late and clients see their tokens late; both engines must agree on every one of these times."""
    plan, policy, options = random_case(seed)
    options = replace(
        options, api_server="datacenter", api_server_count=1 + seed % 3, warmup=seed % 5, long_prefill_token_threshold=0
    )
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    off = run_sim(plan, policy, DEVICE, replace(options, api_server="off", api_server_count=None))
    assert sim.requests["first_token_ns"].to_pylist() != off.requests["first_token_ns"].to_pylist()
