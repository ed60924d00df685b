"""Mixtures of experts some of whose layers are dense, and configs that are read by a family's own rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ebbench.devices.base import SINGLE, Parallel
from ebbench.devices.costs import roofline_cost
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.layers import KERNEL_S, StepArrays, step_arrays
from ebbench.devices.model_config import read_config
from ebbench.devices.profiles import find_model, find_profile
from ebbench.errors import InputFileError
from tests.devices.test_device_geometry import config

LLAMA4 = {
    "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 48,
    "num_experts_per_tok": 1, "attention_chunk_size": 8192, "vocab_size": 202048, "tie_word_embeddings": False,
}  # fmt: skip
GLM45 = {
    "model_type": "glm4_moe", "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "vocab_size": 151552,
}  # fmt: skip
# Fields of published config.json files, and parameters of the language model in billions as the models' cards or files
# have them (GLM-4.5: without the layer that predicts a second token, which is not loaded).
PUBLISHED = {
    "Llama-4-Scout": ({**LLAMA4, "num_local_experts": 16, "interleave_moe_layer_step": 1}, 107.8),
    "Llama-4-Maverick": ({**LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2}, 400.7),
    "Llama-4-Maverick, its layers listed": (
        {**LLAMA4, "num_local_experts": 128, "moe_layers": list(range(1, 48, 2)), "interleave_moe_layer_step": 2},
        400.7,
    ),
    "GLM-4.5-Air": (
        {**GLM45, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
         "num_hidden_layers": 46, "first_k_dense_replace": 1, "n_routed_experts": 128},
        106.9,
    ),
    "GLM-4.5": (
        {**GLM45, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
         "num_hidden_layers": 92, "first_k_dense_replace": 3, "n_routed_experts": 160},
        352.8,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
         "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
         "num_hidden_layers": 24, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
         "mlp_only_layers": [], "vocab_size": 151936, "head_dim": None},
        14.3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_mixtures(tmp_path: Path, name: str) -> None:
    fields, billions = PUBLISHED[name]
    assert read_config(config(tmp_path, **fields)).params / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({"first_k_dense_replace": 3}, 3),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 19),  # layers 2, 4, ..., 34 of 36 have experts
        ({"moe_layer_freq": [0, 1] * 18}, 18),
        ({"mlp_only_layers": [0, 5]}, 2),
        ({"decoder_sparse_step": 4, "mlp_only_layers": [3]}, 28),
        ({}, 0),
    ],
)
def test_dense_layers_are_counted_by_the_rules_of_the_model(
    tmp_path: Path, fields: dict[str, object], dense: int
) -> None:
    mixture = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        **fields,
    }
    model = read_config(config(tmp_path, **mixture))
    assert (model.dense_layers, model.expert_layers) == (dense, 36 - dense)
    assert model.dense_intermediate == (12288 if dense else 0)


def test_dense_models_have_no_dense_layers_of_a_mixture(tmp_path: Path) -> None:
    model = read_config(config(tmp_path, first_k_dense_replace=3))
    assert (model.dense_layers, model.expert_layers) == (0, 0)


def test_a_list_of_dense_layers_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="mlp_only_layers must be a list"):
        read_config(config(tmp_path, model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, mlp_only_layers=3))


def mixture(dense_layers: int) -> ModelGeometry:
    return replace(find_model("qwen3-30b-a3b"), dense_layers=dense_layers, dense_intermediate=6144)


def arrays(model: ModelGeometry, shape: Parallel = SINGLE) -> StepArrays:
    found = step_arrays(find_profile("h200"), model, shape)
    assert found is not None
    return found


def test_each_layer_takes_the_time_of_its_kind() -> None:
    model = mixture(12)
    all_dense = replace(model, experts=0, intermediate=model.dense_intermediate, dense_layers=0)
    whole, dense = (arrays(each).dense - 3 * KERNEL_S for each in (mixture(0), all_dense))
    expected = (36 / 48) * whole + (12 / 48) * dense
    np.testing.assert_allclose((arrays(model).dense - 3 * KERNEL_S)[1:4096], expected[1:4096], rtol=1e-9)


def test_units_share_experts_only_in_layers_that_have_them() -> None:
    shape = Parallel(dp=2, ep=2)
    all_layers, fewer = (arrays(mixture(dense), shape).experts for dense in (0, 12))
    assert all_layers is not None
    assert fewer is not None
    np.testing.assert_allclose(fewer[1:], 0.75 * all_layers[1:], rtol=1e-9)


def test_dense_layers_of_a_unit_have_an_all_reduce_for_their_mlp() -> None:
    """With tp = 2 and dp = 2 the experts' exchange replaces it elsewhere."""
    apart, within = Parallel(tp=2, dp=2, ep=4), Parallel(tp=2)
    model, none = mixture(48), replace(mixture(48), experts=0, intermediate=6144, dense_layers=0)
    np.testing.assert_allclose(arrays(model, apart).dense[1:1024], arrays(none, within).dense[1:1024], rtol=1e-9)


def test_the_roofline_reads_the_same_parameters() -> None:
    model, profile = mixture(12), find_profile("h200")
    cost = roofline_cost(profile, model, profile.host["default"])
    assert cost.dense_params + cost.expert_params == model.layer_params
    assert cost.expert_params == 36 * model.experts * model.expert_params
    assert model.experts_bytes == 2 * cost.expert_params


def test_chunked_attention_is_said(tmp_path: Path) -> None:
    fields = {**LLAMA4, "num_local_experts": 16, "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12}
    assert "within chunks of 8,192 tokens" in read_config(config(tmp_path, **fields)).note


@pytest.mark.parametrize(
    ("left_out", "params"),
    [
        (["lm_head"], 0),
        (["re:.*lm_head", "re:.*mlp.gate$", "model.layers.0.mlp.gate", "re:.*router", "vision_model"], 0),
        (["model.layers.3.input_layernorm", "model.embed_tokens"], 0),
        (["lm_head", "model.layers.0.self_attn.q_proj"], 4096 * 4096),
        (["model.layers.0.mlp.gate_proj"], 4096 * 12288),
        (["model.layers.1*"], 11 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)),
    ],
)
@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert"])
def test_projections_left_in_16_bits_have_them(tmp_path: Path, left_out: list[str], params: int, key: str) -> None:
    whole = read_config(config(tmp_path, quantization_config={"quant_method": "fp8"}))
    model = read_config(config(tmp_path, quantization_config={"quant_method": "fp8", key: left_out}))
    assert model.weight_bytes - whole.weight_bytes == params
    assert ("are in bfloat16, not in fp8" in model.note) is (params > 10**9)


def test_attention_that_is_left_out_everywhere_has_16_bits(tmp_path: Path) -> None:
    model = read_config(config(tmp_path, quantization_config={"quant_method": "fp8", "ignore": ["re:.*self_attn.*"]}))
    assert (model.weight_dtype, model.dtype_of_attention) == ("fp8", "bfloat16")
    whole = read_config(config(tmp_path, quantization_config={"quant_method": "fp8"}))
    assert model.weight_bytes - whole.weight_bytes == whole.attention_params


def test_experts_alone_are_quantized_in_mxfp4(tmp_path: Path) -> None:
    left = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    assert not read_config(config(tmp_path, quantization_config=left)).note


@pytest.mark.parametrize(
    "fields", [{"model_type": "xlm-roberta"}, {"model_type": "ModernBERT"}, {"is_encoder_decoder": True}]
)
def test_an_encoder_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(InputFileError, match="is an encoder's"):
        read_config(config(tmp_path, **fields))


@pytest.mark.parametrize(
    ("fields", "billions"),
    [
        ({"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}, 3.88),  # gemma-3-4b-it
        (
            {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
             "num_key_value_heads": 8},
            11.77,
        ),  # gemma-3-12b-it
    ],
)  # fmt: skip
def test_gemma_3_has_what_its_config_leaves_out(tmp_path: Path, fields: dict[str, object], billions: float) -> None:
    text = {"model_type": "gemma3_text", "sliding_window": 1024, **fields}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}))
    model = read_config(path)
    assert model.params / 1e9 == pytest.approx(billions, rel=2e-3)
    assert (model.head_dim, model.positions, model.sliding_window) == (256, 131072, 1024)


@pytest.mark.parametrize(
    "kind", ["gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_vl_text", "gpt_oss", "ernie4_5", "llama"]
)
def test_a_head_size_that_is_left_out_is_the_one_of_transformers(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {"hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    path = config(tmp_path, model_type=kind, **fields)
    raw = json.loads(path.read_text())
    del raw["head_dim"]
    path.write_text(json.dumps(raw))
    assert read_config(path).head_dim == transformers.AutoConfig.for_model(kind, **fields).head_dim


def test_a_vision_models_language_model_keeps_its_dense_layers(tmp_path: Path) -> None:
    text = {**LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2, "dtype": "bfloat16"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama4", "text_config": text, "vision_config": {"depth": 2}}))
    model = read_config(path)
    assert (model.dense_layers, model.shared_intermediate) == (24, 8192)
    assert "only its language model" in model.note
