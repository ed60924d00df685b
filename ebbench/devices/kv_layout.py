"""How vLLM's hybrid KV cache manager gives blocks to a model whose layers keep different amounts (vLLM 0.32).

Layers of one kind are divided into groups of equal size; every group has a block table of its own, and all draw blocks
from one pool (``v1/core/kv_cache_utils.py``). Groups with a sliding window give back blocks that have left it; layers
with a state take a fixed number per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ebbench.devices.geometry import Mixer, ModelGeometry

Ints = npt.NDArray[np.int64]


BLOCK_TOKENS = 16


STATE_BLOCKS = 2
"""Per group and sequence with prefix caching (``mamba_cache_mode`` align): the running state and the one before."""


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
    ``per_sequence``: blocks of a sequence of any length, 0 is by tokens; ``chunk``: tokens per chunk, of which only the
    last is kept, 0 is all."""

    tables: int
    block_tokens: int
    window: int = 0
    per_sequence: int = 0
    chunk: int = 0

    def held(self, tokens: Ints, processed: Ints) -> Ints:
        """Blocks of sequences with room for ``tokens``, of which ``processed`` are computed for good."""
        if self.per_sequence:
            return np.full(len(tokens), self.tables * self.per_sequence, np.int64)
        blocks = -(-tokens // self.block_tokens)
        if self.window:
            blocks = blocks - np.maximum(processed - self.window + 1, 0) // self.block_tokens
        if self.chunk:
            blocks = blocks - processed // self.chunk * self.chunk // self.block_tokens
        return np.asarray(self.tables * blocks, np.int64)

    def most(self, tokens: int, in_flight: int) -> int:
        """Blocks that a sequence of ``tokens`` needs at most, with ``in_flight`` tokens scheduled at once."""
        if self.per_sequence:
            return self.tables * self.per_sequence
        blocks = -(-tokens // self.block_tokens)
        if self.window:
            blocks = min(blocks, -(-min(self.window - 1 + in_flight, tokens) // self.block_tokens) + 1)
        if self.chunk:
            blocks = min(blocks, -(-min(self.chunk + in_flight, tokens) // self.block_tokens))
        return self.tables * blocks


@dataclass(frozen=True)
class KvLayout:
    """The groups of a model, the bytes of one block of the pool on one GPU, and what its server is ready for:
    sequences of up to ``longest`` tokens, ``in_flight`` of them scheduled at once."""

    groups: tuple[KvGroup, ...]
    block_bytes: int
    longest: int
    in_flight: int

    @property
    def scheduler_block_tokens(self) -> int:
        """Tokens per block as vLLM's scheduler has it: of which the blocks of every group are a part."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def held(self, tokens: Ints, processed: Ints) -> Ints:
        """Blocks of the pool that sequences hold; see :meth:`KvGroup.held`."""
        held: Ints = np.add.reduce([group.held(tokens, processed) for group in self.groups])
        return held

    def most(self, tokens: int) -> int:
        """Blocks of the pool that a sequence of ``tokens`` needs at most, which vLLM wants free to admit it."""
        return sum(group.most(tokens, self.in_flight) for group in self.groups)

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
        """The longest sequence of at most ``tokens`` tokens that ``blocks`` blocks hold."""
        low, high = 0, tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.most(middle) <= blocks else (low, middle - 1)
        return low


def layout_of(
    model: ModelGeometry, in_flight: int, *, chunks: bool = True, state_blocks: int = STATE_BLOCKS
) -> KvLayout | None:
    """The groups of a model as it lies on one GPU; None for one group that keeps all tokens.

    ``chunks``: whether layers that attend within chunks keep only the last one; ``state_blocks``: of a state's group
    and sequence.
    """
    element = model.kv_dtype_bytes
    kept = [mixer for mixer in model.mixers if mixer.cached or mixer.cached_bytes]
    states = [mixer for mixer in model.mixers if mixer.state_bytes]
    if not states and not any(_window(mixer) or (chunks and _chunk(mixer)) for mixer in kept):
        return None
    tokens = _tokens_beside_states(kept, states, element)
    buckets = [(mixer, tokens * mixer.bytes_per_token(element)) for mixer in _merged(kept, chunks=chunks)]
    page = max((bytes_ for _, bytes_ in buckets), default=0.0)
    page = max(page, *(mixer.state_bytes for mixer in states)) if states else page
    counts = [mixer.layers for mixer, _ in buckets] + [mixer.layers for mixer in states]
    most = max(counts)
    size = most if most < FEW_MORE * min(counts) else min(counts)
    groups = [
        KvGroup(
            -(-mixer.layers // size), tokens * (int(page // own) if page % own == 0 else 1), _window(mixer),
            chunk=_chunk(mixer) if chunks else 0,
        )
        for mixer, own in buckets
    ]  # fmt: skip
    groups += [KvGroup(-(-mixer.layers // size), tokens, per_sequence=state_blocks) for mixer in states]
    return KvLayout(tuple(groups), int(size * page), model.positions or UNSTATED_POSITIONS, in_flight)


def _window(mixer: Mixer) -> int:
    return mixer.window if mixer.kind == "window" else 0


def _chunk(mixer: Mixer) -> int:
    return mixer.window if mixer.kind == "chunk" else 0


def _merged(kept: Iterable[Mixer], *, chunks: bool) -> list[Mixer]:
    """Layers that keep as much as each other, in one way, as one kind."""
    found: dict[tuple[int, int, int, int], Mixer] = {}
    for mixer in kept:
        key = (_window(mixer), _chunk(mixer) if chunks else 0, mixer.cached, mixer.cached_bytes)
        before = found.get(key)
        found[key] = mixer if before is None else replace(before, layers=before.layers + mixer.layers)
    return list(found.values())


def _tokens_beside_states(kept: Iterable[Mixer], states: Iterable[Mixer], element: float) -> int:
    """Tokens per block: the smallest multiple of 16 with which a block of attention is no smaller than a state."""
    largest = max((mixer.state_bytes for mixer in states), default=0)
    narrowest = max((mixer.bytes_per_token(element) for mixer in kept), default=0.0)
    if not largest or not narrowest:
        return BLOCK_TOKENS
    return BLOCK_TOKENS * max(-(-largest // int(BLOCK_TOKENS * narrowest)), 1)
