"""Layers that keep a window: ``sim`` gives and takes back blocks as vLLM's hybrid KV cache manager does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbench.devices.geometry import KvGroup, KvLayout, Mixer, ModelGeometry, attention, kv_layout
from ebbench.engines.emulated import EmulatedEngine
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from tests.devices.test_deepseek_v4 import FLASH
from tests.devices.test_model_families import INKLING, read
from tests.vllm.emulation import DEVICE, Traffic, differences, make_plan
from vllm_eb.policy import parse_policy

pytestmark = pytest.mark.vllm

LAYOUTS = {
    "one of each": (KvGroup(1, 16), KvGroup(1, 16, window=48)),
    "five windows": (KvGroup(1, 16), KvGroup(5, 16, window=33)),
    "wide blocks": (KvGroup(1, 32), KvGroup(3, 16, window=64)),
    "windows only": (KvGroup(1, 16, window=40),),
    "chunks": (KvGroup(1, 16), KvGroup(3, 16, chunk=64)),
    "compressed": (KvGroup(1, 256), KvGroup(2, 64, window=128), KvGroup(1, 4, window=8), KvGroup(1, 8, window=128)),
}


def both(plan: Plan, policy: str, layout: KvLayout, options: EngineOptions) -> list[str]:
    """Where the simulator and vLLM differ."""
    device = replace(DEVICE, kv_layout=layout)
    results = [
        engine.run(plan, parse_policy(policy), device, options)
        for engine in (SimEngine(), EmulatedEngine(shortcuts=False))
    ]
    assert results[1].requests["status"].to_pylist() == ["ok"] * len(plan)
    return differences(*results)


@pytest.mark.parametrize("policy", ["v1", "eb:k=9", "cadence:every=5"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("asynchronous", "budget"), [(True, 48), (True, 4096), (False, 48)])
def test_blocks_are_held_as_in_vllm(policy: str, name: str, asynchronous: bool, budget: int) -> None:
    """With little memory, so that requests wait for blocks and are preempted."""
    in_flight = budget * (2 if asynchronous else 1)
    layout = KvLayout(LAYOUTS[name], 1, 512, in_flight)
    options = EngineOptions(
        max_num_seqs=18, max_num_batched_tokens=budget, num_kv_blocks=40 * sum(group.tables for group in layout.groups),
        async_scheduling=asynchronous, enable_prefix_caching=False, max_model_len=512,
    )  # fmt: skip
    plan = make_plan(Traffic(sessions=28, concurrency=22, seed=3))
    assert both(plan, policy, layout, options) == []


@pytest.mark.parametrize("name", ["one of each", "five windows", "windows only"])
@pytest.mark.parametrize(("asynchronous", "budget"), [(True, 48), (False, 48), (True, 4096)])
def test_a_preempted_request_finds_its_blocks_again(name: str, asynchronous: bool, budget: int) -> None:
    """With prefix caching: about as many tokens are computed again as by vLLM, of which fewer than without."""
    layout = KvLayout(LAYOUTS[name], 1, 512, budget * (2 if asynchronous else 1))
    options = EngineOptions(
        max_num_seqs=18, max_num_batched_tokens=budget, num_kv_blocks=40 * sum(group.tables for group in layout.groups),
        async_scheduling=asynchronous, max_model_len=512, scheduler_reserve_full_isl=False,
    )  # fmt: skip
    plan, device = make_plan(Traffic(sessions=28, concurrency=22, seed=3)), replace(DEVICE, kv_layout=layout)

    def steps_of(engine: SimEngine | EmulatedEngine, caching: bool) -> tuple[int, int]:
        run = engine.run(plan, parse_policy("v1"), device, replace(options, enable_prefix_caching=caching))
        return len(run.steps), sum(run.steps["prefill_tokens"].to_pylist())

    steps, tokens = steps_of(SimEngine(), True)
    real_steps, real_tokens = steps_of(EmulatedEngine(shortcuts=False), True)
    assert abs(steps - real_steps) <= 1
    assert tokens == pytest.approx(real_tokens, rel=0.07)
    assert tokens <= steps_of(SimEngine(), False)[1]


def groups_of_vllm(model: ModelGeometry, inputs: Callable[[Mixer], Any] | None = None) -> list[tuple[int, int]]:
    """Blocks tables and tokens per block of each kind of group that vLLM makes of a model's layers. ``inputs``: vLLM's
    own description of a layer's cache of inputs of convolutions."""
    import torch
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size, unify_kv_cache_spec_page_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs = {}
    for mixer in model.mixers:
        for layer in range(mixer.layers):
            sizes = {
                "block_size": 16, "num_kv_heads": mixer.kv_heads, "head_size": mixer.key_dim,
                "head_size_v": mixer.value_dim, "dtype": torch.bfloat16,
            }  # fmt: skip
            if mixer.window:
                del sizes["head_size_v"]
                specs[f"{mixer.kind}.{layer}"] = SlidingWindowSpec(sliding_window=mixer.window, **sizes)
            else:
                specs[f"{mixer.kind}.{layer}"] = FullAttentionSpec(**sizes)
            if inputs is not None:
                specs[f"inputs of {mixer.kind}.{layer}"] = inputs(mixer)
    groups = _get_kv_cache_groups_uniform_page_size(unify_kv_cache_spec_page_size(specs))
    found: dict[tuple[str, int], int] = {}
    for group in groups:
        key = (type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size)
        found[key] = found.get(key, 0) + 1
    return sorted((count, tokens) for (_, tokens), count in found.items())


@pytest.mark.parametrize(
    ("full", "windowed"),
    [
        ((12, 8, 64), (12, 8, 64)),
        ((8, 4, 256), (40, 4, 256)),
        ((10, 4, 512), (50, 16, 256)),
        ((16, 8, 128), (18, 8, 128)),
    ],
)
def test_layers_are_grouped_as_in_vllm(full: tuple[int, int, int], windowed: tuple[int, int, int]) -> None:
    """As in gpt-oss, Gemma 3 and Gemma 4, and with about as many layers of each kind."""
    mixers = (
        attention("full", full[0], 1024, 16, *full[1:]),
        attention("window", windowed[0], 1024, 16, *windowed[1:], window=128),
    )
    layers = full[0] + windowed[0]
    model = ModelGeometry("m", "m", layers, 1024, 16, full[1], full[2], 4096, 32000, own_mixers=mixers)
    layout = kv_layout(model, 8192)
    assert layout is not None
    assert sorted((group.tables, group.block_tokens) for group in layout.groups) == groups_of_vllm(model)


@pytest.mark.parametrize("tp", [1, 4])
def test_inputs_of_convolutions_are_grouped_as_in_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """Inkling, by vLLM's class for them."""
    import torch
    from vllm.models.inkling.nvidia import sconv_swa_attn

    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    monkeypatch.setattr(sconv_swa_attn, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(sconv_swa_attn, "get_tensor_model_parallel_world_size", lambda: tp)
    model = read(tmp_path, INKLING).sliced(tp)
    pages = set()

    def inputs(mixer: Mixer) -> Any:
        name = str(len(config.compilation_config.static_forward_context))
        state = sconv_swa_attn.InklingConvState(
            num_kv_heads=mixer.kv_heads * tp, head_dim=mixer.key_dim, hidden_size=model.hidden, kernel_size=4,
            prefix=name,
        )  # fmt: skip
        spec = state.get_kv_cache_spec(config)
        pages.add((spec.page_size_bytes, spec.block_size, spec.sliding_window))
        return spec

    layout = kv_layout(model, 8192)
    assert layout is not None
    found: dict[int, int] = {}
    for group in layout.groups:
        found[group.block_tokens] = found.get(group.block_tokens, 0) + group.tables
    assert sorted((tables, tokens) for tokens, tables in found.items()) == groups_of_vllm(model, inputs)
    assert {(page.size, page.tokens, page.window) for _, page in model.inputs} == pages


def packed_by_vllm(layers: Iterable[Mixer]) -> tuple[list[tuple[int, int, int]], int]:
    """Block tables by tokens per block and window that vLLM makes of layers' caches of their own, and bytes of a
    block."""
    import torch
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_bytes_per_block, _get_packed_kv_cache_groups
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    specs = {}
    for at, pages in enumerate(mixer.pages for mixer in layers for _ in range(mixer.layers)):
        for place, page in enumerate(pages):
            sizes = {"block_size": page.tokens, "num_kv_heads": 1, "head_size": 1, "dtype": torch.uint8,
                     "page_size_padded": page.size}  # fmt: skip
            windowed = SlidingWindowMLASpec(sliding_window=page.window, **sizes) if page.window else None
            specs[f"{at}.{place}"] = windowed or MLAAttentionSpec(**sizes)
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC)
    groups = _get_packed_kv_cache_groups(SimpleNamespace(cache_config=cache, speculative_config=None), specs)
    tables_of: dict[tuple[int, int], int] = {}
    for group in groups:
        first = group.kv_cache_spec.first_spec
        key = (first.block_size, getattr(first, "sliding_window", None) or 0)
        tables_of[key] = tables_of.get(key, 0) + 1
    counts = sorted((tables, *key) for key, tables in tables_of.items())
    return counts, _get_kv_cache_bytes_per_block(groups, KVCacheLayout.BLHNC)


@pytest.mark.parametrize(
    "ratios",
    [[0, 0, *[4, 128] * 20, 4], [128, *[128, 4] * 30], [0] * 30 + [4] * 5, [4] * 3 + [128] * 20, [4] * 9],
)
def test_compressed_caches_are_packed_as_in_vllm(ratios: list[int], tmp_path: Path) -> None:
    """DeepSeek-V4-Flash's layers, -Pro's, and such as no model has."""
    model = read(tmp_path, FLASH, num_hidden_layers=len(ratios), compress_ratios=ratios)
    layout = kv_layout(model, 8192)
    assert layout is not None
    ours = sorted((group.tables, group.block_tokens, group.window) for group in layout.groups)
    assert (ours, layout.block_bytes) == packed_by_vllm(model.mixers)
