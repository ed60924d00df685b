"""Shared prefixes of synthetic prompts: groups of sessions whose prompts begin alike, or a cache hit rate to reach.

The first ``share`` of a session's first prompt is the beginning of its group's text, in whole blocks of
:data:`BLOCK_TOKENS` tokens; later turns begin with the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ebbench.errors import UsageError
from ebbench.records import CHUNK_TOKENS
from ebbench.traffic.arrivals import substream
from ebbench.workloads.options import PlanOptions
from ebbench.workloads.requests import Floats, Int32s, Int64s, Requests, int_lists, int_lists_of

BLOCK_TOKENS = 16
"""Tokens per block, as in vLLM's prefix cache."""
_MOST_BLOCKS = 1 << 20
_STEPS = 40


def with_shared_prefixes(requests: Requests, options: PlanOptions) -> Requests:
    """The requests with hash ids for their shared prefixes; facts say the share and the hit rate that it allows.

    Raises UsageError for requests with texts or prefixes of their own, and for a hit rate that cannot be reached.
    """
    if requests.hash_ids is not None or requests.prompt is not None:
        own = "texts" if requests.prompt is not None else "shared prefixes"
        raise UsageError(f"these prompts have {own} of their own; leave out --prefix-share and --cache-hit-rate")
    groups = options.prefix_groups or 1
    group = substream(options.seed, "content/groups").permutation(requests.sessions) % groups
    share = options.prefix_share
    if share is None:
        assert options.cache_hit_rate is not None  # the caller checked options.shares_prefixes
        share = _share_for(requests, group, options.cache_hit_rate, groups)
    blocks = _blocks(requests, share)
    facts = {
        "prefix_share": round(share, 6),
        "prefix_groups": groups,
        **({"cache_hit_rate": options.cache_hit_rate} if options.cache_hit_rate is not None else {}),
        "planned_hit_rate": round(_hit_rate(requests, group, blocks), 6),
    }
    return replace(
        requests,
        hash_ids=_hash_ids(group[requests.session], blocks[requests.session]),
        block_tokens=BLOCK_TOKENS,
        facts={**requests.facts, **facts},
    )


def _blocks(requests: Requests, share: float) -> Int64s:
    """Shared blocks per session: ``share`` of its first prompt, of which one token at least is its own."""
    first = requests.input_tokens[requests.turn == 0].astype(np.int64)
    wanted = np.rint(first * share / BLOCK_TOKENS).astype(np.int64)
    blocks: Int64s = np.minimum(wanted, (first - 1) // BLOCK_TOKENS)
    return blocks


def _hit_rate(requests: Requests, group: Int64s, blocks: Int64s) -> float:
    """Share of the prompt tokens that an unlimited cache holds if requests run one after the other, in plan order."""
    hits = np.zeros(len(requests), np.int64)
    first = requests.turn == 0
    order = np.argsort(group, kind="stable")
    most = np.zeros(len(group), np.int64)
    bounds = np.flatnonzero(np.diff(group[order], prepend=-1))
    for rows in np.split(order, bounds[1:]):
        most[rows[1:]] = np.maximum.accumulate(blocks[rows])[:-1]
    hits[first] = np.minimum(blocks, most) * BLOCK_TOKENS
    total = requests.input_tokens.astype(np.int64) + requests.output_tokens
    before = np.where(first[1:], 0, np.minimum(total[:-1], requests.input_tokens[1:] - 1))
    hits[1:] = np.maximum(hits[1:], before // BLOCK_TOKENS * BLOCK_TOKENS)
    return float(hits.sum() / requests.input_tokens.sum())


def _share_for(requests: Requests, group: Int64s, hit_rate: float, groups: int) -> float:
    """The share of the prompts that gives this hit rate, by bisection."""
    highest = _hit_rate(requests, group, _blocks(requests, 1.0))
    lowest = _hit_rate(requests, group, _blocks(requests, 0.0))
    if not lowest <= hit_rate <= highest:
        what = "conversations repeat" if lowest > hit_rate else f"{groups} groups of {requests.sessions} sessions reach"
        bound = lowest if lowest > hit_rate else highest
        advice = "give a higher one" if lowest > hit_rate else "give fewer --prefix-groups or more --num-prompts"
        raise UsageError(f"a cache hit rate of {hit_rate:g} cannot be reached: {what} {bound:.3f}; {advice}")
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _hit_rate(requests, group, _blocks(requests, middle)) < hit_rate:
            low = middle
        else:
            high = middle
    return high


def _hash_ids(group: Int64s, blocks: Int64s) -> pa.Array:
    """Ids of the first blocks of each row's group; one list per row."""
    ends = np.concatenate([[0], np.cumsum(blocks)])
    place = np.arange(int(ends[-1])) - np.repeat(ends[:-1], blocks)
    flat = np.repeat(group * _MOST_BLOCKS, blocks) + place
    return int_lists_of(flat, blocks, np.ones(len(blocks), np.bool_))


# Prompts that share prefixes: how a log's prompts repeat earlier ones, and new prompts that repeat alike.

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
    return count_repeats(requests.hash_ids, requests.input_tokens, requests.block_tokens or CHUNK_TOKENS)


def count_repeats(hash_ids: pa.Array, input_tokens: Int32s, block_tokens: int) -> Repeats:
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
        for place, block_id in enumerate(ids or ()):
            size = min(block_tokens, tokens - place * block_tokens)
            node = nodes.setdefault((node, block_id, size), len(nodes))
            path.append(node)
        known_blocks = next((place for place, node in enumerate(path) if node >= len(last)), len(path))
        blocks.append(known_blocks)
        parent = last[path[known_blocks - 1]] if known_blocks else row
        lags.append(row - parent)
        earlier.append(sizes[parent] if known_blocks else 0)
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
