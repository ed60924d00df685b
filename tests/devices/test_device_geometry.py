"""Model geometry: published parameter counts, and any config.json of a decoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ebbench.devices.layers import step_arrays
from ebbench.devices.model_config import read_config
from ebbench.devices.profiles import find_model, find_profile, list_models
from ebbench.errors import InputFileError, UnknownNameError

# Parameter counts from the models' cards, billions.
PUBLISHED = {
    "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
    "llama-3.1-8b": 8.03, "gemma-3-1b-it": 1.0, "mistral-7b": 7.24, "qwen2.5-coder-7b": 7.62,
}  # fmt: skip

DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def config(tmp_path: Path, **fields: object) -> Path:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**DENSE, **fields}))
    return path


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert find_model(name).params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_config_json_gives_the_same_geometry_as_the_short_name(tmp_path: Path) -> None:
    read, known = read_config(config(tmp_path)), find_model("qwen3-8b")
    for field in ("layers", "qkv_width", "params", "kv_bytes_per_token", "qk_norm", "norms", "weight_bytes"):
        assert getattr(read, field) == getattr(known, field)


def test_a_moe_config_has_the_parameters_of_the_bundled_model(tmp_path: Path) -> None:
    path = config(
        tmp_path, model_type="qwen3_moe", num_hidden_layers=48, hidden_size=2048, num_key_value_heads=4,
        intermediate_size=6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    )  # fmt: skip
    assert read_config(path).params == find_model("qwen3-30b-a3b").params


def test_missing_head_dim_and_kv_heads_follow_from_the_others(tmp_path: Path) -> None:
    path = config(tmp_path)
    raw = json.loads(path.read_text())
    del raw["head_dim"], raw["num_key_value_heads"]
    path.write_text(json.dumps(raw))
    model = read_config(path)
    assert (model.head_dim, model.kv_heads) == (128, 32)


def test_nested_text_config_with_layer_types(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    path = tmp_path / "config.json"
    text = {**DENSE, "num_hidden_layers": 6, "sliding_window": 512, "layer_types": kinds}
    path.write_text(json.dumps({"text_config": text}))
    model = read_config(path)
    assert (model.sliding_window, model.sliding_layers) == (512, 5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
    ],
)
def test_bad_config_is_refused_with_the_field(tmp_path: Path, fields: dict[str, object], named: str) -> None:
    with pytest.raises(InputFileError, match=named):
        read_config(config(tmp_path, **fields))


def test_an_unreadable_config_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(InputFileError, match="is not valid JSON"):
        read_config(broken)
    with pytest.raises(InputFileError, match="cannot be read"):
        read_config(tmp_path / "nowhere.json")


def test_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'qwen3-8b'"):
        find_model("qwen3-8")
    assert find_model("Qwen/Qwen3-8B").name == "qwen3-8b"
    assert "qwen3-8b" in list_models()


@pytest.mark.parametrize(("kind", "norms"), [("gemma3_text", 4), ("gemma2", 4), ("qwen3", 2), ("llama", 2)])
def test_gemma_has_norms_before_and_after_each_half_of_a_layer(tmp_path: Path, kind: str, norms: int) -> None:
    assert read_config(config(tmp_path, model_type=kind)).norms == norms


def test_further_norms_take_time_in_every_step() -> None:
    gemma = find_model("gemma-3-1b-it")
    two, four = (step_arrays(find_profile("h200"), replace(gemma, norms=norms)) for norms in (2, 4))
    assert two is not None
    assert four is not None
    assert all(four.dense[tokens] > two.dense[tokens] for tokens in (1, 256, 16_384))


@pytest.mark.parametrize(
    "fields",
    [
        {"mamba_d_state": 16}, {"ssm_state_size": 16}, {"linear_num_value_heads": 32}, {"full_attention_interval": 4},
        {"attn_type_list": [1, 0] * 18}, {"moe_num_experts": 64, "moe_intermediate_size": 1536},
    ],
)  # fmt: skip
def test_what_the_geometry_does_not_hold_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    """Jamba, Nemotron-H, Qwen3-Next, ERNIE 4.5: they were read as dense models with attention in every layer."""
    with pytest.raises(InputFileError, match=next(iter(fields))):
        read_config(config(tmp_path, **fields))


def test_a_list_of_softmax_layers_only_is_read(tmp_path: Path) -> None:
    """MiniMax-M2: MiniMax-M1 had linear layers, 0 in this list."""
    assert read_config(config(tmp_path, attn_type_list=[1] * 36)).layers


def test_weights_quantized_beside_the_config_are_not_taken_for_16_bits(tmp_path: Path) -> None:
    path = config(tmp_path)
    algorithms = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    path.with_name("hf_quant_config.json").write_text(json.dumps({"quantization": algorithms}))
    model = read_config(path)
    assert (model.weight_dtype, model.kv_dtype) == ("fp8", "fp8")


def test_shared_experts_are_counted(tmp_path: Path) -> None:
    """GLM-4.5-Air has 106 billion parameters, a shared expert among them; its first layer is dense."""
    path = config(
        tmp_path, model_type="glm4_moe", num_hidden_layers=46, hidden_size=4096, num_attention_heads=96,
        intermediate_size=10944, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=1408, first_k_dense_replace=1, vocab_size=151552,
    )  # fmt: skip
    model = read_config(path)
    assert model.shared_intermediate == 1408
    assert (model.dense_layers, model.dense_intermediate) == (1, 10944)


@pytest.mark.parametrize(("kind", "sliding"), [("gemma2", 13), ("gemma3_text", 22), ("mistral", 26)])
def test_a_family_that_leaves_its_defaults_out_has_them(tmp_path: Path, kind: str, sliding: int) -> None:
    """The published gemma-2-2b has neither layer types nor tied embeddings in its config.json."""
    path = config(tmp_path, model_type=kind, num_hidden_layers=26, sliding_window=4096)
    raw = json.loads(path.read_text())
    del raw["tie_word_embeddings"]
    path.write_text(json.dumps(raw))
    model = read_config(path)
    assert (model.sliding_layers, model.tied_embeddings) == (sliding, kind != "mistral")


def test_the_rest_of_a_model_of_images_is_said_to_be_left_out(tmp_path: Path) -> None:
    path = config(tmp_path, vision_config={"hidden_size": 1280})
    assert "encoder" in read_config(path).note
    raw = json.loads(path.read_text())
    nested = {key: value for key, value in raw.items() if key not in ("vision_config", "tie_word_embeddings")}
    outer = {"vision_config": {}, "tie_word_embeddings": True, "text_config": nested}
    path.write_text(json.dumps(outer | {"vision_config": {"hidden_size": 1280}}))
    model = read_config(path)
    assert model.tied_embeddings
    assert "encoder" in model.note


@pytest.mark.parametrize("kind", ["starcoder2", "gpt_neox"])
def test_a_model_with_two_matrices_in_its_mlp_has_fewer_parameters(tmp_path: Path, kind: str) -> None:
    gated, without = (read_config(config(tmp_path, model_type=name)) for name in ("llama", kind))
    assert gated.params - without.params == 36 * 4096 * 12288


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({}, 32768),  # its class has them
        ({"max_position_embeddings": 40960}, 40960),
        ({"model_type": "chatglm", "multi_query_attention": True, "seq_length": 8192}, 8192),
        ({"model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"max_position_embeddings": 40960, "rope_scaling": None}, 40960),
        ({"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "factor": 4.0}}, 40960),
        (
            {"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
             "original_max_position_embeddings": 32768}}, 131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384),
        (
            {"model_type": "gemma3_text", "max_position_embeddings": 131072,
             "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072,
        ),
    ],
)  # fmt: skip
def test_positions_are_stretched_as_vllm_stretches_them(
    tmp_path: Path, fields: dict[str, object], positions: int
) -> None:
    assert read_config(config(tmp_path, **fields)).positions == positions
