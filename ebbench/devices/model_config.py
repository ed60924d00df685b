"""Reads the shape of a decoder from its Hugging Face config.json, by the rules of transformers and vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbench.devices.config_file import read_model_file
from ebbench.devices.geometry import ModelGeometry
from ebbench.errors import InputFileError

_STATED_STRETCHED = (None, "default", "su", "longrope", "llama3", "mrope")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WITH_QK_NORM = ("qwen3", "gemma3", "olmo2")
_WITH_FOUR_NORMS = ("gemma2", "gemma3")  # before and after attention, before and after the MLP
_OF_ALL = ("quantization_config", "tie_word_embeddings", "vision_config", "audio_config")  # beside text_config
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4}
_REFUSED = {"kv_lora_rank": "latent (MLA) attention", "state_size": "a state-space model"}
# Layers without softmax attention, or with another one, by the beginning of a key's name.
_REFUSED_KINDS = ("mamba_d", "ssm_", "linear_num_", "linear_attn_", "full_attention_interval")
_TIED = ("gemma", "cohere", "ernie4_5", "smollm3", "starcoder2")  # where the key is absent (transformers' defaults)
# Of families whose config.json leaves them out, or whose head size is not hidden_size / num_attention_heads
# (transformers' defaults).
_GEMMA3 = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 4096,
    "max_position_embeddings": 131072,
}  # fmt: skip
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma": {"head_dim": 256}, "gemma2": {"head_dim": 256}, "gemma3_text": _GEMMA3, "gemma3": _GEMMA3,
    "qwen3": {"head_dim": 128}, "qwen3_vl_text": {"head_dim": 128}, "gpt_oss": {"head_dim": 64},
    "ernie4_5": {"head_dim": 128},
}  # fmt: skip
_LEFT_OUT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
# Language head, embeddings, norms, routers and encoders have 16 bits in every cost model.
_IN_16_BITS = re.compile(r"lm_head|embed|norm|router|gate\$?$|vision|visual|audio|tower|multi_modal|mm_", re.IGNORECASE)
_WINDOW_EVERY = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}  # one layer in so many attends to all tokens
_TWO_MATRICES = ("starcoder2", "gpt_neox", "phi", "nemotron", "arcee", "apertus", "persimmon")


def read_config(path: Path) -> ModelGeometry:
    """Read a Hugging Face config.json of a dense or MoE decoder. Raises InputFileError that names the field."""
    raw = read_model_file(path)
    nested = raw.get("text_config")
    return _from_config(
        path, {**{key: raw[key] for key in _OF_ALL if key in raw}, **nested} if isinstance(nested, dict) else raw
    )


def positions_of(raw: Mapping[str, Any]) -> int:
    """Longest sequence in tokens that a config.json allows, as vLLM derives it; 0: not stated.

    A scaling of rotary embeddings stretches the positions, unless those stated are stretched already (Gemma 3, and the
    kinds in ``_STATED_STRETCHED``).
    """
    stated, scaling = raw.get("max_position_embeddings"), raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(stated, int):
        return 0
    if not isinstance(scaling, Mapping) or "gemma3" in str(raw.get("model_type")):
        return stated
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind in _STATED_STRETCHED or not isinstance(factor, int | float):
        return stated
    original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original if isinstance(original, int) else stated) * factor)


def _from_config(path: Path, given: Mapping[str, Any]) -> ModelGeometry:
    raw = {**_DEFAULTS.get(str(given.get("model_type")), {}), **given}
    for key, what in _REFUSED.items():
        if raw.get(key):
            raise InputFileError(path, f"{key} means {what}, which has no cost model here")
    refused = [key for key in raw if key.startswith(_REFUSED_KINDS) and raw[key]]
    if 0 in (raw.get("attn_type_list") or ()):  # MiniMax: 0 is linear attention, 1 softmax
        refused.append("attn_type_list")
    if refused:
        why = "means layers without softmax attention, which have no cost model here"
        raise InputFileError(path, f"{refused[0]} {why}")
    if raw.get("is_encoder_decoder") or "bert" in str(raw.get("model_type")).lower():
        raise InputFileError(path, "is an encoder's; decoders that generate text have a cost model here")
    kinds = raw.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in _ATTENTION:
            raise InputFileError(path, f"layer_types has {kind!r}, which has no cost model here")
    heads, hidden = _count(path, raw, "num_attention_heads"), _count(path, raw, "hidden_size")
    layers = _count(path, raw, "num_hidden_layers")
    experts = _count(path, raw, *_EXPERTS, default=0)
    unknown = [key for key in raw if key.endswith("num_experts") and key not in _EXPERTS and raw[key]]
    if unknown and not experts:
        raise InputFileError(path, f"{unknown[0]}: experts under this name are not read; write them as {_EXPERTS[0]}")
    kind = str(raw.get("model_type", ""))
    window, sliding = _sliding(raw, layers)
    dense = _dense_layers(path, raw, layers) if experts else 0
    weights, experts_in, kv = _quantised(path, raw.get("quantization_config"))
    name = str(raw.get("_name_or_path") or path.parent.name or path.stem)
    return ModelGeometry(
        name=name,
        hf_id=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_count(path, raw, "num_key_value_heads", default=heads),
        head_dim=_count(path, raw, "head_dim", default=hidden // heads),
        intermediate=_count(path, raw, "intermediate_size"),
        vocab=_count(path, raw, "vocab_size"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", kind.startswith(_TIED))),
        qk_norm=kind.startswith(_WITH_QK_NORM),
        norms=4 if kind.startswith(_WITH_FOUR_NORMS) else 2,
        experts=experts,
        experts_per_token=_count(path, raw, "num_experts_per_tok", "experts_per_token") if experts else 0,
        expert_intermediate=_count(path, raw, "moe_intermediate_size", "intermediate_size") if experts else 0,
        shared_intermediate=_shared(path, raw) if experts else 0,
        dense_layers=dense,
        dense_intermediate=_count(path, raw, "intermediate_size_mlp", "intermediate_size") if dense else 0,
        sliding_window=window,
        sliding_layers=sliding,
        dtype_bytes=_dtype(path, raw),
        weight_dtype=weights,
        expert_dtype=experts_in if experts else "",
        kv_dtype=kv,
        positions=positions_of(raw),
        note=_simplified(raw),
    )


def _count(path: Path, raw: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default != 0 else 0):
            raise InputFileError(path, f"{key} must be a positive whole number, not {value!r}")
        return value
    if default is None:
        raise InputFileError(path, f"{keys[0]} is missing; a decoder's config.json has it")
    return default


def _shared(path: Path, raw: Mapping[str, Any]) -> int:
    """Width of what every token passes beside its experts."""
    if str(raw.get("model_type")).startswith("llama4"):  # one in every layer with experts, under no key
        return _count(path, raw, "intermediate_size")
    if count := _count(path, raw, "n_shared_experts", "num_shared_experts", default=0):
        return count * _count(path, raw, "moe_intermediate_size", "intermediate_size")
    return _count(path, raw, "shared_expert_intermediate_size", "shared_intermediate_size", default=0)


def _dense_layers(path: Path, raw: Mapping[str, Any], layers: int) -> int:
    """Number of a mixture's layers with a dense MLP, by the rules of transformers and vLLM.

    The first ``first_k_dense_replace``, those listed, and all but every nth: counted from 1 in Qwen's and Llama 4's
    mixtures, from 0 in DeepSeek's (``moe_layer_freq``, a number or a list of 0 and 1).
    """
    listed = raw.get("moe_layers")  # Llama 4
    if isinstance(listed, list) and listed:
        return layers - len(listed)
    named, frequency = raw.get("mlp_only_layers") or [], raw.get("moe_layer_freq")
    if not isinstance(named, list):
        raise InputFileError(path, f"mlp_only_layers must be a list of layers, not {named!r}")
    first = _count(path, raw, "first_k_dense_replace", default=0)
    every = _count(path, raw, "decoder_sparse_step", "interleave_moe_layer_step", default=0) or 1
    if isinstance(frequency, list):
        with_experts = [layer for layer, flag in enumerate(frequency[:layers]) if flag]
    else:
        frequency = _count(path, raw, "moe_layer_freq", default=0) or 1
        with_experts = [layer for layer in range(layers) if layer % frequency == 0 and (layer + 1) % every == 0]
    return layers - sum(layer >= first and layer not in named for layer in with_experts)


def _sliding(raw: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Sliding window in tokens, and number of layers with it; none if it is as long as the longest sequence."""
    window = raw.get("sliding_window")
    if not isinstance(window, int) or window <= 0 or raw.get("use_sliding_window") is False:
        return 0, 0
    if 0 < positions_of(raw) <= window:
        return 0, 0
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        return window, sum(kind == "sliding_attention" for kind in kinds)
    usual = next((every for kind, every in _WINDOW_EVERY.items() if str(raw.get("model_type")).startswith(kind)), None)
    pattern = raw.get("sliding_window_pattern") or usual
    full = layers // pattern if isinstance(pattern, int) and pattern > 0 else 0
    return window, layers - full


def _quantised(path: Path, config: object) -> tuple[str, str, str]:
    """Data types of projections, experts ("" as projections) and KV cache.

    Raises InputFileError for unsupported ones.
    """
    beside = path.with_name("hf_quant_config.json")  # ModelOptimizer's
    if not config and beside.is_file():
        raise InputFileError(
            path, f"has no quantization_config, but {beside.name} beside it says that the weights are quantized: add "
            'quantization_config = {"quant_method": "fp8"} if they are FP8'
        )  # fmt: skip
    if not config:
        return "bfloat16", "", "bfloat16"
    if not isinstance(config, dict):
        raise InputFileError(path, "quantization_config must be an object")
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    scheme = config.get("kv_cache_scheme")
    kv = "fp8" if scheme and ("8" in str(scheme)) else "bfloat16"
    if method == "mxfp4":
        return "bfloat16", "w4a16_mxfp4", kv
    weights = [group.get("weights") or {} for group in _groups(config)]
    grouped = bool(weights) and all(one.get("num_bits") == 8 and one.get("type") == "float" for one in weights)
    if method == "fp8" or (grouped and method in ("compressed-tensors", "modelopt", "")):
        in_blocks = config.get("weight_block_size") or any(one.get("strategy") == "block" for one in weights)
        return ("fp8_block" if in_blocks else "fp8"), "", kv
    raise InputFileError(
        path, f"quantization_config {method or 'without quant_method'!r} has no tables; fp8 and mxfp4 have"
    )


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of layers of a quantization_config by compressed-tensors or ModelOpt; none by other methods."""
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _computes_in_16_bits(config: object) -> bool:
    """Whether FP8 weights meet activations of 16 bits (compressed-tensors without ``input_activations``)."""
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        return False
    groups = _groups(config)
    return bool(groups) and not all(group.get("input_activations") for group in groups)


def _simplified(raw: Mapping[str, Any]) -> str:
    """What the geometry simplifies, for a warning; "" for nothing."""
    found = []
    if chunk := raw.get("attention_chunk_size"):
        found.append(
            f"most of its layers attend within chunks of {chunk:,} tokens; here all attend to all tokens, so longer "
            "sequences are too slow"
        )
    if str(raw.get("model_type", "")) in _TWO_MATRICES:
        found.append("its MLP has two matrices per layer; three are taken, so weights and prefill are too large")
    if left := _left_in_16_bits(raw.get("quantization_config")):
        found.append(
            f"its quantization_config leaves layers in 16 bits ({left[0]}) that are taken to be quantized: weights are "
            "too small"
        )
    if _computes_in_16_bits(raw.get("quantization_config")):
        found.append(
            "its activations stay in 16 bits (no input_activations in its quantization_config), while products are "
            "taken in FP8: steps with many tokens are too fast"
        )
    if raw.get("vision_config") or raw.get("audio_config"):
        found.append("only its language model is taken: the encoder's weights and time are left out")
    return "; ".join(found)


def _left_in_16_bits(config: object) -> list[str]:
    """Names of projections that a quantization leaves out, without those that are in 16 bits here as well."""
    if not isinstance(config, dict) or config.get("quant_method") == "mxfp4":  # there only experts are quantized
        return []
    listed: list[object] = next((config[key] for key in _LEFT_OUT if isinstance(config.get(key), list)), [])
    return [str(name) for name in listed if not _IN_16_BITS.search(str(name))]


def _dtype(path: Path, raw: Mapping[str, Any]) -> int:
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16")
    if name not in _DTYPE_BYTES:
        raise InputFileError(path, f"torch_dtype {name!r} is not one of {', '.join(_DTYPE_BYTES)}")
    # vLLM serves float32 checkpoints in 16 bits by default (dtype "auto").
    return 2 if name == "float32" else _DTYPE_BYTES[name]
