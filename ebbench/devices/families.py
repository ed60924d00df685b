"""Families of decoders by ``model_type``: what their config.json leaves out, and rules for their layers.

One entry of ``FAMILIES`` is all that a new family takes. Values under usual names are read without an entry's help:
layers, widths, heads, experts (``config_names.toml``), ``layer_types``, sliding windows, first and listed dense layers
of mixtures. An entry says what differs; sizes and defaults are those of transformers and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ebbench.devices.geometry import Product
from ebbench.devices.mixer_rules import (
    ConfigValues,
    Rule,
    block_index,
    block_sparse,
    compressed,
    delta,
    factored,
    gated_latent,
    gated_recurrence,
    index,
    kimi_delta,
    latent,
    lightning,
    mamba1,
    mamba2,
    relative,
    short_conv,
    softmax,
)
from ebbench.errors import InputFileError

_BY_RATIO = {0: "window_alone", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
FULL, WINDOW, CHUNK, LINEAR, CONV, SPARSE = (
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "sparse_attention",
)  # fmt: skip
DENSE_MLP, EXPERTS = "mlp", "moe"
Kinds = list[str]
Pattern = Callable[[ConfigValues, int], Kinds]

_SOFTMAX: Mapping[str, tuple[Rule, ...]] = {FULL: (softmax(),), WINDOW: (softmax("window"),)}


@dataclass(frozen=True)
class Family:
    """What the config.json of one family means.

    ``defaults``: values of keys that may be absent. ``layers``: rules of each kind of layer that it has; a kind that is
    not here is refused. ``pattern``: the kinds where no list of them is given. ``experts``: whether it may have any;
    ``dense_width``, ``shared_width``: keys of the width of a dense MLP, and of what every token passes beside its
    experts, if not the usual ones. ``width``: the MLP's width, if not what a key says. ``mlp_matrices``: 3 with a gate,
    2 without. ``one_each``: a layer is attention or MLP, not both. ``tied``: whether embeddings are tied where the
    config does not say. ``streams``: the key of the number of streams of hidden states whose mixing has times.
    ``wide_router``: vLLM chooses experts in 32 bits. ``others``: parameters outside layers, embeddings and head.
    ``understood``: keys that change nothing here. ``instead``: values that
    count in place of those given. ``note``: a caveat that its results carry.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, tuple[Rule, ...]] = field(default_factory=lambda: _SOFTMAX)
    pattern: Pattern | None = None
    experts: bool = False
    dense_width: tuple[str, ...] = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size")
    shared_width: tuple[str, ...] = ()
    width: Callable[[ConfigValues], int] | None = None
    mlp_matrices: int = 3
    one_each: bool = False
    tied: bool = False
    qk_norm: bool = False
    joint_norms: bool = False
    wide_router: bool = False
    norms: int = 2
    streams: str = ""
    others: Callable[[ConfigValues], int] | None = None
    understood: tuple[str, ...] = ()
    instead: Callable[[ConfigValues], Mapping[str, Any]] | None = None
    note: str = ""


# Patterns of kinds of layers.


def every(number: int, *keys: str, first: bool = False, otherwise: str = WINDOW) -> Pattern:
    """One layer per group attends to everything, its last or its ``first``. The group's size is the first of ``keys``
    that is given, else ``number``."""

    def pattern(v: ConfigValues, layers: int) -> Kinds:
        stated = v.number(*keys, default=0) if keys else 0
        group = stated or number
        due = 0 if first else group - 1
        return [FULL if layer % group == due else otherwise for layer in range(layers)]

    return pattern


def lettered(v: ConfigValues, layers: int) -> Kinds:
    """``sliding_window_pattern`` as a number or as letters, L for a window (EXAONE 4)."""
    given = v.get("sliding_window_pattern")
    if not isinstance(given, str):
        return every(4, "sliding_window_pattern")(v, layers)
    kinds = [WINDOW if given[layer % len(given)] == "L" else FULL for layer in range(layers)]
    return [*kinds[:-1], FULL]


def _after_layers(v: ConfigValues, layers: int) -> Kinds:
    """Qwen 2 and 3: windows from ``max_window_layers`` on, if they are used at all."""
    first = v.number("max_window_layers", default=0)
    return [WINDOW if v.flag("use_sliding_window") and layer >= first else FULL for layer in range(layers)]


def _chunks(v: ConfigValues, layers: int) -> Kinds:
    """Llama 4: layers with rotary embeddings attend within chunks, if chunks have a size."""
    interval = v.number("no_rope_layer_interval", default=4)
    stated = v.per_layer("no_rope_layers", layers) if v.listed("no_rope_layers") else None  # published files have []
    listed = stated or [(layer + 1) % interval for layer in range(layers)]
    return [CHUNK if rope and v.has("attention_chunk_size") else FULL for rope in listed]


def _flags(key: str, flagged: str, unflagged: str = FULL) -> Pattern:
    """A list of 0 and 1."""

    def pattern(v: ConfigValues, layers: int) -> Kinds:
        listed = v.per_layer(key, layers)
        return [flagged if flag else unflagged for flag in listed] if listed else [unflagged] * layers

    return pattern


def _mimo(v: ConfigValues, layers: int) -> Kinds:
    listed = v.per_layer("hybrid_layer_pattern", layers)
    if listed:
        return [WINDOW if flag else FULL for flag in listed]
    return [FULL if layer == 0 or (layer + 1) % 6 == 0 else WINDOW for layer in range(layers)]


def _repeated(key: str) -> Pattern:
    """A short list of kinds, repeated."""

    def pattern(v: ConfigValues, layers: int) -> Kinds:
        listed = v.listed(key) or ["recurrent", "recurrent", "attention"]
        return [str(listed[layer % len(listed)]) for layer in range(layers)]

    return pattern


def _listed_full(*keys: str, otherwise: str) -> Pattern:
    """The numbers of the layers with attention."""

    def pattern(v: ConfigValues, layers: int) -> Kinds:
        lists = [v.listed(key) for key in keys]
        full = next((listed for listed in lists if listed is not None), None)
        if full is None:
            full = list(range(layers)) if otherwise == CONV else []
        return [FULL if layer in full else otherwise for layer in range(layers)]

    return pattern


def _listed_windows(v: ConfigValues, layers: int) -> Kinds:
    """Inkling: the numbers of the layers with a window."""
    listed = v.listed("local_layer_ids")
    return every(6)(v, layers) if listed is None else [WINDOW if layer in listed else FULL for layer in range(layers)]


def _period(v: ConfigValues, layers: int) -> Kinds:
    """Jamba."""
    period, offset = v.number("attn_layer_period", default=8), v.number("attn_layer_offset", default=0)
    return [FULL if layer % period == offset else LINEAR for layer in range(layers)]


def _kimi(v: ConfigValues, layers: int) -> Kinds:
    """Kimi Linear lists layers from 1."""
    v.understood(("kda_layers",))
    full = v.listed("full_attn_layers") or range(4, layers, 4)
    return [FULL if layer + 1 in full else LINEAR for layer in range(layers)]


def _compressed(v: ConfigValues, layers: int) -> Kinds:
    """DeepSeek-V4: how many tokens make one key in every layer, after which those of its MTP modules may stand."""
    if v.get("vision_n_layers"):
        raise InputFileError(v.path, "vision_n_layers: the model's encoder and its attention to images are not read")
    ratios = (v.listed("compress_ratios") or [])[:layers]
    if len(ratios) < layers or 4 not in ratios or not all(ratio in (0, 1, 4, 128) for ratio in ratios):
        raise InputFileError(v.path, "compress_ratios must say 0, 4 or 128 for every layer, and 4 for one at least")
    return [_BY_RATIO[0 if ratio == 1 else ratio] for ratio in ratios]


def _all(kind: str) -> Pattern:
    return lambda v, layers: [kind] * layers


# Widths and further parameters.


def _half(v: ConfigValues) -> int:
    return v.number("intermediate_size") // 2


def _lfm2(v: ConfigValues) -> int:
    width = v.number("block_ff_dim", "intermediate_size", default=0) or v.number("intermediate_size", default=12288)
    v.understood(("block_dim", "block_use_swiglu", "block_mlp_init_scale", "block_out_init_scale", "block_norm_eps"))
    v.understood(("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_use_xavier_init", "full_attn_idxs"))
    v.understood(("block_ffn_dim_multiplier", "block_multiple_of", "num_heads"))
    if not v.flag("block_auto_adjust_ff_dim", default=True):
        return width
    factor, multiple = v.get("block_ffn_dim_multiplier"), v.number("block_multiple_of", default=256)
    factor = factor if isinstance(factor, int | float) and 0 < factor < 1000 else 1.0
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _inkling_words(v: ConfigValues) -> Mapping[str, Any]:
    """In the words of vLLM's class ``intermediate_size`` is the experts' width, and dense MLPs have a key."""
    width = {"moe_intermediate_size": v.number("intermediate_size")} if v.has("dense_intermediate_size") else {}
    return {"first_k_dense_replace": v.number("dense_mlp_idx", default=0), **width}


def _four_times(v: ConfigValues) -> int:
    expansion = v.get("expansion_ratio")
    wide = v.number("intermediate_size", default=0)
    return wide or (expansion if isinstance(expansion, int) else 4) * v.number("hidden_size")


def _per_layer_inputs(v: ConfigValues) -> int:
    """Gemma 3n and 4: an embedding for every layer, and its way into the layers."""
    width = v.number("hidden_size_per_layer_input", default=0)
    hidden, layers = v.number("hidden_size"), v.number("num_hidden_layers")
    words = v.number("vocab_size_per_layer_input", default=0)
    return layers * width * (words + 3 * hidden)


def _gemma3n(v: ConfigValues) -> int:
    hidden, layers, inputs = v.number("hidden_size"), v.number("num_hidden_layers"), v.number("altup_num_inputs")
    v.understood(("altup_active_idx", "altup_coef_clip", "altup_correct_scale", "activation_sparsity_pattern"))
    low_rank = 2 * v.number("laurel_rank") * hidden
    return _per_layer_inputs(v) + 2 * (inputs - 1) * hidden * hidden + layers * (low_rank + inputs * hidden)


_ERNIE_PAIRS = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")


def _ernie_text(v: ConfigValues) -> Mapping[str, Any]:
    """ERNIE 4.5 VL: of pairs the first is of text, the second of images, whose experts text never uses.

    Raises InputFileError where their layers or numbers differ, and for weights that are quantized.
    """
    pairs = {key: given if isinstance(given := v.get(key), list) else [given] * 2 for key in _ERNIE_PAIRS}
    last = v.number("num_hidden_layers") - 1
    for key, pair in pairs.items():
        plain = len(pair) == 2 and all(entry is None or isinstance(entry, int) for entry in pair)
        if plain and key == "moe_layer_end_index":
            pairs[key] = pair = [last if end is None or end < 0 else min(end, last) for end in pair]
        if not plain or (key != "moe_intermediate_size" and pair[0] != pair[1]):
            raise InputFileError(v.path, f"{key} must be two numbers, for text and images, and equal but of widths")
    if v.number("moe_layer_interval", default=1) != 1 or v.has("quantization_config"):
        raise InputFileError(v.path, "experts in some layers alone, or quantized, are not read of ernie4_5_vl")
    of_images = {"vision_expert_width": pairs["moe_intermediate_size"][1]}
    return {key: pair[0] for key, pair in pairs.items()} | of_images


def _ernie_images(v: ConfigValues) -> int:
    """Experts and routers of images."""
    types, first = v.listed("mlp_layer_types"), v.number("moe_layer_start_index", default=0)
    layers = v.number("moe_layer_end_index") + 1 - first if types is None else len(types) - types.count("dense")
    return layers * v.number("experts") * v.number("hidden_size") * (3 * v.number("vision_expert_width") + 1)


_GEMMA3 = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 4096,
    "max_position_embeddings": 131072,
}  # fmt: skip
_LATENT: Mapping[str, tuple[Rule, ...]] = {FULL: (latent,)}
_DELTA_DEFAULTS = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "head_dim": 256,
}  # fmt: skip


def _gated_unless(key: str, kind: str = "full") -> Rule:
    """Qwen3-Next, Muse Glimmer: a gate for every element of the queries, unless ``key`` denies it."""
    return lambda v, layers: softmax(kind, gate="element" if v.flag(key, default=True) else "")(v, layers)


_DELTA: Mapping[str, tuple[Rule, ...]] = {FULL: (_gated_unless("attn_output_gate"),), LINEAR: (delta,)}
_STREAMS = (
    "its layers keep several streams of hidden states (hyper-connections), whose time is left out: steps are too fast"
)
_NOT_SPARSE = "indexer_rope_interleave", "index_share_for_mtp_iteration", "index_skip_topk_offset"
DENSE = Family()
MIXTURE = Family(experts=True)
NO_GATE = Family(mlp_matrices=2)
GEMMA = Family(tied=True, defaults={"head_dim": 256})
GEMMA2 = replace(GEMMA, pattern=every(2), norms=4)
GEMMA3 = replace(GEMMA, defaults=_GEMMA3, pattern=every(6, "sliding_window_pattern", "_sliding_window_pattern"),
                 norms=4, qk_norm=True)  # fmt: skip
QWEN2 = Family(pattern=_after_layers)
QWEN3 = replace(QWEN2, qk_norm=True, defaults={"head_dim": 128})
QWEN_MOE = replace(QWEN2, experts=True)
QWEN3_MOE = replace(QWEN_MOE, qk_norm=True)
QWEN3_NEXT = Family(defaults=_DELTA_DEFAULTS, layers=_DELTA, experts=True, qk_norm=True,
                    pattern=every(4, "full_attention_interval", otherwise=LINEAR))  # fmt: skip
DEEPSEEK = Family(layers=_LATENT, experts=True)
DSA = replace(DEEPSEEK, layers={FULL: (latent, index)}, understood=_NOT_SPARSE, defaults={"first_k_dense_replace": 3})
DEEPSEEK_V4 = Family(
    layers={kind: (compressed(every),) for every, kind in _BY_RATIO.items()}, experts=True, pattern=_compressed,
    streams="hc_mult", understood=("num_hash_layers", "expert_dtype"),
    note="its KV cache is as vLLM 0.28 to 0.32 lay it out (0.22 took 5 % more); two public servers (0.22, "
         "0.26) had 4 to 5 GiB less of it per GPU than estimated here (--num-kv-blocks takes what vLLM says)",
)  # fmt: skip
MINIMAX_M3 = Family(
    experts=True, qk_norm=True, wide_router=True, pattern=_flags("sparse_attention_freq", SPARSE),
    layers={FULL: (softmax(),), SPARSE: (block_sparse, block_index)},
    understood=("rotary_dim", "use_gemma_norm", "sparse_score_type", "sparse_disable_index_value",
                "use_sparse_attention"),
    note="its sparse layers choose whole blocks of keys; how long the choice takes was not measured",
)  # fmt: skip
MAMBA_ATTENTION: Mapping[str, tuple[Rule, ...]] = {FULL: (softmax(),), LINEAR: (mamba2,)}
NEMOTRON_H = Family(layers=MAMBA_ATTENTION,
                    experts=True, mlp_matrices=2, one_each=True, norms=1,
                    defaults={"mamba_ssm_cache_dtype": "float32"},  # vLLM's, where the config does not say
                    understood=("time_step_rank", "mamba_proj_bias", "mtp_layers_block_type"))  # fmt: skip
GRANITE_HYBRID = Family(layers=MAMBA_ATTENTION, experts=True,
                        pattern=_listed_full("attn_layer_indices", otherwise=LINEAR),
                        dense_width=("shared_intermediate_size",), understood=("intermediate_size",))  # fmt: skip
INKLING = Family(
    experts=True, qk_norm=True, pattern=_listed_windows,
    layers={FULL: (relative(),), WINDOW: (relative("window", "swa_"),)},
    instead=_inkling_words,
    understood=("local_layer_ids", "v_head_dim", "swa_v_head_dim", "shared_expert_sink", "shared_experts_size",
                "number_of_conv_states", "use_sconv", "unpadded_vocab_size", "inference_moe_w13_interleaved"),
    note="its relative positions and short convolutions have no times here: steps are too fast",
)  # fmt: skip
EXAONE4 = Family(pattern=lettered, qk_norm=True)
GPT2 = Family(
    mlp_matrices=2, tied=True, width=_four_times,
    others=lambda v: v.number("n_positions", "max_position_embeddings", default=0) * v.number("hidden_size"),
)  # fmt: skip
LFM2 = Family(layers={FULL: (softmax(),), CONV: (short_conv,)}, tied=True, width=_lfm2, qk_norm=True,
              pattern=_listed_full("full_attn_idxs", otherwise=CONV),
              defaults={"intermediate_size": 12288})  # fmt: skip
_OF_IMAGES = (
    "embd_layer", "audio_chunk_length", "additional_vocab_size", "embedding_size", "use_qk_norm", "qk_norm_type",
    "attention_layer_norm", "norm_after",
)  # fmt: skip
COHERE = Family(tied=True)
_HUNYUAN_KEYS = (
    "attention_head_dim",
    "cla_share_factor",
    "dense_list",
    "anyres_pooling_size",
    "num_media_embeds",
    "org_vocab_size",
    "moe_layer_num_skipped",
)
HUNYUAN = Family(qk_norm=True, understood=_HUNYUAN_KEYS)
BAILING = Family(experts=True, qk_norm=True, understood=("group_norm_size", "linear_silu", "layer_group_size"))
_FIRST_DENSE = {"first_k_dense_replace": 1}
_ONE_SHARED = {"num_shared_experts": 1, "first_k_dense_replace": 1}
ERNIE = Family(tied=True, defaults={"head_dim": 128})


def _gemma4_full(v: ConfigValues, layers: int) -> Any:
    """Gemma 4: layers with full attention have heads of another width, and may have one projection for both keys and
    values."""
    if v.has("per_layer_config"):
        return softmax(own_values=not v.flag("attention_k_eq_v"))(v, layers)
    wide = v.overlaid({"global_head_dim": v.get("global_head_dim") or 512})
    if not v.flag("attention_k_eq_v"):
        wide = wide.overlaid({"num_global_key_value_heads": None})
    rule = softmax(kv_heads="num_global_key_value_heads", key_dim="global_head_dim", value_dim="",
                   own_values=not v.flag("attention_k_eq_v"))  # fmt: skip
    v.understood(("num_global_key_value_heads", "global_head_dim"))
    return rule(wide, layers)


def _latent_if_any(v: ConfigValues, layers: int) -> Any:
    """Ling: latents since 2.5."""
    return (latent if v.has("kv_lora_rank") else softmax())(v, layers)


def _two_latents(v: ConfigValues, layers: int) -> Any:
    """LongCat Flash: two times attention in every layer."""
    return replace(latent(v, layers), layers=2 * layers)


def _kimi_latent(v: ConfigValues, layers: int) -> Any:
    """Kimi Linear, and Kimi K3 with an output gate."""
    return (gated_latent if v.flag("mla_use_output_gate") else latent)(v, layers)


def _ling_latent(v: ConfigValues, layers: int) -> Any:
    """Ling 3: latents with an output gate per head, per element or none."""
    granularity = v.get("gated_attention_proj_granularity_type")
    if granularity not in (None, "", "head_wise", "element_wise"):
        raise InputFileError(v.path, f"gated_attention_proj_granularity_type {granularity!r} is not read here")
    if granularity == "element_wise":
        return gated_latent(v, layers)
    mixer = latent(v, layers)
    gate = (Product(mixer.heads, v.number("hidden_size")),) if granularity else ()
    return replace(mixer, products=(*mixer.products, *gate))


def _ling_delta(v: ConfigValues, layers: int) -> Any:
    """Ling 3: Kimi's delta attention, which vLLM 0.32 reads with whole gates alone."""
    if not v.flag("no_kda_lora"):
        raise InputFileError(v.path, "no_kda_lora must be true: vLLM 0.32 reads no other Ling 3")
    return kimi_delta(v.overlaid({"num_heads": v.number("num_attention_heads")}), layers)


def _ling_groups(v: ConfigValues, layers: int) -> Kinds:
    """Ling 3: the last layer of each group has latents, and those after the last whole group."""
    group = v.number("layer_group_size")
    grouped = layers // group * group
    return [LINEAR if (layer + 1) % group and layer < grouped else FULL for layer in range(layers)]


def _falcon(v: ConfigValues, layers: int) -> Any:
    """Falcon: one KV head, unless the config is of the new kind, which says how many."""
    shared = v.flag("multi_query", default=True) and not v.flag("new_decoder_architecture")
    return softmax()(v.overlaid({"num_kv_heads": 1, "num_key_value_heads": 1} if shared else {}), layers)


def _mimo_window(v: ConfigValues, layers: int) -> Any:
    """MiMo V2: layers with a window have twice the KV heads, where the config does not say."""
    doubled = v.overlaid(
        {"swa_num_key_value_heads": v.get("swa_num_key_value_heads") or 2 * v.number("num_key_value_heads")}
    )
    rule = softmax("window", heads="swa_num_attention_heads", kv_heads="swa_num_key_value_heads",
                   key_dim="swa_head_dim", value_dim="swa_v_head_dim")  # fmt: skip
    return rule(doubled, layers)


def _step_window(v: ConfigValues, layers: int) -> Any:
    """Step 3.5: ``attention_other_setting`` has the heads of layers with a window."""
    sizes = v.objects("attention_other_setting")
    own = {key: sizes[key] for key in ("num_attention_heads", "num_attention_groups", "head_dim") if key in sizes}
    if v.has("num_sliding_attention_heads"):
        own["num_attention_heads"] = v.number("num_sliding_attention_heads")
    gate = "head" if v.flag("use_head_wise_attn_gate") else ""
    return softmax("window", gate=gate)(v.overlaid(own), layers)


GEMMA4 = replace(GEMMA3, defaults={"head_dim": 256}, experts=True,
                 others=_per_layer_inputs, pattern=lambda v, layers: [*every(6)(v, layers)[:-1], FULL],
                 layers={FULL: (_gemma4_full,), WINDOW: (softmax("window"),)},
                 shared_width=("intermediate_size",), understood=("use_double_wide_mlp",))  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral3", "granite", "seed_oss", "helium", "glm", "hyperclovax", "solar", "internlm3",
         "orion", "telechat2", "telechat3", "PanguEmbedded", "internlm2", "exaone", "bitnet", "iquestcoder",
         "stablelm", "diffllama", "baichuan", "aquila", "xverse", "qwen2_vl_text", "qwen2_5_vl_text", "olmo", "yi"),
        DENSE,
    ),
    # Models of images and sound that have the decoder's values beside their encoders'.
    **dict.fromkeys(("phi3_v", "phi4-siglip"), replace(DENSE, understood=_OF_IMAGES)),
    **dict.fromkeys(("minicpmv", "minicpmo", "dots_ocr"), replace(QWEN2, understood=_OF_IMAGES)),
    **dict.fromkeys(("Keye", "KeyeVL1_5", "isaac", "molmo2_text"), replace(DENSE, qk_norm=True, understood=_OF_IMAGES)),
    "molmo": replace(DENSE, width=_half, understood=_OF_IMAGES),
    "smollm3": COHERE,
    "phi3": replace(DENSE, understood=("full_attn_mod",)),
    **dict.fromkeys(("phi4mm", "phi4_multimodal"), replace(
        DENSE, tied=True, understood=("full_attn_mod", "embd_layer"),
        note="its encoders and their adapters are left out, weights and time",
    )),
    "minicpm": replace(
        DENSE, tied=True, understood=("dim_model_base", "scale_depth", "sparse_config"),  # vLLM attends to all tokens
    ),
    "falcon": Family(layers={FULL: (_falcon,)}, mlp_matrices=2, tied=True, width=_four_times,
                     understood=("num_kv_heads", "new_decoder_architecture")),
    **dict.fromkeys(("glm4", "glm4v_text", "glm4v", "glm_ocr_text"), replace(DENSE, norms=4)),
    "muse_glimmer_text": replace(
        DENSE, norms=4, pattern=lambda v, layers: every(4, first=True)(v, layers)[::-1],  # counted from the last
        layers={
            FULL: (_gated_unless("use_attn_output_gate"),), WINDOW: (_gated_unless("use_attn_output_gate", "window"),),
        },
    ),
    "olmo2": replace(DENSE, qk_norm=True),
    "olmo3": replace(DENSE, qk_norm=True, pattern=every(4)),
    "ministral": replace(DENSE, defaults={"head_dim": 128}),
    **dict.fromkeys(("inkling_text", "inkling_model"), INKLING),
    "cwm": replace(DENSE, pattern=every(4, first=True)),
    "granite_swa": replace(DENSE, pattern=every(4, first=True), tied=True),
    "qwen": replace(DENSE, width=_half, understood=("use_logn_attn",)),
    "chatglm": Family(understood=("multi_query_attention", "interleaved_qkv")),
    **dict.fromkeys(("qwen2", "mimo", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_text"), QWEN2),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), QWEN3),
    **dict.fromkeys(("arcee", "nemotron", "apertus", "persimmon", "jais2", "phi", "gpt_neox",
                     "cosmos3_edge_text"), NO_GATE),
    "starcoder2": replace(NO_GATE, tied=True),
    "nanochat": NO_GATE,
    "gpt2": GPT2,
    "gpt_bigcode": replace(GPT2, defaults={"num_key_value_heads": 1}, understood=("multi_query",)),
    "opt": replace(GPT2, understood=("word_embed_proj_dim",)),
    "gptj": replace(GPT2, tied=False, others=None, understood=("rotary_dim",)),
    "bloom": replace(GPT2, others=None),
    **dict.fromkeys(("cohere", "cohere2_vision_text"), COHERE),
    "cohere2": replace(COHERE, pattern=every(4, "sliding_window_pattern", "layer_switch"),
                       understood=("order_of_interleaved_layers", "layer_switch", "use_parallel_block",
                                   "use_parallel_embedding")),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "vaultgemma": replace(GEMMA2, norms=2),
    **dict.fromkeys(("gemma3", "gemma3_text"), GEMMA3),
    "gemma3n_text": replace(
        GEMMA3, pattern=every(5), others=_gemma3n, defaults={"head_dim": 256},
        note="its layers keep several streams and inputs of their own (AltUp), whose time is left out: steps "
             "are too fast",
    ),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified_text"), GEMMA4),
    **dict.fromkeys(("exaone4", "exaone4_5_text"), EXAONE4),
    "exaone_moe": replace(EXAONE4, experts=True, defaults=_FIRST_DENSE),
    **dict.fromkeys(("ernie4_5", "paddleocr_vl_text", "paddleocr_vl"), ERNIE),
    "ernie4_5_moe": replace(MIXTURE, tied=True, wide_router=True),
    **dict.fromkeys(("ernie4_5_vl_moe_text", "ernie4_5_moe_vl"), replace(
        MIXTURE, tied=True, wide_router=True, instead=_ernie_text, others=_ernie_images,
        defaults={"moe_intermediate_size": [1536, 512], "moe_layer_start_index": 1},
        note="its experts of images are weights without time",
    )),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_vl_text", "hunyuan_vl"), HUNYUAN),
    "hunyuan_v1_moe": replace(HUNYUAN, experts=True, defaults={"num_shared_expert": 1},
                              understood=(*_HUNYUAN_KEYS, "use_mixed_mlp_moe")),
    "hy_v3": replace(MIXTURE, qk_norm=True, wide_router=True, understood=("enable_moe_fp32_combine",),
                     defaults=_FIRST_DENSE),
    "minimax_m2": replace(MIXTURE, qk_norm=True, joint_norms=True, wide_router=True),
    **dict.fromkeys(("mixtral", "dbrx", "phimoe", "granitemoe", "granitemoeshared", "olmoe", "flex_olmo", "deepseek",
                     "solar_open", "aria_text"), MIXTURE),
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text"), replace(MIXTURE, wide_router=True)),
    "dots1": replace(MIXTURE, pattern=_after_layers),
    "granitemoe_swa": replace(MIXTURE, pattern=every(4, first=True)),
    "mellum": replace(MIXTURE, qk_norm=True, pattern=_all(FULL)),
    "laguna": replace(MIXTURE, defaults=_FIRST_DENSE, qk_norm=True, pattern=_all(FULL),
                      layers={FULL: (softmax(gate="head"),), WINDOW: (softmax("window", gate="head"),)},
                      understood=("gating", "swa_attention_sink_enabled")),
    "afmoe": replace(MIXTURE, qk_norm=True, wide_router=True, norms=4, pattern=every(4, "global_attn_every_n_layers"),
                     layers={FULL: (softmax(gate="element"),), WINDOW: (softmax("window", gate="element"),)}),
    "cohere2_moe": replace(MIXTURE, tied=True, pattern=every(4, "sliding_window_pattern"),
                           understood=("prefix_dense_sliding_window_pattern", "shared_expert_combination_strategy")),
    "gpt_oss": replace(MIXTURE, pattern=every(2), defaults={"head_dim": 64}),
    **dict.fromkeys(("qwen2_moe",), QWEN_MOE),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), QWEN3_MOE),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"), QWEN3_NEXT),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5"), replace(QWEN3_NEXT, experts=False)),
    "olmo_hybrid": Family(layers={FULL: (softmax(),), LINEAR: (delta,)}, pattern=every(4, otherwise=LINEAR),
                          qk_norm=True),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "axk1", "mistral4", "mistral4_text"), DEEPSEEK),
    "glm4_moe_lite": replace(DEEPSEEK, defaults=_FIRST_DENSE),
    "longcat_flash": replace(
        DEEPSEEK, layers={FULL: (_two_latents,)}, defaults={"n_shared_experts": 2}, shared_width=("ffn_hidden_size",),
        understood=("zero_expert_type", "attention_method"),
        note="as many of its experts are computed per token as on average are not identities; its dense MLPs are taken "
             "to wait for them",
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), DSA),
    "deepseek_v4": DEEPSEEK_V4,
    "hy_v4": replace(
        DSA, layers={FULL: (gated_latent, index)}, defaults={"first_k_dense_replace": 1, "index_topk_freq": 4},
        note=_STREAMS,
    ),
    **dict.fromkeys(("glm5_next_text", "glm5_next"), replace(
        DSA, layers={FULL: (latent, index), LINEAR: (kimi_delta,)}, defaults={"first_k_dense_replace": 3},
        pattern=every(4, otherwise=LINEAR), understood=(*_NOT_SPARSE, "index_kpool_always_select_tail"),
        note=f"{_STREAMS}; blocks of its KV cache are sized as for other models with states",
    )),
    **dict.fromkeys(("step3p5", "step3p7"), replace(
        MIXTURE, qk_norm=True, wide_router=True, pattern=_all(FULL), defaults=_FIRST_DENSE,
        layers={FULL: (softmax(),), WINDOW: (_step_window,)},
        understood=("moe_layers_enum", "moe_every_n_layer"))),
    "step3_text": replace(MIXTURE, layers={FULL: (factored,)},
                          defaults={"moe_layers_enum": ",".join(map(str, range(4, 60)))}),  # vLLM's
    "youtu": Family(layers=_LATENT, tied=True),
    "minicpm3": Family(layers=_LATENT, tied=True, understood=("dim_model_base", "scale_depth")),
    "llama4_text": replace(MIXTURE,
                           pattern=_chunks, layers={FULL: (softmax(),), CHUNK: (softmax("chunk"),)},
                           shared_width=("intermediate_size",),
                           understood=("attention_chunk_size", "use_qk_norm", "for_llm_compressor")),
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), Family(
        experts=True, defaults=_FIRST_DENSE, wide_router=True, pattern=_mimo,
        understood=("attention_chunk_size", "hybrid_block_size", "sliding_window_size"),
        layers={FULL: (softmax(),), WINDOW: (_mimo_window,)},
    )),
    **dict.fromkeys(("minimax_m3", "minimax_m3_text", "minimax_m3_vl_text"), MINIMAX_M3),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), Family(
        experts=True, layers={FULL: (softmax(),), LINEAR: (lightning,)},
        pattern=_flags("attn_type_list", FULL, LINEAR), understood=("shared_moe_mode", "rotary_dim"),
    )),
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2"), BAILING),
    "sarvam_moe": replace(BAILING, defaults=_ONE_SHARED),
    "param2moe": replace(BAILING, defaults=_ONE_SHARED, wide_router=True),
    "sarvam_mla": replace(DEEPSEEK, defaults=_ONE_SHARED),
    **dict.fromkeys(("bailing_moe_linear", "bailing_moe_v2_5", "bailing_hybrid"), replace(
        BAILING, layers={FULL: (_latent_if_any,), LINEAR: (lightning,)},
        pattern=lambda v, layers: every(v.number("layer_group_size"), otherwise=LINEAR)(v, layers))),
    "bailing_moe_v3": Family(
        experts=True, wide_router=True, pattern=_ling_groups, layers={FULL: (_ling_latent,), LINEAR: (_ling_delta,)},
        defaults={"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512},
        understood=("group_norm_size", "linear_silu", "kda_lower_bound", "kda_safe_gate", "mtp_use_kda", "rotary_dim",
                    "num_kv_heads_for_linear_attn", "use_kda_lora", "use_mla_nope", "max_window_layers"),
    ),
    "bamba": replace(GRANITE_HYBRID, experts=False, dense_width=("intermediate_size",)),
    "granitemoehybrid": GRANITE_HYBRID,
    "falcon_h1": Family(layers={FULL: (softmax(), mamba2)}, pattern=_all(FULL)),
    "nemotron_h": NEMOTRON_H,
    "jamba": Family(layers={FULL: (softmax(),), LINEAR: (mamba1,)}, pattern=_period, experts=True,
                    understood=("mamba_inner_layernorms",)),
    "lfm2": LFM2,
    "lfm2_moe": replace(LFM2, experts=True, width=None, defaults={}),
    "kimi_linear": Family(layers={FULL: (_kimi_latent,), LINEAR: (kimi_delta,)}, experts=True, pattern=_kimi,
                          understood=("attn_res_block_size",), defaults=_FIRST_DENSE),
    "recurrent_gemma": Family(
        layers={FULL: (softmax("window"),), LINEAR: (gated_recurrence,)}, pattern=_repeated("block_types"), tied=True,
        width=_half, understood=("_block_types",),
    ),
}  # fmt: skip
"""The families that are read."""
REFUSED: Mapping[str, str] = dict.fromkeys(
    ("qwen4_exp", "qwen4_exp_text"),
    "its layers look up embeddings of n-grams, tables larger than the layers, in the host's memory (PLE), and its KV "
    "pool packs linear layers' states, compressed keys and rings of raw keys (QSA) into blocks of one size",
)
"""Families that are known and not read: what has no times or no layout here."""
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where a model of images or sound has its decoder."""
