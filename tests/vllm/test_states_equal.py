"""Layers that keep a state: ``sim`` gives out blocks, those of drafts too, as vLLM's manager of states does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ebbench.devices.base import Device, Parallel
from ebbench.devices.capacity import layout_with
from ebbench.devices.geometry import KvGroup, KvLayout
from ebbench.devices.model_config import read_config
from ebbench.engines.base import EngineResult
from ebbench.engines.emulated import EmulatedEngine
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from tests.vllm.drawn_policies import draw_policy
from tests.vllm.emulation import DEVICE, differences, drafting_device, random_case, run_sim, seeds, with_priorities
from tests.vllm.test_drafts_equal import max_tokens, random_drafts
from vllm_eb.policy import least_seqs, parse_policy, policy_types

pytestmark = pytest.mark.vllm

QWEN = Path(__file__).parents[1] / "benchmarks" / "qwen3.5-397b-a17b.json"


def random_states(seed: int, *, drafts: bool, caching: bool) -> tuple[Plan, str, EngineOptions, Device]:
    """A random case on a model with one table of attention and one to three of states: turns of sessions and prompts
    share content, and drafts and prompts compete for blocks from just enough for the longest request."""
    plan, policy, options = random_drafts(seed) if drafts else random_case(seed)
    if least_seqs(parse_policy(policy)) > options.running_limit:
        policy = "v0"
    rng, drafted = random.Random(~seed), 0 if options.drafts is None else options.drafts.tokens
    block_tokens, tables = 16 * rng.randint(1, 8), rng.randint(1, 3)
    groups = (
        KvGroup(1, block_tokens),
        KvGroup(tables, block_tokens, per_sequence=(2 if caching else 1) + drafted, drafts=drafted),
    )
    in_flight = options.max_num_batched_tokens * (2 if options.async_scheduling else 1)
    layout = KvLayout(groups, 1, options.max_model_len, in_flight)
    longest = layout.most(max_tokens(plan) + 2 * drafted) + tables
    blocks = longest + (1 + tables) * rng.choice([0, 1, 3, 10, 50])
    options = replace(options, enable_prefix_caching=caching, block_size=16, num_kv_blocks=blocks)
    if seed % 5 == 0:
        plan, options = with_priorities(plan, seed), replace(options, scheduling_policy="priority")
    return plan, policy, options, replace(DEVICE, kv_layout=layout)


def both(plan: Plan, policy: str, options: EngineOptions, device: Device) -> tuple[EngineResult, EngineResult]:
    """The simulator and vLLM."""
    emulated = EmulatedEngine(shortcuts=False).run(plan, parse_policy(policy), device, options)
    return run_sim(plan, policy, device, options), emulated


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", seeds(700, 725))
def test_equal_with_states(seed: int, drafts: bool, caching: bool) -> None:
    case = random_states(seed, drafts=drafts, caching=caching)
    sim, emulated = both(*case)
    assert differences(sim, emulated) == []
    assert sim.requests["output_tokens"].to_pylist() == case[0].table["output_tokens"].to_pylist()


@pytest.mark.parametrize("caching", [False, True])
def test_states_are_preempted_where_engines_are_compared(caching: bool) -> None:
    """Else the test above would not see blocks given back, nor states found again."""
    preempted = cached = 0
    for seed in range(700, 725):
        plan, policy, options, device = random_states(seed, drafts=True, caching=caching)
        result = run_sim(plan, policy, device, options)
        preempted += sum(result.steps["preemptions"].to_pylist())
        cached += sum(map(bool, result.requests["cached_tokens"].to_pylist()))
        if caching and min(preempted, cached) > 10:
            return
    assert preempted > 10
    assert (cached > 10) == caching


@pytest.mark.parametrize("kind", policy_types())
@pytest.mark.parametrize("seed", range(741, 743))
def test_equal_with_states_under_every_policy(kind: str, seed: int) -> None:
    plan, _, options, device = random_states(seed, drafts=True, caching=bool(seed % 2))
    policy = draw_policy(kind, seed, options.running_limit, options.max_num_batched_tokens)
    assert differences(*both(plan, policy, options, device)) == []


@pytest.mark.parametrize("seed", seeds(750, 758))
def test_equal_with_states_and_drafts_that_adapt(seed: int) -> None:
    plan, _, options, device = random_states(seed, drafts=True, caching=bool(seed % 2))
    assert options.drafts is not None
    device = replace(drafting_device(options.drafts.tokens), kv_layout=device.kv_layout)
    assert differences(*both(plan, "marginal:draft=adaptive,update_every=3", options, device)) == []


def test_a_call_without_requests_orders_no_queue() -> None:
    """The last two answers end in one step, and what follows them comes in the next nanosecond: shortest first."""
    plan, _, options, device = random_states(743, drafts=True, caching=True)
    assert differences(*both(plan, "marginal:order=shortest", options, device)) == []


@pytest.mark.parametrize(("tp", "drafts"), [(1, 0), (8, 0), (8, 1), (8, 5)])
@pytest.mark.parametrize("caching", [True, False])
def test_states_lie_as_in_vllm(tp: int, drafts: int, caching: bool) -> None:
    """Qwen3.5 with its MTP layer: bytes of a state, tokens per block, tables, and bytes of the longest sequence."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    model = read_config(QWEN).with_drafter(1 if drafts else 0, drafts)
    layout = layout_with(model, Parallel(tp=tp), 8192, "0.32", prefix_caching=caching, drafts=drafts)
    assert layout is not None
    keep = {"num_kv_heads": max(2 // tp, 1), "head_size": 256, "dtype": torch.bfloat16}
    state = MambaSpec(
        shapes=MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 16, 64, 128, 128, 4, num_spec=drafts),
        dtypes=(torch.bfloat16, torch.float32), block_size=16, mamba_cache_mode="align" if caching else "none",
        num_speculative_blocks=drafts,
    )  # fmt: skip
    token_bytes = FullAttentionSpec(block_size=1, **keep).page_size_bytes
    tokens = 16 * -(-state.page_size_bytes // (16 * token_bytes))
    specs = {f"state.{layer}": replace(state, page_size_padded=tokens * token_bytes) for layer in range(45)}
    attended = {f"full.{layer}": FullAttentionSpec(block_size=tokens, **keep) for layer in range(16 if drafts else 15)}
    groups = _get_kv_cache_groups_uniform_page_size({**specs, **attended})
    states = sum(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    per_sequence = (2 if caching else 1) + drafts
    assert layout.groups == (
        KvGroup(len(groups) - states, tokens),
        KvGroup(states, tokens, per_sequence=per_sequence, drafts=drafts),
    )
    assert layout.block_bytes == len(attended) * tokens * token_bytes
