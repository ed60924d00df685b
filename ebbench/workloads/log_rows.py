"""The rows of a log as columns of numbers: 100 bytes or less per request while a log is read."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.errors import InputFileError
from ebbench.workloads.files import LogFile
from ebbench.workloads.options import TIME_UNITS
from ebbench.workloads.recorded import MOST_CLASSES, Dropped, Reading, Recorded, StampColumn, Stamps, TimeReading
from ebbench.workloads.requests import Floats, Int32s, Int64s, Requests, int_lists_of, ints, strings

_NO_SESSION, _NO_IDS, _UNKNOWN = -1, -1, float("nan")
_LARGE_ID = 1 << 40
_BLOCKS = (512, 16, 64, 128, 256, 32, 1024, 2048)
"""Block sizes in tokens of published traces and of servers, in order of preference where several fit."""


@dataclass
class Collected:
    """Columns with one entry per request in file order; a column that no row needs is empty.

    ``session``: codes from 0, -1 without a session. ``hash_flat`` and ``hash_counts``: hash ids of all rows one after
    the other, and how many each row has, -1 without any; ``block_tokens``: prompt tokens per hash id, and
    ``derived_block``: that size follows from the lengths and is not the usual one. ``dropped``: per reason the number
    of rows and the line of the first; ``failed_by``: roles of columns that told failed ones; ``odd``: as ``dropped``,
    of requests with impossible values that are not used, by the warning. ``cached_tokens``: prompt tokens that were in
    the server's cache, over all rows; None if the log does not say. ``classes``: empty if no row has one.
    ``steps_by_accepted``: decode steps of all rows that accepted 0, 1, ... drafts; empty if the log does not say.
    """

    line: Any = field(default_factory=lambda: array("q"))
    input_tokens: Any = field(default_factory=lambda: array("i"))
    output_tokens: Any = field(default_factory=lambda: array("i"))
    session: Any = field(default_factory=lambda: array("q"))
    turn: Any = field(default_factory=lambda: array("d"))
    dropped: dict[str, tuple[int, int]] = field(default_factory=dict)
    failed_by: set[str] = field(default_factory=set)
    prompts: list[str | None] = field(default_factory=list)
    classes: list[str | None] = field(default_factory=list)
    steps_by_accepted: list[int] = field(default_factory=list)
    hash_flat: Any = field(default_factory=lambda: array("q"))
    hash_counts: Any = field(default_factory=lambda: array("q"))
    block_tokens: int | None = None
    derived_block: bool = False
    times: StampColumn = field(default_factory=StampColumn)
    odd: dict[str, tuple[int, int]] = field(default_factory=dict)
    cached_tokens: int | None = None
    ends: Any = field(default_factory=lambda: array("d"))
    durations: Any = field(default_factory=lambda: array("d"))
    pauses: Any = field(default_factory=lambda: array("d"))
    brings_results: Any = field(default_factory=lambda: array("d"))
    calls_tools: Any = field(default_factory=lambda: array("d"))
    _codes: dict[Any, int] = field(default_factory=dict)
    _labels: dict[int | str, int] = field(default_factory=lambda: defaultdict(count().__next__))

    def __len__(self) -> int:
        return len(self.line)

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens that were in the server's cache; None if the log does not say."""
        if self.cached_tokens is None:
            return None
        return self.cached_tokens / max(1, int(np.asarray(self.input_tokens, np.int64).sum()))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafts that were accepted at least up to each position; empty if the log does not say."""
        counts = self.steps_by_accepted
        steps = sum(counts)
        return tuple(sum(counts[place:]) / steps for place in range(1, len(counts))) if steps else ()

    @property
    def sessions(self) -> bool:
        """Whether any request belongs to a session."""
        return bool(self._codes)

    def add(self, row: Recorded) -> None:
        """Append one request."""
        self.line.append(row.line)
        self.input_tokens.append(row.input_tokens)
        self.output_tokens.append(row.output_tokens)
        if row.stamp is not None:
            self.times.append(row.stamp)
        if row.session is not None:
            code = self._codes.setdefault(
                str(row.session) if isinstance(row.session, list | dict) else row.session, len(self._codes)
            )
            _put(self.session, len(self.line), code, _NO_SESSION)
        negative = row.duration_s is not None and row.duration_s < 0
        if negative or (row.end is not None and row.stamp is not None and row.end.value < row.stamp.value):
            _count(self.odd, "ends-before-starts", row.line)
            row = row._replace(end=None, duration_s=None)
        if row.end is not None:
            _put(self.ends, len(self.line), row.end.value - self.times.base, _UNKNOWN)
        for column, said in (
            (self.turn, row.turn), (self.durations, row.duration_s), (self.pauses, row.pause_s),
            (self.brings_results, row.brings_results), (self.calls_tools, row.calls_tools),
        ):  # fmt: skip
            if said is not None:
                _put(column, len(self.line), float(said), _UNKNOWN)
        if row.hash_ids is not None:
            before = len(self.hash_flat)
            try:
                self.hash_flat.extend(map(self._labels.__getitem__, row.hash_ids) if self._labels else row.hash_ids)
            except (OverflowError, TypeError):
                earlier_ids = self.hash_flat[:before]
                self.hash_flat = array("q", map(self._labels.__getitem__, (*earlier_ids, *row.hash_ids)))
            _put(self.hash_counts, len(self.line), len(row.hash_ids), _NO_IDS)
        if row.cached_tokens is not None and row.cached_tokens > row.input_tokens:
            _count(self.odd, "more-cached-than-prompt", row.line)
        elif row.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + row.cached_tokens
        if row.steps_by_accepted is not None:
            self.steps_by_accepted += [0] * (len(row.steps_by_accepted) - len(self.steps_by_accepted))
            for place, steps in enumerate(row.steps_by_accepted):
                self.steps_by_accepted[place] += steps
        for texts, text in ((self.prompts, row.prompt), (self.classes, row.request_class)):
            if text is not None:
                _put(texts, len(self.line), text, None)

    def drop(self, row: Dropped) -> None:
        """Count a row that is left out."""
        _count(self.dropped, row.reason, row.line)
        self.failed_by.add(row.role)

    def join(self, before: Mapping[Any, Any]) -> None:
        """Make one session of each chain of requests, whose ids are their sessions so far, in whatever order they are.

        ``before``: the id of each request's predecessor, by id.
        """
        first: dict[Any, Any] = {}
        for request in self._codes:
            chain = {request: None}
            while request not in first and (earlier := before.get(request)) in before and earlier not in chain:
                chain[request := earlier] = None
            first |= dict.fromkeys(chain, first.get(request, request))
        codes: dict[Any, int] = {}
        numbers = [codes.setdefault(first[request], len(codes)) for request in self._codes]
        self.session = array("q", np.append(numbers, _NO_SESSION)[np.asarray(self.session)].tolist())
        self._codes = codes

    def forget_single_ids(self) -> None:
        """Remove hash ids that occur in one prompt only: they show no sharing."""
        flat, counts = np.asarray(self.hash_flat, np.int64), np.asarray(self.hash_counts, np.int64)
        if not flat.size:
            return
        shared = np.bincount(flat)[flat] > 1
        rows = np.repeat(np.arange(len(counts)), np.maximum(counts, 0))
        kept = np.bincount(rows[shared], minlength=len(counts))
        self.hash_flat = array("q", flat[shared].tolist())
        self.hash_counts = array("q", np.where(counts < 0, counts, kept).tolist())

    def stamps(self) -> Stamps | None:
        """The start times; None if the rows have none. Raises ValueError if their kinds are mixed."""
        return self.times.stamps() if self.times.offsets else None

    def end_s(self, stamps: Stamps, unit: TimeReading) -> Floats | None:
        """End times in s from the first start, NaN where unknown; None if none is known."""
        if not self.ends:
            return None
        ends = _padded(self.ends, len(self), _UNKNOWN)
        scale = 1.0 if unit.unit == "iso" else TIME_UNITS[unit.unit]
        seconds: Floats = (ends - (float(stamps.first - self.times.base))) / scale
        return seconds

    @property
    def lasted_s(self) -> Floats | None:
        """Durations in s, NaN where unknown; None if none is known."""
        return _padded(self.durations, len(self), _UNKNOWN) if self.durations else None

    @property
    def ids_per_row(self) -> Int64s:
        """``hash_counts`` with an entry for every row."""
        counts: Int64s = _padded(self.hash_counts, len(self), _NO_IDS)
        return counts


def _count(counts: dict[str, tuple[int, int]], what: str, line: int) -> None:
    earlier, first = counts.get(what, (0, line))
    counts[what] = (earlier + 1, first)


def _put(column: Any, rows: int, value: Any, missing: Any) -> None:
    """Write the entry of the last of ``rows`` rows; those before it that have none get ``missing``."""
    lacking = rows - 1 - len(column)
    if lacking:
        column.extend([missing] * lacking)
    column.append(value)


def _padded(column: Any, rows: int, missing: Any) -> Any:
    return np.concatenate([np.asarray(column), np.full(rows - len(column), missing, np.asarray(column).dtype)])


def collect(log: LogFile, reading: Reading) -> Collected:
    """Read all rows. Raises InputFileError with the line."""
    collected = Collected()
    for row in reading.rows:
        if isinstance(row, Recorded):
            if row.end is not None and row.stamp is not None and row.end[1:] != row.stamp[1:]:
                problem = "its start and its end are not written one way (ISO 8601, with or without a zone, or numbers)"
                raise InputFileError(log.path, problem, row.line)
            collected.add(row)
        else:
            collected.drop(row)
    if reading.before and collected.sessions:
        collected.join(reading.before)
    if collected.times.offsets and len(collected.times.offsets) != len(collected):
        raise InputFileError(log.path, "some requests have a time and some have none", int(collected.line[-1]))
    for texts in filter(None, (collected.prompts, collected.classes)):
        texts += [None] * (len(collected) - len(texts))
    if (classes := len(set(collected.classes) - {None})) > MOST_CLASSES:
        column = "class" if reading.columns is None else reading.columns.names.get("class", "class")
        problem = f"column {column!r} has {classes:,} different values, too many for classes of requests"
        raise InputFileError(log.path, f"{problem}; --columns class=- leaves it out")
    if collected.hash_counts:
        flat = np.asarray(collected.hash_flat, np.int64)
        if flat.size and not 0 <= flat.min() <= flat.max() < _LARGE_ID:
            collected.hash_flat = array("q", np.unique(flat, return_inverse=True)[1].tolist())
        collected.block_tokens = _block_tokens(log, collected, reading)
        if reading.from_texts:
            collected.forget_single_ids()
        collected.derived_block = reading.block_tokens is None and collected.block_tokens != _BLOCKS[0]
    return collected


def _block_tokens(log: LogFile, rows: Collected, reading: Reading) -> int:
    """Prompt tokens per hash id: as defined by the format, else the size that fits the lengths of all prompts.

    Raises InputFileError, with the line, if a prompt has more ids than it can fill.
    """
    counts, lengths = rows.ids_per_row, np.asarray(rows.input_tokens, np.int64)
    known = counts > 0
    if not known.any():
        return reading.block_tokens or _BLOCKS[0]
    ids, tokens = counts[known], lengths[known]
    several = ids > 1
    # Every id but the last stands for a whole block, so that the blocks are at most this long.
    most = np.where(several, (tokens - 1) // np.maximum(ids - 1, 1), np.iinfo(np.int64).max)
    size = reading.block_tokens or _fitting(ids, tokens, most)
    worst = int(np.argmin(most))
    if size > most[worst]:
        line = int(np.asarray(rows.line)[known][worst])
        problem = f"{ids[worst]} hash_ids are too many for {tokens[worst]} tokens in blocks of {size}"
        raise InputFileError(log.path, f"{problem}; --columns block_tokens=N sets the size", line)
    return size


def _fitting(ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], most: npt.NDArray[np.int64]) -> int:
    """The preferred block size that gives every prompt an id per begun block; else per full block; else 512."""
    begun = (int((-(-tokens // ids)).max()), int(most.min()))
    full = (int((tokens // (ids + 1)).max()) + 1, int((tokens // ids).min()))
    for low, high in (begun, full):
        fits = [size for size in _BLOCKS if low <= size <= high]
        if fits:
            return fits[0]
    return _BLOCKS[0]


# Puts a log's requests in order: sessions by their first arrival, and within a session who waits for whom.
#
# A request waits for those of its session that had ended when it started; without known ends, for the one before. Its
# pause is the time from then to its own start. Contents: a prompt that is at least as long as the prompt and output
# before it continues them; a shorter one begins anew. Where requests of a session overlap, "before it" are those that
# it waits for, and what they branched off from: a turn that joins sub-agents continues the turn that started them.


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
    if rows.pauses:  # that the log states
        pause_s = _padded(rows.pauses, count, _UNKNOWN)[order]
    first = turn == 0
    starts_s = times[order]
    own_times = start_s is not None and rows.sessions and end_s is not None
    hash_ids = None
    if rows.hash_counts:
        counts = rows.ids_per_row
        lists = int_lists_of(np.asarray(rows.hash_flat, np.int64), np.maximum(counts, 0), counts >= 0)
        hash_ids = lists.take(ints(order, pa.int64()))
    return Requests(
        session,
        turn,
        inputs,
        outputs,
        prompt=strings_or_null([rows.prompts[row] for row in order]) if rows.prompts else None,
        hash_ids=hash_ids,
        block_tokens=rows.block_tokens,
        content=_contents(session, turn, inputs, outputs, after) if rows.sessions else None,
        arrival_s=None if start_s is None else starts_s[first],
        pause_s=pause_s,
        tool_share=None if pause_s is None else _tool_share(rows, order, turn, after),
        after=after,
        classes=[rows.classes[row] for row in order] if rows.classes else None,
        offset_s=starts_s - starts_s[first][session] if own_times else None,
    )


def _tool_share(rows: Collected, order: Int64s, turn: Int32s, after: list[list[int] | None] | None) -> Floats | None:
    """Per row 1 where the pause before it is of tools, 0 where it is the user's, NaN where the log does not say; None
    if it never does. A request with results of tools follows them, else one that follows a response with calls."""
    brings, calls = (_padded(column, len(rows), _UNKNOWN)[order] for column in (rows.brings_results, rows.calls_tools))
    before = np.arange(len(order)) - 1
    for row, waits in enumerate(after or ()):
        if waits:
            before[row] = row - int(turn[row]) + max(waits)
    share: Floats = np.where(np.isnan(brings), calls[before], brings)
    share[turn == 0] = np.nan
    return None if np.isnan(share).all() else share


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
    codes = _padded(rows.session, count, _NO_SESSION)
    alone = codes < 0
    codes = np.where(alone, codes.max() + 1 + np.cumsum(alone), codes)
    place = np.arange(count)
    turns = np.nan_to_num(_padded(rows.turn, count, _UNKNOWN))
    by_session = np.lexsort((place, turns, times, codes))
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
        branched = (candidate for waited in before for candidate in waits[begins[chain[waited]]])
        candidates = {
            candidate
            for candidate in (*before, *branched)
            if candidate not in continued and total[candidate] <= inputs[row]
        }
        if candidates:
            last = max(candidates, key=lambda candidate: (total[candidate], candidate))
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
        latest = sorted(earlier for _, earlier in ended[bisect_right(ended, (starts[newest], len(starts))) :])
        if not latest:  # the last one took no time
            latest = [max(earlier for _, earlier in ended[bisect_left(ended, (starts[newest], -1)) :])]
        after[first + turn] = None if latest == [turn - 1] else latest
        pause[first + turn] = starts[turn] - ended[-1][0]
