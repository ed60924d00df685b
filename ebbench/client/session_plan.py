"""A plan in the form that workers use: sessions in release order; large columns are read row by row from Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.client.bodies import Turn
from ebbench.client.pacing import Arrivals, Slots
from ebbench.errors import UsageError
from ebbench.records.content import CHUNK_TOKENS, block_tokens
from ebbench.records.plan import ClosedPhase
from ebbench.records.turn_graph import TurnGraph, turn_graph


@dataclass(frozen=True)
class SessionPlan:
    """Session i is ``rows[starts[i]:starts[i + 1]]`` of the table, turns in order."""

    columns: Mapping[str, Sequence[Any]]
    rows: Sequence[int]
    starts: Sequence[int]
    slots: Slots
    arrivals: Arrivals | None
    graph: TurnGraph
    block_tokens: int = CHUNK_TOKENS

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return len(self.starts) - 1

    def turns(self, session: int) -> Sequence[int]:
        """Rows of a session, in turn order."""
        return self.rows[self.starts[session] : self.starts[session + 1]]

    def turn(self, row: int) -> Turn:
        """One request."""
        fields: dict[str, Any] = {name: self.columns[name][row] for name in _TURN_COLUMNS}
        for name in ("lora", "image_tokens", "image_side"):
            if name in self.columns and (value := self.columns[name][row]) is not None:
                fields[name] = value
        return Turn(row=row, block_tokens=self.block_tokens, **fields)

    def hang_up_ns(self, row: int) -> int | None:
        """How long (ns) after sending the client hangs up; None: never."""
        times = self.columns.get("hang_up_ns")
        return None if times is None else times[row]


class _LazyColumn(Sequence[Any]):
    """A column with large values, converted from Arrow one value at a time."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._array = None if column.null_count == len(column) else column.combine_chunks()
        self._length = len(column)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return None if self._array is None else self._array[index].as_py()


_LARGE = ("hash_ids", "prompt")
_TURN_COLUMNS = ("request_id", "turn", "input_tokens", "output_tokens", "content", "hash_ids", "prompt")


def plan_sessions(
    table: pa.Table, phases: Sequence[ClosedPhase], max_concurrency: int | None, spacing_ns: int = 0
) -> SessionPlan:
    """Group a plan's rows by session; slots of a closed loop open ``spacing_ns`` apart. Raises UsageError."""
    table = table.combine_chunks()
    rows, starts = _grouped(table)
    columns = {
        name: _LazyColumn(table.column(name)) if name in _LARGE else table.column(name).to_pylist()
        for name in _TURN_COLUMNS
    }
    for name in ("hang_up_ns", "lora", "image_tokens", "image_side"):
        if name in table.column_names:
            columns[name] = table.column(name).to_pylist()
    graph = turn_graph(table)
    if phases:
        slots = Slots.of_phases(phases, spacing_ns)
        return SessionPlan(columns, rows, starts, slots, None, graph, block_tokens(table))
    first = table.column("arrival_ns").take(pa.array([rows[s] for s in starts[:-1]]))
    if first.null_count:
        raise UsageError("an open-loop plan needs an arrival time for each session")
    arrival_ns = first.to_numpy()
    # An open loop releases sessions in the order of their arrival times.
    order = np.argsort(arrival_ns, kind="stable")
    if np.any(np.diff(arrival_ns) < 0):
        rows, starts = _reordered(rows, starts, order.tolist())
    arrivals = Arrivals(arrival_ns[order].tolist())
    slots = Slots.constant(max_concurrency)
    return SessionPlan(columns, rows, starts, slots, arrivals, graph, block_tokens(table))


def unique_ids(table: pa.Table) -> tuple[pa.Table, int]:
    """The table with unique request ids (``x``, ``x#2``, ``x#3``, ...), and how many ids were changed."""
    ids = table.column("request_id").to_pylist()
    if len(set(ids)) == len(ids):
        return table, 0
    seen: dict[str, int] = {}
    taken = set(ids)
    unique = []
    for name in ids:
        number = seen[name] = seen.get(name, 0) + 1
        candidate = name if number == 1 else f"{name}#{number}"
        while number > 1 and candidate in taken:
            number = seen[name] = number + 1
            candidate = f"{name}#{number}"
        taken.add(candidate)
        unique.append(candidate)
    index = table.schema.get_field_index("request_id")
    changed = sum(a != b for a, b in zip(ids, unique, strict=True))
    return table.set_column(index, table.schema.field(index), pa.array(unique, pa.string())), changed


def check_attachments(table: pa.Table, endpoint: str, served: frozenset[str] | None) -> None:
    """Raise UsageError for images on another endpoint than chat, and for an adapter that the server does not serve."""
    images = "image_tokens" in table.column_names and table["image_tokens"].null_count < table.num_rows
    if images and endpoint != "chat":
        raise UsageError("images are sent in chat messages; give --endpoint chat")
    if "lora" not in table.column_names or served is None:
        return
    missing = sorted(set(table["lora"].drop_null().unique().to_pylist()) - served)
    if missing:
        raise UsageError(f"the server does not serve the adapter {missing[0]!r}; it serves {', '.join(sorted(served))}")


def rows_too_long(table: pa.Table, max_model_len: int | None, drop_too_long: bool) -> frozenset[int]:
    """Rows to leave out because prompt plus output exceed ``max_model_len`` tokens (None: no limit known).

    Raises UsageError if such rows exist and ``drop_too_long`` is False, or if no row is left.
    """
    if max_model_len is None:
        return frozenset()
    total = table.column("input_tokens").to_numpy() + table.column("output_tokens").to_numpy()
    rows = np.flatnonzero(total > max_model_len)
    if rows.size == 0:
        return frozenset()
    if not drop_too_long:
        name = table.column("request_id")[int(rows[0])].as_py()
        raise UsageError(
            f"{rows.size} of {table.num_rows} requests exceed the server's max_model_len {max_model_len} "
            f"(first: {name}, {total[rows[0]]} tokens); shorten them or drop them with --drop-too-long"
        )
    if rows.size == table.num_rows:
        raise UsageError(f"every request exceeds the server's max_model_len {max_model_len}; shorten them")
    return frozenset(rows.tolist())


def _grouped(table: pa.Table) -> tuple[list[int], list[int]]:
    """Row numbers grouped by session (in order of first appearance, turns ascending), and the start of each group."""
    if table.num_rows == 0:
        raise UsageError("the plan has no requests")
    codes = pc.dictionary_encode(table.column("session").combine_chunks()).indices.to_numpy()
    turns = table.column("turn").to_numpy()
    rows = np.lexsort((turns, codes))
    starts = np.searchsorted(codes[rows], np.arange(codes.max() + 2))
    return rows.tolist(), starts.tolist()


def _reordered(rows: list[int], starts: list[int], order: list[int]) -> tuple[list[int], list[int]]:
    groups = [rows[starts[i] : starts[i + 1]] for i in order]
    bounds = np.cumsum([0, *map(len, groups)])
    return [row for group in groups for row in group], bounds.tolist()
