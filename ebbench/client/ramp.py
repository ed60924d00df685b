"""Ramp-up: the load grows to its full size over some seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.spec.client import ClientOptions


def ramped(plan: Plan, options: ClientOptions, ramp_up_s: float) -> tuple[Plan, ClientOptions]:
    """The plan and the options with a ramp of ``ramp_up_s`` seconds.

    Open loop: the arrival rate grows linearly from zero to the planned rate. Closed loop: the slots of the first phase
    open one after the other over that time. Raises UsageError if ``ramp_up_s`` is not positive.
    """
    if not ramp_up_s > 0:
        raise UsageError(f"--ramp-up must be positive, not {ramp_up_s:g}")
    facts = {**plan.facts, "ramp_up_s": ramp_up_s}
    if plan.closed_loop:
        spacing_s = ramp_up_s / plan.phases[0].max_concurrency
        return replace(plan, facts=facts), replace(options, slot_spacing_s=spacing_s)
    index = plan.table.schema.get_field_index("arrival_ns")
    arrival = plan.table.column("arrival_ns").combine_chunks()
    known = arrival.is_valid().to_numpy(zero_copy_only=False)
    slowed = slow_start_ns(arrival.fill_null(0).to_numpy(zero_copy_only=False), round(ramp_up_s * 1e9))
    column = pa.array(slowed, pa.int64(), mask=~known)
    return replace(
        plan, table=plan.table.set_column(index, plan.table.schema.field(index), column), facts=facts
    ), options


def slow_start_ns(arrival_ns: npt.NDArray[np.int64], ramp_ns: int) -> npt.NDArray[np.int64]:
    """Arrival times (ns) under a rate that grows linearly from 0 to the planned rate over ``ramp_ns``.

    The expected number of arrivals by time t becomes rate * t^2 / (2 ramp) during the ramp and rate * (t - ramp / 2)
    after it, instead of rate * t. An arrival planned at time a moves to the time at which that number is rate * a. A
    Poisson process remains one, with a rate that varies over time.
    """
    planned = arrival_ns.astype(np.float64)
    during = np.sqrt(2.0 * ramp_ns * planned)
    slowed: npt.NDArray[np.float64] = np.where(planned < ramp_ns / 2, during, planned + ramp_ns / 2)
    return np.rint(slowed).astype(np.int64)
