"""Prompts that share prefixes: how a log's prompts repeat earlier ones, and new prompts that repeat alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ebbench.records.content import CHUNK_TOKENS
from ebbench.workloads.arrow import int_lists
from ebbench.workloads.requests import Floats, Int32s, Int64s, Requests

_NEAR = 0.25
"""Share of the wanted lag by which the lag of the prompt that is repeated may be off, if one there is long enough."""


class Repeats(NamedTuple):
    """Per request: leading blocks that an earlier prompt had; requests since the last of those; blocks of that one."""

    blocks: Int64s
    lag: Int64s
    earlier_blocks: Int64s


def repeats_in(requests: Requests) -> Repeats:
    """How each prompt of a log repeats earlier ones. The requests have hash ids."""
    assert requests.hash_ids is not None  # the caller checked
    return repeats_of(requests.hash_ids, requests.input_tokens, requests.block_tokens or CHUNK_TOKENS)


def repeats_of(hash_ids: pa.Array, input_tokens: Int32s, block_tokens: int) -> Repeats:
    """How each prompt repeats earlier ones. ``hash_ids``: one list per request in order of arrival, null for none.

    A block is repeated if an earlier prompt had it after the same blocks, and as long: a last block that is not full is
    no prefix of a longer one.
    """
    nodes: dict[tuple[int, int, int], int] = {}  # by the node before, the id, and the block's tokens
    last: list[int] = []  # per node, the last request that had it
    sizes: list[int] = []
    blocks, lags, earlier = [], [], []
    for row, (ids, tokens) in enumerate(zip(hash_ids.to_pylist(), input_tokens.tolist(), strict=True)):
        path, node = list[int](), -1
        for place, one in enumerate(ids or ()):
            size = min(block_tokens, tokens - place * block_tokens)
            node = nodes.setdefault((node, one, size), len(nodes))
            path.append(node)
        held = next((place for place, node in enumerate(path) if node >= len(last)), len(path))
        blocks.append(held)
        parent = last[path[held - 1]] if held else row
        lags.append(row - parent)
        earlier.append(sizes[parent] if held else 0)
        sizes.append(len(path))
        last += [row] * (len(nodes) - len(last))
        for node in path:
            last[node] = row
    return Repeats(np.asarray(blocks, np.int64), np.asarray(lags, np.int64), np.asarray(earlier, np.int64))


def shared_prefixes(input_tokens: Int32s, blocks: Int64s, lags: Floats, depths: Floats, block_tokens: int) -> pa.Array:
    """Hash ids of prompts that repeat ``blocks`` leading blocks of an earlier prompt, about ``lags`` requests before.

    ``depths``: the share of the earlier prompt that is repeated. Each argument has one entry per request. The earlier
    prompt is, among those near the lag that are long enough, the one whose length fits the depth best. Returns one list
    per request with the repeated ids and new ids for the rest.
    """
    count = len(input_tokens)
    have = -(-input_tokens.astype(np.int64) // block_tokens)
    whole = input_tokens.astype(np.int64) // block_tokens
    rows: list[list[int]] = []
    fresh = 0
    for row in range(count):
        want = min(int(blocks[row]), int(whole[row]))
        ids: list[int] = []
        if want and row:
            ids = rows[_earlier(whole[:row], want, float(lags[row]), float(depths[row]))][:want]
        missing = int(have[row]) - len(ids)
        rows.append([*ids, *range(fresh, fresh + missing)])
        fresh += missing
    return int_lists(rows)


def _earlier(sizes: Int64s, want: int, lag: float, depth: float) -> int:
    """The prompt to repeat: near the lag and of at least ``want`` blocks; of several the one nearest to the depth.

    Where no prompt near the lag is long enough the range widens; if none is at all, the longest is repeated.
    """
    count = len(sizes)
    middle, near = max(0, count - max(1, round(lag))), max(2, int(_NEAR * lag))
    while True:
        low, high = max(0, middle - near), min(count, middle + near + 1)
        part = sizes[low:high]
        if part.max() >= want or (low == 0 and high == count):
            break
        near *= 4
    wanted = max(float(want), want / max(depth, 1e-3))
    distance = np.abs(np.log(np.maximum(part, 0.5) / wanted)) + np.where(part < want, 1e3 * (want - part), 0.0)
    return low + int(np.argmin(distance))
