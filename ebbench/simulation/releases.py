"""The clients of a simulation: when they send the requests of a plan and of the warm-up before it (at arrival times,
after completions, or after others of their session), when they hang up, and what became of each request."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ebbench.records.plan import Plan, optional_ints, primed, turn_graph
from ebbench.records.schema import (
    ABANDONED,
    EARLIER_TURN_ABANDONED,
    EARLIER_TURN_FAILED,
    PLAN,
    REQUESTS_EXTRAS,
    with_columns,
)
from ebbench.simulation.state import (
    ARRIVAL,
    FOLLOW,
    HANG_UP,
    RESUME,
    TURNAROUND_NS,
    UNSET,
    Failure,
    Ints,
    RequestState,
    requests_table,
)
from ebbench.simulation.step import FigureLog, StepLog
from ebbench.spec.server import EngineOptions
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

    def begin(self, now_ns: int, log: StepLog | FigureLog, controllers: Iterable[Controller]) -> None:
        """The plan begins: drop the records of the warm-up."""
        self.time_ns, self.steps = now_ns, len(log)
        self.steps_of = log.steps_per_instance()
        for controller in controllers:
            controller.drain_records()

    def first_step(self, log: StepLog | FigureLog) -> int:
        """The number of the plan's first step."""
        return self.steps if self.begun else len(log)


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


def since_beginning(times_ns: Ints, beginning: Beginning) -> Ints:
    """Times (ns) on a clock that starts with the plan; UNSET stays."""
    return np.where(times_ns == UNSET, UNSET, times_ns - beginning.time_ns)


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


_NEVER = -1


class HangUps:
    """Open requests whose clients may hang up, and those that did.

    ``any``: whether a client of the plan may hang up. ``abandoned``: rows whose clients hung up. ``given_up``: rows
    that are never sent because they wait for such a row.
    """

    def __init__(self, plan: Plan) -> None:
        self._after_ns = optional_ints(plan.table, "hang_up_ns", _NEVER)
        self._open: set[int] = set()
        self.any = self._after_ns is not None
        self.abandoned: set[int] = set()
        self.given_up: list[int] = []

    def sent(self, row: int) -> int | None:
        """Note that a request is sent; returns how long (ns) its client waits, None: to the end."""
        times = self._after_ns
        if times is None or row >= len(times) or times[row] == _NEVER:
            return None
        self._open.add(row)
        return int(times[row])

    def still_wanted(self, rows: Iterable[int]) -> list[int]:
        """The rows whose clients have not hung up."""
        return [row for row in rows if row not in self.abandoned]

    def ended(self, rows: Iterable[int]) -> None:
        """Record that clients have received complete responses; these requests can no longer be abandoned."""
        self._open.difference_update(rows)

    def hangs_up(self, row: int) -> bool:
        """Whether the request is still open at the end of its client's patience; it is then abandoned."""
        if row not in self._open:
            return False
        self._open.discard(row)
        self.abandoned.add(row)
        return True


# Limits on open requests in vLLM's API server (0.32): it refuses further ones with HTTP 503.
#
# The rules are those of `AsyncLLM.check_admission`, asked when a request comes to the API server:
#
# - `max_num_queued_reqs`: refused if that many requests are open, waiting or running;
# - `max_num_queued_tokens`: refused if the open requests without a first token have that many prompt tokens. Each
#   counts in full: the API server does not learn how much of a prompt is computed or cached.

REFUSED = ("http_503", "vLLM's queue limits (--max-num-queued-reqs, --max-num-queued-tokens) refused it", 503)


class QueueLimits:
    """Open requests of one API server."""

    def __init__(self, state: RequestState, max_reqs: int | None, max_tokens: int | None) -> None:
        self._state, self._max_reqs, self._max_tokens = state, max_reqs, max_tokens
        self._open = 0
        self._prefilling: dict[int, int] = {}  # prompt tokens of open requests without a first token, by row

    @classmethod
    def of(cls, options: EngineOptions, state: RequestState) -> QueueLimits | None:
        """The limits that the options set; None if they set none."""
        limits = options.max_num_queued_reqs, options.max_num_queued_tokens
        return None if limits == (None, None) else cls(state, *limits)

    def admits(self, row: int, now_ns: int) -> bool:
        """Whether a request that comes now is accepted; it is then open."""
        if self._max_reqs is not None and self._open + 1 > self._max_reqs:
            return False
        if self._max_tokens is not None and self._queued_tokens(now_ns) >= self._max_tokens:
            return False
        self._open += 1
        self._prefilling[row] = int(self._state.prompt[row])
        return True

    def _queued_tokens(self, now_ns: int) -> int:
        times = self._state.token_ns if self._state.client_ns is None else self._state.client_ns
        first_slot = self._state.first_slot
        for row in [row for row in self._prefilling if UNSET < times[first_slot[row]] <= now_ns]:
            del self._prefilling[row]
        return sum(self._prefilling.values())

    def ended(self, row: int) -> None:
        """An accepted request has ended."""
        self._open -= 1
        self._prefilling.pop(row, None)


AtTime = Callable[[int], None]
"""Called with the time of the clock, in ns."""


class Clients(ABC):
    """The clients of a plan in virtual time: they send its requests and may hang up.

    ``_events`` are taken by time, then kind (:mod:`ebbench.simulation.state`), then in the order they were made; who
    takes one sets ``now_ns``.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[RequestState],
        options: EngineOptions | None = None,
        begin: AtTime | None = None,
    ) -> None:
        """``states``: of the requests, by stage, those of a warm-up after the plan's. ``options``: of the API server;
        None: it refuses nothing. ``begin`` is called at the end of the warm-up, before the plan starts."""
        warmup = states[0].count - len(plan)
        self.beginning = Beginning(begun=not warmup)
        self.now_ns = 0
        self.ended = 0  # including warm-up requests, and requests that are never sent
        self.failed: dict[int, Failure] = {}
        self.never_sent: list[int] = []  # they wait for a refused one
        self.hang_ups = HangUps(plan)
        self._plan, self._states, self._releases = plan, states, Releases(plan, warmup)
        self._begin = begin
        self._queue_limits = None if options is None else QueueLimits.of(options, states[0])
        self._events: list[tuple[int, int, int, Any]] = []
        self._sequence = 0

    @abstractmethod
    def _bring(self, rows: list[int]) -> None:
        """Bring requests that are sent now to the engines."""

    @abstractmethod
    def _withdraw(self, row: int) -> None:
        """Take a request whose client hangs up from the engine."""

    def push(self, time_ns: int, kind: int, subject: Any) -> None:
        """Add an event; ``kind``: see :mod:`ebbench.simulation.state`."""
        self._sequence += 1
        heapq.heappush(self._events, (time_ns, kind, self._sequence, subject))

    def _start(self) -> None:
        if self.beginning.begun:
            self._schedule_arrivals()
        self._release(self._releases.start())

    def _schedule_arrivals(self) -> None:
        if self._plan.closed_loop:
            return
        arrivals = np.asarray(self._plan.table["arrival_ns"].fill_null(0))
        for row in self._releases.first_rows:
            self.push(self.now_ns + int(arrivals[row]), ARRIVAL, row)

    def _arrival(self, row: int) -> None:
        for state in self._states:
            state.intended_ns[row] = self.now_ns
        self._release(self._releases.arrived(row))

    def _release(self, rows: list[int]) -> None:
        """Send requests when they have paused."""
        self._submit(self._pause(rows))

    def _pause(self, rows: list[int]) -> list[int]:
        """Let requests pause; returns those that do not."""
        at_once = []
        for row in rows:
            if pause_ns := self._releases.pause_ns(row):
                self.push(self.now_ns + pause_ns, RESUME, row)
            else:
                at_once.append(row)
        return at_once

    def _resume(self, row: int) -> None:
        self._submit([row])

    def _follow(self, rows: list[int]) -> None:
        for state in self._states:
            state.intend(rows, self.now_ns - TURNAROUND_NS)
        self._submit(rows)

    def _submit(self, rows: list[int]) -> None:
        if not rows:
            return
        self._stamp(rows)
        if self._queue_limits is not None:
            rows = self._accepted(rows, self._queue_limits)
        if self.hang_ups.any:
            for row in rows:
                if (patience_ns := self.hang_ups.sent(row)) is not None:
                    self.push(self.now_ns + patience_ns, HANG_UP, row)
        self._bring(rows)

    def _stamp(self, rows: Sequence[int]) -> None:
        """Note that requests are sent now."""
        for state in self._states:
            state.intend(rows, self.now_ns)
            for row in rows:
                state.sent_ns[row] = self.now_ns

    def _accepted(self, rows: Sequence[int], limits: QueueLimits) -> list[int]:
        """The requests that the API server accepts, of ``rows`` and of those sent in place of refused ones."""
        accepted, coming = [], deque(rows)
        while coming:
            row = coming.popleft()
            if limits.admits(row, self.now_ns):
                accepted.append(row)
                continue
            self.failed[row] = REFUSED
            released = self._lose(row, self.never_sent)
            self._stamp(released)
            coming += released
        return accepted

    def _lose(self, row: int, never: list[int]) -> list[int]:
        """A request ends now without an answer, and its client sends nothing that waits for it, as the load generator
        does: that is added to ``never``. Returns the rows to send instead."""
        self._states[-1].end_ns[row] = self.now_ns
        lost, released = self._releases.failed(row)
        never += lost
        self._count_ended(1 + len(lost))
        return released

    def _count_ended(self, requests: int) -> None:
        self.ended += requests
        if not self.beginning.begun and self._releases.begun:
            self.beginning.begun = True
            if self._begin is not None:
                self._begin(self.now_ns)
            self._schedule_arrivals()

    def gone(self, rows: Sequence[int]) -> None:
        """Requests have ended for their clients: send those that their ends release."""
        if self.hang_ups.any:
            self.hang_ups.ended(rows)
        if self._queue_limits is not None:
            for row in rows:
                self._queue_limits.ended(row)
        begun = self.beginning.begun
        released = self._releases.all_ended(rows)
        self._count_ended(len(rows))
        if not begun and self.beginning.begun:  # the plan's first requests, at its time zero
            self._release(released)
        elif following := self._pause(released):
            self.push(self.now_ns + TURNAROUND_NS, FOLLOW, following)

    def _hang_up(self, row: int) -> bool:
        """A client closes its connection, unless its answer is complete; returns whether it does."""
        if not self.hang_ups.hangs_up(row):
            return False
        self._withdraw(row)
        if self._queue_limits is not None:
            self._queue_limits.ended(row)
        self._release(self._lose(row, self.hang_ups.given_up))
        return True


# Tables of the plan's requests.


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


def cut_at_hang_ups(state: RequestState, abandoned: Iterable[int]) -> None:
    """Remove the tokens that reached clients after they had hung up."""
    for times in (state.token_ns, state.client_ns):
        if times is None:
            continue
        for row in abandoned:
            own = times[state.first_slot[row] : state.end_slot[row]]
            own[own > state.end_ns[row]] = UNSET
    received = state.token_ns if state.client_ns is None else state.client_ns
    for row in abandoned:
        own = received[state.first_slot[row] : state.end_slot[row]]
        state.next_slot[row] = state.first_slot[row] + np.count_nonzero(own != UNSET)


def plan_requests(plan: Plan, state: RequestState, clients: Clients) -> pa.Table:
    """Table REQUESTS of the plan's own rows, with what became of requests that were not answered."""
    own = without_warmup(state, plan, clients.beginning)
    cut_at_hang_ups(own, clients.hang_ups.abandoned)
    requests = requests_table(plan, own)
    if not clients.hang_ups.abandoned and not clients.failed:
        return requests
    names = ("status", "finish_reason", "error_class", "error_body", "http_status")
    columns = {name: requests[name].to_pylist() for name in names}
    for row in clients.hang_ups.abandoned:
        columns["status"][row], columns["finish_reason"][row] = ABANDONED, None
    for row in clients.hang_ups.given_up:
        columns["status"][row], columns["error_class"][row] = "never_sent", EARLIER_TURN_ABANDONED
    for row, failure in clients.failed.items():
        if row < requests.num_rows:
            for name, value in zip(names, ("failed", None, *failure), strict=True):
                columns[name][row] = value
    for row in clients.never_sent:
        columns["error_class"][row] = EARLIER_TURN_FAILED
    return with_columns(requests, columns)


def with_prefill_ends(requests: pa.Table, prefills: RequestState, beginning: Beginning) -> pa.Table:
    """The table with ``prefilled_ns``: when the prefill units, which have ``prefills``, had computed each prompt."""
    ends_ns = since_beginning(prefills.token_ns[prefills.first_slot[: len(requests)]], beginning)
    return requests.append_column(
        REQUESTS_EXTRAS.field("prefilled_ns"), pa.array(ends_ns, pa.int64(), mask=ends_ns == UNSET)
    )
