"""KV blocks of layers that keep a window or a state: sizes, room, and runs that need it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ebbench.devices.base import SINGLE, Device, Parallel
from ebbench.devices.capacity import layout_with
from ebbench.devices.geometry import KvGroup, KvLayout, Mixer, ModelGeometry, attention, kv_layout
from ebbench.devices.loader import check_drafts, load_device
from ebbench.devices.profiles import find_model
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.simulation.kv import StatesKv
from ebbench.simulation.state import RequestState
from ebbench.spec.server import EngineOptions, parse_speculative
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

WINDOWED = {
    "model_type": "gemma3_text", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000, "sliding_window": 512,
    "max_position_embeddings": 131072, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
}  # fmt: skip


def device_of(folder: Path, utilization: float | None = None, **changes: object) -> Device:
    (folder / "config.json").write_text(json.dumps({**WINDOWED, **changes}))
    return load_device("l40s", str(folder), max_num_batched_tokens=2048, gpu_memory_utilization=utilization)


def held(layout: KvLayout, tokens: int, processed: int) -> int:
    return int(layout.held(np.array([tokens]), np.array([processed]))[0])


def test_a_window_gives_its_blocks_back() -> None:
    layout = KvLayout((KvGroup(1, 16), KvGroup(5, 16, window=48)), 1, 4096, 256)
    assert held(layout, 32, 16) == 2 + 5 * 2
    assert held(layout, 4096, 4095) == 256 + 5 * (256 - (4095 - 47) // 16)
    assert layout.most(4096) == 256 + 5 * (-(-(47 + 256) // 16) + 1)
    decoding = layout.by_length.decoding  # by how many tokens are in flight besides
    assert [decoding[flying][62] for flying in (0, 1)] == [4 + 5 * 4 - 5 * 0, 4 + 5 * 4]
    assert [decoding[flying][63] for flying in (0, 1)] == [held(layout, 64, 63), held(layout, 64, 62)] == [19, 24]


def test_a_chunk_gives_its_blocks_back_when_it_is_finished() -> None:
    """As in Llama 4: a token attends to those of its own chunk."""
    layout = KvLayout((KvGroup(1, 16), KvGroup(3, 16, chunk=64)), 1, 4096, 256)
    assert held(layout, 64, 63) == 4 + 3 * 4
    assert held(layout, 70, 64) == 5 + 3 * 1
    assert held(layout, 4096, 4095) == 256 + 3 * (256 - 63 * 4)
    assert layout.most(4096) == 256 + 3 * (64 + 256) // 16


@pytest.mark.parametrize(
    ("version", "asynchronous", "window_tokens"),
    [("0.25.1", True, 1023 + 32768), ("0.26", True, 1023 + 65536), ("0.32", False, 1023 + 32768)],
)
def test_windows_reckon_with_the_steps_in_flight(version: str, asynchronous: bool, window_tokens: int) -> None:
    """Gemma 4 of 31B with 32,768 tokens per step: vLLM 0.25.1 wanted 45.79 GiB for one sequence of 262,144 tokens, 0.26
    70.79 (issue 49878 of vLLM)."""
    mixers = (
        attention("full", 10, 5376, 32, 4, 512),
        attention("window", 50, 5376, 32, 16, 256, window=1024),
    )
    model = ModelGeometry("m", "m", 60, 5376, 32, 4, 512, 21504, 262144, own_mixers=mixers, positions=262144)
    layout = layout_with(model, SINGLE, 32768, version, async_scheduling=asynchronous)
    assert layout is not None
    assert layout.most(262144) == 262144 // 32 + 5 * (-(-window_tokens // 16) + 1)
    if asynchronous:
        assert round(layout.most(262144) * layout.block_bytes / 2**30, 2) == {"0.25.1": 45.79, "0.26": 70.79}[version]


def test_chunks_are_kept_by_old_versions_and_with_drafts() -> None:
    mixers = (attention("full", 12, 1024, 16, 8, 64), attention("chunk", 36, 1024, 16, 8, 64, window=8192))
    model = ModelGeometry("m", "m", 48, 1024, 16, 8, 64, 4096, 32000, own_mixers=mixers, positions=131072)
    layout = layout_with(model, SINGLE, 8192, "0.32")
    assert layout is not None
    assert [(group.tables, group.chunk) for group in layout.groups] == [(1, 0), (3, 8192)]
    assert layout_with(model, SINGLE, 8192, "0.12") is None
    assert layout_with(model, SINGLE, 8192, "0.32", drafts=True) is None


def test_a_sequence_has_one_state_without_prefix_caching(tmp_path: Path) -> None:
    """45 blocks for 32,768 tokens of Qwen3.5-27B: 33.04 sequences in 1,487 blocks (issue 40691 of vLLM)."""
    linear = {
        "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408, "vocab_size": 248320,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 32768,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(linear))
    model = find_model(str(tmp_path))
    one, two = (layout_with(model, SINGLE, 8192, "0.32", prefix_caching=cached) for cached in (False, True))
    assert one is not None
    assert two is not None
    assert (one.most(32768), two.most(32768)) == (42 + 3, 42 + 3 * 2)
    assert one.groups[0].block_tokens == 784


def test_a_state_takes_the_same_for_every_length() -> None:
    layout = KvLayout((KvGroup(1, 16), KvGroup(3, 16, per_sequence=2)), 1, 4096, 256)
    assert held(layout, 16, 0) - 1 == held(layout, 1600, 1599) - 100 == 3


def test_a_state_has_a_second_block_until_its_block_is_computed() -> None:
    """And one per drafted token, at any length: 16 tokens per block, two tables."""
    layout = KvLayout((KvGroup(1, 16), KvGroup(2, 16, per_sequence=5, drafts=3)), 1, 4096, 256)
    assert (layout.first(500) - 32, layout.most(500) - 32) == (2 * 4, 2 * 5)
    plan = build_plan("balanced", num_prompts=1, max_concurrency=1, input_len=32, output_len=9)
    kv = StatesKv(RequestState(plan), 40, layout, 16, recomputes=False, marked=False)
    assert not kv.lookup(0, 32)
    assert kv.fits(32, 32)
    kv.admit(0, 32, 32, 32)
    used = {32: kv.total - kv.free}
    for tokens in (33, 34):
        assert kv.grow(0, tokens, tokens, tokens - 1, 32)
        used[tokens] = kv.total - kv.free
    assert used == {32: 2 + 2 * 4, 33: 3 + 2 * 5, 34: 3 + 2 * 4}
    kv.release(0, 34)
    assert kv.free == kv.total


def test_a_pool_without_room_for_a_state_names_no_length_of_zero() -> None:
    layout = KvLayout((KvGroup(1, 16), KvGroup(3, 16, per_sequence=2)), 1, 4096, 256)
    device = replace(load_device("h200", "qwen3-8b"), kv_layout=layout, profile=None)
    plan = build_plan("balanced", num_prompts=4, max_concurrency=4)
    with pytest.raises(UsageError, match=r"holds 0, so it cannot run; give it more memory$"):
        SimEngine().run(plan, parse_policy("v1"), device, EngineOptions(num_kv_blocks=8))


def test_a_longer_state_per_drafted_token_makes_blocks_longer() -> None:
    """Qwen3.5 on eight GPUs: the convolution keeps five inputs more of 2 x 12,288 / 8 bytes."""
    model = find_model("tests/benchmarks/qwen3.5-397b-a17b.json")
    tokens = []
    for drafts in (0, 5):
        layout = layout_with(model.with_drafter(0, drafts), Parallel(tp=8), 8192, "0.32", drafts=drafts)
        assert layout is not None
        tokens.append(layout.state_block_tokens)
    assert tokens == [528, 544]


def test_all_layers_alike_need_no_groups() -> None:
    assert kv_layout(find_model("qwen3-8b"), 8192) is None


def test_the_longer_sequences_are_the_more_of_their_tokens_fit() -> None:
    layout = KvLayout((KvGroup(1, 16), KvGroup(5, 16, window=128)), 1, 4096, 256)
    within, beyond = (layout.effective_tokens(6_000, mean) for mean in (64, 4096))
    assert within == 6_000 // 6 * 16
    assert beyond > 4 * within


def test_groups_have_the_size_of_the_smallest_kind() -> None:
    """Gemma 3: one layer in six attends to everything."""
    layout = kv_layout(find_model("gemma-3-1b-it"), 8192)
    assert layout is not None
    full, windowed = layout.groups
    assert (full.tables, full.window) == (1, 0)
    assert windowed.tables == 6  # 22 layers in groups of 4
    assert windowed.window == 512


def test_a_server_that_reports_tokens_has_the_blocks_of_them(tmp_path: Path) -> None:
    device = device_of(tmp_path)
    assert device.kv_layout is not None
    blocks = device.kv_layout.blocks_of(device.kv_capacity_tokens)
    assert device.kv_layout.tokens_of(blocks) == device.kv_capacity_tokens


def test_blocks_that_are_no_blocks_of_the_pool_are_refused(tmp_path: Path) -> None:
    """A server logs 4,000,000 tokens: in blocks of 16 they would take more memory than there is."""
    device = device_of(tmp_path)
    plan = build_plan("balanced", num_prompts=3, max_concurrency=1)
    options = EngineOptions(max_num_batched_tokens=2048, num_kv_blocks=250_000)
    with pytest.raises(UsageError, match="--num-kv-blocks 250000 would take 66 GB of 48: layers of"):
        SimEngine().run(plan, parse_policy("v1"), device, options)


def test_long_requests_fit_where_layers_keep_a_window(tmp_path: Path) -> None:
    """Six times as many tokens: a sixth of the layers keeps them."""
    device = device_of(tmp_path, utilization=0.12)
    assert device.geometry is not None
    assert device.kv_layout is not None
    memory = device.kv_layout.blocks_of(device.kv_capacity_tokens) * device.kv_layout.block_bytes
    alike = memory // device.geometry.kv_bytes_per_token
    prompt = 2 * int(alike)
    plan = build_plan("balanced", num_prompts=3, max_concurrency=1, input_len=prompt, output_len=8)
    options = EngineOptions(max_num_batched_tokens=2048, max_model_len=131072, enable_prefix_caching=False)
    result = SimEngine().run(plan, parse_policy("v1"), device, options)
    assert result.requests["status"].to_pylist() == ["ok"] * 3
    everywhere = replace(device, kv_layout=None, kv_capacity_tokens=int(alike))
    with pytest.raises(UsageError, match="KV tokens"):
        SimEngine().run(plan, parse_policy("v1"), everywhere, options)


def test_more_sequences_run_at_once_where_layers_keep_a_window(tmp_path: Path) -> None:
    device = device_of(tmp_path, utilization=0.12)
    assert device.geometry is not None
    assert device.kv_layout is not None
    memory = device.kv_layout.blocks_of(device.kv_capacity_tokens) * device.kv_layout.block_bytes
    alike = replace(device, kv_layout=None, kv_capacity_tokens=memory // device.geometry.kv_bytes_per_token)
    plan = build_plan("balanced", num_prompts=60, max_concurrency=60, input_len=4000, output_len=32)
    options = EngineOptions(max_num_batched_tokens=2048, enable_prefix_caching=False)
    most = [
        max(SimEngine().run(plan, parse_policy("v1"), each, options).steps["running"].to_pylist())
        for each in (device, alike)
    ]
    assert most[0] > 1.5 * most[1]


def test_shared_prefixes_are_said_to_be_counted_at_the_mean_length(tmp_path: Path) -> None:
    device = device_of(tmp_path)
    plan = build_plan("wildchat", num_prompts=12, max_concurrency=4)
    result = SimEngine().run(plan, parse_policy("v1"), device, EngineOptions(max_num_batched_tokens=2048))
    said = [text for text in map(str, result.warnings) if "keep a window of tokens" in text]
    assert len(plan.table["content"].unique()) < len(plan)
    assert len(said) == 1


def test_states_do_not_take_memory_for_sequences_that_are_not_there(tmp_path: Path) -> None:
    """27 billion parameters with 150 MB of state per sequence: on one GPU, with 1,024 slots."""
    linear = {
        "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408, "vocab_size": 248320,
        "max_position_embeddings": 262144, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(linear))
    device = load_device("h200", str(tmp_path), assume_kernels=True)
    assert device.geometry is not None
    assert device.geometry.state_bytes * 1024 > 140e9
    assert device.kv_capacity_tokens > 1_000_000


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (Mixer("window", 3, cached=64, window=128), "keep a window of tokens"),
        (Mixer("state", 3, state_bytes=4096), "keep a state without a convolution"),
        (Mixer("state", 3, state_bytes=4096, draft_bytes=64), ""),
    ],
)
def test_drafts_are_refused_where_vllm_rules_are_not_simulated(mixer: Mixer, said: str) -> None:
    model = ModelGeometry("m", "m", 4, 64, 4, 2, 16, 256, 1000, own_mixers=(mixer, attention("full", 1, 64, 4, 2, 16)))
    drafts = parse_speculative("method=ngram,acceptance=0.5")
    if not said:
        check_drafts(drafts, model)
        return
    with pytest.raises(UsageError, match=said) as refused:
        check_drafts(drafts, model)
    assert "\n" not in str(refused.value)
