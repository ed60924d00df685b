"""Weights and KV cache in FP8: what a config.json says, what the command line asks for, memory and step times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbench.devices.base import Parallel
from ebbench.devices.costs import decode_shape, prefill_shape
from ebbench.devices.loader import load_device
from ebbench.devices.model_config import read_config
from ebbench.devices.profiles import find_model
from ebbench.errors import InputFileError, UnknownNameError, UsageError

QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8}}}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
FLOATS = {"num_bits": 8, "type": "float", "dynamic": False}
IN_BLOCKS = {"group_0": {"weights": BLOCKS, "input_activations": {"num_bits": 8}}}


def written(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(QWEN3_8B | changes))
    return path


@pytest.mark.parametrize(
    ("config", "weights", "kv"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", "bfloat16"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", "bfloat16"),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, "fp8", "bfloat16"),
        ({"quant_method": "compressed-tensors", "config_groups": IN_BLOCKS}, "fp8_block", "bfloat16"),
        ({"quant_algo": "FP8", "config_groups": GROUPS, "kv_cache_scheme": "FP8"}, "fp8", "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": FLOATS}, "fp8", "fp8"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {**FLOATS, "dynamic": True}},
            "fp8",
            "bfloat16",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS, "kv_cache_scheme": FLOATS}, "fp8", "fp8"),
        # What a server must be asked for: --kv-cache-dtype fp8.
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
                "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
            },
            "fp8",
            "bfloat16",
        ),
        # Stored as whole numbers of 4 bits.
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}},
            "int4",
            "bfloat16",
        ),
        # The types of compressed-tensors' own class.
        ({"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": {}}}}, "int8", "bfloat16"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", "bfloat16"),
        ({"quant_method": "gptq", "bits": 8}, "int8", "bfloat16"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"all": {"weights": {"num_bits": 4.0, "type": "int"}}},
            },
            "int4",
            "bfloat16",
        ),
        (None, "bfloat16", "bfloat16"),
    ],
)
def test_a_config_says_the_types_of_weights_and_kv_cache(
    tmp_path: Path, config: dict[str, Any], weights: str, kv: str
) -> None:
    model = read_config(written(tmp_path, quantization_config=config))
    assert (model.weight_dtype, model.kv_dtype) == (weights, kv)


def test_a_file_beside_counts_where_the_config_says_nothing(tmp_path: Path) -> None:
    """Qwen3.6-35B-A3B-NVFP4: its own file alone speaks of the KV cache, and vLLM does not open it."""
    types = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": types}))
    assert read_config(written(tmp_path)).kv_dtype == "fp8"
    for method in ("modelopt", "fp8"):
        inner = {"quant_method": method, "quant_algo": "FP8"}
        assert read_config(written(tmp_path, quantization_config=inner)).kv_dtype == "bfloat16"


def test_layers_of_mixed_precision_may_be_in_the_file_beside(tmp_path: Path) -> None:
    layers = {f"model.layers.{layer}.mlp.{name}_proj": {"quant_algo": "FP8"} for layer in range(36)
              for name in ("gate", "up", "down")}  # fmt: skip
    types = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": types}))
    given = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    model = read_config(written(tmp_path, quantization_config=given))
    assert (model.weight_dtype, model.dtype_of_attention, model.kv_dtype) == ("fp8", "bfloat16", "bfloat16")


def test_an_empty_list_of_what_is_left_out_is_none(tmp_path: Path) -> None:
    """As vLLM's class for FP8: the second key counts where the first has nothing."""
    lists = {"ignore": [], "ignored_layers": [], "modules_to_not_convert": ["self_attn"]}
    model = read_config(written(tmp_path, quantization_config={"quant_method": "fp8", **lists}))
    assert (model.dtype_of_attention, model.weight_dtype) == ("bfloat16", "fp8")


def test_weights_quantized_for_mlx_are_refused(tmp_path: Path) -> None:
    """They were read as weights in 16 bits, also within a model of images."""
    own = {"quantization": {"group_size": 64, "bits": 4}}
    for config in (QWEN3_8B | own, {"model_type": "qwen3_vl", "text_config": QWEN3_8B} | own):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputFileError, match="MLX"):
            read_config(tmp_path / "config.json")


FOURS = {"num_bits": 4, "type": "int", "symmetric": True}
LINEAR = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)


def in_groups(size: int, targets: str = "Linear") -> dict[str, Any]:
    groups = {"group_0": {"targets": [targets], "weights": {**FOURS, "group_size": size}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True}, 4 + 20 / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}, 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, 8.5),
        (in_groups(32), 4.5),
        (in_groups(128), 4.125),
    ],
)
def test_scales_of_small_groups_count_in_the_size(tmp_path: Path, config: dict[str, Any], bits: float) -> None:
    """Kimi-K2.5, 4 bits in groups of 32, is 595 GB and not 547."""
    model = read_config(written(tmp_path, quantization_config=config))
    assert model.weight_bytes - 2 * model.embedding_params == pytest.approx(LINEAR * bits / 8, rel=1e-6)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FULL_NAME = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "attention", "mlp"),
    [
        ({**GPTQ, "dynamic": {r"-:.*self_attn.*": {}}}, "bfloat16", "int4"),
        ({**GPTQ, "dynamic": {r"+:.*\.mlp\..*": {"bits": 8}}}, "int4", "int8"),
        ({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]}, "int4", "bfloat16"),
        ({**GPTQ, "quant_method": "auto-round", "extra_config": {".*mlp.*": {"bits": 16}}}, "int4", "bfloat16"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp4"},) + 2 * ("w4a16_mxfp4",),
        (in_groups(128, "re:.*qkv_proj"), "int4", "bfloat16"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_data": {"module_fqn_to_config": {
            "_default": {"_type": "Int4WeightOnlyConfig"},
            "self_attn": {"_type": "Float8DynamicActivationFloat8WeightConfig"}}}}}}, "fp8", "int4"),
    ],
)  # fmt: skip
def test_modules_may_have_settings_of_their_own(
    tmp_path: Path, config: dict[str, Any], attention: str, mlp: str
) -> None:
    model = read_config(written(tmp_path, quantization_config=config))
    assert (model.dtype_of_attention, model.weight_dtype) == (attention, mlp)


def test_one_module_with_settings_of_its_own_counts_in_the_size(tmp_path: Path) -> None:
    config = {**GPTQ, "quant_method": "auto-round", "extra_config": {FULL_NAME: {"bits": 16}}}
    whole = read_config(written(tmp_path, quantization_config={**config, "extra_config": {}}))
    model = read_config(written(tmp_path, quantization_config=config))
    assert model.weight_bytes - whole.weight_bytes == pytest.approx(4096 * 4096 * (16 - 4.125) / 8, abs=1)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"bits": 4}, "without quant_method"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({**in_groups(128), "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "8 bits of type 'int'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "KV cache in NVFP4"),
    ],
)
def test_a_quantisation_that_is_not_read_is_refused_by_name(
    tmp_path: Path, config: dict[str, object], named: str
) -> None:
    with pytest.raises(InputFileError, match=named):
        read_config(written(tmp_path, quantization_config=config))


@pytest.mark.parametrize(("activations", "said"), [({"num_bits": 8}, False), (None, True)])
def test_activations_that_stay_in_16_bits_are_a_caveat(tmp_path: Path, activations: object, said: bool) -> None:
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": activations}}
    path = written(tmp_path, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})
    assert ("its activations stay in 16 bits" in read_config(path).note) == said


INT4 = {"num_bits": 4, "type": "int", "group_size": 128}
HEADS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, "int4"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": False}, "bfloat16"),
    ({"quant_method": "gptq", "bits": 4, "lm_head": True, "dynamic": {"-:lm_head": {}}}, "bfloat16"),
    ({"quant_method": "gptq", "bits": 4, "lm_head": True, "dynamic": {"+:lm_head": {"bits": 8}}}, "int8"),
    ({"quant_method": "gptq", "bits": 4, "lm_head": True, "modules_in_block_to_quantize": ["q_proj"]}, "bfloat16"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "lm_head": True}, "int4"),
    ({"quant_method": "awq", "bits": 4, "lm_head": True, "modules_to_not_convert": ["lm_head"]}, "bfloat16"),
    ({"quant_method": "auto-round", "bits": 4, "lm_head": True}, "bfloat16"),
    ({"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 8}}}, "int8"),
    ({"quant_method": "compressed-tensors", "config_groups": {"0": {"targets": ["Linear"], "weights": INT4}}},
     "bfloat16"),
    ({"quant_method": "compressed-tensors", "config_groups": {"0": {"targets": ["Linear", "re:.*lm_head"],
                                                                     "weights": INT4}}}, "int4"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, "bfloat16"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "lm_head": {"quant_algo": "NVFP4"}, "model.layers.*": {"quant_algo": "FP8"}}}, "nvfp4"),
    ({"quant_method": "fp8"}, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "head"), HEADS)
def test_a_language_head_has_the_type_that_vllm_gives_it(tmp_path: Path, config: dict[str, Any], head: str) -> None:
    model = read_config(written(tmp_path, quantization_config=config))
    assert model.head_dtype == head
    tied = read_config(written(tmp_path, quantization_config=config, tie_word_embeddings=True))
    assert tied.head_dtype == "bfloat16", "tied embeddings are looked up in 16 bits"


def test_a_quantized_head_counts_in_bytes_and_times(tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    measured = []
    for left_out in ([], ["lm_head"]):
        path = written(tmp_path, quantization_config=config | {"exclude_modules": left_out})
        time_s = load_device("h200", str(path)).cost.step_s(decode_shape(1, 100))
        measured.append((read_config(path).weight_bytes, time_s))
    (fewer, sooner), (more, later) = measured
    head_bytes = 151936 * 4096
    assert more - fewer == head_bytes
    assert later - sooner == pytest.approx(head_bytes / 4.8e12, rel=0.4)


@pytest.mark.parametrize(("window", "layers"), [(4096, 36), (32768, 0), (262144, 0)])
def test_a_window_as_long_as_the_longest_sequence_is_none(tmp_path: Path, window: int, layers: int) -> None:
    model = read_config(written(tmp_path, model_type="mistral", sliding_window=window, max_position_embeddings=32768))
    assert model.sliding_layers == layers
    assert bool(model.sliding_window) == bool(layers)


def test_layers_without_a_cost_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="layer_types has 'linear_attention'"):
        read_config(written(tmp_path, layer_types=["linear_attention"] * 27 + ["full_attention"] * 9))


def test_fp8_halves_projections_and_keys_and_leaves_embeddings() -> None:
    whole = load_device("h200", "qwen3-8b").geometry
    halved = load_device("h200", "qwen3-8b", quantization="fp8", kv_cache_dtype="fp8").geometry
    assert whole is not None
    assert halved is not None
    embeddings = 2 * 2 * whole.vocab * whole.hidden
    assert halved.weight_bytes - embeddings == pytest.approx((whole.weight_bytes - embeddings) / 2)
    assert halved.kv_bytes_per_token * 2 == whole.kv_bytes_per_token


@pytest.mark.parametrize("device", ["h100", "h200", "b200", "b300", "l40s", "rtx-pro-6000"])
def test_fp8_is_faster_and_holds_more_on_every_device_that_has_its_tables(device: str) -> None:
    plain = load_device(device, "llama-3.1-8b")
    fp8 = load_device(device, "llama-3.1-8b", quantization="fp8", kv_cache_dtype="fp8")
    assert fp8.kv_capacity_tokens > 2 * plain.kv_capacity_tokens
    assert fp8.cost.step_s(prefill_shape(4096)) < plain.cost.step_s(prefill_shape(4096))
    assert fp8.cost.step_s(decode_shape(64, 2048)) < plain.cost.step_s(decode_shape(64, 2048))
    assert fp8.cost.step_s(decode_shape(64, 2048)) < 1.02 * plain.cost.step_s(decode_shape(64, 2048))
    assert "weights in fp8, KV cache in fp8" in fp8.provenance


@pytest.mark.parametrize("device", ["rtx-4090", "a100"])
def test_a_device_without_fp8_tables_refuses_it(device: str) -> None:
    with pytest.raises(UsageError, match=f"no kernels with fp8 weights were measured on {device}"):
        load_device(device, "llama-3.1-8b", quantization="fp8")


def test_unknown_quantizations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="awq"):
        load_device("h200", "qwen3-8b", quantization="awq")
    with pytest.raises(UnknownNameError, match="fp4"):
        load_device("h200", "qwen3-8b", kv_cache_dtype="fp4")
    with pytest.raises(UsageError, match="are in w4a16_mxfp4 already"):
        load_device("b200", "gpt-oss-120b", quantization="fp8")


def test_block_scales_that_were_not_measured_are_said(tmp_path: Path) -> None:
    path = written(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert any("timed with their launch" in text for text in map(str, load_device("h200", str(path)).warnings))
    assert any("one scale per tensor" in text for text in map(str, load_device("rtx-pro-6000", str(path)).warnings))


def test_the_published_calibration_of_16_bits_is_not_taken_for_fp8() -> None:
    assert "weifang231" in load_device("h200", "qwen3-8b").calibration.source
    assert "weifang231" not in load_device("h200", "qwen3-8b", quantization="fp8").calibration.source


@pytest.mark.parametrize(
    ("name", "parameters_b"),
    [
        ("llama-3.1-70b", 70.6), ("qwen2.5-7b", 7.6), ("qwen3-235b-a22b", 235.0), ("mistral-nemo", 12.2),
        ("gpt-oss-120b", 116.8), ("qwen3-235b-a22b-fp8", 235.0),
    ],
)  # fmt: skip
def test_models_have_the_number_of_parameters_in_their_names(name: str, parameters_b: float) -> None:
    assert find_model(name).params / 1e9 == pytest.approx(parameters_b, rel=0.01)


def test_a_model_that_needs_several_gpus_loads_on_them() -> None:
    with pytest.raises(UsageError, match=r"more GPUs .--tp N; run and capacity: --topology tp=N; vLLM: -- --tens"):
        load_device("h100", "llama-3.1-70b")
    assert load_device("h100", "llama-3.1-70b", parallel=Parallel(tp=4)).kv_capacity_tokens > 100_000


def test_slices_that_vllm_refuses_are_refused() -> None:
    """Experts of 1,536 columns in blocks of 128: 4 GPUs have 384 each, 8 would have 192; experts spread whole fit."""
    with pytest.raises(UsageError, match="192 each"):
        load_device("h100", "qwen3-235b-a22b-fp8", parallel=Parallel(tp=8))
    for shape in (Parallel(tp=4), Parallel(tp=8, ep=8)):
        assert load_device("h100", "qwen3-235b-a22b-fp8", parallel=shape).kv_capacity_tokens
    assert load_device("h100", "qwen3-235b-a22b", parallel=Parallel(tp=8), quantization="fp8").kv_capacity_tokens


@pytest.mark.parametrize(("kv_heads", "tp", "works"), [(10, 4, False), (10, 2, True), (2, 8, True), (8, 5, False)])
def test_key_value_heads_are_shared_evenly(kv_heads: int, tp: int, works: bool) -> None:
    """As vLLM asserts: 10 KV heads are not divided among 4 GPUs, though 40 query heads are."""
    model = replace(find_model("qwen3-8b"), heads=40, kv_heads=kv_heads)
    if works:
        Parallel(tp=tp).check(model)
    else:
        with pytest.raises(UsageError, match="cannot share evenly"):
            Parallel(tp=tp).check(model)
