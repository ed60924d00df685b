"""The values of a config.json under the names that families give them, with a note of which were read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ebbench.errors import InputFileError

NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_attention_groups"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"),
    "vocab_size": ("padded_vocab_size", "vocab_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
        "top_k_experts", "topk_experts",
    ),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_width": (
        "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
        "share_expert_dim",
    ),
    "window": ("sliding_window", "sliding_window_size", "attention_window_size"),
}  # fmt: skip
"""What a value is called here, and the keys that have it, the first one present counting."""

SHAPES = re.compile(
    r"layer|head(?!er)|(^|_)kv|window|sliding|chunk|dim($|_)|width|size|rank|expert|moe|ffn|intermediate|inner|mamba|ssm|conv|state"
    r"|linear|attn|attention|block|sparse|index|latent|compress|pattern|interval|every|freq|global|local|recurrent|lru"
    r"|mixer|(^|_)mla(?!_use_nope)|(^|_)cla($|_)|output_gate|loop|depth|n_embd|d_model|share|full_|delta|engram|memory|hyper|altup|laurel"
)
"""Keys that speak of layers, heads, KV or widths: what has one of these words and was not read is refused."""
HARMLESS = re.compile(
    r".*(dropout|drop|bias|_norm|norm_\w+|layernorm|layer_?norm|loss|init\w*|rope|rotary|soft_?cap\w*|scale\w*|scaling\w*|multiplier\w*|theta|eps|epsilon"
    r"|token_id|token_ids|token_index|mtp|nextn|quant\w*|cache_dtype|implementation|checkpoint\w*|aux|output_\w+|act|activation\w*|version|jitter\w*|pdrop|clip\w*)(?![a-z]).*"
    r"|max_\w*(position|len|length|seq)\w*|(n|num)_?(ctx|positions)|.*(max_seq_len|seq_length|context_length|model_max_length).*|pretraining_tp|attn_impl\w*|torch_dtype|dtype|architectures"
    r"|chunk_size_feed_forward|(mamba_)?chunk_size|topk_group|n_group|num_expert_group|topk_method|scoring_func|expert_selection_fn|router_\w+|use_mamba_kernels|use_cache"
    r"|moe_(router|renormalize|token_drop\w*|shared_expert_overlap|routed_scaling\w*|aux\w*|norm\w*|use_\w*|capacity|gate|dropout|group\w*|layer_recompute|multi\w*|random\w*|softmax\w*)\w*"
    r"|use_(flash|sdpa|dynamic|expert_bias|conv_bias|moe|bidirectional)\w*|fp32_residual\w*|residual_in_fp32|attention_type|attn_temperature\w*|floor_scale|time_step\w*|query_pre_attn_scalar"
    r"|num_logits_to_keep|block_size|ep_size|ep_\w+|moe_layer_num|is_decoder|vision_\w+|image_\w+|video_\w+|audio_\w+|mm_\w+|projector_\w+|spatial_\w+|patch_size|downsample\w*"
    r"|(attention|key|value|query|attn)_(softmax|multiplier)\w*|.*_multipliers?|apply_\w+|num_logits\w*|summary_\w+|reorder\w*|add_cross_attention|cross_attention_hidden_size"
    r"|tie_\w+|_?attn_implementation\w*|experts_implementation|use_parallel_residual|parallel_attn|partial_\w+|mlp_(alpha|beta)\w*|\w+_attn_(alpha|beta)_factor|no_rope_layers?|no_rope_layer_interval"
    r"|nope_layer_interval|layer_rope_theta|mamba_(norm|rms_norm|conv_bias|proj_bias|hidden_act)\w*|first_layer_fusion|keep_window_size|swiglu\w*|hidden_act\w*|_?name_or_path|model_type|transformers_version|auto_map|id2label|label2id|torchscript|use_return_dict|return_dict|base_model_\w+|is_encoder_decoder|tokenizer_class|deepspeed\w*|task_specific\w*|begin_suppress\w*|problem_type|gradient\w*|_commit_hash|\w*original_max_\w*"
)
"""Of these, what no figure depends on."""
_EMPTY = (None, False, 0, 0.0, "", "none")


class ConfigValues:
    """Values by key, with a file for messages. ``read`` keys are known to be understood."""

    def __init__(self, path: Path, raw: Mapping[str, Any], read: set[str] | None = None) -> None:
        self.path = path
        self._raw = raw
        self._read: set[str] = set() if read is None else read

    def overlaid(self, further: Mapping[str, Any]) -> ConfigValues:
        """The same with other values of some keys."""
        return ConfigValues(self.path, {**self._raw, **further}, self._read) if further else self

    def get(self, *keys: str) -> Any:
        """The first of these that is given and not null."""
        self._read.update(keys)
        return next((self._raw[key] for key in keys if self._raw.get(key) is not None), None)

    def has(self, key: str) -> bool:
        """Whether a key is given and not null."""
        return self.get(key) is not None

    def number(self, *names: str, default: int | None = None) -> int:
        """A whole number by its name here or by its key, at least 1, or 0 where 0 is the default. A list of equal
        numbers is one. Raises InputFileError."""
        keys = [key for name in names for key in NAMES.get(name, (name,))]
        self._read.update(keys)
        for key in keys:
            value = self._raw.get(key)
            if isinstance(value, list) and value and all(each == value[0] for each in value):
                value = value[0]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default != 0 else 0):
                raise InputFileError(self.path, f"{key} must be a positive whole number, not {_short(value)}")
            return value
        if default is None:
            raise InputFileError(self.path, f"{keys[0]} is missing; a decoder's config.json has it")
        return default

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A truth value."""
        value = self.get(key)
        return default if value is None else bool(value)

    def listed(self, key: str) -> list[Any] | None:
        """A list, or None. Raises InputFileError for anything else."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise InputFileError(self.path, f"{key} must be a list, not {_short(value)}")
        return value

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with one entry per layer, or None. Raises InputFileError for one of another length."""
        value = self.listed(key)
        if value is not None and len(value) != layers:
            raise InputFileError(self.path, f"{key} has {len(value)} entries for {layers} layers; it needs one each")
        for each in value or ():
            self._check_plain(key, each)
        return value

    def objects(self, key: str) -> Mapping[str, Any]:
        """An object whose values are plain, empty if there is none. Raises InputFileError for anything else."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InputFileError(self.path, f"{key} must be an object, not {_short(value)}")
        return value

    def _check_plain(self, key: str, value: Any) -> None:
        if isinstance(value, list | dict):
            raise InputFileError(self.path, f"{key} has {_short(value)}, where a number or a name belongs")

    def by_layer(self, key: str) -> dict[int, dict[str, Any]]:
        """An object of objects by the number of a layer. Raises InputFileError for anything else."""
        found = {}
        for layer, own in self.objects(key).items():
            if not (layer.isascii() and layer.isdigit() and isinstance(own, dict)):
                raise InputFileError(self.path, f"{key} must be an object of objects by the number of a layer")
            for value in own.values():
                self._check_plain(key, value)
            found[int(layer)] = own
        return found

    def understood(self, keys: Iterable[str]) -> None:
        """Note that these are understood without being read."""
        self._read.update(keys)

    def not_understood(self) -> list[str]:
        """Keys about the shape of the model that have a value and were not read."""
        return [
            key
            for key, value in self._raw.items()
            if key not in self._read and not _is_empty(value) and SHAPES.search(key) and not HARMLESS.fullmatch(key)
        ]


def _is_empty(value: Any) -> bool:
    if isinstance(value, list | dict):
        return not value
    return any(value is empty or value == empty for empty in _EMPTY)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}..."
