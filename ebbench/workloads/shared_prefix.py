"""Shared prefixes of synthetic prompts: groups of sessions whose prompts begin alike, or a cache hit rate to reach.

The first ``share`` of a session's first prompt is the beginning of its group's text, in whole blocks of
:data:`BLOCK_TOKENS` tokens; later turns begin with the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ebbench.errors import UsageError
from ebbench.traffic.substreams import substream
from ebbench.workloads.arrow import ints
from ebbench.workloads.requests import Int64s, Requests

BLOCK_TOKENS = 16
"""Tokens per block, as in vLLM's prefix cache."""
_MOST_BLOCKS = 1 << 20
_STEPS = 40


@dataclass(frozen=True)
class PrefixOptions:
    """``share`` of the prompts in (0, 1), or the ``hit_rate`` to reach in (0, 1); ``groups`` of equal size."""

    share: float | None = None
    groups: int | None = None
    hit_rate: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--prefix-share", self.share), ("--cache-hit-rate", self.hit_rate)):
            if value is not None and not 0 < value < 1:
                raise UsageError(f"{name} must lie between 0 and 1, not {value:g}")
        if self.groups is not None and self.groups < 1:
            raise UsageError(f"--prefix-groups must be at least 1, not {self.groups}")
        if self.share is not None and self.hit_rate is not None:
            raise UsageError("--prefix-share and --cache-hit-rate both set the shared prefix; leave one of them out")
        if self.groups is not None and self.share is None and self.hit_rate is None:
            raise UsageError("--prefix-groups needs --prefix-share or --cache-hit-rate")

    @property
    def asked(self) -> bool:
        """Whether prompts are to share prefixes."""
        return self.share is not None or self.hit_rate is not None


def with_shared_prefixes(requests: Requests, options: PrefixOptions, seed: int) -> Requests:
    """The requests with hash ids for their shared prefixes; facts say the share and the hit rate that it allows.

    Raises UsageError for requests with texts or prefixes of their own, and for a hit rate that cannot be reached.
    """
    if requests.hash_ids is not None or requests.prompt is not None:
        own = "texts" if requests.prompt is not None else "shared prefixes"
        raise UsageError(f"these prompts have {own} of their own; leave out --prefix-share and --cache-hit-rate")
    groups = options.groups or 1
    group = substream(seed, "content/groups").permutation(requests.sessions) % groups
    share = options.share
    if share is None:
        assert options.hit_rate is not None  # the caller checked options.asked
        share = _share_for(requests, group, options.hit_rate, groups)
    blocks = _blocks(requests, share)
    facts = {
        "prefix_share": round(share, 6),
        "prefix_groups": groups,
        **({"cache_hit_rate": options.hit_rate} if options.hit_rate is not None else {}),
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
    found: Int64s = np.minimum(wanted, (first - 1) // BLOCK_TOKENS)
    return found


def _hit_rate(requests: Requests, group: Int64s, blocks: Int64s) -> float:
    """Share of the prompt tokens that an unlimited cache holds if requests run one after the other, in plan order."""
    hits = np.zeros(len(requests), np.int64)
    first = requests.turn == 0
    hits[first] = np.minimum(blocks, _most_before(group, blocks)) * BLOCK_TOKENS
    total = requests.input_tokens.astype(np.int64) + requests.output_tokens
    before = np.where(first[1:], 0, np.minimum(total[:-1], requests.input_tokens[1:] - 1))
    hits[1:] = np.maximum(hits[1:], before // BLOCK_TOKENS * BLOCK_TOKENS)
    return float(hits.sum() / requests.input_tokens.sum())


def _most_before(group: Int64s, blocks: Int64s) -> Int64s:
    """The most blocks of an earlier session of the same group; 0 for the first."""
    order = np.argsort(group, kind="stable")
    found = np.zeros(len(group), np.int64)
    bounds = np.flatnonzero(np.diff(group[order], prepend=-1))
    for rows in np.split(order, bounds[1:]):
        found[rows[1:]] = np.maximum.accumulate(blocks[rows])[:-1]
    return found


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
    return pa.Array.from_buffers(
        pa.list_(pa.int64()),
        len(blocks),
        [None, pa.py_buffer(ends.astype(np.int32))],
        children=[ints(flat, pa.int64())],
    )
