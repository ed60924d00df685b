"""Mistral's own format, ``params.json``, in the words of a config.json (vLLM's ``transformers_utils/configs``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbench.errors import InputFileError

_KEYS: dict[str, str] = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
_EXPERTS = {
    "num_experts": "n_routed_experts", "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size", "num_shared_experts": "n_shared_experts",
    "first_k_dense_replace": "first_k_dense_replace", "route_every_n": "moe_layer_freq",
}  # fmt: skip
_FP8 = "fp8_e4m3"


def is_params(raw: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a params.json."""
    return "model_type" not in raw and {"dim", "n_layers", "n_heads"} <= raw.keys()


def as_config(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same model as a config.json. Raises InputFileError for a quantization of another kind."""
    config = {_KEYS.get(key, key): value for key, value in raw.items()}
    config.setdefault("max_position_embeddings", 128_000)
    config["model_type"] = "mistral"
    experts = config.pop("moe", None)
    if isinstance(experts, dict):
        config.update({_EXPERTS.get(str(key), str(key)): value for key, value in experts.items()})
        config["model_type"] = "mixtral"
    if config.get("qk_nope_head_dim"):
        config["model_type"] = "deepseek_v3"
    windows = config.get("sliding_window")
    if isinstance(windows, list) and windows:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        layers = config["num_hidden_layers"]
        config["layer_types"] = kinds * (layers // len(kinds) if isinstance(layers, int) else 1)
        config["sliding_window"] = next((window for window in windows if window), None)
    quantization = config.pop("quantization", None)
    if isinstance(quantization, dict) and quantization:
        config["quantization_config"] = _quantization(path, quantization)
    return config


def _quantization(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("qformat_weight") == _FP8:
        return {"quant_method": "fp8"}
    if "compressed" in str(given.get("quant_method")):
        return {**given, "quant_method": "compressed-tensors"}
    raise InputFileError(path, f"quantization {dict(given)!r} is not read here; {_FP8} and compressed-tensors are")
