"""Clients that hang up: which ones do, what becomes of their requests in a scheduler, and in the table of requests.

A server learns of a hang-up at once and acts on it when its engine next looks: before it uses the output of the step in
flight, as vLLM does. The tokens of the steps in flight are therefore computed and lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ebbench.records.plan import Plan
from ebbench.records.schema import ABANDONED, EARLIER_TURN_ABANDONED, REQUESTS_EXTRAS
from ebbench.records.turn_graph import optional_ns
from ebbench.simulation.state import UNSET, RequestState
from ebbench.simulation.warmup import Beginning, since_beginning

if TYPE_CHECKING:
    from ebbench.simulation.scheduler import Scheduler

_NEVER = -1


class HangUps:
    """Open requests whose clients may hang up, and those that did.

    ``any``: whether a client of the plan may hang up. ``abandoned``: rows whose clients hung up. ``given_up``: rows
    that are never sent because they wait for such a row.
    """

    def __init__(self, plan: Plan) -> None:
        self._after_ns = optional_ns(plan.table, "hang_up_ns", _NEVER)
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
        """Note that requests have ended for their clients, who can no longer hang up."""
        self._open.difference_update(rows)

    def hangs_up(self, row: int) -> bool:
        """Whether the request is still open at the end of its client's patience; it is then abandoned."""
        if row not in self._open:
            return False
        self._open.discard(row)
        self.abandoned.add(row)
        return True


def drop(scheduler: Scheduler, row: int) -> None:
    """Remove a request from a scheduler, as vLLM's ``finish_requests`` does: its blocks become free at once, and what
    was computed of it stays in the prefix cache."""
    state = scheduler.state
    if state.done[row]:
        scheduler.free_finished(row)  # a computed prompt, kept for a transfer that will not begin
        return
    published = _published_tokens(scheduler, row)
    for queued in scheduler.in_flight:
        if row in queued.sampled:
            queued.sampled = queued.sampled[queued.sampled != row]
    state.done[row] = True
    scheduler.forget(row)
    if state.held_blocks[row]:
        scheduler.kv.release(row, min(int(state.computed[row]), published))
        state.held_blocks[row] = 0
    output_tokens = int(state.next_slot[row] - state.first_slot[row])
    for listener in scheduler.listeners:
        listener.withdrawn(row, output_tokens)


def _published_tokens(scheduler: Scheduler, row: int) -> int:
    """Tokens up to which vLLM has published the blocks of a request: those known when it last scheduled it."""
    holding = [queued for queued in scheduler.in_flight if row in queued.rows]
    known = int(scheduler.state.target[row]) - sum(row in queued.sampled for queued in holding)
    return known - bool(holding and scheduler.got_token_since(row, holding[-1].scheduled_ns))


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


def with_hang_ups(requests: pa.Table, hang_ups: HangUps) -> pa.Table:
    """A table of requests with the status of abandoned requests, and of those that were not sent because of them."""
    if not hang_ups.abandoned:
        return requests
    columns = {name: requests[name].to_pylist() for name in ("status", "finish_reason", "error_class")}
    for row in hang_ups.abandoned:
        columns["status"][row], columns["finish_reason"][row] = ABANDONED, None
    for row in hang_ups.given_up:
        columns["status"][row], columns["error_class"][row] = "never_sent", EARLIER_TURN_ABANDONED
    for name, values in columns.items():
        index = requests.column_names.index(name)
        field = requests.schema.field(index)
        requests = requests.set_column(index, field, pa.array(values, field.type))
    return requests


def with_prefill_ends(requests: pa.Table, prefills: RequestState, beginning: Beginning) -> pa.Table:
    """The table with ``prefilled_ns``: when the prefill units, which have ``prefills``, had computed each prompt."""
    ends_ns = since_beginning(prefills.token_ns[prefills.first_slot[: len(requests)]], beginning)
    return requests.append_column(
        REQUESTS_EXTRAS.field("prefilled_ns"), pa.array(ends_ns, pa.int64(), mask=ends_ns == UNSET)
    )
