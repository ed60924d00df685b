"""Families of decoders: layers, KV cache and parameters from config.json files as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbench.devices.base import Parallel
from ebbench.devices.geometry import ModelGeometry, Page
from ebbench.devices.loader import load_device
from ebbench.devices.model_config import read_config
from ebbench.devices.profiles import as_decoder, find_model
from ebbench.errors import InputFileError, UsageError
from tests.devices.active_params import active_params

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 65536,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DEEPSEEK = {
    **LATENT, "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "vocab_size": 129280, "max_position_embeddings": 163840, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4, "head_dim": 256,
}  # fmt: skip

INKLING: dict[str, Any] = {
    "model_type": "inkling_mm_model", "architectures": ["InklingForConditionalGeneration"], "text_config": {
        "vocab_size": 201024, "hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 24576,
        "num_hidden_layers": 66, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 128, "sliding_window_size": 512,
        "local_layer_ids": [layer for layer in range(66) if (layer + 1) % 6], "d_rel": 16, "rel_extent": 1024,
        "use_sconv": True, "sconv_kernel_size": 4, "dense_mlp_idx": 2, "n_routed_experts": 256, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "shared_expert_sink": True, "use_gate_bias": True, "use_global_scale": True,
        "model_max_length": 131072, "unpadded_vocab_size": 200058, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""In the words of vLLM's class, whose ``intermediate_size`` is the experts' width."""


def write(folder: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(config))
    return path


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelGeometry:
    return read_config(write(folder, {**config, **changes}))


def kinds(model: ModelGeometry) -> list[tuple[str, int]]:
    return [(mixer.kind, mixer.layers) for mixer in model.mixers]


def test_an_unknown_type_is_refused_or_assumed_with_a_caveat(tmp_path: Path) -> None:
    path = write(tmp_path, {**LLAMA, "model_type": "brand_new"})
    with pytest.raises(InputFileError, match=r"model_type 'brand_new' is not known here; --assume-decoder"):
        find_model(str(path))
    model = find_model(as_decoder(str(path)))
    assert model.params == read(tmp_path / "known", LLAMA).params
    assert "any figure may be wrong" in model.note


@pytest.mark.parametrize(
    "key",
    [
        "attn_output_gate",
        "head_compression",
        "kv_sharing_groups",
        "local_attention_span",
        "layer_skip_every",
        "expert_block_width",
        "ssm_rank",
    ],
)
def test_a_key_about_the_shape_that_no_rule_reads_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(InputFileError, match=f"{key} says something of the shape"):
        read(tmp_path, LLAMA, **{key: 4})
    assert read(tmp_path, LLAMA, **{key: None}).note == ""
    model = find_model(as_decoder(str(write(tmp_path, {**LLAMA, key: 4}))))
    assert f"what {key} says of its shape is left out" in model.note


def test_what_has_no_cost_model_is_named(tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "qwen4_exp_text"}
    with pytest.raises(InputFileError, match=r"'qwen4_exp_text' has no cost model here: .*n-grams.*\(PLE\).*\(QSA\)"):
        read(tmp_path, {"model_type": "qwen4_exp", "text_config": text})


def test_keys_that_change_no_figure_are_understood(tmp_path: Path) -> None:
    """As published configs have them."""
    fields = {
        "attention_bias": False, "attention_dropout": 0.1, "rope_theta": 5e5, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "initializer_range": 0.02, "mlp_bias": False, "pretraining_tp": 1,
        "use_cache": True, "bos_token_id": 1,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "head_dim": 64, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    assert read(tmp_path, LLAMA, **fields).note == ""


def test_attention_of_qwen3_next_has_a_gate_unless_said(tmp_path: Path) -> None:
    gated, plain = (
        read(tmp_path, LLAMA, model_type="qwen3_next", **DELTA, attn_output_gate=gate) for gate in (True, False)
    )
    assert gated.params - plain.params == 2 * 1024 * 16 * 256


def test_chunks_without_a_size_are_none(tmp_path: Path) -> None:
    assert kinds(read(tmp_path, LLAMA, model_type="llama4_text", attention_chunk_size=None)) == [("full", 8)]


def test_an_empty_list_of_layers_without_positions_is_none(tmp_path: Path) -> None:
    """Llama 4 in FP8, as it is published: which layers attend within chunks is in its class."""
    config = {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192}
    assert (
        kinds(read(tmp_path, config, no_rope_layers=[])) == kinds(read(tmp_path, config)) == [("chunk", 6), ("full", 2)]
    )


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("lfm2", {"num_heads": 16, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 4}),
        ("qwen", {"use_logn_attn": True}),
    ],
)
def test_keys_of_published_files_that_change_nothing(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    assert read(tmp_path, {**LLAMA, "model_type": kind, **fields}).note == ""


def test_minicpm_has_one_matrix_for_embeddings_and_head(tmp_path: Path) -> None:
    """MiniCPM-2B has 2.7 billion parameters; its config.json leaves out that they are tied, its class says so."""
    untold = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert read(tmp_path, untold, model_type="minicpm").params == read(tmp_path, LLAMA, tie_word_embeddings=True).params


def test_lists_may_go_on_with_modules_that_predict_further_tokens(tmp_path: Path) -> None:
    """Step-3.5-Flash: 48 kinds for 45 layers and 3 modules."""
    listed = ["full_attention", "sliding_attention"] * 5
    config = {**LLAMA, "model_type": "step3p5", "sliding_window": 512, "layer_types": listed}
    assert kinds(read(tmp_path, config, num_nextn_predict_layers=2)) == [("full", 4), ("window", 4)]
    with pytest.raises(InputFileError, match="10 entries for 8 layers"):
        read(tmp_path, config)


def test_lists_of_layers_need_an_entry_for_each(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="layer_types has 4 entries for 8 layers"):
        read(tmp_path, LLAMA, layer_types=["full_attention"] * 4)


def test_latent_attention_keeps_one_latent_per_token(tmp_path: Path) -> None:
    """DeepSeek V3: 671 billion parameters, 37 of them active; 576 elements per token and layer, whatever tp is."""
    model = read(tmp_path, DEEPSEEK)
    assert model.params / 1e9 == pytest.approx(671.0, abs=0.2)
    assert active_params(model) / 1e9 == pytest.approx(37.5, abs=0.5)
    assert kinds(model) == [("latent", 61)]
    assert model.kv_bytes_per_token == 61 * 576 * 2
    assert model.sliced(8).kv_bytes_per_token == model.kv_bytes_per_token


def test_a_model_with_an_index_keeps_it_beside_its_latents(tmp_path: Path) -> None:
    """DeepSeek V3.2: an index of 128 bytes and a scale per token."""
    model = read(
        tmp_path, DEEPSEEK, model_type="deepseek_v32", index_topk=2048, index_n_heads=64, index_head_dim=128
    )  # fmt: skip
    assert kinds(model) == [("latent", 61), ("index", 61)]
    assert model.kv_bytes_per_token == 61 * (576 * 2 + 132)
    assert model.params / 1e9 == pytest.approx(671.9, abs=0.1)


@pytest.mark.parametrize(
    "given", [{"indexer_types": ["full", "shared"] * 30 + ["full"]}, {"index_topk_pattern": "FS" * 30 + "F"}]
)
def test_layers_that_share_an_index_keep_none(tmp_path: Path, given: dict[str, Any]) -> None:
    """As in GLM-5.2; which ones they are has to be said."""
    sparse = {"model_type": "glm_moe_dsa", "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128}
    model = read(tmp_path, DEEPSEEK, **sparse, index_topk_freq=2, **given)
    assert sum(mixer.layers for mixer in model.mixers if mixer.kind == "index") == 31
    with pytest.raises(InputFileError, match="indexer_types is missing"):
        read(tmp_path, DEEPSEEK, **sparse, index_topk_freq=2)


def test_an_index_over_pools_of_tokens_keeps_one_key_for_each(tmp_path: Path) -> None:
    """As in GLM-5.3-Flash: 33 bytes per token and layer with an index, and latents without a rotary part."""
    model = read(
        tmp_path, DEEPSEEK, model_type="glm5_next_text", num_hidden_layers=8, qk_rope_head_dim=0, index_topk=2048,
        index_n_heads=32, index_head_dim=128, index_kpool=4, num_nextn_predict_layers=0,
        linear_attn_config={"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
    )  # fmt: skip
    assert model.kv_bytes_per_token == 2 * (512 * 2 + 33)
    assert model.state_bytes == 6 * (3 * 3 * 64 * 128 * 2 + 64 * 128 * 128 * 4)
    assert "several streams" in model.note


def test_gates_may_have_as_many_rows_as_the_hidden_size(tmp_path: Path) -> None:
    """As in Kimi-K3: a whole gate in linear layers, one behind the latents, experts that see half of the width."""
    linear = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 64, "num_heads": 16,
              "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}  # fmt: skip
    kimi = {**LLAMA, **LATENT, "model_type": "kimi_linear", "num_experts": 8, "num_experts_per_token": 2,
            "moe_intermediate_size": 512, "num_shared_experts": 1, "linear_attn_config": linear}  # fmt: skip
    before = read(tmp_path, kimi)
    whole = read(tmp_path, kimi, linear_attn_config={**linear, "use_full_rank_gate": True})
    assert whole.params - before.params == 6 * (1024 * 1024 - 64 * (1024 + 1024))
    assert read(tmp_path, kimi, mla_use_output_gate=True).params - before.params == 2 * 1024 * 16 * 128
    narrow = read(tmp_path, kimi, routed_expert_hidden_size=512, attn_res_block_size=4)
    assert (before.expert_params, narrow.expert_params) == (3 * 1024 * 512, 3 * 512 * 512)
    assert narrow.kv_bytes_per_token == 2 * 576 * 2


def test_an_architecture_may_stand_for_the_type(tmp_path: Path) -> None:
    """As in LongCat-Flash's published file: every layer has attention and a dense MLP twice."""
    longcat = {key: value for key, value in {**LLAMA, **LATENT}.items() if key != "model_type"}
    more = {"ffn_hidden_size": 4096, "expert_ffn_hidden_size": 512, "n_routed_experts": 8, "moe_topk": 3,
            "zero_expert_num": 4}  # fmt: skip
    model = read(tmp_path, longcat, **more, architectures=["LongcatFlashForCausalLM"])
    assert (kinds(model), model.shared_intermediate, model.experts_per_token) == ([("latent", 16)], 8192, 2)
    with pytest.raises(InputFileError, match="model_type is missing"):
        read(tmp_path, longcat, architectures=["LlamaForCausalLM"])


def test_layers_with_attention_between_linear_ones_may_have_latents(tmp_path: Path) -> None:
    """As in Ring-2.5; Ling and Ring before have keys and values. States have the type of the model."""
    ring = {**LLAMA, "model_type": "bailing_hybrid", "layer_group_size": 4, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 512, "num_shared_experts": 1, "first_k_dense_replace": 1}  # fmt: skip
    latents, keys = read(tmp_path, ring, **LATENT), read(tmp_path, ring)
    assert sorted(kinds(latents)) == [("latent", 2), ("state", 6)]
    assert (latents.kv_bytes_per_token, keys.kv_bytes_per_token) == (2 * 576 * 2, 2 * 2 * 4 * 64 * 2)
    assert latents.state_bytes == 6 * 16 * 64 * 64 * 2
    with pytest.raises(InputFileError, match="short_conv_kernel_size"):  # Ling 3 has other linear layers
        read(tmp_path, ring, **LATENT, short_conv_kernel_size=4)


LING_3 = {
    **LATENT, "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "layer_group_size": 3,
    "no_kda_lora": True, "short_conv_kernel_size": 4, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64,
    "moe_intermediate_size": 512, "num_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_ling_3_is_known_by_its_architecture(tmp_path: Path) -> None:
    """Layers after the last whole group have latents; its states are vLLM's: inputs of three convolutions, 32 bits."""
    model = read(tmp_path, LLAMA, **LING_3)
    assert sorted(kinds(model)) == [("latent", 4), ("state", 4)]
    assert model.state_bytes == 4 * (3 * 3 * 1024 * 2 + 16 * 64 * 64 * 4)
    gated = read(tmp_path, LLAMA, **LING_3, gated_attention_proj_granularity_type="head_wise")
    whole = read(tmp_path, LLAMA, **LING_3, gated_attention_proj_granularity_type="element_wise")
    assert gated.params - model.params == 4 * 16 * 1024
    assert whole.params - model.params == 4 * 16 * 128 * 1024
    outer = {"model_type": "bailing_moe_v3_vl", "architectures": ["BailingMoeV3VLForConditionalGeneration"]}
    assert kinds(read(tmp_path, {**outer, "text_config": {**LLAMA, **LING_3}})) == kinds(model)


def test_a_published_ling_3_has_the_parameters_of_its_card(tmp_path: Path) -> None:
    """Edge0-8B, without what it predicts its experts with: 7.9 billion parameters, 18 and 6 layers."""
    edge = {
        "architectures": ["BailingMoeV3ForCausalLM"], "hidden_size": 1536, "intermediate_size": 4608,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
        "layer_group_size": 4, "first_k_dense_replace": 1, "num_experts": 128, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512,
        "kv_lora_rank": 512, "q_lora_rank": 256, "gated_attention_proj_granularity_type": "head_wise",
        "short_conv_kernel_size": 4, "no_kda_lora": True, "kda_safe_gate": True, "kda_lower_bound": -5,
        "group_norm_size": 1, "rotary_dim": 64, "vocab_size": 157184,
    }  # fmt: skip
    model = read_config(write(tmp_path, edge))
    assert model.params / 1e9 == pytest.approx(7.9, rel=0.01)
    assert sorted(kinds(model)) == [("latent", 6), ("state", 18)]
    assert (model.kv_bytes_per_token, model.state_bytes) == (6912, 18 * (3 * 6144 * 2 + 16 * 128 * 128 * 4))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"no_kda_lora": False}, "no_kda_lora must be true"),
        ({"gated_attention_proj_granularity_type": "token_wise"}, "granularity_type 'token_wise' is not read"),
        ({"pregate_shallow_layers": 5}, "pregate_shallow_layers says something of the shape"),
        ({"quantization_config": {"quant_method": "fp8", "routed_experts_quant_method": "int4"}}, "'int4' is not read"),
    ],
)
def test_other_kinds_of_ling_3_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputFileError, match=said):
        read(tmp_path, LLAMA, **LING_3 | changes)


def test_routed_experts_of_ling_3_have_a_type_of_their_own(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "routed_experts_quant_method": "mxfp4"}
    model = read(tmp_path, LLAMA, **LING_3, quantization_config=config)
    assert (model.weight_dtype, model.dtype_of_experts, model.other_bytes) == ("fp8_block", "w4a16_mxfp4", 0)
    with pytest.raises(InputFileError, match="'mxfp4' is not read"):
        read(tmp_path, LLAMA, quantization_config=config)


ERNIE_VL = {
    **LLAMA, "model_type": "ernie4_5_moe_vl", "moe_num_experts": [8, 8], "moe_intermediate_size": [512, 128],
    "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28],
}  # fmt: skip


def test_of_pairs_the_first_is_of_text(tmp_path: Path) -> None:
    """ERNIE 4.5 VL, whose experts of images are weights without time."""
    model = read(tmp_path, ERNIE_VL)
    assert (model.experts, model.expert_intermediate, model.shared_intermediate) == (8, 512, 1024)
    assert (model.expert_layers, model.dense_layers) == (7, 1)
    assert model.other_params == 7 * 8 * 1024 * (3 * 128 + 1)
    text = {key: value for key, value in ERNIE_VL.items() if "moe_layer" not in key}
    kinds_of_mlps = {"moe_num_experts": 8, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6}
    newer = read(tmp_path, {"model_type": "ernie4_5_vl_moe", "text_config": {
        **text, **kinds_of_mlps, "model_type": "ernie4_5_vl_moe_text"}})  # fmt: skip
    assert (newer.expert_layers, newer.other_params) == (6, 6 * 8 * 1024 * (3 * 128 + 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_num_experts": [8, 4]}, "moe_num_experts must be two numbers"),
        ({"moe_intermediate_size": [512, 128, 64]}, "moe_intermediate_size must be two numbers"),
        ({"moe_layer_end_index": ["all", 7]}, "moe_layer_end_index must be two numbers"),
        ({"moe_layer_interval": 2}, "experts in some layers alone"),
        ({"quantization_config": {"quant_method": "fp8"}}, "or quantized, are not read"),
    ],
)
def test_other_pairs_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputFileError, match=said):
        read(tmp_path, ERNIE_VL, **changes)


def test_mistrals_own_files_of_a_mixture_with_latents_are_read(tmp_path: Path) -> None:
    """As Mistral Large 3: 673 billion parameters beside its encoder, 40 of them active."""
    params = {
        "dim": 7168, "n_layers": 61, "n_heads": 128, "n_kv_heads": 128, "head_dim": 128, "hidden_dim": 16384,
        "vocab_size": 131072, "max_position_embeddings": 294912, "tied_embeddings": False, **LATENT,
        "llama_4_scaling": {"beta": 0.1}, "yarn": {"factor": 36}, "quantization": {"qformat_weight": "fp8_e4m3"},
        "moe": {"num_experts": 128, "num_experts_per_tok": 4, "expert_hidden_dim": 4096, "num_shared_experts": 1,
                "first_k_dense_replace": 3, "route_every_n": 1, "expert_parallel": 1, "num_expert_groups": 1},
        "vision_encoder": {"hidden_size": 1664, "num_hidden_layers": 48, "intermediate_size": 8192},
    }  # fmt: skip
    model = read_config(write(tmp_path, params, "params.json"))
    assert (round(model.params / 1e9), round(active_params(model) / 1e9)) == (673, 40)
    assert (model.kv_bytes_per_token, model.positions, model.weight_dtype) == (61 * 576 * 2, 294912, "fp8")


def test_flags_say_which_layers_have_experts(tmp_path: Path) -> None:
    """As in K-EXAONE."""
    model = read(
        tmp_path, LLAMA, model_type="exaone_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=512,
        is_moe_layer=[False, True] * 4, first_k_dense_replace=1,
    )  # fmt: skip
    assert (model.expert_layers, model.dense_layers) == (4, 4)


def test_linear_layers_keep_a_state_and_no_tokens(tmp_path: Path) -> None:
    """Qwen3-Next: 80 billion parameters, 3 of them active; a quarter of the layers has attention."""
    model = read(
        tmp_path, LLAMA, model_type="qwen3_next", num_hidden_layers=48, hidden_size=2048, num_key_value_heads=2,
        intermediate_size=5120, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512,
        num_experts_per_tok=10, decoder_sparse_step=1, mlp_only_layers=[], vocab_size=151936, **DELTA,
    )  # fmt: skip
    assert sorted(kinds(model)) == [("full", 12), ("state", 36)]
    assert model.params / 1e9 == pytest.approx(79.7, abs=0.1)
    assert active_params(model) / 1e9 == pytest.approx(3.9, abs=0.1)
    assert model.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert model.state_bytes == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 2)


def test_layers_of_one_kind_only(tmp_path: Path) -> None:
    """Nemotron-H: a layer is Mamba, attention or an MLP of two matrices."""
    model = read(
        tmp_path, LLAMA, model_type="nemotron_h", num_hidden_layers=52, hidden_size=4096, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=21504, vocab_size=131072, attention_head_dim=128, head_dim=128,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4, expand=2, chunk_size=128,
    )  # fmt: skip
    assert sorted(kinds(model)) == [("full", 4), ("state", 24)]
    assert model.params / 1e9 == pytest.approx(8.1, abs=0.1)
    assert model.kv_bytes_per_token == 4 * 2 * 8 * 128 * 2


def test_kinds_of_attention_with_heads_of_their_own(tmp_path: Path) -> None:
    """As in Gemma 4: fewer and wider heads, one projection for both keys and values, where all tokens are kept."""
    layers = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    model = read(
        tmp_path, LLAMA, model_type="gemma4_text", num_hidden_layers=12, layer_types=layers, head_dim=64,
        global_head_dim=128, num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=512,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, tie_word_embeddings=True,
    )  # fmt: skip
    window, full = model.mixers
    assert (window.kind, window.layers, window.window, window.cached) == ("window", 10, 512, 2 * 4 * 64)
    assert (full.kind, full.layers, full.cached) == ("full", 2, 2 * 2 * 128)
    assert full.params == 1024 * (16 * 128 + 2 * 128) + 16 * 128 * 1024


def test_inputs_of_convolutions_have_a_cache_beside_keys_and_values(tmp_path: Path) -> None:
    """Inkling: 55 of 66 layers keep a window, and each the last four inputs of its convolutions."""
    model = read(tmp_path, INKLING)
    window, full = model.mixers
    assert (window.kind, window.layers, window.window, window.kv_heads) == ("window", 55, 512, 16)
    assert (full.kind, full.layers, full.kv_heads) == ("full", 11, 8)
    assert full.products[0].columns == (64 + 2 * 8) * 128 + 64 * 16
    assert model.inputs == ((55, Page(2 * 4 * 16 * 1024, 4, 4)), (11, Page(2 * 4 * 8 * 2048, 4, 4)))
    assert (model.dense_layers, model.dense_intermediate, model.expert_intermediate) == (2, 24576, 3072)
    assert (model.shared_intermediate, model.positions, model.vocab) == (2 * 3072, 131072, 201024)
    text = INKLING["text_config"]
    narrow = read(tmp_path, {**INKLING, "text_config": {**text, "intermediate_size": 2048}})
    assert (narrow.expert_intermediate, narrow.dense_intermediate) == (2048, 24576)
    of_transformers = {**text, "intermediate_size": 24576, "moe_intermediate_size": 3072, "model_type": "inkling_text"}
    del of_transformers["dense_intermediate_size"]
    assert read(tmp_path, of_transformers).layer_params == model.layer_params
    tokens = 1000
    kept = 55 * 512 * 2 * 16 * 128 * 2 + 11 * tokens * 2 * 8 * 128 * 2 + 66 * 131072
    assert model.kv_bytes(tokens) == kept
    Parallel(tp=8).check(model)
    with pytest.raises(UsageError, match="no more GPUs; use a tp of at most 8"):
        Parallel(tp=16).check(model)


def test_layers_that_share_the_cache_of_others_keep_none(tmp_path: Path) -> None:
    """As in Gemma 3n."""
    model = read(
        tmp_path, LLAMA, model_type="gemma3n_text", num_hidden_layers=10, num_kv_shared_layers=4, sliding_window=512,
        head_dim=64, intermediate_size=[4096] * 10, hidden_size_per_layer_input=256, vocab_size_per_layer_input=32000,
        altup_num_inputs=4, laurel_rank=64,
    )  # fmt: skip
    own = [mixer for mixer in model.mixers if mixer.cached]
    assert sum(mixer.layers for mixer in own) == 6
    assert {mixer.cached for mixer in own} == {2 * 4 * 64}
    assert {mixer.reads for mixer in model.mixers} == {2 * 4 * 64}


@pytest.mark.parametrize(("given", "windowed"), [("LLLG", 6), ("LG", 4), (2, 4)])
def test_a_pattern_of_letters_sets_the_windows(tmp_path: Path, given: object, windowed: int) -> None:
    model = read(tmp_path, LLAMA, model_type="exaone4", sliding_window=4096, sliding_window_pattern=given)
    assert sum(mixer.layers for mixer in model.windows) == windowed


def test_a_first_qwen_has_half_the_width_of_its_key(tmp_path: Path) -> None:
    whole, half = (read(tmp_path, LLAMA, model_type=kind, tie_word_embeddings=False) for kind in ("llama", "qwen"))
    assert (whole.intermediate, half.intermediate) == (4096, 2048)


def test_a_hybrid_without_states_is_a_dense_model(tmp_path: Path) -> None:
    """Granite 4 has configs of its hybrid type in which every layer has attention."""
    model = read(
        tmp_path, LLAMA, model_type="granitemoehybrid", layer_types=["attention"] * 8, shared_intermediate_size=4096,
        num_local_experts=0, num_experts_per_tok=0, mamba_d_conv=4, mamba_d_state=128, mamba_n_heads=128,
        mamba_d_head=64, mamba_n_groups=1, mamba_expand=2,
    )  # fmt: skip
    assert model.params == read(tmp_path / "dense", LLAMA).params


def test_sparse_layers_read_few_of_the_tokens_that_they_keep(tmp_path: Path) -> None:
    """As in MiniMax M3: 16 blocks of 128 tokens, and an index of one head."""
    sparse = {
        "use_sparse_attention": True, "sparse_attention_freq": [0, 0, 1, 1, 1, 1, 1, 1], "sparse_block_size": 128,
        "sparse_topk_blocks": 16, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
    }  # fmt: skip
    model = read(
        tmp_path, LLAMA, model_type="minimax_m3", num_local_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        shared_intermediate_size=512, moe_intermediate_size=512, dense_intermediate_size=2048, head_dim=64,
        moe_layer_freq=[0, 0, 1, 1, 1, 1, 1, 1], sparse_attention_config=sparse,
    )  # fmt: skip
    found = {mixer.kind: (mixer.layers, mixer.window, mixer.bytes_per_token(2)) for mixer in model.mixers}
    assert found == {"full": (2, 0, 1024.0), "sparse": (6, 2048, 1024.0), "index": (6, 0, 256.0)}
    assert (model.dense_layers, model.dense_intermediate) == (2, 2048)


def test_layers_of_different_shapes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="block_configs"):
        read(tmp_path, LLAMA, model_type="nemotron-nas", block_configs=[{"ffn": {"ffn_mult": 2.6}}] * 8)


def test_a_state_space_model_without_attention_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no layer with attention"):
        read(
            tmp_path, LLAMA, model_type="bamba", mamba_n_heads=32, mamba_d_head=64, mamba_d_state=16, mamba_d_conv=4
        )  # fmt: skip


def test_mistrals_own_format_is_read(tmp_path: Path) -> None:
    params = {
        "dim": 1024, "n_layers": 8, "head_dim": 64, "hidden_dim": 4096, "n_heads": 16, "n_kv_heads": 4,
        "vocab_size": 32000, "norm_eps": 1e-5, "rope_theta": 1e6,
    }  # fmt: skip
    write(tmp_path, params, "params.json")
    model, known = find_model(str(tmp_path)), read(tmp_path / "config", LLAMA)
    assert (model.params, model.mixers) == (known.params, known.mixers)  # the class mistral has a window by default
    mixture = write(tmp_path, {**params, "moe": {"num_experts": 4, "num_experts_per_tok": 2}}, "params.json")
    assert read_config(mixture).experts == 4


def test_mistrals_own_files_without_experts_are_dense(tmp_path: Path) -> None:
    """Voxtral's have an encoder of sound; the class of models with latents has 256 experts by default."""
    sizes = {"dim": 1024, "n_layers": 8, "hidden_dim": 4096, "n_heads": 16, "vocab_size": 32000, **LATENT}
    plain = read_config(write(tmp_path, sizes, "params.json"))
    assert plain.experts == 0
    encoder = {"dim": 1280, "n_layers": 32, "head_dim": 64, "hidden_dim": 5120, "n_heads": 20}
    heard = {**sizes, "multimodal": {"whisper_model_args": {"encoder_args": encoder}}}
    assert read_config(write(tmp_path, heard, "params.json")).encoder_bytes == 2 * 32 * 1280 * (4 * 1280 + 2 * 5120)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_config(path).params == read(tmp_path / "without", LLAMA).params


@pytest.mark.parametrize(
    ("key", "encoder"),
    [("text_config", "vision_config"), ("llm_config", "vit_config"), ("language_config", "encoder_config")],
)
def test_the_decoder_within_a_model_of_images_is_read(tmp_path: Path, key: str, encoder: str) -> None:
    vision = {"hidden_size": 1280, "depth": 32, "intermediate_size": 5120}
    outer = {"model_type": "anything_vl", encoder: vision, key: LLAMA}
    model, alone = read(tmp_path, outer), read(tmp_path / "alone", LLAMA)
    assert model.params == alone.params
    assert model.weight_bytes - alone.weight_bytes == 2 * 32 * (4 * 1280**2 + 2 * 1280 * 5120)
    assert "the time of its encoder is left out, its weights are estimated" in model.note
    assert "weights of one" in read(tmp_path, outer, **{encoder: {"args": {"model": "vit_huge_patch16_224"}}}).note


BY_MERGING = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "spatial_merge_size": 2}


@pytest.mark.parametrize(
    ("encoder", "millions"),
    [
        ({**BY_MERGING, "model_type": "gemma4_vision", "out_hidden_size": None}, 569.5),
        ({"model_type": "qwen3_vl_vision", **BY_MERGING, "out_hidden_size": 3584,
          "deepstack_visual_indexes": [8, 16, 24]}, 566.9),
        ({"model_type": "glm4v_vision", "depth": 24, "hidden_size": 1536, "intermediate_size": 13696,
          "out_hidden_size": 4096, "spatial_merge_size": 2, "hidden_act": "silu"}, 892.5),
    ],
)  # fmt: skip
def test_encoders_weigh_about_what_their_classes_do(tmp_path: Path, encoder: dict[str, Any], millions: float) -> None:
    """Parameters of the classes of transformers, on the meta device."""
    model = read(tmp_path, {"model_type": "any_vl", "text_config": LLAMA, "vision_config": encoder})
    assert model.encoder_bytes / 2e6 == pytest.approx(millions, rel=0.05)


FLAT: dict[str, dict[str, Any]] = {
    "minicpmv": {"query_num": 64, "slice_config": {"max_slice_nums": 9}, "use_sliding_window": False,
                 "max_window_layers": 28, "sliding_window": 32768},
    "phi3_v": {"embd_layer": {"embedding_cls": "image"}, "img_processor": {"image_dim_out": 1024}},
    "molmo": {"intermediate_size": 8192, "embedding_size": 32000, "attention_layer_norm": False, "norm_after": False},
    "molmo2_text": {"additional_vocab_size": 128, "use_qk_norm": True, "qk_norm_type": "qwen3"},
    "dots_ocr": {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 131072},
    "deepseek_v2": {"use_mla": False, "kv_lora_rank": None, "qk_nope_head_dim": 0, "v_head_dim": 0, "lm_head": True,
                    "n_routed_experts": 0, "n_shared_experts": None, "num_experts_per_tok": 0,
                    "moe_intermediate_size": None},
    "llama": {"_flash_attn_2_enabled": True, "pixel_shuffle_factor": 3},
}  # fmt: skip


@pytest.mark.parametrize("kind", FLAT)
def test_decoders_within_models_of_images_are_ordinary_ones(tmp_path: Path, kind: str) -> None:
    model = read(tmp_path, LLAMA, **FLAT[kind], model_type=kind)
    known = read(tmp_path / "known", LLAMA)
    assert (model.params, model.kv_bytes_per_token) == (known.params, known.kv_bytes_per_token)


def test_the_decoder_within_says_what_differs_from_its_class(tmp_path: Path) -> None:
    """As in LLaVA-1.5, whose file says two sizes of its Llama; and a mixture of Mistral's without its KV heads."""
    within = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    model = read(tmp_path, {"model_type": "llava", "text_config": within})
    assert (round(model.params / 1e9, 2), model.kv_bytes_per_token, model.positions) == (6.74, 524_288, 4096)
    assert read(tmp_path, LLAMA, text_config={}).layers == 8
    mistral = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read(tmp_path, mistral, model_type="mistral").kv_heads == 8
    assert read(tmp_path, mistral, model_type="mistral", num_key_value_heads=None).kv_heads == 16
    with pytest.raises(InputFileError, match="hidden_size is missing"):
        read(tmp_path, {"model_type": "llama", "num_hidden_layers": 8, "num_attention_heads": 16})


@pytest.mark.parametrize("within", [True, False])
def test_whoever_has_the_head_says_whether_it_is_tied(tmp_path: Path, within: bool) -> None:
    """vLLM takes the outer value, whatever the decoder's own says."""
    outer = {"model_type": "anything_vl", "tie_word_embeddings": not within}
    model = read(tmp_path, {**outer, "text_config": {**LLAMA, "tie_word_embeddings": within}})
    assert model.tied_embeddings is not within


def test_windows_of_a_step_model_have_heads_of_their_own(tmp_path: Path) -> None:
    step = {**LLAMA, "model_type": "step3p5", "layer_types": ["full_attention", "sliding_attention"] * 4,
            "sliding_window": 512, "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 512}  # fmt: skip
    narrow, wide = read(tmp_path, step), read(tmp_path, step, num_sliding_attention_heads=32)
    assert wide.params - narrow.params == 4 * 2 * 16 * 64 * 1024


@pytest.mark.usefixtures("without_library")
def test_kinds_without_tables_are_estimated_and_said(tmp_path: Path) -> None:
    """On eight GPUs, since a roofline of them as a whole does not exist."""
    path = write(
        tmp_path, {**DEEPSEEK, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    )
    with pytest.raises(UsageError, match=r"latent .* was not measured on h200.*--assume-kernels"):
        load_device("h200", str(path), parallel=Parallel(tp=8))
    device = load_device("h200", str(path), parallel=Parallel(tp=8), assume_kernels=True)
    (said,) = (text for text in map(str, device.warnings) if "latent (MLA) attention" in text)
    assert "too fast rather than too slow" in said
    assert device.kv_capacity_tokens > 500_000
    with pytest.raises(UsageError, match="does not fit"):
        load_device("h200", str(path))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_fewer_bits_take_less_time_to_read(tmp_path: Path, bits: int) -> None:
    from ebbench.devices.costs import decode_shape

    wide = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14_336}  # reading takes longer than a launch
    small = write(tmp_path / "small", {**wide, "quantization_config": {"quant_method": "awq", "bits": bits}})
    plain = load_device("h200", str(write(tmp_path / "plain", wide))).cost.step_s(decode_shape(1, 128))
    quantised = load_device("h200", str(small))
    assert quantised.cost.step_s(decode_shape(1, 128)) < 0.8 * plain
    assert any("were not measured on h200" in text for text in map(str, quantised.warnings))


def test_types_that_most_weights_of_a_kind_do_not_have_count_in_the_size(tmp_path: Path) -> None:
    """ModelOptimizer leaves the projections around the latents in 16 bits, one name per layer and projection."""
    parts = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    left = [f"model.layers.{layer}.self_attn.{part}" for layer in range(61) for part in parts]
    (tmp_path / "plain").mkdir()
    (tmp_path / "left").mkdir()
    for folder, excluded in (("plain", []), ("left", left)):
        types = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": excluded}
        (tmp_path / folder / "hf_quant_config.json").write_text(json.dumps({"quantization": types}))
    whole, model = (read(tmp_path / folder, DEEPSEEK) for folder in ("plain", "left"))
    (latent,) = model.mixers
    out = latent.products[-1].params
    assert (model.dtype_of_attention, model.dtype_of_experts, model.kv_dtype) == ("nvfp4", "nvfp4", "fp8")
    assert model.weight_bytes - whole.weight_bytes == pytest.approx(61 * (latent.params - out) * 11.5 / 8, rel=1e-6)
    assert "37% of its attention projections are in bfloat16" in model.note


MAMBA = {"mamba_d_conv": 4, "mamba_d_state": 64, "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_expand": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}


@pytest.mark.parametrize(
    ("kind", "fields", "parts"),
    [
        ("lfm2", {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 4},
         ["conv", "feed_forward", "re:.*self_attn.(q|k|v|out)_proj$"]),
        ("falcon_h1", MAMBA, ["mamba", "feed_forward.gate_proj", "feed_forward.up_proj", "down_proj", "self_attn"]),
        ("granitemoehybrid", {**MAMBA, **EXPERTS, "num_local_experts": 4, "shared_intermediate_size": 256,
                              "layer_types": ["mamba", "attention"] * 4},
         ["re:.*mamba.*", "re:.*shared_mlp.*", "re:.*block_sparse_moe.output_linear", "self_attn"]),
        ("bailing_moe_v2", {**EXPERTS, "num_experts": 4, "num_shared_experts": 1},
         ["re:.*attention.query_key_value$", "re:.*attention.dense$", "mlp"]),
        ("step3p5", {"moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 512, "share_expert_dim": 512,
                     "moe_layers_enum": "1,2,3,4,5,6,7"}, ["moe", "share_expert", "model.layers.0.mlp", "self_attn"]),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 512},
         ["re:.*mlp.shared_mlp.*", "re:.*mlp.experts.*", "self_attn"]),
    ],
)  # fmt: skip
def test_parts_of_layers_have_their_published_names(
    tmp_path: Path, kind: str, fields: dict[str, Any], parts: list[str]
) -> None:
    """A configuration that leaves out all of them leaves the model in 16 bits."""
    groups = {"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}}
    given = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": parts}
    model = read(tmp_path, {**LLAMA, "model_type": kind, **fields}, quantization_config=given)
    assert (model.plain, model.other_bytes) == (True, 0)


def test_mixed_precision_is_read_by_the_names_of_layers(tmp_path: Path) -> None:
    named = {
        f"model.layers.{layer}.{part}": {"quant_algo": kind}
        for layer in range(8)
        for part, kind in (("self_attn.q_proj", "FP8"), ("self_attn.o_proj", "FP8"), ("mlp.down_proj", "NVFP4"),
                           ("mlp.up_proj", "NVFP4"), ("mlp.gate_proj", "NVFP4"))
    }  # fmt: skip
    types = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": named}
    model = read(tmp_path, LLAMA, quantization_config=types)
    assert (model.dtype_of_attention, model.weight_dtype) == ("fp8", "nvfp4")
    assert "20% of its attention projections are in bfloat16" in model.note


@pytest.mark.parametrize("listed", [["re:(a+)+b"], ["re:" + "x*" * 30], ["re:("]])
def test_patterns_that_could_take_long_are_refused(tmp_path: Path, listed: list[str]) -> None:
    with pytest.raises(InputFileError, match="names modules by"):
        read(tmp_path, LLAMA, quantization_config={"quant_method": "fp8", "ignore": listed})


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma4_text", "per_layer_config": {"five": {"head_dim": 512}}},
        {"model_type": "gemma4_text", "per_layer_config": {"5": {"head_dim": [512]}}},
        {"model_type": "laguna", "num_attention_heads_per_layer": [[16]] * 8},
        {"model_type": "step3p5", "attention_other_setting": "wide", "sliding_window": 512,
         "layer_types": ["sliding_attention"] * 8},
        {"model_type": "nemotron_h", "hybrid_override_pattern": 8, "num_hidden_layers": None},
        {"n_layers": 2**40, "num_hidden_layers": None},
        {"layer_types": {"0": "full_attention"}},
        {"max_position_embeddings": -5},
        {"rope_scaling": {"rope_type": "yarn", "factor": -1}},
        {"vision_config": {"depth": -5, "hidden_size": 1024}},
        {"v_head_dim": 2**70},
        {"num_attention_heads": 12},
        {"num_key_value_heads": 5},
        {"num_key_value_heads": 64},
        {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 8},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
                                 "kv_cache_scheme": {"type": "float", "num_bits": 4}}},
    ],
)  # fmt: skip
def test_values_of_another_kind_are_one_line_of_error(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(InputFileError):
        read(tmp_path, LLAMA, **fields)


def test_bits_of_a_kv_cache_that_are_no_number_are_not_understood(tmp_path: Path) -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": {}}}
    assert read(tmp_path, LLAMA, quantization_config=scheme).kv_dtype == "bfloat16"
