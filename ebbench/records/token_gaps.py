"""Which output tokens have a time of their own.

A message of a stream may carry several tokens, a proxy may deliver several messages at once, and a server may count
thinking that it does not send. The tokens that come at the time of the first one tell nothing of the speed of
generation: the time per output token is that of the tokens after them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SAME_TIME_NS = 200_000
"""Tokens that follow each other faster were delivered together: no server decodes 5,000 tokens/s for one user."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def tokens_after_first(output_tokens: Ints, bundled: Bools, gap_counts: Ints, gaps_ns: Ints) -> Ints:
    """Per request the output tokens that came later than the first one; 0 where all came at one time.

    ``bundled``: requests in which not every token has a time of its own. ``gaps_ns`` concatenates the gaps between the
    tokens of all requests (ns), ``gap_counts`` of each.
    """
    after = output_tokens - 1
    if bundled.any():
        stops = np.cumsum(gap_counts)
        starts = (stops - gap_counts)[bundled]
        apart = np.append(np.flatnonzero(gaps_ns >= SAME_TIME_NS), len(gaps_ns))
        first_apart = apart[np.searchsorted(apart, starts)]
        after[bundled] = stops[bundled] - np.minimum(first_apart, stops[bundled])
    return np.maximum(after, 0)


def tokens_after_first_of(requests: pa.Table) -> Ints:
    """:func:`tokens_after_first` of a table in the REQUESTS schema."""
    gaps = requests.column("itl_ns").combine_chunks()
    return tokens_after_first(
        np.array(pc.fill_null(requests.column("output_tokens"), 0).to_numpy(), np.int64),
        np.array(pc.fill_null(requests.column("bundled_tokens"), False).to_numpy(), np.bool_),
        np.array(pc.fill_null(pc.list_value_length(gaps), 0).to_numpy(zero_copy_only=False), np.int64),
        pc.list_flatten(gaps).to_numpy(zero_copy_only=False),
    )
