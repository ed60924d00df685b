"""Token ids of prompts, as a pure function of content identity and position.

All engines that need real token ids call :func:`token_ids`, so that a plan has the same prompts and shared prefixes on
every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

CHUNK_TOKENS = 512
"""Prompt tokens per hash id, where a plan does not say otherwise: as in Mooncake's traces."""


_BLOCK_KEY = b"block_tokens"


_STREAM_SALT = 0x9E3779B97F4A7C15


_CHUNK_SALT = 0xD1B54A32D192ED03


_MASK = (1 << 64) - 1


def block_tokens(table: pa.Table) -> int:
    """Prompt tokens per entry of a plan's ``hash_ids``: metadata of that column, 512 without it."""
    metadata = table.schema.field("hash_ids").metadata or {}
    return int(metadata.get(_BLOCK_KEY, CHUNK_TOKENS))


def with_block_tokens(table: pa.Table, tokens: int) -> pa.Table:
    """The plan's table with ``tokens`` prompt tokens per entry of ``hash_ids``; unchanged for the default."""
    if tokens == block_tokens(table):
        return table
    index = table.schema.get_field_index("hash_ids")
    field = table.schema.field(index).with_metadata({_BLOCK_KEY: str(tokens).encode()})
    return table.set_column(index, field, table.column(index))


def token_ids(
    content: int, hash_ids: Sequence[int] | None, start: int, count: int, vocab: int, block_tokens: int = CHUNK_TOKENS
) -> npt.NDArray[np.int32]:
    """Tokens ``[start, start + count)`` of stream ``content``, each in ``[0, vocab)``; shape (count,).

    Positions covered by ``hash_ids`` (blocks of ``block_tokens`` tokens) depend only on the hash id and the offset in
    the block, so that equal hash ids give equal tokens in all sessions; later positions depend on the stream. Raises
    ValueError for a negative range or a vocabulary below 1.
    """
    if start < 0 or count < 0 or vocab < 1:
        raise ValueError(f"token range [{start}, +{count}) of a vocabulary of {vocab} is invalid")
    if start == 0 and not (hash_ids is not None and len(hash_ids)):
        return _from_the_start(content, count, vocab)
    positions = np.arange(start, start + count, dtype=np.uint64)
    keys = np.full(count, _mixed_key(content, _STREAM_SALT), dtype=np.uint64)
    if hash_ids is not None and len(hash_ids) > 0 and start < len(hash_ids) * block_tokens:
        chunk_keys = np.array([_mixed_key(h, _CHUNK_SALT) for h in hash_ids], dtype=np.uint64)
        chunk = (positions // np.uint64(block_tokens)).astype(np.int64)
        named = chunk < len(chunk_keys)
        keys[named] = chunk_keys[chunk[named]]
        positions[named] %= np.uint64(block_tokens)
    return (_mix(keys + _mix(positions)) % np.uint64(vocab)).astype(np.int32)


def _from_the_start(content: int, count: int, vocab: int) -> npt.NDArray[np.int32]:
    """The first tokens of a stream; the positions are mixed once for all streams."""
    mixed = _mixed_positions(1 << max(count - 1, 0).bit_length())[:count]
    return (_mix(mixed + np.uint64(_mixed_key(content, _STREAM_SALT))) % np.uint64(vocab)).astype(np.int32)


@lru_cache(maxsize=4)
def _mixed_positions(count: int) -> npt.NDArray[np.uint64]:
    return _mix(np.arange(count, dtype=np.uint64))


def _mixed_key(identity: int, salt: int) -> int:
    """A 64-bit key per identity; ``salt`` separates streams and chunks with equal numbers."""
    x = ((identity ^ salt) + _STEP) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection of 64-bit words."""
    x = x + np.uint64(_STEP)
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(_FIRST)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(_SECOND)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x
