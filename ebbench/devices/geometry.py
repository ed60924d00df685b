"""Shape of a decoder-only transformer: bytes of its weights, KV bytes per token, parameters used per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbench.errors import InputFileError

# Bits per weight with its share of the scales: one scale per tensor (fp8), per 128 x 128 block, per 32 weights (mxfp4).
WEIGHT_BITS = {"bfloat16": 16.0, "fp8": 8.0, "fp8_block": 8.0, "w4a16_mxfp4": 4.25}
_STATED_STRETCHED = (None, "default", "su", "longrope", "llama3", "mrope")
KV_DTYPES = ("auto", "bfloat16", "fp8")


@dataclass(frozen=True)
class ModelGeometry:
    """A dense or mixture-of-experts decoder. ``experts`` 0 is dense; sizes are in elements.

    ``sliding_layers`` of the ``layers`` attend only to the last ``sliding_window`` tokens. ``norms``: norms of the
    hidden size per layer. ``dtype_bytes``: bytes per element of activations, embeddings and language head.
    ``weight_dtype``: type of the projections in the layers; ``expert_dtype``: of the experts ("": as the projections);
    ``kv_dtype``: of the KV cache; names of WEIGHT_BITS, with bfloat16 for any 16-bit type. ``positions``: longest
    sequence in tokens that its config.json allows, 0: not known. ``note``: what is simplified.
    """

    name: str
    hf_id: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool = False
    qk_norm: bool = False
    norms: int = 2
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    sliding_window: int = 0
    sliding_layers: int = 0
    dtype_bytes: int = 2
    weight_dtype: str = "bfloat16"
    expert_dtype: str = ""
    kv_dtype: str = "bfloat16"
    positions: int = 0
    note: str = ""

    @property
    def dtype_of_experts(self) -> str:
        """Data type of the experts."""
        return self.expert_dtype or self.weight_dtype

    @property
    def plain(self) -> bool:
        """Whether weights and KV cache have 16 bits."""
        return self.dtype_of_experts == self.weight_dtype == self.kv_dtype == "bfloat16"

    @property
    def kv_dtype_bytes(self) -> float:
        """Bytes per element of the KV cache."""
        return WEIGHT_BITS[self.kv_dtype] / 8

    @property
    def experts_bytes(self) -> float:
        """Bytes of all experts of all layers."""
        return self.layers * self.experts * self.expert_params * WEIGHT_BITS[self.dtype_of_experts] / 8

    def sliced(self, tp: int) -> ModelGeometry:
        """The part on one of ``tp`` GPUs: its heads, its slice of the dense MLP and of the vocabulary.

        The hidden size is not divided; neither are the experts, whose tables have their own division. With fewer KV
        heads than GPUs each head is stored more than once (vLLM).
        """
        return replace(
            self,
            heads=self.heads // tp,
            kv_heads=max(self.kv_heads // tp, 1),
            intermediate=-(-self.intermediate // tp),
            shared_intermediate=-(-self.shared_intermediate // tp),
            vocab=-(-self.vocab // tp),
        )

    @property
    def qkv_width(self) -> int:
        """Output columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's four attention projections."""
        return self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden

    @property
    def mlp_params(self) -> int:
        """Parameters of one layer's gated MLP, all experts together."""
        if not self.experts:
            return 3 * self.hidden * self.intermediate
        return self.experts * self.expert_params + self.hidden * (self.experts + 3 * self.shared_intermediate)

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def params(self) -> int:
        """All parameters without norms (below 0.01 %)."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * (self.attention_params + self.mlp_params) + embeddings

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        experts = self.layers * self.experts * self.expert_params
        projections = self.params - embeddings - experts
        return int(
            embeddings * self.dtype_bytes + projections * WEIGHT_BITS[self.weight_dtype] / 8 + self.experts_bytes
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes per token over all layers (a hybrid cache frees more; see capacity)."""
        return int(2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WITH_QK_NORM = ("qwen3", "gemma3", "olmo2")
_WITH_FOUR_NORMS = ("gemma2", "gemma3")  # before and after attention, before and after the MLP
_OF_ALL = ("quantization_config", "tie_word_embeddings", "vision_config", "audio_config")  # beside text_config
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4}
_REFUSED = {"kv_lora_rank": "latent (MLA) attention", "state_size": "a state-space model"}
# Layers without softmax attention, or with another one, by the beginning of a key's name.
_REFUSED_KINDS = ("mamba_d", "ssm_", "linear_num_", "linear_attn_", "full_attention_interval", "attn_type_list")
_TIED = ("gemma", "cohere", "ernie4_5", "smollm3", "starcoder2")  # where the key is absent (transformers' defaults)
_WINDOW_EVERY = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}  # one layer in so many attends to all tokens
_TWO_MATRICES = ("starcoder2", "gpt_neox", "phi", "nemotron", "arcee", "apertus", "persimmon")


def read_config(path: Path) -> ModelGeometry:
    """Read a Hugging Face config.json of a dense or MoE decoder. Raises InputFileError that names the field."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputFileError(path, f"is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InputFileError(path, "is not a JSON object")
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


def _from_config(path: Path, raw: Mapping[str, Any]) -> ModelGeometry:
    for key, what in _REFUSED.items():
        if raw.get(key):
            raise InputFileError(path, f"{key} means {what}, which has no cost model here")
    for key in raw:
        if key.startswith(_REFUSED_KINDS) and raw[key]:
            raise InputFileError(path, f"{key} means layers without softmax attention, which have no cost model here")
    kinds = raw.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in ("full_attention", "sliding_attention"):
            raise InputFileError(path, f"layer_types has {kind!r}, which has no cost model here")
    heads, hidden = _count(path, raw, "num_attention_heads"), _count(path, raw, "hidden_size")
    layers = _count(path, raw, "num_hidden_layers")
    experts = _count(path, raw, *_EXPERTS, default=0)
    unknown = [key for key in raw if key.endswith("num_experts") and key not in _EXPERTS and raw[key]]
    if unknown and not experts:
        raise InputFileError(path, f"{unknown[0]}: experts under this name are not read; write them as {_EXPERTS[0]}")
    kind = str(raw.get("model_type", ""))
    window, sliding = _sliding(raw, layers)
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
    if count := _count(path, raw, "n_shared_experts", "num_shared_experts", default=0):
        return count * _count(path, raw, "moe_intermediate_size", "intermediate_size")
    return _count(path, raw, "shared_expert_intermediate_size", "shared_intermediate_size", default=0)


def _sliding(raw: Mapping[str, Any], layers: int) -> tuple[int, int]:
    window = raw.get("sliding_window")
    if not isinstance(window, int) or window <= 0 or raw.get("use_sliding_window") is False:
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
    groups = config.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    grouped = bool(weights) and all(one.get("num_bits") == 8 and one.get("type") == "float" for one in weights)
    if method == "fp8" or (grouped and method in ("compressed-tensors", "modelopt", "")):
        return ("fp8_block" if config.get("weight_block_size") else "fp8"), "", kv
    raise InputFileError(
        path, f"quantization_config {method or 'without quant_method'!r} has no tables; fp8 and mxfp4 have"
    )


def _simplified(raw: Mapping[str, Any]) -> str:
    """What the geometry simplifies, for a warning; "" for nothing."""
    found = []
    dense = raw.get("mlp_only_layers") or raw.get("first_k_dense_replace")
    every = raw.get("decoder_sparse_step") or raw.get("moe_layer_freq") or raw.get("interleave_moe_layer_step") or 1
    if dense or (isinstance(every, int) and every > 1):
        found.append("some of its layers have no experts; all are taken to have them")
    if str(raw.get("model_type", "")) in _TWO_MATRICES:
        found.append("its MLP has two matrices per layer; three are taken, so weights and prefill are too large")
    if raw.get("vision_config") or raw.get("audio_config"):
        found.append("only its language model is taken: the encoder's weights and time are left out")
    return "; ".join(found)


def _dtype(path: Path, raw: Mapping[str, Any]) -> int:
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16")
    if name not in _DTYPE_BYTES:
        raise InputFileError(path, f"torch_dtype {name!r} is not one of {', '.join(_DTYPE_BYTES)}")
    # vLLM serves float32 checkpoints in 16 bits by default (dtype "auto").
    return 2 if name == "float32" else _DTYPE_BYTES[name]
