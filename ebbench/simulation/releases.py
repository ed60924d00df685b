"""When requests are sent: those of a plan at arrival times, after completions, or after others of their session, and
those of the warm-up before them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ebbench.records.plan import Plan, primed, turn_graph
from ebbench.records.schema import PLAN
from ebbench.simulation.state import UNSET, Ints, RequestState
from ebbench.simulation.step import FigureLog, StepLog, StepParts
from vllm_eb.controller import Controller
from vllm_eb.strategy import Record

_TIMES = ("intended_ns", "sent_ns", "scheduled_ns", "end_ns")
_COUNTS = ("preemptions", "cached_tokens", "next_slot")


@dataclass
class Beginning:
    """When the plan began on the engine's clock, and after how many steps, in total and per instance.

    ``begun`` False: not yet.
    """

    begun: bool
    time_ns: int = 0
    steps: int = 0
    steps_of: Counter[int] = field(default_factory=Counter)


def at_beginning(
    beginning: Beginning, log: StepLog | FigureLog, controllers: Iterable[Controller]
) -> Callable[[int], None]:
    """A function to call with the time at which the plan begins: it stores the time and drops the warm-up's records."""

    def begin(now_ns: int) -> None:
        beginning.begun, beginning.time_ns, beginning.steps = True, now_ns, len(log)
        beginning.steps_of = log.steps_per_instance()
        for controller in controllers:
            controller.drain_records()

    return begin


def with_warmup(plan: Plan, count: int) -> Plan:
    """The plan with ``count`` warm-up requests after its own rows, whose lengths are the plan's in its order, and then
    those that put prefixes of its prompts into the cache."""
    table = plan.table
    kept = [*PLAN.names, *({"priority"} & {*table.column_names})]
    priming = primed(table)
    if not count and not priming.num_rows:
        return plan
    rows = pa.array(np.arange(count) % table.num_rows)
    sessions = table["session"].to_numpy()
    columns = {
        "request_id": pa.array([f"warmup-{number}" for number in range(count)]),
        "session": pa.array(int(sessions.max()) + 1 + np.arange(count)),
        "turn": pa.array(np.zeros(count, np.int32)),
        "phase": pa.array(["warmup"] * count),
        "arrival_ns": pa.nulls(count, pa.int64()),
        "input_tokens": table["input_tokens"].take(rows),
        "output_tokens": table["output_tokens"].take(rows),
        "content": pa.array(-1 - np.arange(count)),
        "hash_ids": pa.nulls(count, PLAN.field("hash_ids").type),
        "prompt": pa.nulls(count, pa.string()),
    }
    warmup = pa.table({name: columns[name] for name in PLAN.names}, schema=PLAN)
    parts = [table.select(kept), warmup, priming]
    return replace(plan, table=pa.concat_tables(parts, promote_options="default").combine_chunks())


def without_warmup(state: RequestState, plan: Plan, beginning: Beginning) -> RequestState:
    """The state of the plan's own rows, on a clock that starts with the plan."""
    if state.count == len(plan):
        return state
    alone = RequestState(plan)
    for name in _COUNTS:
        setattr(alone, name, getattr(state, name)[: alone.count])
    for name in _TIMES:
        setattr(alone, name, since_beginning(getattr(state, name)[: alone.count], beginning))
    own = len(alone.token_ns)
    alone.token_ns = since_beginning(state.token_ns[:own], beginning)
    if state.client_ns is not None:
        alone.client_ns = since_beginning(state.client_ns[:own], beginning)
    return alone


def since_beginning(times_ns: Ints, beginning: Beginning) -> Ints:
    """Times (ns) on a clock that starts with the plan; UNSET stays."""
    return np.where(times_ns == UNSET, UNSET, times_ns - beginning.time_ns)


def steps_after(
    log: StepLog | FigureLog,
    beginning: Beginning,
    request_ids: pa.Array,
    kv_blocks_total: int | Sequence[int],
    *,
    by_time: bool,
) -> pa.Table:
    """Table STEPS of the plan's own steps on its own clock; the other arguments are those of :meth:`StepLog.table`."""
    first = beginning.steps if beginning.begun else len(log)
    return log.table(request_ids, kv_blocks_total, first=first, begin_ns=beginning.time_ns, by_time=by_time)


def step_parts_after(
    log: StepLog, beginning: Beginning, request_ids: pa.Array, kv_blocks_total: int | Sequence[int]
) -> StepParts:
    """What :func:`steps_after` gives, in parts."""
    first = beginning.steps if beginning.begun else len(log)
    return log.parts(request_ids, kv_blocks_total, first=first, begin_ns=beginning.time_ns)


def records_after(records: Sequence[tuple[int, Record]], beginning: Beginning) -> list[tuple[int, Record]]:
    """Records of the plan with their instances, on its own clock and with its own step numbers."""
    if not beginning.begun:
        return []
    begin_s, before = beginning.time_ns / 1e9, beginning.steps_of
    return [
        (instance, replace(record, time_s=record.time_s - begin_s, step_id=record.step_id - before[instance]))
        for instance, record in records
    ]


WARMUP_AT_ONCE = 64  # default of the load generator


class Releases:
    """Converts a plan to releases. Each call returns the plan rows that may be sent now, in order; the caller adds the
    pause of each (:meth:`pause_ns`).

    Closed loop: sessions are released in plan order while fewer than the current phase's ``max_concurrency`` are open.
    Open loop: sessions start at their arrival time; a cap on open sessions makes later ones wait. A session is open
    until its last request has ended, also while it pauses.

    ``warmup`` requests of one turn, in rows after the plan's, are sent first; the plan begins when the last of them has
    ended.
    """

    def __init__(self, plan: Plan, warmup: int = 0) -> None:
        self._graph = turn_graph(plan.table)
        self._takes_turns = bool(len(self._graph.follower_rows))
        self.first_rows: list[int] = self._graph.first_rows
        self._given_up: set[int] = set()
        if self._graph.branched:
            self._waits = self._graph.waits.tolist()
            _, codes, sizes = np.unique(np.asarray(plan.table["session"]), return_inverse=True, return_counts=True)
            self._session_of, self._left = codes.tolist(), sizes.tolist()
        self._rows = len(plan)
        self._open = 0
        self._limits = [(phase.sessions, phase.max_concurrency) for phase in plan.phases]
        self._cap = plan.max_concurrency
        self._queue: deque[int] = deque(self.first_rows if plan.phases else ())
        self._released_in_phase = 0
        self._warmup = deque(range(len(plan), len(plan) + warmup))
        self._warming = warmup

    @property
    def begun(self) -> bool:
        """Whether the warm-up has ended, so that the plan's clock runs."""
        return not self._warming

    @property
    def by_completions(self) -> bool:
        """Whether the end of a request may release another one."""
        return self._takes_turns or bool(self._queue) or not self.begun

    def pause_ns(self, row: int) -> int:
        """How long (ns) a released request waits before it is sent."""
        return self._graph.pause_of(row)

    def start(self) -> list[int]:
        """Rows sent at time zero: concurrent warm-up requests, else those of a closed loop."""
        if self.begun:
            return self._release_closed()
        at_once = self._limits[0][1] if self._limits else self._cap or WARMUP_AT_ONCE
        return [self._warmup.popleft() for _ in range(min(at_once, len(self._warmup)))]

    def arrived(self, row: int) -> list[int]:
        """Release an arrived open-loop session: its first rows, or nothing while the cap is reached."""
        if self._cap is not None and self._open >= self._cap:
            self._queue.append(row)
            return []
        return self._begin(row)

    def ended(self, row: int) -> list[int]:
        """Release after the end of a request: requests that waited for it, or sessions for the freed slot."""
        if self._warming:
            self._warming -= 1
            if self._warmup:
                return [self._warmup.popleft()]
            return self._release_closed() if self.begun else []
        if self._takes_turns or self._graph.branched:
            following = self._graph.followers(row)
            if self._graph.branched:
                for follower in following:
                    self._waits[follower] -= 1
                following = [follower for follower in following if not self._waits[follower]]
                if self._still_open(row, 1):
                    return following
            elif following:
                return following
        return self._close_session()

    def all_ended(self, rows: Sequence[int]) -> list[int]:
        """Release after the ends of several requests: what :meth:`ended` returns for one after the other.

        Sessions of one request in a closed loop end together: which are released depends only on the number of free
        slots.
        """
        if self._warming or self._takes_turns or self._graph.branched or not self._limits:
            return [later for row in rows for later in self.ended(row)]
        self._open -= len(rows)
        return self._release_closed()

    def failed(self, row: int) -> tuple[list[int], list[int]]:
        """A request has failed or its client hung up, so what waits for it is not sent.

        Returns the requests that wait for it, directly or through others, and the rows to send instead.
        """
        if row >= self._rows:  # a warm-up request
            return [], self.ended(row)
        later = [follower for follower in self._graph.descendants(row) if follower not in self._given_up]
        self._given_up.update(later)
        if self._graph.branched and self._still_open(row, 1 + len(later)):
            return later, []
        return later, self._close_session()

    def _still_open(self, row: int, done: int) -> bool:
        """Whether requests of the row's session are left after ``done`` more."""
        session = self._session_of[row]
        self._left[session] -= done
        return bool(self._left[session])

    def _close_session(self) -> list[int]:
        self._open -= 1
        if self._limits:
            return self._release_closed()
        return self._begin(self._queue.popleft()) if self._queue else []

    def _begin(self, row: int) -> list[int]:
        self._open += 1
        return [row, *self._graph.parallel_starts.get(row, ())] if self._graph.parallel_starts else [row]

    def _release_closed(self) -> list[int]:
        rows: list[int] = []
        queue, limits = self._queue, self._limits
        while queue and limits:
            sessions, max_concurrency = limits[0]
            if len(limits) > 1 and self._released_in_phase >= sessions:
                limits.pop(0)
                self._released_in_phase = 0
            elif self._open < max_concurrency:
                rows += self._begin(queue.popleft())
                self._released_in_phase += 1
            else:
                break
        return rows
