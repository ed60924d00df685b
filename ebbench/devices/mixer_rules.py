"""Rules by which layers are read from a config.json: attention of every kind, states, convolutions.

A rule takes the values of one layer and the number of layers that have them, and gives their :class:`Mixer`.
Sizes of states are vLLM's (``model_executor/layers/mamba/mamba_utils.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ebbench.devices.geometry import BY_ROWS, WHOLE, Mixer, Page, Product, attention
from ebbench.errors import InputFileError
from ebbench.foreign.documents import load_toml


class Superseded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lists of the layers, and keys that count only where none of them is given."""

    lists: tuple[str, ...]
    keys: tuple[str, ...]


class ModuleNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts of a layer: attention, what has a state in its place, MLP, experts, and what every token passes beside
    these."""

    attention: str = "self_attn"
    state: str = "linear_attn"
    mlp: str = "mlp"
    experts: str = "mlp.experts"
    shared: str = ""


class ConfigNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``config_names.toml``, which says what each table holds."""

    values: dict[str, tuple[str, ...]]
    kinds: dict[str, tuple[str, ...]]
    text_types: dict[str, str]
    architectures: dict[str, str]
    superseded: dict[str, Superseded]
    params: dict[str, str]
    params_moe: dict[str, str]
    encoders: dict[str, tuple[str, ...]]
    quantization: dict[str, tuple[str, ...]]
    modelopt: dict[str, str]
    modules: dict[str, ModuleNames]


NAMES = load_toml(Path(__file__).with_name("config_names.toml"), ConfigNames)

# The values of a config.json under the names that families give them, with a note of which were read.

SHAPES = re.compile(
    r"layer|head(?!er)|(^|_)kv|window|sliding|chunk|dim($|_)|width|size|rank|expert|moe|ffn|intermediate|inner|mamba|ssm|conv|state"
    r"|linear|attn|attention|block|sparse|index|latent|compress|pattern|interval|every|freq|global|local|recurrent|lru"
    r"|mixer|(^|_)mla(?!_use_nope)|(^|_)cla($|_)|output_gate|loop|depth|n_embd|d_model|share|full_|delta|engram|memory|hyper|altup|laurel"
)
"""Keys that speak of layers, heads, KV or widths: what has one of these words and was not read is refused."""
HARMLESS = re.compile(
    r".*(dropout|drop|bias|_norm|norm_\w+|layernorm|layer_?norm|loss|init\w*|rope|rotary|soft_?cap\w*|scale\w*|scaling\w*|multiplier\w*|theta|eps|epsilon"
    r"|token_id|token_ids|token_index|mtp|nextn|quant\w*|cache_dtype|implementation|checkpoint\w*|aux|output_(?!gate$)\w+|act|activation\w*|version|jitter\w*|pdrop|clip\w*)(?![a-z]).*"
    r"|max_\w*(position|len|length|seq)\w*|(n|num)_?(ctx|positions)|.*(max_seq_len|seq_length|context_length|model_max_length).*|pretraining_tp|attn_impl\w*|torch_dtype|dtype|architectures"
    r"|chunk_size_feed_forward|(mamba_)?chunk_size|topk_group|n_group|num_expert_group|topk_method|scoring_func|expert_selection_fn|router_\w+|use_mamba_kernels|use_cache"
    r"|moe_(router|renormalize|token_drop\w*|shared_expert_overlap|routed_scaling\w*|aux\w*|norm\w*|use_\w*|capacity|gate|dropout|group\w*|layer_recompute|multi\w*|random\w*|softmax\w*)\w*"
    r"|lm_head|rm_head|_?flash_attn\w*|pixel_shuffle\w*|use_(flash|sdpa|dynamic|expert_bias|conv_bias|moe|bidirectional)\w*|fp32_residual\w*|residual_in_fp32|attention_type|attn_temperature\w*|floor_scale|time_step\w*|query_pre_attn_scalar"
    r"|num_logits_to_keep|block_size|ep_size|ep_\w+|moe_layer_num|is_decoder|vision_\w+|image_\w+|video_\w+|audio_\w+|mm_\w+|projector_\w+|spatial_\w+|patch_size|downsample\w*"
    r"|(attention|key|value|query|attn)_(softmax|multiplier)\w*|.*_multipliers?|apply_\w+|num_logits\w*|summary_\w+|reorder\w*|add_cross_attention|cross_attention_hidden_size"
    r"|tie_\w+|_?attn_implementation\w*|experts_implementation|use_parallel_residual|parallel_attn|partial_\w+|mlp_(alpha|beta)\w*|\w+_attn_(alpha|beta)_factor|no_rope_layers?|no_rope_layer_interval"
    r"|nope_layer_interval|layer_rope_theta|mamba_(norm|rms_norm|conv_bias|proj_bias|hidden_act)\w*|first_layer_fusion|keep_window_size|swiglu\w*|hidden_act\w*|_?name_or_path|model_type|transformers_version|auto_map|id2label|label2id|torchscript|use_return_dict|return_dict|base_model_\w+|is_encoder_decoder|tokenizer_class|deepspeed\w*|task_specific\w*|begin_suppress\w*|problem_type|gradient\w*|_commit_hash|\w*original_max_\w*"
)
"""The ones of these on which no figure depends."""
MOST = 2**40
"""No size of a model is larger."""
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_EMPTY = (None, False, 0, 0.0, "", "none")


class ConfigValues:
    """Values by key, with a file for messages. ``read`` keys are known to be understood."""

    def __init__(self, path: Path, raw: Mapping[str, Any], read: set[str] | None = None) -> None:
        self.path = path
        self._raw = raw
        self._read: set[str] = set() if read is None else read

    def overlaid(self, further: Mapping[str, Any]) -> ConfigValues:
        """A copy in which ``further`` replaces some keys; what is read from it counts as read here."""
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
        keys = [key for name in names for key in NAMES.values.get(name, (name,))]
        self._read.update(keys)
        for key in keys:
            value = self._raw.get(key)
            if isinstance(value, list) and value and all(entry == value[0] for entry in value):
                value = value[0]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < (1 if default != 0 else 0):
                raise InputFileError(self.path, f"{key} must be a positive whole number, not {shortened(value)}")
            if value > MOST:
                raise InputFileError(self.path, f"{key} must be at most {MOST:,}, not {shortened(value)}")
            return value
        if default is None:
            raise InputFileError(self.path, f"{keys[0]} is missing; a decoder's config.json has it")
        return default

    def shared(self, key: str, size: int, parts: int) -> int:
        """The part of a size that is divided evenly. Raises InputFileError for one that is not."""
        if size % parts:
            raise InputFileError(self.path, f"{key} {size:,} cannot be divided by {parts:,} heads")
        return size // parts

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A truth value."""
        value = self.get(key)
        return default if value is None else bool(value)

    def listed(self, key: str) -> list[Any] | None:
        """A list, or None. Raises InputFileError for anything else."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise InputFileError(self.path, f"{key} must be a list, not {shortened(value)}")
        return value

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with one entry per layer, or None. Raises InputFileError for one of another length."""
        value = self.listed(key)
        if value is None:
            return None
        for entry in value:
            self._check_plain(key, entry)
        return list(self.of_layers(key, value, layers))

    def of_layers(self, key: str, listed: Sequence[Any], layers: int) -> Sequence[Any]:
        """A list without the entries of MTP modules, which may follow those of the layers (Step 3.5). Raises
        InputFileError for one of another length."""
        if len(listed) not in (layers, layers + self.number(*MTP_LAYERS, default=0)):
            raise InputFileError(self.path, f"{key} has {len(listed)} entries for {layers} layers; it needs one each")
        return listed[:layers]

    def objects(self, key: str) -> Mapping[str, Any]:
        """An object whose values are plain, empty if there is none. Raises InputFileError for anything else."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InputFileError(self.path, f"{key} must be an object, not {shortened(value)}")
        return value

    def _check_plain(self, key: str, value: Any) -> None:
        if isinstance(value, list | dict):
            raise InputFileError(self.path, f"{key} has {shortened(value)}, where a number or a name belongs")

    def by_layer(self, key: str) -> dict[int, dict[str, Any]]:
        """An object of objects by the number of a layer. Raises InputFileError for anything else."""
        own_values = {}
        for layer, own in self.objects(key).items():
            if not (layer.isascii() and layer.isdigit() and isinstance(own, dict)):
                raise InputFileError(self.path, f"{key} must be an object of objects by the number of a layer")
            for value in own.values():
                self._check_plain(key, value)
            own_values[int(layer)] = own
        return own_values

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


def shortened(value: Any) -> str:
    """A value of a config.json for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}..."


Rule = Callable[[ConfigValues, int], Mixer | None]
SHARES_CACHE = "shares the cache of another layer"
"""Value that is set in a layer that has no KV cache of its own."""
_WINDOW_KEYS = {"window": ("window",), "chunk": ("attention_chunk_size",)}
_STATE_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
INDEX_SCALE_BYTES = 4
"""Per 128 elements of an index, which vLLM keeps in FP8."""
PACKED_LATENT_BYTES = 528
"""Of one token of a sparse latent cache in FP8 on Hopper (512 in FP8, 4 scales), beside its rotary part in 16 bits."""


def heads_of(v: ConfigValues) -> int:
    """Query heads."""
    return v.number("num_attention_heads")


def head_dim_of(v: ConfigValues, *keys: str) -> int:
    """Width of a head: stated, or the hidden size divided among the heads."""
    stated = v.number(*keys, "head_dim", default=0)
    return stated or v.shared("hidden_size", v.number("hidden_size"), heads_of(v))


def softmax(
    kind: str = "full",
    *,
    heads: str = "num_attention_heads",
    kv_heads: str = "num_key_value_heads",
    key_dim: str = "head_dim",
    value_dim: str = "v_head_dim",
    gate: str = "",
    own_values: bool = True,
) -> Rule:
    """Softmax attention with grouped keys, by the keys that hold its sizes.

    ``gate``: an output gate with a column per ``element`` of the queries, or one per ``head``. Without ``own_values``
    the projection of keys also gives the values (``attention_k_eq_v``).
    """

    def rule(v: ConfigValues, layers: int) -> Mixer:
        count = v.number(heads, "num_attention_heads")
        keys = v.number(kv_heads, "num_key_value_heads", default=count)
        v.shared(heads, count, keys)
        width = head_dim_of(v, key_dim)
        values = v.number(value_dim, "v_head_dim", default=width) if value_dim else width
        columns = {"": 0, "element": count * values, "head": count}[gate]
        window = v.number(*_WINDOW_KEYS[kind]) if kind in _WINDOW_KEYS else 0
        return attention(
            kind, layers, v.number("hidden_size"), count, keys, width, values,
            window=window, gate=columns, keys_are_values=not own_values, own_cache=not v.flag(SHARES_CACHE),
        )  # fmt: skip

    return rule


def relative(kind: str = "full", prefix: str = "") -> Rule:
    """Inkling's attention, whose sizes have keys with ``prefix``: queries have ``d_rel`` further elements for relative
    positions, and keys, values and what attention and MLP add pass short convolutions, whose inputs lie in a cache of
    their own (vLLM 0.32's ``models/inkling``: widths padded to a power of 2, a convolution's length per block)."""

    heads, kv_heads, key_dim = (f"{prefix}{key}" for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    plain = softmax(kind, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim="")

    def rule(v: ConfigValues, layers: int) -> Mixer:
        mixer = plain(v, layers) or Mixer(kind, layers)
        hidden, further = v.number("hidden_size"), v.number("d_rel")
        kernel = v.number("sconv_kernel_size", "conv_kernel_size", default=4)
        width = 2 * (mixer.key_dim + v.shared("hidden_size", hidden, mixer.kv_heads))
        first, *others = mixer.products
        return replace(
            mixer,
            products=(replace(first, columns=first.columns + further * mixer.heads), *others),
            others=further * (mixer.window or v.number("rel_extent")) + 2 * kernel * (mixer.cached // 2 + hidden),
            inputs=Page(2 * kernel * mixer.kv_heads * (1 << (width - 1).bit_length()), kernel, kernel),
        )

    return rule


def factored(v: ConfigValues, layers: int) -> Mixer:
    """Attention whose queries come from a part that all heads share (Step 3)."""
    mixer = softmax()(v, layers) or Mixer("full", layers)
    hidden, shared, width = v.number("hidden_size"), v.number("share_q_dim"), mixer.heads * mixer.key_dim
    products = (
        Product(shared + mixer.cached, hidden, WHOLE), Product(width, shared), Product(hidden, width, BY_ROWS),
    )  # fmt: skip
    return replace(mixer, products=products)


def latent(v: ConfigValues, layers: int) -> Mixer:
    """Multi-head latent attention (MLA), sparse where the config has an index; plain attention without ``use_mla``."""
    if v.get("use_mla") is False:
        v.understood(("v_head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
        return softmax(value_dim="")(v, layers) or Mixer("full", layers)
    hidden, heads = v.number("hidden_size"), heads_of(v)
    rank, rope, nope = v.number("kv_lora_rank"), v.number("qk_rope_head_dim", default=0), v.number("qk_nope_head_dim")
    values, queries = v.number("v_head_dim"), v.number("q_lora_rank", default=0)
    v.understood(("head_dim", "num_key_value_heads", "qk_head_dim"))
    top = v.number("index_topk", default=0)
    width = heads * (nope + rope)
    to_queries = (Product(queries, hidden, WHOLE), Product(width, queries)) if queries else (Product(width, hidden),)
    return Mixer(
        "latent",
        layers,
        heads=heads,
        key_dim=nope + rope,
        value_dim=values,
        window=top,
        latent=rank,
        cached=rank + rope,
        cached_fp8_bytes=PACKED_LATENT_BYTES + 2 * rope if top else 0,
        reads=rank + rope,
        products=(
            *to_queries,
            Product(rank + rope, hidden, WHOLE),
            Product(heads * (nope + values), rank),
            Product(hidden, heads * values, BY_ROWS),
        ),
    )


def gated_latent(v: ConfigValues, layers: int) -> Mixer:
    """:func:`latent` with an output gate for every element (Hunyuan V4)."""
    mixer = latent(v, layers)
    return replace(mixer, products=(*mixer.products, Product(mixer.heads * mixer.value_dim, v.number("hidden_size"))))


def index(v: ConfigValues, layers: int) -> Mixer | None:
    """The index of sparse latent attention (DeepSeek V3.2): keys of one head in FP8, or one for each few of them
    (``index_kpool``); none where layers share one."""
    every = v.number("index_topk_freq", default=1)
    if not v.number("index_topk", default=0) or v.get("indexer_types") == "shared":
        return None
    if v.get("indexer_types") is None and every > 1:
        raise InputFileError(v.path, "indexer_types is missing: most layers share an index, which ones it would say")
    heads, width, pooled = v.number("index_n_heads"), v.number("index_head_dim"), v.number("index_kpool", default=1)
    return Mixer(
        "index",
        layers,
        heads=heads,
        kv_heads=1,
        key_dim=width,
        cached_bytes=(width + width // 128 * INDEX_SCALE_BYTES) // pooled,
        reads=width // 2 // pooled,
        products=(
            Product(heads * width, v.number("q_lora_rank"), WHOLE),
            Product(width + heads, v.number("hidden_size"), WHOLE),
        ),
    )


COMPRESSED_BLOCK, WINDOW_BLOCK, COMPRESSOR_BLOCKS = 256, 64, {4: 4, 128: 8}
"""Tokens per block of compressed keys, of keys in the window, and of what a compressor has not compressed yet."""
COMPRESSED_KEY_BYTES = 584
"""Of 512 elements: 448 in FP8 with 8 scales, 64 with positions in 16 bits."""
_COMPRESSED_ALIGNMENT = 576


def _page(entries: int, entry_bytes: int, tokens: int, window: int = 0) -> Page:
    return Page(-(-entries * entry_bytes // _COMPRESSED_ALIGNMENT) * _COMPRESSED_ALIGNMENT, tokens, window)


def _compressor(every: int, width: int) -> tuple[int, int, Page]:
    """Weights per input and outside products, and the cache of its states: keys and scores in 32 bits, of the tokens
    that make one key, twice as many where keys overlap (every 4 tokens)."""
    overlap = 2 if every == 4 else 1
    columns, tokens = 2 * overlap * width, COMPRESSOR_BLOCKS[every]
    return columns, every * overlap * width, _page(tokens, 4 * columns, tokens, overlap * every)


def compressed(every: int) -> Rule:
    """DeepSeek-V4's attention: the last tokens, and one key for each ``every`` (0: none) before them; for every 4 an
    index chooses among these. Sizes are vLLM 0.32's (``models/deepseek_v4``): all GPUs keep the whole cache, and the
    way to a latent, compressors and index are not divided. One ``Mixer`` is the whole of it.
    """

    def rule(v: ConfigValues, layers: int) -> Mixer:
        hidden, heads, width = v.number("hidden_size"), heads_of(v), v.number("head_dim")
        if (width, v.number("qk_rope_head_dim")) != (512, 64) or v.number("num_key_value_heads") != 1:
            raise InputFileError(v.path, "head_dim, qk_rope_head_dim and num_key_value_heads must be 512, 64 and 1")
        queries, out, groups = v.number("q_lora_rank"), v.number("o_lora_rank"), v.number("o_groups")
        index_heads, index_width = v.number("index_n_heads"), v.number("index_head_dim")
        window, streams = v.number("window"), v.number("hc_mult")
        v.understood(("index_topk",))
        others = 2 * (2 + streams) * streams * streams * hidden  # of what mixes the streams, before attention and MLP
        pages = [_page(WINDOW_BLOCK, COMPRESSED_KEY_BYTES, WINDOW_BLOCK, window)]
        whole = [Product(queries + width, hidden, WHOLE)]
        if every:
            columns, beside, states = _compressor(every, width)
            others += columns * hidden + beside
            pages += [_page(COMPRESSED_BLOCK // every, COMPRESSED_KEY_BYTES, COMPRESSED_BLOCK), states]
        if every == 4:
            whole.append(Product(index_heads * index_width, queries, WHOLE))
            columns, beside, states = _compressor(every, index_width)
            others += (columns + index_heads) * hidden + beside
            entry = index_width + index_width // 128 * INDEX_SCALE_BYTES
            pages += [_page(COMPRESSED_BLOCK // every, entry, COMPRESSED_BLOCK), states]
        grouped = Product(groups * out, v.shared("o_groups", heads * width, groups))
        return Mixer(
            "compressed", layers, heads, 1, width, width, window, every=every, pages=tuple(pages), others=others,
            products=(Product(heads * width, queries), *whole, grouped, Product(hidden, groups * out, BY_ROWS)),
        )  # fmt: skip

    return rule


def block_sparse(v: ConfigValues, layers: int) -> Mixer:
    """Grouped attention to the best blocks of keys (MiniMax M3)."""
    chosen = v.number("index_topk_blocks", "sparse_topk_blocks") * v.number("index_block_size", "sparse_block_size")
    v.understood(("index_local_blocks", "sparse_local_block", "sparse_init_block"))
    return replace(softmax("sparse")(v, layers) or Mixer("sparse", layers), window=chosen)


def block_index(v: ConfigValues, layers: int) -> Mixer:
    """The index of :func:`block_sparse`: keys of one head in the type of the model."""
    heads = v.number("index_n_heads", "sparse_num_index_heads")
    width = v.number("index_head_dim", "sparse_index_dim")
    return Mixer(
        "index",
        layers,
        heads=heads,
        kv_heads=1,
        key_dim=width,
        cached_bytes=2 * width,
        reads=width,
        products=(Product((heads + 1) * width, v.number("hidden_size"), WHOLE),),
    )


def mamba2(v: ConfigValues, layers: int) -> Mixer:
    """Mamba 2: a convolution and a state per head."""
    hidden = v.number("hidden_size")
    heads = v.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    stated = v.get("mamba_d_head")
    v.understood(("mamba_expand", "expand", "mamba_chunk_size", "mamba_use_mlp"))
    width = (v.number("mamba_d_ssm", default=0) or v.number("mamba_expand", default=2) * hidden) // heads
    if stated != "auto":
        width = v.number("mamba_head_dim", "mamba_d_head", default=width)
    groups, state = v.number("n_groups", "mamba_n_groups", default=1), v.number("ssm_state_size", "mamba_d_state")
    inner, kernel = heads * width, v.number("conv_kernel", "mamba_d_conv")
    convolved = inner + 2 * groups * state
    bytes_of_state = _STATE_TYPES.get(str(v.get("mamba_ssm_cache_dtype")), 2)
    return Mixer(
        "state",
        layers,
        heads=heads,
        state_bytes=(kernel - 1) * convolved * 2 + inner * state * bytes_of_state,
        draft_bytes=convolved * 2,
        products=(Product(inner + convolved + heads, hidden), Product(hidden, inner, BY_ROWS)),
        others=convolved * (kernel + 1) + inner,
    )


def mamba1(v: ConfigValues, layers: int) -> Mixer:
    """Mamba 1: a state per channel."""
    hidden, state = v.number("hidden_size"), v.number("mamba_d_state", "state_size")
    inner, kernel = v.number("mamba_expand", "expand") * hidden, v.number("mamba_d_conv", "conv_kernel")
    ranks = v.get("mamba_dt_rank", "time_step_rank")
    rank = ranks if isinstance(ranks, int) else -(-hidden // 16)
    return Mixer(
        "state",
        layers,
        state_bytes=(kernel - 1) * inner * 2 + inner * state * 2,
        products=(
            Product(2 * inner, hidden),
            Product(rank + 2 * state, inner, BY_ROWS),
            Product(inner, rank),
            Product(hidden, inner, BY_ROWS),
        ),
        others=inner * (state + kernel + 3),
    )


def delta(v: ConfigValues, layers: int) -> Mixer:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid)."""
    hidden, kernel = v.number("hidden_size"), v.number("linear_conv_kernel_dim")
    keys, values = v.number("linear_num_key_heads"), v.number("linear_num_value_heads")
    key_dim, value_dim = v.number("linear_key_head_dim"), v.number("linear_value_head_dim")
    convolved = 2 * keys * key_dim + values * value_dim
    bytes_of_state = _STATE_TYPES.get(str(v.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype")), 2)
    v.understood(
        ("linear_a_log_max", "linear_allow_neg_eigval", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min")
    )
    return Mixer(
        "state",
        layers,
        heads=values,
        state_bytes=(kernel - 1) * convolved * 2 + values * value_dim * key_dim * bytes_of_state,
        draft_bytes=convolved * 2,
        products=(
            Product(convolved + values * value_dim + 2 * values, hidden),
            Product(hidden, values * value_dim, BY_ROWS),
        ),
        others=convolved * kernel,
        sizes=(
            ("num_k_heads", keys), ("head_k_dim", key_dim), ("num_v_heads", values), ("head_v_dim", value_dim),
            ("d_conv", kernel),
        ),
    )  # fmt: skip


def kimi_delta(v: ConfigValues, layers: int) -> Mixer:
    """Kimi Delta Attention: as :func:`delta`, with gates of low rank; the output's may be whole (Kimi K3), or both are
    (``no_kda_lora``)."""
    hidden, heads = v.number("hidden_size"), v.number("linear_num_heads", "num_heads")
    width, kernel = (
        v.number("linear_head_dim", "head_dim"),
        v.number("linear_conv_kernel_dim", "short_conv_kernel_size"),
    )
    inner = heads * width
    v.understood(("gate_lower_bound", "linear_lower_bound"))
    whole = 2 if v.flag("no_kda_lora") else int(v.flag("use_full_rank_gate"))
    low = Product((2 - whole) * width, hidden, WHOLE), Product((2 - whole) * inner, width)
    return Mixer(
        "state",
        layers,
        heads=heads,
        state_bytes=(kernel - 1) * 3 * inner * 2 + heads * width * width * 4,
        draft_bytes=3 * inner * 2,
        products=(
            Product((3 + whole) * inner + heads, hidden),
            *(low if whole < 2 else ()),
            Product(hidden, inner, BY_ROWS),
        ),
        others=3 * inner * kernel,
    )


def lightning(v: ConfigValues, layers: int) -> Mixer:
    """Linear attention with decay and an output gate (MiniMax-Text-01, Ring-linear), its state in the model's type."""
    hidden, heads = v.number("hidden_size"), heads_of(v)
    width = head_dim_of(v)
    inner = heads * width
    return Mixer(
        "state",
        layers,
        heads=heads,
        state_bytes=heads * width * width * 2,
        products=(Product(4 * inner, hidden), Product(hidden, inner, BY_ROWS)),
    )


def short_conv(v: ConfigValues, layers: int) -> Mixer:
    """A gated short convolution (LFM2)."""
    hidden, kernel = v.number("hidden_size"), v.number("conv_L_cache")
    return Mixer(
        "state",
        layers,
        state_bytes=(kernel - 1) * hidden * 2,
        draft_bytes=hidden * 2,
        products=(Product(3 * hidden, hidden), Product(hidden, hidden, BY_ROWS)),
        others=kernel * hidden,
    )


def gated_recurrence(v: ConfigValues, layers: int) -> Mixer:
    """The real-gated linear recurrent unit of RecurrentGemma."""
    hidden, heads = v.number("hidden_size"), heads_of(v)
    width, kernel = v.number("lru_width", default=hidden), v.number("conv1d_width", default=4)
    return Mixer(
        "state",
        layers,
        heads=heads,
        state_bytes=(kernel - 1) * width * 2 + width * 4,
        products=(Product(2 * width, hidden), Product(hidden, width, BY_ROWS)),
        others=2 * heads * (width // heads) ** 2 + width * (kernel + 5),
    )
