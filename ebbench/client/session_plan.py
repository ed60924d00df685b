"""A plan in the form that workers use: sessions in release order; large columns are read row by row from Arrow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.dialects import DIALECTS
from ebbench.client.release_schedule import Arrivals, ReleaseSchedule, SharedInts, Slots
from ebbench.config.server_url import Endpoint, ServerUrl
from ebbench.errors import UsageError
from ebbench.records import CHUNK_TOKENS
from ebbench.records.plan import ClosedPhase, TurnGraph, block_tokens, turn_graph
from ebbench.records.schema import with_columns
from ebbench.spec.client import ClientOptions


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

    def schedule(self, memory: SharedInts, lock: AbstractContextManager[object]) -> ReleaseSchedule:
        """The release of the sessions, with its state in ``memory``."""
        return ReleaseSchedule(memory, lock, self.sessions, self.slots, self.arrivals)

    def turns(self, session: int) -> Sequence[int]:
        """Rows of a session, in turn order."""
        return self.rows[self.starts[session] : self.starts[session + 1]]

    def turn(self, row: int) -> Turn:
        """The request at a row of the plan, with its own columns."""
        fields: dict[str, Any] = {name: self.columns[name][row] for name in _TURN_COLUMNS}
        for name in _ATTACHED:
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
_ATTACHED = ("lora", "image_tokens", "image_side", "priority")
"""Columns of PLAN_EXTRAS that a body depends on."""
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
    for name in ("hang_up_ns", *_ATTACHED):
        if name in table.column_names:
            columns[name] = table.column(name).to_pylist()
    graph = turn_graph(table)
    if phases:
        slots = Slots.of_phases(phases, spacing_ns)
        return SessionPlan(columns, rows, starts, slots, None, graph, block_tokens(table))
    times_ns = table.column("arrival_ns").to_pylist()
    first_ns = [times_ns[rows[start]] for start in starts[:-1]]
    if None in first_ns:
        raise UsageError("an open-loop plan needs an arrival time for each session")
    arrival_ns = np.array(first_ns, np.int64)
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
    return with_columns(table, {"request_id": unique}), sum(a != b for a, b in zip(ids, unique, strict=True))


def check_attachments(table: pa.Table, endpoint: Endpoint, served: frozenset[str] | None) -> None:
    """Raise UsageError for images on another endpoint than chat, for priorities where the endpoint's API has none, and
    for an adapter that the server does not serve."""
    if "priority" in table.column_names and not DIALECTS[endpoint].priority:
        takes = ", ".join(name for name, dialect in DIALECTS.items() if dialect.priority)
        raise UsageError(f"requests of --endpoint {endpoint} have no priority: leave --priorities out, or give {takes}")
    images = "image_tokens" in table.column_names and table["image_tokens"].null_count < table.num_rows
    if images and endpoint != "chat":
        raise UsageError("images are sent in chat messages; give --endpoint chat")
    if "lora" not in table.column_names or served is None:
        return
    missing = sorted(set(table["lora"].drop_null().unique().to_pylist()) - served)
    if missing:
        raise UsageError(f"the server does not serve the adapter {missing[0]!r}; it serves {', '.join(sorted(served))}")


def rows_too_long(
    table: pa.Table, max_model_len: int | None, drop_too_long: bool, prompts_only: bool = False
) -> frozenset[int]:
    """Rows to leave out because prompt plus output exceed ``max_model_len`` tokens (None: no limit known).

    ``prompts_only``: no output is generated.

    Raises UsageError if such rows exist and ``drop_too_long`` is False, or if no row is left.
    """
    if max_model_len is None:
        return frozenset()
    total = table.column("input_tokens").to_numpy()
    total = total if prompts_only else total + table.column("output_tokens").to_numpy()
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
    _, first, codes = np.unique(table.column("session").to_numpy(), return_index=True, return_inverse=True)
    codes = np.argsort(np.argsort(first))[codes]  # numbered in order of first appearance
    turns = table.column("turn").to_numpy()
    rows = np.lexsort((turns, codes))
    starts = np.searchsorted(codes[rows], np.arange(codes.max() + 2))
    return rows.tolist(), starts.tolist()


def _reordered(rows: list[int], starts: list[int], order: list[int]) -> tuple[list[int], list[int]]:
    groups = [rows[starts[i] : starts[i + 1]] for i in order]
    bounds = np.cumsum([0, *map(len, groups)])
    return [row for group in groups for row in group], bounds.tolist()


# Splits a plan over several machines: whole sessions, in release order, each machine with its share of the load.

Ints = npt.NDArray[np.int64]
_TOO_LITTLE = (
    "{} client nodes need a session each in the plan, and in every phase as many sessions open at a time; use fewer "
    "nodes or a larger load"
)


@dataclass(frozen=True)
class MachineLoad:
    """What one machine sends where, beside the requests themselves.

    ``phases`` and ``max_concurrency``: this machine's share of the plan's. ``dropped``: rows of its requests that are
    not sent. ``spacing_ns``: time between the openings of new slots.
    """

    url: ServerUrl
    model: str
    options: ClientOptions
    id_prefix: str
    phases: tuple[ClosedPhase, ...]
    max_concurrency: int | None
    dropped: frozenset[int]
    spacing_ns: int

    @property
    def target(self) -> str:
        """The URL of every request."""
        return self.url.target(self.options.endpoint, self.model)

    @property
    def most_open(self) -> int:
        """How many sessions may be open at a time; 0 if the plan sets no limit."""
        return max((phase.max_concurrency for phase in self.phases), default=self.max_concurrency or 0)

    def sessions(self, table: pa.Table) -> SessionPlan:
        """The requests of ``table`` by sessions in release order."""
        return plan_sessions(table, self.phases, self.max_concurrency, self.spacing_ns)


@dataclass(frozen=True)
class PlanPart:
    """The requests that one machine sends (schema PLAN), and their rows in the whole plan, ascending."""

    rows: Ints
    table: pa.Table
    load: MachineLoad

    @cached_property
    def sessions(self) -> SessionPlan:
        """The part by sessions in release order."""
        return self.load.sessions(self.table)


def split(plan: PlanPart, machines: int) -> list[PlanPart]:
    """The parts of ``machines`` machines. Each session is in exactly one part.

    Sessions are dealt in release order: in an open loop to each machine in turn, in a closed loop in proportion to the
    machines' shares of the phase's slots. The shares of a limit differ by 1 at most. Raises UsageError if a machine
    would have no slot or no session.
    """
    limits = [phase.max_concurrency for phase in plan.load.phases]
    if plan.load.max_concurrency is not None:
        limits.append(plan.load.max_concurrency)
    if min([plan.sessions.sessions, *limits]) < machines:
        raise UsageError(_TOO_LITTLE.format(machines))
    machine_of = _dealt(plan, machines)
    if np.unique(machine_of).size < machines:
        raise UsageError(_TOO_LITTLE.format(machines))
    session_of_row = np.empty(len(plan.rows), np.int64)
    starts = np.asarray(plan.sessions.starts)
    session_of_row[np.asarray(plan.sessions.rows)] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return [_machine_part(plan, machine_of, session_of_row, number, machines) for number in range(machines)]


def shares(limit: int, machines: int) -> list[int]:
    """``limit`` divided into ``machines`` whole numbers that differ by 1 at most, larger ones first."""
    least, more = divmod(limit, machines)
    return [least + (number < more) for number in range(machines)]


def _dealt(plan: PlanPart, machines: int) -> Ints:
    """The machine of each session, by session in release order."""
    phases = plan.load.phases
    if not phases:
        return np.arange(plan.sessions.sessions) % machines
    dealt = [np.resize(_turn_order(shares(phase.max_concurrency, machines)), phase.sessions) for phase in phases]
    order: Ints = np.concatenate(dealt)
    last = _turn_order(shares(phases[-1].max_concurrency, machines))
    # Sessions after the last phase belong to it.
    return np.concatenate([order, np.resize(last, max(0, plan.sessions.sessions - len(order)))])


def _turn_order(slots: Sequence[int]) -> Ints:
    """The machines in an order in which machine m comes ``slots[m]`` times, evenly spread; shape (sum of slots,)."""
    machines = np.repeat(np.arange(len(slots)), slots)
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in slots])
    order: Ints = machines[np.lexsort((machines, places))]
    return order


def _machine_part(plan: PlanPart, machine_of: Ints, session_of_row: Ints, number: int, machines: int) -> PlanPart:
    local = np.flatnonzero(machine_of[session_of_row] == number)
    load, phases, first = plan.load, [], 0
    for phase in load.phases:
        own = int(np.count_nonzero(machine_of[first : first + phase.sessions] == number))
        slots = shares(phase.max_concurrency, machines)[number]
        phases.append(replace(phase, sessions=own, max_concurrency=slots))
        first += phase.sessions
    limit = load.max_concurrency
    dropped = np.flatnonzero(np.isin(local, np.fromiter(load.dropped, np.int64, len(load.dropped))))
    own_load = replace(
        load,
        phases=tuple(phases),
        max_concurrency=None if limit is None else shares(limit, machines)[number],
        dropped=frozenset(dropped.tolist()),
        spacing_ns=load.spacing_ns * machines,
    )
    return PlanPart(plan.rows[local], plan.table.take(pa.array(local)).combine_chunks(), own_load)


# Builds bodies before they are due: short ones before the start, those of long prompts in a thread of their own.
#
# A short body takes 30 us in a row of them, and 100 us when it is due, since the processor has forgotten how. A body of
# 50,000 tokens takes milliseconds, in which the event loop can neither send in time nor time a response. The thread
# builds first requests of the sessions that this worker will release next, up to a limit of memory.

LONG_PROMPT_TOKENS = 2048
"""Prompts from this length on are built in the thread; a shorter one takes less time than handing it over."""
LIMIT_BYTES = 128 << 20
SHORT_BYTES, SHORT_S = 4 << 20, 0.2
"""Bodies of short prompts that are built before the start, and how long that may take; later ones are when due."""


class BodiesAhead:
    """Bodies by row. Use :meth:`start`, then :meth:`take` from the event loop; :meth:`close` ends the thread."""

    def __init__(self, bodies: RequestBodies, plan: SessionPlan, first: int, step: int) -> None:
        """The worker expects to release the sessions ``first``, ``first + step``, ..."""
        self._bodies, self._plan = bodies, plan
        self._sessions = range(first, plan.sessions, step)
        self._short: dict[int, bytes] = {}
        self._built: dict[int, tuple[int, bytes]] = {}  # session and body by row, in the order of the sessions
        self._bytes = self._released = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, wanted: int) -> None:
        """Start building; returns when the bodies of the first ``wanted`` sessions, or as many as fit, are there."""
        self._build_short()
        rows = self._rows()
        upcoming = next(rows, None)
        if upcoming is None:
            return
        self._thread = threading.Thread(target=self._build_all, args=(upcoming, rows), daemon=True)
        with self._changed:
            self._thread.start()
            self._changed.wait_for(lambda: self._closed or len(self._built) >= wanted or self._full or not self._alive)

    @property
    def _full(self) -> bool:
        return self._bytes >= LIMIT_BYTES

    @property
    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def take(self, row: int) -> bytes | None:
        """The body of a row if it is there; the thread may then build another."""
        if self._thread is None or row in self._short:
            return self._short.pop(row, None)
        with self._changed:
            built = self._built.pop(row, None)
            if built is None:
                return None
            session, body = built
            self._bytes -= len(body)
            self._released = max(self._released, session)
            self._changed.notify_all()
            return body

    def passed(self, released: int) -> None:
        """Drop bodies of sessions below ``released`` that another worker sends."""
        with self._changed:
            self._released = max(self._released, released)
            for row in [row for row, (session, _) in self._built.items() if session < released - 1]:
                self._bytes -= len(self._built.pop(row)[1])
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Sessions and their first rows, as far as those have long synthetic prompts."""
        for session in self._sessions:
            row = self._plan.turns(session)[0]
            if self._plan.columns["input_tokens"][row] < LONG_PROMPT_TOKENS:
                continue
            if self._plan.columns["prompt"][row] is None:
                yield session, row

    def _build_all(self, upcoming: tuple[int, int], rows: Iterator[tuple[int, int]]) -> None:
        try:
            current: tuple[int, int] | None = upcoming
            while current is not None:
                session, row = current
                if session >= self._released:
                    self._keep(session, row, self._body(row))
                if self._closed:
                    return
                current = next(rows, None)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _build_short(self) -> None:
        """Build the bodies of the first sessions with short prompts, unless several workers share the sessions out as
        slots become free."""
        if self._sessions.step > 1 and self._plan.arrivals is None:
            return
        left, end_s = SHORT_BYTES, time.monotonic() + SHORT_S
        for session in self._sessions:
            row = self._plan.turns(session)[0]
            if self._plan.columns["input_tokens"][row] < LONG_PROMPT_TOKENS:
                self._short[row] = self._body(row)
                left -= len(self._short[row])
            if left <= 0 or time.monotonic() > end_s:
                return

    def _body(self, row: int) -> bytes:
        return self._bodies.build(self._plan.turn(row), may_hang_up=self._plan.hang_up_ns(row) is not None)

    def _keep(self, session: int, row: int, body: bytes) -> None:
        with self._changed:
            if session >= self._released:
                self._built[row] = (session, body)
                self._bytes += len(body)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or not self._full)
