"""The request plan: which requests are sent, when, and after which others; independent of engine and policy. And how
far a run of it has come.

Token ids of prompts are a pure function of what identifies their content, and of the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.errors import UsageError
from ebbench.grouping import by_key
from ebbench.records import CHUNK_TOKENS
from ebbench.records.warnings import RunWarning

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
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
        mixed = _mixed_positions(1 << max(count - 1, 0).bit_length())[:count]
        return (_mix(mixed + np.uint64(_mixed_key(content, _STREAM_SALT))) % np.uint64(vocab)).astype(np.int32)
    positions = np.arange(start, start + count, dtype=np.uint64)
    keys = np.full(count, _mixed_key(content, _STREAM_SALT), dtype=np.uint64)
    if hash_ids is not None and len(hash_ids) > 0 and start < len(hash_ids) * block_tokens:
        chunk_keys = np.array([_mixed_key(h, _CHUNK_SALT) for h in hash_ids], dtype=np.uint64)
        chunk = (positions // np.uint64(block_tokens)).astype(np.int64)
        named = chunk < len(chunk_keys)
        keys[named] = chunk_keys[chunk[named]]
        positions[named] %= np.uint64(block_tokens)
    return (_mix(keys + _mix(positions)) % np.uint64(vocab)).astype(np.int32)


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


@dataclass(frozen=True)
class ClosedPhase:
    """A closed-loop phase: ``sessions`` released in plan order while fewer than ``max_concurrency`` are open.

    A session holds one slot from its first turn's release until its last turn ends. The next phase begins with
    the release that follows the last one of this phase; sessions still open keep their slots.
    """

    name: str
    sessions: int
    max_concurrency: int


@dataclass(frozen=True)
class Plan:
    """A table in the PLAN schema, ordered by release, and the release rules.

    The table may also have columns of PLAN_EXTRAS: pauses, requests that wait for several others, clients that hang up.
    ``phases`` not empty: closed loop. Empty: open loop, sessions start at ``arrival_ns``; ``max_concurrency`` may cap
    open sessions (a request above the cap waits; its intended start does not change). ``facts``: entries for the
    manifest (workload, scenario, seed, source and others). ``release_for_s``: a closed loop releases no session after
    this many seconds; open sessions run to their end. ``cut_from``: the original plan, if this one holds only its
    released sessions.
    """

    table: pa.Table
    phases: tuple[ClosedPhase, ...]
    facts: Mapping[str, Any]
    max_concurrency: int | None = None
    warnings: tuple[RunWarning, ...] = field(default=())
    release_for_s: float | None = None
    cut_from: Plan | None = None

    @property
    def closed_loop(self) -> bool:
        """Whether completions release sessions, instead of arrival times."""
        return bool(self.phases)

    def __len__(self) -> int:
        return int(self.table.num_rows)


# The order of a session's requests: which request waits for which others, and how long it pauses then.
#
# Without a column `after` the turns of a session follow one another. With it a session is a directed graph without
# cycles: a turn may wait for several others, and several turns may wait for one (PLAN_EXTRAS in
# `ebbench.records.files`). The simulator, the emulated engine and the load generator all release requests by this
# graph.

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TurnGraph:
    """One entry per row of a plan.

    ``waits``: how many requests a row waits for, shape (rows,). Row r is followed by
    ``follower_rows[follower_starts[r]:follower_starts[r + 1]]``. ``pause_ns``: see PLAN_EXTRAS; None if no row pauses.
    ``first_rows``: the first row of each session, in plan order. ``parallel_starts``: further rows that start with
    their session, by its first row. ``branched``: whether a row may wait for several others, or be followed by several.
    """

    waits: Ints
    follower_starts: list[int]
    follower_rows: list[int]
    pause_ns: Ints | None
    first_rows: list[int]
    parallel_starts: Mapping[int, list[int]]
    branched: bool

    def followers(self, row: int) -> list[int]:
        """Rows that wait for ``row``, by turn."""
        return self.follower_rows[self.follower_starts[row] : self.follower_starts[row + 1]]

    def descendants(self, row: int) -> Iterator[int]:
        """Every row that waits for ``row``, directly or through others, once each."""
        seen: set[int] = set()
        open_rows = self.followers(row)
        while open_rows:
            following = open_rows.pop()
            if following not in seen:
                seen.add(following)
                yield following
                open_rows += self.followers(following)

    def pause_of(self, row: int) -> int:
        """The pause (ns) of a row; 0 for rows after the plan's own, which are warm-up requests."""
        return 0 if self.pause_ns is None or row >= len(self.pause_ns) else int(self.pause_ns[row])


def turn_graph(table: pa.Table) -> TurnGraph:
    """The graph of a plan's table. Raises UsageError for a turn that waits for one that is not before it."""
    sessions = np.asarray(table["session"])
    turns = np.asarray(table["turn"])
    order = np.lexsort((turns, sessions))
    same = sessions[order][1:] == sessions[order][:-1]
    first = np.ones(len(order), np.bool_)
    first[order[1:][same]] = False
    parents, children = order[:-1][same], order[1:][same]
    branched = "after" in table.column_names
    if branched:
        parents, children = _edges(table, parents, children, sessions, turns)
    waits = np.bincount(children, minlength=len(order)).astype(np.int64)
    by_parent = np.argsort(parents, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(parents, minlength=len(order)))])
    return TurnGraph(
        waits,
        starts.tolist(),
        children[by_parent].tolist(),
        optional_ints(table, "pause_ns"),
        np.flatnonzero(first).tolist(),
        _parallel_starts(sessions, first, np.flatnonzero((waits == 0) & ~first)) if branched else {},
        branched,
    )


def primed(table: pa.Table) -> pa.Table:
    """The requests (PLAN, one row each) that put what a plan's table takes for held into the prefix cache."""
    from ebbench.records.schema import PLAN

    if "primed_tokens" not in table.column_names:
        return PLAN.empty_table()
    rows = table.filter(table["primed_tokens"].is_valid())
    tokens, size = rows["primed_tokens"].to_pylist(), block_tokens(table)
    ids = [
        block_ids and block_ids[: -(-n // size)]
        for block_ids, n in zip(rows["hash_ids"].to_pylist(), tokens, strict=True)
    ]
    sessions = np.arange(rows.num_rows) + 2 * int(np.asarray(table["session"]).max(initial=0)) + table.num_rows + 1
    changed = {
        "request_id": pa.array([f"primed-{name}" for name in rows["request_id"].to_pylist()], pa.string()),
        "session": pa.array(sessions, pa.int64()),
        "turn": pa.array(np.zeros(rows.num_rows), pa.int32()),
        "input_tokens": pa.array(tokens, pa.int32()),
        "output_tokens": pa.array(np.ones(rows.num_rows), pa.int32()),
        "hash_ids": pa.array(ids, PLAN.field("hash_ids").type),
    }
    return pa.table({name: changed.get(name, rows[name]) for name in PLAN.names}, schema=PLAN)


def with_plan_columns(requests: pa.Table, plan: pa.Table) -> pa.Table:
    """The table of a run's requests with their classes and the time that tools took before them, where the plan says
    so."""
    import pyarrow.compute as pc

    from ebbench.records.schema import REQUESTS_EXTRAS

    columns = {name: plan[name] for name in ("class", "tool_ns") if name in plan.column_names}
    if "tool_ns" in columns:
        columns["tool_ns"] = pc.if_else(plan["pause_ns"].is_valid(), plan["tool_ns"], 0)
    columns = {name: values for name, values in columns.items() if name not in requests.column_names}
    rows = pc.index_in(requests["request_id"], value_set=plan["request_id"].combine_chunks()) if columns else None
    for name, values in columns.items():
        requests = requests.append_column(REQUESTS_EXTRAS.field(name), values.combine_chunks().take(rows))
    return requests


def optional_ints(table: pa.Table, name: str, null: int = 0) -> Ints | None:
    """A column of whole numbers with ``null`` for null, shape (rows,); None if the table lacks it or has only nulls."""
    if name not in table.column_names or table[name].null_count == table.num_rows:
        return None
    values: Ints = np.asarray(table[name].fill_null(null), np.int64)
    return values


def _edges(table: pa.Table, before: Ints, following: Ints, sessions: Ints, turns: Ints) -> tuple[Ints, Ints]:
    """Rows waited for and rows that wait, one entry per pair, ordered by session and turn of the waiting row.

    ``before`` and ``following``: the pairs if every turn waited for the one before it.
    """
    after = table["after"].combine_chunks()
    listed = after.is_valid().to_numpy(zero_copy_only=False)
    by_default = ~listed[following]
    waiting = after.value_parent_indices().to_numpy(zero_copy_only=False).astype(np.int64)
    wanted = after.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    _, codes = np.unique(sessions, return_inverse=True)
    width = int(turns.max()) + 1 if len(turns) else 1
    keys = codes * width + turns
    by_key = np.argsort(keys, kind="stable")
    places = np.minimum(np.searchsorted(keys, codes[waiting] * width + wanted, sorter=by_key), len(keys) - 1)
    rows = by_key[places]
    bad = (wanted >= turns[waiting]) | (wanted < 0) | (sessions[rows] != sessions[waiting]) | (turns[rows] != wanted)
    if bad.any():
        place = int(np.flatnonzero(bad)[0])
        name = table["request_id"][int(waiting[place])].as_py()
        raise UsageError(
            f"request {name} waits for turn {wanted[place]}, which is not an earlier turn of its session; "
            "`after` lists lower turn numbers of the same session"
        )
    parents = np.concatenate([before[by_default], rows])
    children = np.concatenate([following[by_default], waiting])
    order = np.lexsort((turns[children], sessions[children]))
    return parents[order], children[order]


def _parallel_starts(sessions: Ints, first: npt.NDArray[np.bool_], others: Ints) -> dict[int, list[int]]:
    first_of = dict(zip(sessions[first].tolist(), np.flatnonzero(first).tolist(), strict=True))
    return by_key((first_of[int(sessions[row])], row) for row in others.tolist())


@dataclass(frozen=True)
class Progress:
    """A snapshot for the progress line."""

    policy: str
    completed: int
    planned: int
    output_tokens: int
    total_tokens: int
    time_s: float  # engine time, virtual or real
    mode: str
    running: int
    waiting: int
    # Known during the run only for engines that measure a server; failures by class, and medians of the last 500
    # complete responses, in ms.
    failures: Mapping[str, int] = field(default_factory=dict)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    # What the engine waits for before the first request; ``time_s`` is then the time of the wait.
    waiting_for: str = ""


class Observer(Protocol):
    """Receives snapshots during a run; must return quickly."""

    def update(self, progress: Progress) -> None:
        """Process a snapshot."""
        ...
