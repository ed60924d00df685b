"""Rules by which layers are read from a config.json: attention of every kind, states, convolutions.

A rule takes the values of one layer and the number of layers that have them, and gives their :class:`Mixer`.
Sizes of states are vLLM's (``model_executor/layers/mamba/mamba_utils.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ebbench.devices.config_values import ConfigValues
from ebbench.devices.mixers import BY_ROWS, WHOLE, Mixer, Product, attention

Rule = Callable[[ConfigValues, int], Mixer | None]
SHARES_CACHE = "shares the cache of another layer"
"""Value that is set in a layer that has no KV cache of its own."""
_WINDOW_KEYS = {"window": ("window",), "chunk": ("attention_chunk_size",)}
_STATE_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
INDEX_SCALE_BYTES = 4
"""Per 128 elements of an index, which vLLM keeps in FP8."""
PACKED_LATENT_BYTES = 656
"""Of one token of a sparse latent cache in FP8 on Hopper (512 in FP8, 4 scales, 64 in 16 bits)."""


def heads_of(v: ConfigValues) -> int:
    """Query heads."""
    return v.number("num_attention_heads")


def head_dim_of(v: ConfigValues, *keys: str) -> int:
    """Width of a head: stated, or the hidden size divided among the heads."""
    stated = v.number(*keys, "head_dim", default=0)
    return stated or v.number("hidden_size") // heads_of(v)


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
    the projection of keys gives the values, too (``attention_k_eq_v``).
    """

    def rule(v: ConfigValues, layers: int) -> Mixer:
        count = v.number(heads, "num_attention_heads")
        keys = v.number(kv_heads, "num_key_value_heads", default=count)
        width = head_dim_of(v, key_dim)
        values = v.number(value_dim, "v_head_dim", default=width) if value_dim else width
        columns = {"": 0, "element": count * values, "head": count}[gate]
        window = v.number(*_WINDOW_KEYS[kind]) if kind in _WINDOW_KEYS else 0
        return attention(
            kind, layers, v.number("hidden_size"), count, keys, width, values,
            window=window, gate=columns, keys_are_values=not own_values, own_cache=not v.flag(SHARES_CACHE),
        )  # fmt: skip

    return rule


def latent(v: ConfigValues, layers: int) -> Mixer:
    """Multi-head latent attention (MLA), sparse where the config has an index."""
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
        cached_fp8_bytes=PACKED_LATENT_BYTES if top else 0,
        reads=rank + rope,
        products=(
            *to_queries,
            Product(rank + rope, hidden, WHOLE),
            Product(heads * (nope + values), rank),
            Product(hidden, heads * values, BY_ROWS),
        ),
    )


def index(v: ConfigValues, layers: int) -> Mixer | None:
    """The index of sparse latent attention (DeepSeek V3.2): keys of one head in FP8; none where layers share one."""
    if not v.number("index_topk", default=0) or v.get("indexer_types") == "shared":
        return None
    heads, width = v.number("index_n_heads"), v.number("index_head_dim")
    return Mixer(
        "index",
        layers,
        heads=heads,
        kv_heads=1,
        key_dim=width,
        cached_bytes=width + width // 128 * INDEX_SCALE_BYTES,
        reads=width // 2,
        products=(
            Product(heads * width, v.number("q_lora_rank"), WHOLE),
            Product(width + heads, v.number("hidden_size"), WHOLE),
        ),
    )


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
    v.understood(("mamba_expand", "expand", "mamba_d_ssm", "mamba_chunk_size", "mamba_use_mlp"))
    width = v.number("mamba_expand", default=2) * hidden // heads
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
    """Kimi Delta Attention: as :func:`delta`, with gates of low rank."""
    hidden, heads = v.number("hidden_size"), v.number("linear_num_heads", "num_heads")
    width, kernel = (
        v.number("linear_head_dim", "head_dim"),
        v.number("linear_conv_kernel_dim", "short_conv_kernel_size"),
    )
    inner = heads * width
    return Mixer(
        "state",
        layers,
        heads=heads,
        state_bytes=(kernel - 1) * 3 * inner * 2 + heads * width * width * 4,
        products=(
            Product(3 * inner + heads, hidden),
            Product(2 * width, hidden, WHOLE),
            Product(2 * inner, width),
            Product(hidden, inner, BY_ROWS),
        ),
        others=3 * inner * kernel,
    )


def lightning(v: ConfigValues, layers: int) -> Mixer:
    """Linear attention with decay and an output gate (MiniMax-Text-01, Ring-linear)."""
    hidden, heads = v.number("hidden_size"), heads_of(v)
    width = head_dim_of(v)
    inner = heads * width
    return Mixer(
        "state",
        layers,
        heads=heads,
        state_bytes=heads * width * width * 4,
        products=(Product(4 * inner, hidden), Product(hidden, inner, BY_ROWS)),
    )


def short_conv(v: ConfigValues, layers: int) -> Mixer:
    """A gated short convolution (LFM2)."""
    hidden, kernel = v.number("hidden_size"), v.number("conv_L_cache")
    return Mixer(
        "state",
        layers,
        state_bytes=(kernel - 1) * hidden * 2,
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
