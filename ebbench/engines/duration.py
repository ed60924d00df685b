"""``--duration`` in a closed loop: stop the release of sessions after so many seconds, on any engine.

The number of released sessions depends on how fast they end, so the plan holds more sessions than are released. The
released ones become the run's plan; the original plan is kept, so that runs can be compared.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.devices.base import Device
from ebbench.engines.base import Engine, EngineResult, Observer
from ebbench.records.plan import Plan
from ebbench.spec.server import VIRTUAL_TIME, EngineOptions
from vllm_eb.policy import PolicySpec


def run_plan(
    engine: Engine, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
) -> tuple[Plan, EngineResult]:
    """Run ``plan``; returns the result and the plan, or its part that was released in time.

    Raises what the engine raises.
    """
    if plan.release_for_s is None:
        return plan, engine.run(plan, policy, device, options, observer)
    if engine.name not in VIRTUAL_TIME:
        result = engine.run(plan, policy, device, options, observer)
        return (plan, result) if result.interrupted else _released(plan, result)
    return _in_virtual_time(engine, plan, policy, device, options, observer)


def _released(plan: Plan, result: EngineResult) -> tuple[Plan, EngineResult]:
    """The sessions that the load generator released before it stopped.

    One machine releases them in plan order; several do so each with its own sessions.
    """
    left = result.requests.filter(pc.equal(result.requests["error_class"], "not_released"))["session"].unique()
    kept_rows = pc.invert(pc.is_in(plan.table["session"], value_set=left))
    if pc.all(kept_rows).as_py():
        return exhausted(plan, result)
    part = part_of(plan, plan.table.filter(kept_rows))
    kept = pc.is_in(result.requests["request_id"], value_set=part.table["request_id"].combine_chunks())
    return part, replace(result, requests=result.requests.filter(kept))


def _in_virtual_time(
    engine: Engine, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
) -> tuple[Plan, EngineResult]:
    """Run again with exactly the sessions that a longer run released in time.

    Sessions are released in plan order, and events up to a time do not depend on later releases. So a run of only those
    sessions equals the run that stops releasing at that time.
    """
    assert plan.release_for_s is not None  # checked by the caller
    order = _sessions_in_order(plan)
    tried = min(len(order), 4 * max(phase.max_concurrency for phase in plan.phases))
    while True:
        part = _first_sessions(plan, order, tried)
        result = engine.run(part, policy, device, options, None)
        if result.interrupted:
            return part, result
        in_time = _released_before(result.requests, order[:tried], plan.release_for_s)
        if in_time < tried:
            break
        if tried == len(order):
            return exhausted(plan, engine.run(plan, policy, device, options, observer))
        tried = min(len(order), 2 * tried)
    part = _first_sessions(plan, order, in_time)
    return part, engine.run(part, policy, device, options, observer)


def _sessions_in_order(plan: Plan) -> list[int]:
    """Sessions in release order: the order of their first rows."""
    return list(dict.fromkeys(plan.table["session"].to_pylist()))


def _released_before(requests: pa.Table, sessions: list[int], seconds: float) -> int:
    """How many of these sessions began within the first ``seconds``."""
    begun = requests.filter(pc.less(requests["intended_ns"], round(seconds * 1e9)))
    first = set(begun.filter(pc.equal(begun["turn"], 0))["session"].to_pylist())
    return sum(session in first for session in sessions)


def _first_sessions(plan: Plan, order: list[int], count: int) -> Plan:
    chosen = pa.array(order[:count], plan.table.schema.field("session").type)
    return part_of(plan, plan.table.filter(pc.is_in(plan.table["session"], value_set=chosen)))


def part_of(plan: Plan, table: pa.Table) -> Plan:
    """The plan with only the rows of ``table``; ``cut_from`` keeps the whole plan."""
    sessions = np.unique(table["session"].to_numpy()).size
    facts = {**plan.facts, "released_sessions": int(sessions), "released_requests": table.num_rows}
    return replace(plan, table=table, facts=facts, cut_from=plan.cut_from or plan)


def exhausted(plan: Plan, result: EngineResult) -> tuple[Plan, EngineResult]:
    """Add a warning if all sessions were released before the time was over."""
    sessions = len(_sessions_in_order(plan))
    note = (
        f"All {sessions:,} sessions of the plan were released before --duration {plan.release_for_s:g} was over; "
        "a larger --num-prompts fills it."
    )
    return plan, replace(result, warnings=(*result.warnings, note))
