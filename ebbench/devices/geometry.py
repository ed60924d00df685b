"""Shape of a decoder-only transformer: bytes of its weights, parameters used per token, and layout of its KV cache."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Layers that mix tokens: attention of several kinds, and what stands in its place, with weights, cache and slices.

KINDS = ("full", "window", "chunk", "sparse", "latent", "index", "state", "compressed")
BY_COLUMNS, BY_ROWS, WHOLE = "columns", "rows", "whole"


@dataclass(frozen=True)
class Product:
    """A matrix of ``columns`` outputs and ``rows`` inputs; ``split``: which of them several GPUs share."""

    columns: int
    rows: int
    split: str = BY_COLUMNS

    @property
    def params(self) -> int:
        """Number of weights: columns x rows."""
        return self.columns * self.rows

    def sliced(self, tp: int) -> Product:
        """The part on one of ``tp`` GPUs."""
        if self.split == BY_COLUMNS:
            return replace(self, columns=-(-self.columns // tp))
        return replace(self, rows=-(-self.rows // tp)) if self.split == BY_ROWS else self


@dataclass(frozen=True)
class Page:
    """A cache of one layer whose blocks hold ``tokens`` tokens in ``size`` bytes, padding included; ``window``: tokens
    that it keeps, 0 is all."""

    size: int
    tokens: int
    window: int = 0


@dataclass(frozen=True)
class Mixer:
    """``layers`` equal layers of one kind.

    ``full``: every token attends to all before it. ``window``: to the last ``window``, and no more are kept. ``chunk``:
    to those in its piece of ``window`` tokens. ``sparse``: all are kept, ``window`` of them are read. ``latent``: all
    heads share ``latent`` elements and a rotary part per token (MLA). ``index``: the keys by which sparse layers choose
    (of ``heads`` and ``key_dim``). ``state``: a state of fixed size per sequence (Mamba, linear attention, short
    convolutions). ``compressed``: to the last ``window`` tokens and to one key for every ``every`` tokens before, or to
    no more where ``every`` is 0 (DeepSeek-V4).

    ``cached``: elements of the KV cache per token and layer, in the cache's type; ``cached_fp8_bytes``: bytes instead
    of these where an FP8 cache has a format of its own; ``cached_bytes``: further bytes, in no type that a server
    chooses; ``state_bytes``: bytes per sequence; ``draft_bytes``: further bytes of a state per drafted token (inputs of
    its convolution), 0 where drafts are not verified with it. ``pages``: the layer's caches instead of all these, where
    they have blocks of their own; ``inputs``: a cache beside keys and values, of the last inputs of convolutions.
    ``reads``: elements that a query reads per token before
    it (of a layer that uses another layer's cache, too). ``others``: parameters outside ``products``, in 16 bits.
    ``sizes``: of a gated delta rule, numbers and widths of its heads by the names of the kernels' arguments.
    """

    kind: str
    layers: int
    heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    latent: int = 0
    cached: int = 0
    cached_bytes: int = 0
    cached_fp8_bytes: int = 0
    state_bytes: int = 0
    draft_bytes: int = 0
    reads: int = 0
    every: int = 0
    pages: tuple[Page, ...] = ()
    inputs: Page | None = None
    products: tuple[Product, ...] = ()
    others: int = 0
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def params(self) -> int:
        """Parameters of the products of one layer."""
        return sum(product.params for product in self.products)

    @property
    def measured_alike(self) -> bool:
        """Whether kernel tables of softmax attention with grouped keys hold for it."""
        return self.kind in ("full", "window", "chunk", "sparse")

    @property
    def head_dim(self) -> int:
        """Mean width of keys and values of one head, by which kernel tables know it."""
        return (self.key_dim + self.value_dim) // 2

    def bytes_per_token(self, element_bytes: float) -> float:
        """Bytes of the cache per token that one layer keeps; of ``pages``, of all tokens."""
        if self.pages:
            return sum(page.size / page.tokens for page in self.pages if not page.window)
        own_format = self.cached_fp8_bytes if element_bytes == 1 else 0
        return (own_format or self.cached * element_bytes) + self.cached_bytes

    def sliced(self, tp: int) -> Mixer:
        """The part on one of ``tp`` GPUs. With fewer KV heads than GPUs each is stored more than once; latents and
        indices are stored by every GPU."""
        if tp == 1:
            return self
        products = tuple(product.sliced(tp) for product in self.products)
        if self.kind == "index":
            return replace(self, products=products)
        sizes = tuple((name, max(size // tp, 1) if name.startswith("n") else size) for name, size in self.sizes)
        state_bytes, draft_bytes = -(-self.state_bytes // tp), -(-self.draft_bytes // tp)
        inputs = self.inputs and replace(self.inputs, size=self.inputs.size // tp)
        part = replace(
            self, products=products, heads=-(-self.heads // tp), state_bytes=state_bytes, draft_bytes=draft_bytes,
            inputs=inputs, sizes=sizes,
        )  # fmt: skip
        if not self.kv_heads:
            return part
        kept = max(self.kv_heads // tp, 1)
        cached, reads = (values_per_token * kept // self.kv_heads for values_per_token in (self.cached, self.reads))
        return replace(part, kv_heads=kept, cached=cached, reads=reads)


def attention(
    kind: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int = 0,
    *,
    window: int = 0,
    gate: int = 0,
    keys_are_values: bool = False,
    own_cache: bool = True,
) -> Mixer:
    """Softmax attention with grouped keys. ``gate``: further columns beside queries; ``keys_are_values``: one
    projection gives both; without ``own_cache`` a layer reads the cache of another."""
    value_dim = value_dim or key_dim
    kept = kv_heads * (key_dim + value_dim)
    projected = (kv_heads * key_dim if keys_are_values else kept) if own_cache else 0
    return Mixer(
        kind,
        layers,
        heads,
        kv_heads,
        key_dim,
        value_dim,
        window,
        cached=kept if own_cache else 0,
        reads=kept,
        products=(
            Product(heads * key_dim + gate + projected, hidden),
            Product(hidden, heads * value_dim, BY_ROWS),
        ),
    )


def pair_flops(mixer: Mixer) -> float:
    """Operations of one layer per pair of a prompt's query and a key."""
    return 2.0 * mixer.heads * (mixer.key_dim + mixer.value_dim)


def decode_flops(mixer: Mixer) -> float:
    """Operations of one layer per pair of a decode's query and a key: latents are used as they are (absorbed MLA)."""
    return 2.0 * mixer.heads * (mixer.reads + mixer.latent) if mixer.latent else pair_flops(mixer)


# Bits per weight with its share of the scales: one scale per tensor or channel (fp8, int8), per 128 x 128 block, per 32
# weights (mxfp4, mxfp8), per 16 (nvfp4), per 128 (int4).
WEIGHT_BITS = {
    "bfloat16": 16.0, "fp8": 8.0, "fp8_block": 8.0, "mxfp8": 8.25, "int8": 8.0,
    "w4a16_mxfp4": 4.25, "nvfp4": 4.5, "int4": 4.125,
}  # fmt: skip
KV_DTYPES = ("auto", "bfloat16", "fp8")


@dataclass(frozen=True)
class ModelGeometry:
    """A dense or mixture-of-experts decoder. ``experts`` 0 is dense; sizes are in elements.

    ``dense_layers`` of a mixture's ``layers`` have a dense MLP of ``dense_intermediate`` in place of experts;
    ``bare_layers`` have neither. ``mlp_matrices``: three with a gate, two without. ``expert_hidden``: width of what
    experts see, if not ``hidden``. ``sliding_layers`` of the ``layers`` attend only to the last ``sliding_window``
    tokens. ``own_mixers``: the layers by kind of attention, where they are not all described by ``heads``,
    ``kv_heads``, ``head_dim`` and the window. ``other_params``: further parameters in 16 bits (embeddings per layer or
    of positions); ``other_bytes``: by which weights of another type than most of their kind differ; ``encoder_bytes``:
    of weights that read images or sound. ``norms``: norms of the hidden size per layer. ``streams``: of
    hidden states that its layers mix (manifold-constrained hyper-connections), 0 is one. ``qk_norm``: queries and keys
    are normed, ``joint_norms``: over the heads of all GPUs. ``dtype_bytes``: bytes per element of activations,
    embeddings and head.
    ``weight_dtype``: type of the projections in the layers; ``attention_dtype``: of those of attention ("": as the
    others); ``expert_dtype``: of the experts ("": as the projections); ``head_dtype``: of the language head, if it is
    not tied; ``kv_dtype``: of the KV cache; names of WEIGHT_BITS, with bfloat16 for any 16-bit type. ``router_dtype``:
    in which experts are chosen, bfloat16, float32 or tf32 (:mod:`ebbench.devices.routers`). ``positions``:
    longest sequence in tokens that its config.json allows, 0: not known. ``mtp_layers``: modules that predict further
    tokens, which only speculative decoding uses.
    ``note``: what is simplified.
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
    joint_norms: bool = False
    norms: int = 2
    streams: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    expert_hidden: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    bare_layers: int = 0
    mlp_matrices: int = 3
    sliding_window: int = 0
    sliding_layers: int = 0
    own_mixers: tuple[Mixer, ...] = ()
    other_params: int = 0
    other_bytes: int = 0
    encoder_bytes: int = 0
    dtype_bytes: int = 2
    weight_dtype: str = "bfloat16"
    attention_dtype: str = ""
    expert_dtype: str = ""
    head_dtype: str = "bfloat16"
    router_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    positions: int = 0
    mtp_layers: int = 0
    note: str = ""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Its layers by kind of attention."""
        if self.own_mixers:
            return self.own_mixers
        full, windowed = self.layers - self.sliding_layers, self.sliding_layers
        shape = (self.hidden, self.heads, self.kv_heads, self.head_dim)
        kinds = (
            attention("full", full, *shape),
            attention("window", windowed, *shape, window=self.sliding_window),
        )
        return tuple(kind for kind in kinds if kind.layers)

    @property
    def windows(self) -> tuple[Mixer, ...]:
        """Layers that keep no more than a window of every sequence, or than a chunk."""
        return tuple(mixer for mixer in self.mixers if mixer.kind in ("window", "chunk") and mixer.cached)

    @property
    def own_pages(self) -> tuple[tuple[int, Page], ...]:
        """Caches with blocks of their own, with the numbers of layers that have them."""
        return tuple((mixer.layers, page) for mixer in self.mixers for page in mixer.pages)

    @property
    def inputs(self) -> tuple[tuple[int, Page], ...]:
        """Caches of the last inputs of convolutions, with the numbers of layers that have them."""
        return tuple((mixer.layers, mixer.inputs) for mixer in self.mixers if mixer.inputs)

    @property
    def dtype_of_experts(self) -> str:
        """Data type of the experts."""
        return self.expert_dtype or self.weight_dtype

    @property
    def experts_of_gpt_oss(self) -> bool:
        """Whether the experts are gpt-oss's: in MXFP4 they have Triton's kernels on Hopper since vLLM 0.12, others
        Marlin's (0.32, fused_moe/oracle/mxfp4.py)."""
        return self.hidden == self.expert_intermediate == 2880

    @property
    def dtype_of_attention(self) -> str:
        """Data type of the projections of attention."""
        return self.attention_dtype or self.weight_dtype

    @property
    def weight_dtypes(self) -> tuple[str, ...]:
        """Data types of all weights in the layers and of a quantized language head, without repetition."""
        dtypes = [self.weight_dtype, self.dtype_of_attention, *([self.dtype_of_experts] if self.experts else [])]
        return tuple(dict.fromkeys([*dtypes, *([self.head_dtype] if self.head_dtype != "bfloat16" else [])]))

    @property
    def plain(self) -> bool:
        """Whether weights and KV cache have 16 bits."""
        return {*self.weight_dtypes, self.kv_dtype} == {"bfloat16"}

    @property
    def kv_dtype_bytes(self) -> float:
        """Bytes per element of the KV cache."""
        return WEIGHT_BITS[self.kv_dtype] / 8

    @property
    def experts_bytes(self) -> float:
        """Bytes of all experts of all layers."""
        return self.expert_layers * self.experts * self.expert_params * WEIGHT_BITS[self.dtype_of_experts] / 8

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers - self.bare_layers if self.experts else 0

    @property
    def mlp_layers(self) -> int:
        """Layers with an MLP or with experts."""
        return self.layers - self.bare_layers

    @property
    def main(self) -> Mixer:
        """The kind of layers that a drafter has: those that attend to all tokens, or the first that attend."""
        full = (mixer for mixer in self.mixers if mixer.kind == "full")
        return next(full, next(mixer for mixer in self.mixers if mixer.kind != "state"))

    def with_drafter(self, layers: int, tokens: int = 0) -> ModelGeometry:
        """The model as a server that drafts ``tokens`` tokens holds it: ``layers`` more, as a drafter has them, and
        longer states."""
        own = tuple(
            replace(
                mixer,
                layers=mixer.layers + (layers if mixer == self.main else 0),
                state_bytes=mixer.state_bytes + tokens * mixer.draft_bytes,
            )
            for mixer in self.own_mixers
        )
        return replace(self, layers=self.layers + layers, own_mixers=own)

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
            dense_intermediate=-(-self.dense_intermediate // tp),
            own_mixers=tuple(mixer.sliced(tp) for mixer in self.own_mixers),
            vocab=-(-self.vocab // tp),
        )

    @property
    def qkv_width(self) -> int:
        """Output columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_params(self) -> int:
        """Parameters of the projections of attention, and of what stands in its place, of all layers."""
        return sum(mixer.layers * mixer.params for mixer in self.mixers)

    @property
    def mlp_params(self) -> int:
        """Parameters of one layer's MLP, all experts together; of a mixture, of a layer with experts."""
        if not self.experts:
            return self.mlp_matrices * self.hidden * self.intermediate
        return self.experts * self.expert_params + self._beside_experts

    @property
    def _beside_experts(self) -> int:
        """Parameters of a layer with experts that every token uses: router, shared experts, way to the experts."""
        latent = 2 * self.hidden * self.expert_hidden
        return self.hidden * (self.experts + self.mlp_matrices * self.shared_intermediate) + latent

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return self.mlp_matrices * (self.expert_hidden or self.hidden) * self.expert_intermediate

    @property
    def embedding_params(self) -> int:
        """Parameters of embeddings and language head."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def head_bytes(self) -> float:
        """Bytes of the language head."""
        plain = self.head_dtype == "bfloat16"
        return self.vocab * self.hidden * (self.dtype_bytes if plain else WEIGHT_BITS[self.head_dtype] / 8)

    @property
    def embedding_bytes(self) -> float:
        """Bytes of embeddings and language head."""
        return self.head_bytes + (0 if self.tied_embeddings else self.vocab * self.hidden * self.dtype_bytes)

    @property
    def params(self) -> int:
        """All parameters without norms (below 0.01 %)."""
        return self.layer_params + self.embedding_params + self.other_params

    @property
    def layer_params(self) -> int:
        """Parameters of all layers."""
        dense = self.dense_layers * self.mlp_matrices * self.hidden * self.dense_intermediate
        with_mlp = self.mlp_layers - self.dense_layers
        others = sum(mixer.layers * mixer.others for mixer in self.mixers)
        return self.attention_params + with_mlp * self.mlp_params + dense + others

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        others = sum(mixer.layers * mixer.others for mixer in self.mixers) + self.other_params
        experts = self.expert_layers * self.experts * self.expert_params
        mlp = self.layer_params - self.attention_params - experts - (others - self.other_params)
        return int(
            self.embedding_bytes
            + others * self.dtype_bytes
            + self.attention_params * WEIGHT_BITS[self.dtype_of_attention] / 8
            + mlp * WEIGHT_BITS[self.weight_dtype] / 8
            + self.experts_bytes
            + self.other_bytes
            + self.encoder_bytes
        )

    def mlp_products(self, inner: int) -> tuple[Product, ...]:
        """The products of an MLP of this width; none for a width of 0."""
        if not inner:
            return ()
        return Product((self.mlp_matrices - 1) * inner, self.hidden), Product(self.hidden, inner, BY_ROWS)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes per token over all layers, as long as every layer keeps it."""
        return int(sum(mixer.layers * mixer.bytes_per_token(self.kv_dtype_bytes) for mixer in self.mixers))

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states over all layers, whatever its length."""
        return sum(mixer.layers * mixer.state_bytes for mixer in self.mixers)

    def kv_bytes(self, tokens: float) -> float:
        """Bytes that a sequence of ``tokens`` keeps over all layers."""
        kept = float(self.state_bytes)
        for mixer in self.mixers:
            length = min(tokens, mixer.window) if mixer.kind in ("window", "chunk") else tokens
            kept += mixer.layers * length * mixer.bytes_per_token(self.kv_dtype_bytes)
        windows = ((layers, page) for layers, page in (*self.own_pages, *self.inputs) if page.window)
        return kept + sum(layers * min(tokens, page.window) * page.size / page.tokens for layers, page in windows)


Ints = npt.NDArray[np.int64]


BLOCK_TOKENS = 16


STATE_BLOCKS = 2
"""Per group and sequence with prefix caching (``mamba_cache_mode`` align): the running state and the one before.
Drafted tokens add one each, from which the state goes on after the last accepted one."""


SETTLED_SINCE = (0, 26)
"""vLLM before freed blocks that left a window when the step was scheduled, and so reckoned with one step in flight."""


CHUNKS_SINCE = (0, 13)
"""From then on layers that attend within chunks give finished chunks back; before they kept all tokens by default."""


FEW_MORE = 1.5
"""If the largest kind has less than so many times the layers of the smallest, groups have the size of the largest."""


UNSTATED_POSITIONS = 32_768


@dataclass(frozen=True)
class KvGroup:
    """``tables`` block tables alike. ``block_tokens``: tokens per block; ``window``: tokens kept, 0 is all;
    ``per_sequence``: blocks of a sequence of any length at most, 0 is by tokens, ``drafts`` of them for drafted tokens;
    ``chunk``: tokens per chunk, of which only the last is kept, 0 is all."""

    tables: int
    block_tokens: int
    window: int = 0
    per_sequence: int = 0
    chunk: int = 0
    drafts: int = 0

    @property
    def by_block(self) -> bool:
        """Whether it keeps states where they stood at the end of blocks, as prefix caching needs them."""
        return self.per_sequence > self.drafts + 1

    def first(self, tokens: Ints | int, in_flight: int) -> Ints | int:
        """Blocks that vLLM wants free to admit a sequence of ``tokens``: a later state's block is not among them."""
        if self.by_block:
            return self.tables * (1 + self.drafts)
        most = self.most(tokens, in_flight)
        return np.minimum(most, self.tables * -(-tokens // self.block_tokens)) if self.window else most

    def most(self, tokens: Ints | int, in_flight: int) -> Ints | int:
        """Blocks that vLLM reckons with for a longest sequence of ``tokens``, with ``in_flight`` tokens scheduled at
        once: a window has one more, even where it is longer than the sequence."""
        if self.per_sequence:
            return self.tables * self.per_sequence
        blocks = -(-tokens // self.block_tokens)
        if self.window:
            blocks = -(-np.minimum(self.window - 1 + in_flight, tokens) // self.block_tokens) + 1
        if self.chunk:
            blocks = np.minimum(blocks, -(-np.minimum(self.chunk + in_flight, tokens) // self.block_tokens))
        return self.tables * blocks


class BlocksByLength:
    """Blocks of the pool of a sequence by a number of tokens, for lookups: a division takes several times as long.

    ``room``: those for so many tokens; ``left``: those given back since so many are computed for good; ``first``: those
    that vLLM wants free to admit so many. ``decoding``: those for one token more, none of the others in flight, or one.
    """

    def __init__(self, layout: KvLayout) -> None:
        self._layout, self.room = layout, np.zeros(0, np.int64)
        self.reach(1023)

    def reach(self, tokens: int) -> None:
        """Make the lookups long enough for so many tokens, if they are not."""
        if tokens < len(self.room) - 1:
            return
        lengths, layout = np.arange((1 << tokens.bit_length()) + 1), self._layout
        self.room, self.left, self.first = (np.zeros_like(lengths) for _ in range(3))
        for group in layout.groups:
            self.first += group.first(lengths, layout.in_flight)
            if group.per_sequence:
                self.room += group.tables * (1 + group.drafts)  # the running states
                continue
            self.room += group.tables * -(-lengths // group.block_tokens)
            if group.window:
                self.left += group.tables * (np.maximum(lengths - (group.window - 1), 0) // group.block_tokens)
            if group.chunk:
                self.left += group.tables * (lengths // group.chunk * group.chunk // group.block_tokens)
        later = self.room[1:]
        self.decoding = later - self.left[:-1], later - np.concatenate([self.left[:1], self.left[:-2]])


@dataclass(frozen=True)
class KvLayout:
    """The groups of a model, the bytes of one block of the pool on one GPU, and what its server is ready for:
    sequences of up to ``longest`` tokens, ``in_flight`` of them scheduled at once."""

    groups: tuple[KvGroup, ...]
    block_bytes: int
    longest: int
    in_flight: int

    @cached_property
    def scheduler_block_tokens(self) -> int:
        """Tokens per block as vLLM's scheduler has it: of which the blocks of every group are a part."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def state_block_tokens(self) -> int:
        """Tokens per block at whose ends states are kept, and chunks of prompts end; 0 without such states."""
        return next((group.block_tokens for group in self.groups if group.by_block), 0)

    @property
    def states_alone(self) -> bool:
        """Whether every layer keeps all tokens, or states at the ends of blocks, which are all as long."""
        alike = len({group.block_tokens for group in self.groups}) == 1
        kinds = {group.by_block for group in self.groups}
        return alike and len(kinds) == 2 and not any(group.window or group.chunk for group in self.groups)

    def held(self, tokens: Ints | int, processed: Ints | int) -> Ints:
        """Blocks of the pool of sequences with room for ``tokens``, of which ``processed`` are computed for good; of
        states without those that have moved on. Called in every step."""
        by_length = self.by_length
        try:
            return by_length.room.take(tokens) - by_length.left.take(processed)
        except IndexError:
            by_length.reach(int(np.max(tokens)))
            return self.held(tokens, processed)

    @cached_property
    def by_length(self) -> BlocksByLength:
        """The blocks of sequences by their length."""
        return BlocksByLength(self)

    @cached_property
    def most_per_token(self) -> int:
        """Blocks of the pool that one token more may take."""
        return sum(group.tables for group in self.groups if not group.per_sequence)

    def first(self, tokens: int) -> int:
        """Blocks of the pool that vLLM wants free to admit a sequence of ``tokens``."""
        self.by_length.reach(tokens)
        return int(self.by_length.first[tokens])

    def most(self, tokens: int) -> int:
        """Blocks of the pool that a sequence of ``tokens`` needs at most."""
        return int(sum(group.most(tokens, self.in_flight) for group in self.groups))

    def tokens_of(self, blocks: int) -> int:
        """What vLLM logs as the size of its KV cache: as many of the longest sequences as fit, times their length."""
        return int(blocks / self.most(self.longest) * self.longest)

    def blocks_of(self, tokens: int) -> int:
        """The blocks of a server that logs a KV cache of ``tokens`` tokens."""
        return round(tokens / self.longest * self.most(self.longest))

    def effective_tokens(self, blocks: int, mean: float) -> int:
        """Tokens that ``blocks`` blocks hold of sequences whose length is ``mean`` tokens."""
        length = np.array([max(round(mean), 1)], np.int64)
        return int(blocks / self.held(length, length)[0] * length[0])

    def longest_within(self, blocks: int, tokens: int) -> int:
        """The longest sequence of at most ``tokens`` tokens that ``blocks`` blocks hold.

        With two steps in flight it has one state more for a moment than vLLM reckons with.
        """
        blocks -= sum(group.tables for group in self.groups if group.by_block)
        return bisect_right(range(1, tokens + 1), blocks, key=self.most)


class _Bucket(NamedTuple):
    """Layers whose blocks hold as many ``tokens`` in as many ``bytes``, before all pages are made equal."""

    layers: int
    tokens: int
    bytes: float
    window: int
    chunk: int = 0


def kv_layout(
    model: ModelGeometry, in_flight: int, *, chunks: bool = True, state_blocks: int = STATE_BLOCKS, drafts: int = 0
) -> KvLayout | None:
    """The groups of a model as it lies on one GPU; None for one group that keeps all tokens.

    ``chunks``: whether layers that attend within chunks keep only the last one; ``state_blocks``: of a state's group
    and sequence, to which each of ``drafts`` drafted tokens adds one.
    """
    if model.own_pages:
        return _packed(model, in_flight)
    element = model.kv_dtype_bytes
    kept = [mixer for mixer in model.mixers if mixer.cached or mixer.cached_bytes]
    states = [mixer for mixer in model.mixers if mixer.state_bytes]
    if not states and not any(_window(mixer) or (chunks and _chunk(mixer)) for mixer in kept):
        return None
    tokens = _tokens_beside_states(kept, states, element)
    buckets = [
        _Bucket(
            mixer.layers,
            tokens,
            tokens * mixer.bytes_per_token(element),
            _window(mixer),
            _chunk(mixer) if chunks else 0,
        )
        for mixer in _merged(kept, chunks=chunks)
    ]
    buckets += [_Bucket(layers, inputs.tokens, inputs.size, inputs.window) for layers, inputs in model.inputs]
    page = max([*(bucket.bytes for bucket in buckets), *(mixer.state_bytes for mixer in states)])
    counts = [bucket.layers for bucket in buckets] + [mixer.layers for mixer in states]
    most = max(counts)
    size = most if most < FEW_MORE * min(counts) else min(counts)
    groups = [
        KvGroup(
            -(-own.layers // size), own.tokens * (int(page // own.bytes) if page % own.bytes == 0 else 1), own.window,
            chunk=own.chunk,
        )
        for own in buckets
    ]  # fmt: skip
    per_sequence = state_blocks + drafts
    groups += [KvGroup(-(-mixer.layers // size), tokens, per_sequence=per_sequence, drafts=drafts) for mixer in states]
    return KvLayout(tuple(groups), int(size * page), model.positions or UNSTATED_POSITIONS, in_flight)


def _packed(model: ModelGeometry, in_flight: int) -> KvLayout:
    """Pages of several sizes side by side in one block of the pool (vLLM 0.32, ``_get_packed_kv_cache_groups``).

    Caches with as many tokens per block and the same window lie together. Such a group is divided among several block
    tables where every size of page has as many layers: into parts with the number of layers that pads least, but no
    fewer than a group of several sizes has. A block has the bytes of the widest part.
    """
    by_block: dict[tuple[int, int], dict[int, int]] = {}
    for layers, page in model.own_pages:
        sizes = by_block.setdefault((page.tokens, page.window), {})
        sizes[page.size] = sizes.get(page.size, 0) + layers
    even = [sizes for sizes in by_block.values() if len(set(sizes.values())) == 1]
    counts = [max(sizes.values()) for sizes in even]
    least = max((max(sizes.values()) for sizes in even if len(sizes) > 1), default=max(counts, default=1))
    candidates = range(least, max(counts, default=least) + 1)
    part = min(candidates, key=lambda size: (sum(-count % size for count in counts), -size))
    groups, widest = [], 0
    for (tokens, window), sizes in by_block.items():
        tables = -(-max(sizes.values()) // part) if sizes in even else 1
        widest = max(widest, sum(-(-layers // tables) * size for size, layers in sizes.items()))
        groups.append(KvGroup(tables, tokens, window))
    groups.sort(key=lambda group: bool(group.window))
    return KvLayout(tuple(groups), widest, model.positions or UNSTATED_POSITIONS, in_flight)


def _window(mixer: Mixer) -> int:
    return mixer.window if mixer.kind == "window" else 0


def _chunk(mixer: Mixer) -> int:
    return mixer.window if mixer.kind == "chunk" else 0


def _merged(kept: Iterable[Mixer], *, chunks: bool) -> list[Mixer]:
    """Layers that keep as much as each other, in one way, as one kind."""
    by_layout: dict[tuple[int, int, int, int], Mixer] = {}
    for mixer in kept:
        key = (_window(mixer), _chunk(mixer) if chunks else 0, mixer.cached, mixer.cached_bytes)
        before = by_layout.get(key)
        by_layout[key] = mixer if before is None else replace(before, layers=before.layers + mixer.layers)
    return list(by_layout.values())


def _tokens_beside_states(kept: Iterable[Mixer], states: Iterable[Mixer], element: float) -> int:
    """Tokens per block: the smallest multiple of 16 with which a block of attention is no smaller than a state."""
    largest = max((mixer.state_bytes for mixer in states), default=0)
    narrowest = max((mixer.bytes_per_token(element) for mixer in kept), default=0.0)
    if not largest or not narrowest:
        return BLOCK_TOKENS
    return BLOCK_TOKENS * max(-(-largest // int(BLOCK_TOKENS * narrowest)), 1)
