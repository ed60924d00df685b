"""The bound on a run's duration: no simulated policy is faster, no simulated step costs less than its work's prices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbench.devices.base import StepShape
from ebbench.devices.loader import load_device
from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.benchmarks import throughput_bound as bounds
from tests.benchmarks.throughput_bound import bound, fair_prices, plan_work, work_of
from tests.simulation.worlds import World, device, plan, worlds
from vllm_eb.policy import parse_policy

POLICIES = ("v1", "eb:k=3", "delayer", "marginal", "marginal:order=shortest")


def duration_s(result: EngineResult) -> float:
    last, first = (np.asarray(result.requests[name]) for name in ("last_token_ns", "intended_ns"))
    return float(last.max() - first.min()) / 1e9


@given(worlds())
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_policy_is_faster_than_the_bound(world: World) -> None:
    blocks = world.options.num_kv_blocks or 0
    found = bound(world.plan, device().cost, blocks * world.options.block_size, world.options)
    assert 0 < found.seconds <= duration_s(world.run()) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["rtx-pro-6000", "h200"])
@pytest.mark.parametrize("rate", [None, 30.0])
def test_no_policy_is_faster_than_the_bound_on_measured_devices(name: str, rate: float | None) -> None:
    load = {"max_concurrency": 200} if rate is None else {"request_rate": rate, "scenario": "poisson"}
    made = build_plan("sharegpt", source="profile", num_prompts=400, seed=1, **load)
    gpu, options = load_device(name, "qwen3-8b"), EngineOptions(max_num_seqs=256)
    found = bound(made, gpu.cost, gpu.kv_capacity_tokens, options)
    for policy in POLICIES:
        assert found.seconds <= duration_s(SimEngine(figures_only=True).run(made, parse_policy(policy), gpu, options))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_costs_at_least_its_work_at_fair_prices(policy: str) -> None:
    made = build_plan("balanced", num_prompts=300, max_concurrency=150, input_len=700, output_len=90, seed=2)
    gpu, options = load_device("rtx-pro-6000", "qwen3-8b"), EngineOptions(max_num_seqs=128, num_kv_blocks=3000)
    prices = fair_prices(gpu.cost, bounds._limits(made, 48000, options), plan_work(made, 16).sum(axis=0))
    assert (prices > 0).any()
    result = SimEngine().run(made, parse_policy(policy), gpu, options)
    known = dict(zip(made.table["request_id"].to_pylist(), made.table["input_tokens"].to_pylist(), strict=True))
    total = np.zeros(4)
    computed: dict[str, int] = {}
    for step in result.steps.to_pylist():
        for name in step["preempted_ids"]:
            computed.pop(name, None)
        amounts = np.zeros(4)
        for name, tokens in zip(step["request_ids"], step["request_tokens"], strict=True):
            before = computed.get(name, 0)
            computed[name] = after = before + tokens
            last = float(after >= known[name])
            amounts += work_of(StepShape(((tokens, before),), 0, 0, int(last)), [bool(last)])
        assert amounts @ prices <= (step["end_ns"] - step["start_ns"]) / 1e9
        total += amounts
    if not result.steps["preemptions"].to_numpy().any():
        assert total == pytest.approx(plan_work(made, 16).sum(axis=0))


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 30))
def test_a_plan_has_the_work_of_its_steps(tokens: int, chunk: int, outputs: int) -> None:
    made = plan([(tokens, outputs)], concurrency=1)
    total = np.zeros(4)
    for start in range(0, tokens, chunk):
        size = min(chunk, tokens - start)
        last = start + size == tokens
        total += work_of(StepShape(((size, start),), 0, 0, int(last)), [last])
    for position in range(1, outputs):
        total += work_of(StepShape((), 1, tokens + position, 1), [])
    assert plan_work(made, 16)[0] == pytest.approx(total)


def test_later_turns_and_shared_blocks_count_once() -> None:
    turns = plan_work(plan([(100, 20), (40, 5)], turns=2), 16)
    assert turns[0][2] == 99
    assert turns[1][2] == 160 - 1 - 112  # all full blocks of the first 120 tokens may be cached


def test_a_late_arrival_and_a_long_answer_bound_a_run() -> None:
    options = EngineOptions(max_num_seqs=16)
    late = bound(plan([(10, 1), (10, 1)], gap_ns=10**12), device().cost, 10**6, options)
    assert late.seconds > 1000
    assert late.reason == "arrivals"
    long = bound(plan([(10, 900), (10, 1)], gap_ns=1), device().cost, 10**6, options)
    assert long.reason == "one request"
