"""Puts a log's requests in order: sessions by their first arrival, and within a session who waits for whom.

A request waits for those of its session that had ended when it started; without known ends, for the one before. Its
pause is the time from then to its own start. Contents: a prompt that is at least as long as the prompt and output
before it continues them; a shorter one begins anew. Where requests of a session overlap, "before it" are those that it
waits for, and what they branched off from: a turn that joins sub-agents continues the turn that started them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import pyarrow as pa

from ebbench.workloads.arrow import ints, strings
from ebbench.workloads.log_rows import Collected
from ebbench.workloads.requests import Floats, Int32s, Int64s, Requests


def arranged(rows: Collected, start_s: Floats | None, end_s: Floats | None) -> Requests:
    """The requests by arrival and session. ``start_s``, ``end_s``: one entry per row in file order, in any unit.

    ``pause_s`` and ``after`` are set where ends are known, else None.
    """
    count = len(rows)
    times = np.zeros(count) if start_s is None else start_s
    order, session, turn = _order(rows, times)
    inputs = np.asarray(rows.input_tokens, np.int32)[order]
    outputs = np.asarray(rows.output_tokens, np.int32)[order]
    pause_s, after = None, None
    if rows.sessions and end_s is not None:
        pause_s, after = _waits(session, times[order], end_s[order])
    if (stated_s := rows.pause_s) is not None:
        pause_s = stated_s[order]
    first = turn == 0
    return Requests(
        session,
        turn,
        inputs,
        outputs,
        prompt=strings_or_null([rows.prompts[row] for row in order]) if rows.prompts else None,
        hash_ids=_hash_ids(rows, order),
        block_tokens=rows.block_tokens,
        content=_contents(session, turn, inputs, outputs, after) if rows.sessions else None,
        arrival_s=None if start_s is None else times[order][first],
        pause_s=pause_s,
        after=after,
    )


def strings_or_null(texts: Sequence[str | None]) -> pa.Array:
    """A UTF-8 array, null where a text is None."""
    valid = np.fromiter((text is not None for text in texts), np.bool_, len(texts))
    array = strings([text or "" for text in texts])
    return array if valid.all() else pa.compute.if_else(pa.array(valid), array, pa.scalar(None, pa.string()))


def _order(rows: Collected, times: Floats) -> tuple[Int64s, Int64s, Int32s]:
    """Row numbers in plan order, and their session and turn from 0. Equal times keep the order of the file."""
    count = len(rows)
    if not rows.sessions:
        return np.argsort(times, kind="stable"), np.arange(count), np.zeros(count, np.int32)
    codes = rows.session_codes
    alone = codes < 0
    codes = np.where(alone, codes.max() + 1 + np.cumsum(alone), codes)
    place = np.arange(count)
    by_session = np.lexsort((place, np.nan_to_num(rows.turns), times, codes))
    starts = np.flatnonzero(np.diff(codes[by_session], prepend=-1))
    sizes = np.diff(np.append(starts, count))
    arrival = np.minimum.reduceat(times[by_session], starts)
    earliest = by_session[starts]
    ranked = np.lexsort((earliest, arrival))
    session = np.repeat(np.arange(len(ranked)), sizes[ranked])
    begins = np.cumsum(sizes[ranked]) - sizes[ranked]
    turn = np.arange(count) - np.repeat(begins, sizes[ranked])
    order = by_session[np.repeat(starts[ranked], sizes[ranked]) + turn]
    return order, session, turn.astype(np.int32)


def _contents(
    session: Int64s, turn: Int32s, inputs: Int32s, outputs: Int32s, after: list[list[int] | None] | None
) -> Int64s:
    """Content stream per row: that of the row before if the prompt can hold its history, else a new one."""
    total = inputs.astype(np.int64) + outputs
    continues = np.zeros(len(session), bool)
    continues[1:] = (turn[1:] > 0) & (inputs[1:] >= total[:-1])
    content: Int64s = np.cumsum(~continues) - 1
    if after is None:
        return content
    overlapping = np.unique(session[[row for row, waits in enumerate(after) if waits is not None]])
    for first, last in zip(*np.searchsorted(session, [overlapping, overlapping + 1]), strict=True):
        content[first:last] = content.max() + 1 + _chains(after[first:last], inputs[first:last], total[first:last])
    return content


def _chains(after: list[list[int] | None], inputs: Int32s, total: Int64s) -> Int64s:
    """Chain of each request of a session: the longest history that its prompt can hold, which nothing else continues.

    Histories: of the requests that it waits for, and of those that they waited for when their chains began.
    """
    waits = [[row - 1] if row and before is None else before or [] for row, before in enumerate(after)]
    chain: list[int] = []
    begins: list[int] = []
    continued: set[int] = set()
    for row, before in enumerate(waits):
        branched = (one for each in before for one in waits[begins[chain[each]]])
        held = {one for one in (*before, *branched) if one not in continued and total[one] <= inputs[row]}
        if held:
            last = max(held, key=lambda one: (total[one], one))
            continued.add(last)
            chain.append(chain[last])
        else:
            chain.append(len(begins))
            begins.append(row)
    return np.asarray(chain, np.int64)


def _waits(session: Int64s, start_s: Floats, end_s: Floats) -> tuple[Floats, list[list[int] | None] | None]:
    """Pause of each row in s (NaN: unknown, or the first of its session), and the turns it waits for if not the one
    before."""
    count = len(session)
    pause = np.full(count, np.nan)
    same = np.zeros(count, bool)
    same[1:] = session[1:] == session[:-1]
    pause[1:] = np.where(same[1:], start_s[1:] - end_s[:-1], np.nan)
    overlapping = np.unique(session[same & (pause < 0)])
    if not len(overlapping):
        return pause, None
    after: list[list[int] | None] = [None] * count
    bounds = np.searchsorted(session, [overlapping, overlapping + 1])
    for first, last in zip(*bounds, strict=True):
        if np.isnan(end_s[first:last]).any():
            pause[first:last] = np.maximum(pause[first:last], 0.0)
            continue
        _parallel(first, start_s[first:last], end_s[first:last], pause, after)
    return pause, after


def _parallel(first: int, start_s: Floats, end_s: Floats, pause: Floats, after: list[list[int] | None]) -> None:
    """Fill in the waits of one session whose requests overlap: each waits for the last ones that had ended."""
    starts, running = start_s.tolist(), [(end, turn) for turn, end in enumerate(end_s.tolist())]
    waiting: list[tuple[float, int]] = []  # a heap of the requests before this one that have not ended
    ended: list[tuple[float, int]] = []  # the others by their ends, which only come later as starts do
    newest = -1
    for turn in range(1, len(starts)):
        heappush(waiting, running[turn - 1])
        while waiting and waiting[0][0] <= starts[turn]:
            ended.append(heappop(waiting))
            newest = max(newest, ended[-1][1])
        if not ended:
            after[first + turn] = []
            pause[first + turn] = starts[turn] - starts[0]
            continue
        latest = sorted(one for _, one in ended[bisect_right(ended, (starts[newest], len(starts))) :])
        if not latest:  # the last one took no time
            latest = [max(one for _, one in ended[bisect_left(ended, (starts[newest], -1)) :])]
        after[first + turn] = None if latest == [turn - 1] else latest
        pause[first + turn] = starts[turn] - ended[-1][0]


def _hash_ids(rows: Collected, order: Int64s) -> pa.Array | None:
    if not rows.hash_counts:
        return None
    flat = ints(np.asarray(rows.hash_flat, np.int64), pa.int64())
    counts = rows.ids_per_row
    ends = np.concatenate([[0], np.cumsum(np.maximum(counts, 0))])
    missing = counts < 0
    lists = pa.Array.from_buffers(
        pa.list_(pa.int64()),
        len(rows),
        [
            pa.py_buffer(np.packbits(~missing, bitorder="little")) if missing.any() else None,
            pa.py_buffer(ends.astype(np.int32)),
        ],
        children=[flat],
    )
    return lists.take(ints(order, pa.int64()))
