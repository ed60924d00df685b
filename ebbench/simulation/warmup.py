"""Warm-up requests: the plan's lengths with other content, sent before the plan and not recorded.

They use the same controller and instance, so an adaptive policy has estimates when the plan begins. ``vllm bench serve
--num-warmups`` does the same to a server, but repeats its first prompt. Their rows follow the plan's in the arrays of a
run, so that the plan's row numbers do not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ebbench.records.plan import Plan
from ebbench.records.schema import PLAN
from ebbench.simulation.state import UNSET, Ints, RequestState
from ebbench.simulation.step_log import FigureLog, StepLog, StepParts
from vllm_eb.controller import Controller
from vllm_eb.decisions import Record

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
    """The plan with ``count`` warm-up requests after its own rows; their lengths are the plan's, in its order."""
    if not count:
        return plan
    table = plan.table
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
    return replace(plan, table=pa.concat_tables([table.select(PLAN.names), warmup]).combine_chunks())


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
