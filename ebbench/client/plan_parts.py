"""Splits a plan over several machines: whole sessions, in release order, each machine with its share of the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.client.session_plan import SessionPlan, plan_sessions
from ebbench.errors import UsageError
from ebbench.records.plan import ClosedPhase

Ints = npt.NDArray[np.int64]
_TOO_LITTLE = (
    "{} client nodes need a session each in the plan, and in every phase as many sessions open at a time; use fewer "
    "nodes or a larger load"
)


@dataclass(frozen=True)
class PlanPart:
    """The requests that one machine sends.

    ``rows``: their rows in the whole plan, ascending. ``table``: the same requests (schema PLAN). ``phases`` and
    ``max_concurrency``: this machine's share of the plan's. ``dropped``: rows of ``table`` that are not sent.
    ``spacing_ns``: time between the openings of new slots.
    """

    rows: Ints
    table: pa.Table
    phases: tuple[ClosedPhase, ...]
    max_concurrency: int | None
    dropped: frozenset[int]
    spacing_ns: int

    @cached_property
    def sessions(self) -> SessionPlan:
        """The part by sessions in release order."""
        return plan_sessions(self.table, self.phases, self.max_concurrency, self.spacing_ns)

    @property
    def most_open(self) -> int:
        """How many sessions may be open at a time; 0 if the plan sets no limit."""
        return max((phase.max_concurrency for phase in self.phases), default=self.max_concurrency or 0)


def whole(
    table: pa.Table,
    phases: tuple[ClosedPhase, ...],
    max_concurrency: int | None,
    dropped: frozenset[int],
    spacing_ns: int,
) -> PlanPart:
    """The whole plan as the part of one machine."""
    return PlanPart(np.arange(table.num_rows), table, phases, max_concurrency, dropped, spacing_ns)


def split(plan: PlanPart, machines: int) -> list[PlanPart]:
    """The parts of ``machines`` machines. Each session is in exactly one part.

    Sessions are dealt in release order: in an open loop to each machine in turn, in a closed loop in proportion to the
    machines' shares of the phase's slots. The shares of a limit differ by 1 at most. Raises UsageError if a machine
    would have no slot or no session.
    """
    limits = [phase.max_concurrency for phase in plan.phases]
    if plan.max_concurrency is not None:
        limits.append(plan.max_concurrency)
    if min([plan.sessions.sessions, *limits]) < machines:
        raise UsageError(_TOO_LITTLE.format(machines))
    machine_of = _dealt(plan, machines)
    if np.unique(machine_of).size < machines:
        raise UsageError(_TOO_LITTLE.format(machines))
    session_of_row = np.empty(len(plan.rows), np.int64)
    starts = np.asarray(plan.sessions.starts)
    session_of_row[np.asarray(plan.sessions.rows)] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return [_part(plan, machine_of, session_of_row, number, machines) for number in range(machines)]


def shares(limit: int, machines: int) -> list[int]:
    """``limit`` divided into ``machines`` whole numbers that differ by 1 at most, larger ones first."""
    each, more = divmod(limit, machines)
    return [each + (number < more) for number in range(machines)]


def _dealt(plan: PlanPart, machines: int) -> Ints:
    """The machine of each session, by session in release order."""
    if not plan.phases:
        return np.arange(plan.sessions.sessions) % machines
    dealt = [np.resize(_turn_order(shares(one.max_concurrency, machines)), one.sessions) for one in plan.phases]
    order: Ints = np.concatenate(dealt)
    last = _turn_order(shares(plan.phases[-1].max_concurrency, machines))
    # Sessions after the last phase belong to it.
    return np.concatenate([order, np.resize(last, max(0, plan.sessions.sessions - len(order)))])


def _turn_order(slots: Sequence[int]) -> Ints:
    """The machines in an order in which machine m comes ``slots[m]`` times, evenly spread; shape (sum of slots,)."""
    machines = np.repeat(np.arange(len(slots)), slots)
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in slots])
    order: Ints = machines[np.lexsort((machines, places))]
    return order


def _part(plan: PlanPart, machine_of: Ints, session_of_row: Ints, number: int, machines: int) -> PlanPart:
    local = np.flatnonzero(machine_of[session_of_row] == number)
    phases, first = [], 0
    for phase in plan.phases:
        own = int(np.count_nonzero(machine_of[first : first + phase.sessions] == number))
        slots = shares(phase.max_concurrency, machines)[number]
        phases.append(replace(phase, sessions=own, max_concurrency=slots))
        first += phase.sessions
    limit = plan.max_concurrency
    dropped = np.flatnonzero(np.isin(local, np.fromiter(plan.dropped, np.int64, len(plan.dropped))))
    return PlanPart(
        rows=plan.rows[local],
        table=plan.table.take(pa.array(local)).combine_chunks(),
        phases=tuple(phases),
        max_concurrency=None if limit is None else shares(limit, machines)[number],
        dropped=frozenset(dropped.tolist()),
        spacing_ns=plan.spacing_ns * machines,
    )
