"""``sim`` and the real vLLM core agree on sessions with pauses, parallel requests and clients that hang up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbench.spec.server import EngineOptions
from ebbench.workloads.options import PlanOptions
from ebbench.workloads.planner import make_plan
from tests.vllm.emulation import DEVICE, as_agents, differences, random_case, run_emulated, run_sim, seeds

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", seeds(200, 240))
def test_equal_with_agents_and_hang_ups(seed: int) -> None:
    plan, policy, options = random_case(seed)
    options = replace(options, long_prefill_token_threshold=0, warmup=seed % 3)
    if policy.startswith("eb:k="):  # vLLM refuses k above the most sequences
        policy = f"eb:k={min(int(policy[5:]), options.max_num_seqs)}"
    if seed % 4 == 0:
        options = replace(options, api_server="datacenter", api_server_count=1 + seed % 3)
    plan = as_agents(plan, seed)
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []


@pytest.mark.parametrize("seed", seeds(240, 250))
def test_equal_where_sessions_begin_in_their_middle(seed: int) -> None:
    _, policy, options = random_case(seed)
    policy = "v1" if policy.startswith("eb:k=") else policy
    start = PlanOptions(
        "wildchat", num_prompts=10, seed=seed, source="profile", max_concurrency=4, with_text=False, think_time="1",
        session_start="0-1", max_model_len=3000, drop_too_long=True,
    )  # fmt: skip
    options = replace(EngineOptions(), max_model_len=3000, warmup=seed % 2, max_num_seqs=max(4, options.max_num_seqs))
    plan = make_plan(start)
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert sum(sim.requests["cached_tokens"].to_pylist()) > 0
    assert differences(sim, emulated) == []


def test_the_random_cases_hold_every_kind_of_ending() -> None:
    seen: set[str] = set()
    for seed in range(200, 212):
        plan, policy, options = random_case(seed)
        result = run_sim(as_agents(plan, seed), policy, DEVICE, replace(options, long_prefill_token_threshold=0))
        seen |= set(result.requests["status"].to_pylist()) | set(result.requests["error_class"].to_pylist()) - {None}
    assert seen == {"ok", "abandoned", "never_sent", "earlier_turn_abandoned"}
