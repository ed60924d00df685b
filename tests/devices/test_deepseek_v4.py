"""DeepSeek-V4: layers with keys compressed 4 and 128 times, their caches in vLLM's pool, and their times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbench.devices import library
from ebbench.devices.base import Parallel, StepShape, start_up
from ebbench.devices.capacity import reserve_bytes
from ebbench.devices.costs import TableCost
from ebbench.devices.geometry import KvGroup, KvLayout, Mixer, ModelGeometry, Page, kv_layout
from ebbench.devices.loader import load_device
from ebbench.errors import InputFileError, UsageError
from ebbench.spec.server import Speculative
from tests.devices.active_params import active_params
from tests.devices.test_model_families import read, write

FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4", "num_hidden_layers": 43, "hidden_size": 4096, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024,
    "o_groups": 8, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048, "num_hash_layers": 3, "num_nextn_predict_layers": 1, "vocab_size": 129280,
    "max_position_embeddings": 1048576, "expert_dtype": "fp4", "torch_dtype": "bfloat16", "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "tie_word_embeddings": False,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip
PRO = FLASH | {
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "index_topk": 1024, "n_routed_experts": 384, "moe_intermediate_size": 3072,
    "compress_ratios": [128, *[128, 4] * 30, 0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers", "params", "active"),
    # Parameters of transformers 5.19's class on the meta device; active ones as published.
    [
        (FLASH, {0: 2, 4: 21, 128: 20}, 284_332_230_231, 13e9),
        (PRO, {4: 30, 128: 31}, 1_572_997_179_491, 49e9),
    ],
)
def test_layers_and_parameters(
    tmp_path: Path, config: dict[str, Any], layers: dict[int, int], params: int, active: float
) -> None:
    model = read(tmp_path, config)
    assert {mixer.every: mixer.layers for mixer in model.mixers} == layers
    assert model.params == pytest.approx(params, rel=1e-5)
    assert active_params(model) == pytest.approx(active, rel=0.07)
    assert (model.experts_per_token, model.shared_intermediate, model.dense_layers) == (
        6, config["moe_intermediate_size"], 0,
    )  # fmt: skip
    assert (model.mtp_layers, model.positions, model.streams) == (1, 1048576, 4)
    assert (model.weight_dtype, model.dtype_of_attention, model.dtype_of_experts, model.kv_dtype) == (
        "fp8_block", "fp8_block", "w4a16_mxfp4", "fp8",
    )  # fmt: skip


@pytest.mark.parametrize("tp", [1, 8])
def test_the_pool_has_vllms_groups(tmp_path: Path, tp: int) -> None:
    """Blocks of 1,002,240 bytes, of which windows have two tables: printed from vLLM 0.28 (issue 54703). All GPUs keep
    everything."""
    part = read(tmp_path, FLASH).sliced(tp)
    sizes: dict[tuple[int, int], int] = {}
    for layers, page in part.own_pages:
        sizes[page.tokens, page.window] = sizes.get((page.tokens, page.window), 0) + layers * page.size
    assert sizes == {(256, 0): 1_002_240, (64, 128): 823_680 + 786_240, (4, 8): 870_912, (8, 128): 656_640}
    layout = kv_layout(part, 16_384)
    assert layout is not None
    groups = {(group.block_tokens, group.window): group.tables for group in layout.groups}
    assert groups == {(256, 0): 1, (64, 128): 2, (4, 8): 1, (8, 128): 1}
    assert layout.block_bytes == 1_002_240
    assert layout.scheduler_block_tokens == 256


def test_what_one_sequence_takes_at_most(tmp_path: Path) -> None:
    """vLLM 0.22 wanted 6.66 GiB for 30,000 tokens with 16,384 in flight (issue 44376), in blocks of 1,051,776 bytes as
    it packed them then."""
    layout = kv_layout(read(tmp_path, FLASH), 16_384)
    assert layout is not None
    assert layout.most(30_000) * 1_051_776 / 2**30 == pytest.approx(6.66, abs=0.005)


def test_a_group_of_pages_that_occur_unevenly_is_not_divided() -> None:
    pages = Page(4096, 64), Page(512, 64)
    own = (
        Mixer("compressed", 3, 1, pages=(Page(1024, 16, window=32), *pages)),
        Mixer("compressed", 9, 1, pages=(Page(1024, 16, window=32), pages[0])),
        Mixer("compressed", 5, 1, pages=(Page(700, 4, window=8), Page(300, 4, window=8))),
    )
    layout = kv_layout(ModelGeometry("m", "m", 17, 64, 1, 1, 64, 64, 64, own_mixers=own), 512)
    assert layout == KvLayout(
        (KvGroup(1, 64), KvGroup(2, 16, window=32), KvGroup(1, 4, window=8)), 12 * 4096 + 3 * 512, 32_768, 512
    )


def test_what_is_set_aside_at_the_start_grows_with_the_longest_sequence(tmp_path: Path) -> None:
    """As vLLM 0.32 reserves it: keys of four prompts in 16 bits, places of keys compressed 128 times, an index's
    scores; or, of shorter ones, an index's keys."""
    model, start = read(tmp_path, FLASH), start_up("0.32")

    def aside(positions: int, tp: int = 4) -> int:
        return reserve_bytes(replace(model, positions=positions), start, 1024, 8192, parallel=Parallel(tp=tp))

    assert aside(1 << 20) - aside(1 << 19) == 4 * (1 << 17) * 1024 + 2 * 8192 * 4096 * 4
    assert aside(1 << 18) - aside(1 << 17) == 10 * (1 << 17) * 132 + 2 * 8192 * 1024 * 4
    assert aside(1 << 20) > (4 * (1 << 18) * 1024) + 2 * 8192 * 8192 * 4 + (512 << 20) + 8192 * 2 * 64 * 512 * 2
    # Queries of 64 heads, whatever part of them a GPU has.
    assert aside(1 << 20, 4) == aside(1 << 20, 8)


def test_bytes_of_a_sequence(tmp_path: Path) -> None:
    model = read(tmp_path, FLASH)
    per_token = 21 * (37440 + 8640) / 256 + 20 * 1728 / 256
    assert model.kv_bytes_per_token == int(per_token)
    windows = 43 * 2 * 37440 + 21 * 2 * (32832 + 8640) + 20 * 16 * 32832
    assert model.kv_bytes(10_000) == pytest.approx(10_000 * per_token + windows)


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({"expert_dtype": None}, "w4a16_mxfp4"),
        ({"expert_dtype": "fp8"}, "fp8_block"),
        ({"quantization_config": FLASH["quantization_config"] | {"moe_quant_algo": "NVFP4", "ignore": ["*.attn.*"]}},
         "nvfp4"),
    ],
)  # fmt: skip
def test_types_of_experts(tmp_path: Path, changes: dict[str, Any], experts: str) -> None:
    """vLLM leaves nothing out by ``ignore``, which NVIDIA's file has for what its own tool converted."""
    model = read(tmp_path, FLASH, **changes)
    assert (model.dtype_of_attention, model.dtype_of_experts) == ("fp8_block", experts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compress_ratios": None}, "compress_ratios must say 0, 4 or 128 for every layer"),
        ({"compress_ratios": [4, 8] * 22}, "compress_ratios must say 0, 4 or 128"),
        ({"compress_ratios": [128] * 44}, "and 4 for one at least"),
        ({"head_dim": 256}, "head_dim, qk_rope_head_dim and num_key_value_heads must be 512, 64 and 1"),
        ({"expert_dtype": "int3"}, "expert_dtype fp4 or fp8, not fp8, .* and int3"),
        ({"quantization_config": None}, "is read with quant_method fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "not awq"),
        ({"vision_n_layers": 24}, "the model's encoder and its attention to images are not read"),
        ({"kv_groups": 3}, "kv_groups says something of the shape"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputFileError, match=said):
        read(tmp_path, FLASH, **changes)


def test_its_cache_has_one_type_and_drafts_are_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path, FLASH))
    with pytest.raises(UsageError, match="in a format of fp8 alone; leave out bfloat16"):
        load_device("h200", path, parallel=Parallel(tp=4), kv_cache_dtype="bfloat16")
    with pytest.raises(UsageError, match="keep a window of tokens"):
        load_device("h200", path, parallel=Parallel(tp=4), speculative=Speculative("mtp", 1, (0.5,)))


@pytest.mark.usefixtures("without_library")
def test_without_measured_kernels_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"were not measured on h200 .* pip install 'ebbench\[tables\]'"):
        load_device("h200", str(write(tmp_path, FLASH)), parallel=Parallel(tp=4), assume_kernels=True)


def test_times_are_the_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiconfigurator_core")
    device = load_device("h200", str(write(tmp_path, FLASH)), parallel=Parallel(tp=4))
    assert "attention to compressed keys (CSA, HCA) of 21 layers" in device.provenance
    assert "4 streams of hidden states" in device.provenance
    assert any("2 of its layers keep a window alone" in str(caveat) for caveat in device.warnings)
    assert isinstance(device.cost, TableCost)
    monkeypatch.setattr(library.Kernel, "seconds", None)  # a step asks it nothing
    # As measured: 43 layers of attention alone, 32 sequences after 1,024 tokens.
    of_attention = sum(layers * tables.decode.at2(32, 1024) for layers, tables in device.cost.attention)
    assert of_attention == pytest.approx(21 * 95.5e-6 + 22 * 71.4e-6, rel=0.05)
    assert device.cost.step_s(StepShape((), 32, 32 * 1024, 32)) > of_attention
