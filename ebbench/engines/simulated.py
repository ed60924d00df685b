"""Prepares simulations from engine options, shows their progress, and checks that they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ebbench.devices.base import Device
from ebbench.engines.base import Observer, Progress
from ebbench.errors import RunError
from ebbench.records.plan import Plan
from ebbench.simulation.engine import Unit
from ebbench.simulation.state import UNSET, RequestState
from ebbench.simulation.step import SchedulerLimits
from ebbench.spec.server import EngineOptions
from ebbench.termination import interruptible
from vllm_eb.controller import Controller
from vllm_eb.lockstep import LONGEST_PERIOD
from vllm_eb.policy import PolicySpec

PROGRESS_INTERVAL_S = 0.1


class StoppableLoop(Protocol):
    """An event loop over a plan. A KeyboardInterrupt of ``run`` leaves a consistent state."""

    def run(self) -> None:
        """Run to the end of the plan."""
        ...


def run_through(simulation: StoppableLoop) -> bool:
    """Run to the end of the plan. Returns whether the user interrupted it."""
    try:
        with interruptible():
            simulation.run()
    except KeyboardInterrupt:
        return True
    return False


def check_all_ended(ended: int, requests: int, what: str) -> None:
    """Raise RunError if requests have not ended: ``what`` is in a deadlock."""
    if ended < requests:
        raise RunError(f"{requests - ended} of {requests} requests never ended: the {what} is stuck")


def scheduler_limits(options: EngineOptions) -> SchedulerLimits:
    """The options that limit what a scheduling step may hold."""
    return SchedulerLimits(
        options.running_limit,
        options.max_num_batched_tokens,
        options.block_size,
        options.long_prefill_token_threshold,
        options.async_scheduling,
        options.long_prefill_token_threshold_adaptive,
        options.scheduler_reserve_full_isl,
    )


def make_controller(
    policy: PolicySpec,
    device: Device,
    options: EngineOptions,
    total_blocks: int,
    *,
    keep_records: bool = True,
    ranks: int = 1,
) -> Controller | None:
    """The controller of one unit; None is vLLM's own scheduling. ``keep_records``: keep its decisions.

    ``ranks``: units that make every pass together. They know the number of the pass, as vLLM's do that are started with
    a ``--prefill-schedule-interval`` of the longest period.
    """
    if policy.native:
        return None
    return Controller(
        policy,
        device.calibration,
        max_num_seqs=options.running_limit,
        block_size=options.block_size,
        num_blocks=total_blocks,
        max_num_batched_tokens=options.max_num_batched_tokens,
        keep_records=keep_records,
        ranks=ranks,
        pass_interval=LONGEST_PERIOD if ranks > 1 else 1,
    )


def snapshot(
    policy: PolicySpec, plan: Plan, state: RequestState, units: Sequence[Unit], now_ns: int, undispatched: int = 0
) -> Progress:
    """Progress of a simulation. ``state``: state of the requests; warm-up requests follow the plan's rows."""
    own = slice(len(plan))
    outputs = int((state.next_slot[own] - state.first_slot[own]).sum())
    return Progress(
        policy=policy.name,
        completed=int((state.end_ns[own] != UNSET).sum()),
        planned=len(plan),
        output_tokens=outputs,
        total_tokens=outputs + int(state.prompt[own][state.done[own]].sum()),
        time_s=now_ns / 1e9,
        mode=units[0].gate.mode,
        running=sum(len(unit.scheduler.running) for unit in units),
        waiting=sum(len(unit.scheduler.waiting) for unit in units) + undispatched,
    )


def ticker(observer: Observer | None, show: Callable[[int], Progress]) -> Callable[[int], None] | None:
    """A function for an event loop that shows progress a few times per second of wall time; None without an
    observer."""
    if observer is None:
        return None
    last_s = time.perf_counter()

    def tick(now_ns: int) -> None:
        nonlocal last_s
        wall_s = time.perf_counter()
        if wall_s - last_s < PROGRESS_INTERVAL_S:
            return
        last_s = wall_s
        observer.update(show(now_ns))

    return tick
