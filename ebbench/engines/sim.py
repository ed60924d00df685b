"""The ``sim`` engine: vLLM's scheduling rules and the policies on an emulated device, in virtual time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ebbench.devices.base import Device
from ebbench.engines.base import EngineOptions, EngineResult, Observer, Progress
from ebbench.errors import RunError, UsageError
from ebbench.records.plan import Plan
from ebbench.simulation.instance import Instance
from ebbench.simulation.kv import CachingKv, CountingKv, IdentityNeeded, KvBlocks
from ebbench.simulation.loop import EventLoop
from ebbench.simulation.state import RequestState
from ebbench.simulation.step import SchedulerLimits
from ebbench.simulation.streams import StreamKv, streams_take_turns
from ebbench.simulation.tables import NoLog, StepLog, decisions_table, requests_table, steps_table
from ebbench.simulation.warmup import Beginning, at_beginning, records_after, steps_after, with_warmup, without_warmup
from vllm_eb.controller import Controller
from vllm_eb.decisions import Record
from vllm_eb.policy import PolicySpec

PROGRESS_INTERVAL_S = 0.1


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
                return _simulate(job, _counting(total))
            if streams_take_turns(plan):
                try:
                    return _simulate(job, _by_stream(total, options))
                except IdentityNeeded:
                    pass  # a prompt shorter than what its session left in the cache: exactness needs block identities
            return _simulate(job, _by_identity(total, options))


@dataclass(frozen=True)
class _Job:
    plan: Plan
    policy: PolicySpec
    device: Device
    options: EngineOptions
    observer: Observer | None
    requests_only: bool


@contextmanager
def collector_paused() -> Iterator[None]:
    """No search for garbage in cycles: a simulation makes none, and each search walks through a device's tables."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _counting(total_blocks: int) -> Callable[[RequestState], KvBlocks]:
    return lambda state: CountingKv(state, total_blocks, caching=False)


def _by_stream(total_blocks: int, options: EngineOptions) -> Callable[[RequestState], KvBlocks]:
    return lambda state: StreamKv(state, total_blocks, options.block_size)


def _by_identity(total_blocks: int, options: EngineOptions) -> Callable[[RequestState], KvBlocks]:
    return lambda state: CachingKv(state, total_blocks, options.block_size)


def num_kv_blocks(device: Device, options: EngineOptions) -> int:
    """KV blocks of the instance: as asked for, or what the device's capacity holds."""
    return options.num_kv_blocks or device.kv_capacity_tokens // options.block_size


def shares_content(plan: Plan) -> bool:
    """Whether requests of the plan have prompt prefixes in common."""
    table = plan.table
    return table["hash_ids"].null_count < len(plan) or len(table["content"].unique()) < len(plan)


def check_fits(plan: Plan, options: EngineOptions, total_blocks: int) -> None:
    """Raise UsageError for an empty plan, or a request that ``total_blocks`` KV blocks can never hold."""
    state = RequestState(plan)
    if not len(plan):
        raise UsageError("the plan holds no requests; raise --num-prompts")
    tokens = state.last + 1
    worst = int(tokens.argmax())
    if int(tokens[worst]) > options.max_model_len:
        raise UsageError(
            f"request {plan.table['request_id'][worst]} has {tokens[worst]} tokens, more than --max-model-len "
            f"{options.max_model_len}; raise it or pass --drop-too-long"
        )
    if -(-int(state.last[worst]) // options.block_size) > total_blocks:
        raise UsageError(
            f"request {plan.table['request_id'][worst]} has {tokens[worst]} tokens and can never fit in "
            f"{total_blocks} KV blocks of {options.block_size}; use a larger device or --num-kv-blocks"
        )


def _simulate(job: _Job, make_kv: Callable[[RequestState], KvBlocks]) -> EngineResult:
    plan, policy, device, options = job.plan, job.policy, job.device, job.options
    state, log = RequestState(with_warmup(plan, options.warmup)), NoLog() if job.requests_only else StepLog()
    kv = make_kv(state)
    limits = SchedulerLimits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.block_size,
        options.long_prefill_token_threshold,
        options.async_scheduling,
    )
    controller = make_controller(policy, device, options, kv.total)
    instance = Instance(state, limits, device.cost, kv, controller, log)
    if controller is not None:
        controller.follow_ages(instance.running_ages)
    beginning = Beginning(begun=not options.warmup)
    loop = EventLoop(
        plan,
        state,
        [instance],
        tick=_ticker(plan, policy, state, instance, job.observer),
        warmup=options.warmup,
        begin=at_beginning(beginning, log.steps, controller),
    )
    interrupted = False
    try:
        loop.run()
    except KeyboardInterrupt:
        interrupted = True
    if not interrupted and loop.ended < state.count:
        raise RunError(f"{state.count - loop.ended} of {state.count} requests never ended: the scheduler is stuck")
    records: list[Record] = [] if controller is None or job.requests_only else controller.drain_records()
    request_ids = plan.table["request_id"].combine_chunks()
    return EngineResult(
        requests=requests_table(plan, without_warmup(state, plan, beginning)),
        steps=steps_table(steps_after(log.steps, beginning), request_ids, kv.total),
        decisions=decisions_table([(0, record) for record in records_after(records, beginning)]),
        interrupted=interrupted,
    )


def make_controller(policy: PolicySpec, device: Device, options: EngineOptions, total_blocks: int) -> Controller | None:
    """The policy of one instance; None is vLLM's own scheduling."""
    if policy.kind == "v1":
        return None
    return Controller(
        policy,
        device.calibration,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        num_blocks=total_blocks,
    )


def _ticker(plan: Plan, policy: PolicySpec, state: RequestState, instance: Instance, observer: Observer | None):  # type: ignore[no-untyped-def]
    """A callback for the event loop that shows progress a few times per second of wall time."""
    if observer is None:
        return None
    last_s = time.perf_counter()

    def tick(now_ns: int) -> None:
        nonlocal last_s
        wall_s = time.perf_counter()
        if wall_s - last_s < PROGRESS_INTERVAL_S:
            return
        last_s = wall_s
        own = slice(len(plan))  # warm-up requests lie behind the plan's
        outputs = int((state.next_slot[own] - state.first_slot[own]).sum())
        observer.update(
            Progress(
                policy=policy.name,
                completed=int(state.done[own].sum()),
                planned=len(plan),
                output_tokens=outputs,
                total_tokens=outputs + int(state.prompt[own][state.done[own]].sum()),
                time_s=now_ns / 1e9,
                mode=instance.mode,
                running=len(instance.running),
                waiting=len(instance.waiting),
            )
        )

    return tick
