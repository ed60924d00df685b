"""The ``sim`` engine: vLLM's scheduling rules and the policies on an emulated device, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ebbench.collector import collector_paused
from ebbench.devices.base import Device
from ebbench.engines.base import EngineOptions, EngineResult, Observer, Progress
from ebbench.engines.simulated import (
    check_all_ended,
    check_fits,
    make_controller,
    num_kv_blocks,
    run_through,
    scheduler_limits,
    snapshot,
    ticker,
)
from ebbench.records.plan import Plan
from ebbench.simulation.instance import Instance
from ebbench.simulation.kv import CachingKv, CountingKv, IdentityNeeded, KvBlocks
from ebbench.simulation.loop import EventLoop
from ebbench.simulation.state import RequestState
from ebbench.simulation.streams import StreamKv, streams_take_turns
from ebbench.simulation.tables import NoLog, StepLog, decisions_table, requests_table, steps_table
from ebbench.simulation.warmup import Beginning, at_beginning, records_after, steps_after, with_warmup, without_warmup
from vllm_eb.decisions import Record
from vllm_eb.policy import PolicySpec


class SimEngine:
    """Runs a plan in virtual time; seconds of wall time for minutes of traffic."""

    name = "sim"

    def __init__(self, *, requests_only: bool = False) -> None:
        """``requests_only``: tables of steps and decisions come out empty, for who wants the metrics alone."""
        self._requests_only = requests_only

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None = None
    ) -> EngineResult:
        """Run to the end of the plan. Raises UsageError for a request that can never fit, RunError on a deadlock."""
        total = num_kv_blocks(device, options)
        check_fits(plan, options, total)
        job = _Job(plan, policy, device, options, observer, self._requests_only)
        with collector_paused():
            if not options.enable_prefix_caching:
                return _simulate(job, partial(CountingKv, total=total, caching=False))
            if streams_take_turns(plan):
                try:
                    return _simulate(job, partial(StreamKv, total=total, block_size=options.block_size))
                except IdentityNeeded:
                    pass  # a prompt shorter than what its session left in the cache: exactness needs block identities
            return _simulate(job, partial(CachingKv, total=total, block_size=options.block_size))


@dataclass(frozen=True)
class _Job:
    plan: Plan
    policy: PolicySpec
    device: Device
    options: EngineOptions
    observer: Observer | None
    requests_only: bool


def _simulate(job: _Job, make_kv: Callable[[RequestState], KvBlocks]) -> EngineResult:
    plan, policy, device, options = job.plan, job.policy, job.device, job.options
    state, log = RequestState(with_warmup(plan, options.warmup)), NoLog() if job.requests_only else StepLog()
    kv = make_kv(state)
    controller = make_controller(policy, device, options, kv.total, keep_records=not job.requests_only)
    instance = Instance(state, scheduler_limits(options), device.cost, kv, controller, log)
    if controller is not None:
        controller.follow_ages(instance.running_ages)
    beginning = Beginning(begun=not options.warmup)

    def show(now_ns: int) -> Progress:
        return snapshot(policy, plan, state, [instance], now_ns, completed=int(state.done[: len(plan)].sum()))

    loop = EventLoop(
        plan,
        state,
        [instance],
        tick=ticker(job.observer, show),
        warmup=options.warmup,
        begin=at_beginning(beginning, log.steps, controller),
    )
    interrupted = run_through(loop)
    if not interrupted:
        check_all_ended(loop.ended, state.count, "scheduler")
    records: list[Record] = [] if controller is None else controller.drain_records()
    request_ids = plan.table["request_id"].combine_chunks()
    return EngineResult(
        requests=requests_table(plan, without_warmup(state, plan, beginning)),
        steps=steps_table(steps_after(log.steps, beginning), request_ids, kv.total),
        decisions=decisions_table([(0, record) for record in records_after(records, beginning)]),
        interrupted=interrupted,
    )
