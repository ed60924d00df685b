"""The ``sim`` engine: vLLM's scheduling rules and the policies on emulated devices, in virtual time.

One instance, or a topology of several behind a dispatcher: replicas, DP+EP units, prefill and decode pools.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.config.topology import DECODE_UTILIZATION, DEFAULT_DISPATCH, PREFILL_UTILIZATION, PoolSpec, TopologySpec
from ebbench.devices.base import CostModel, Device, StepShape
from ebbench.devices.layers import choose_link
from ebbench.devices.loader import UnitDevice, saving_kv, unit_device
from ebbench.engines.base import (
    EngineResult,
    check_fits,
    longest_sequence,
    num_kv_blocks,
    plan_notes,
    refuse_queue_limits,
    refuse_two_orders,
    refuse_undecided,
    refuse_unsimulated,
)
from ebbench.errors import RunError, UsageError
from ebbench.process.interpreter import collector_paused
from ebbench.process.termination import interruptible
from ebbench.records.plan import Observer, Plan, Progress
from ebbench.records.schema import STEPS, with_columns
from ebbench.records.warnings import RunWarning, warning
from ebbench.simulation.engine import EngineLoop, Unit
from ebbench.simulation.front_end import FrontEnd
from ebbench.simulation.kv import (
    CachingKv,
    CountingKv,
    IdentityNeeded,
    KvBlocks,
    LaidOutKv,
    StatesKv,
    StreamKv,
    streams_take_turns,
)
from ebbench.simulation.loop import EventLoop, Handover, Stage, prefix_reader
from ebbench.simulation.releases import (
    plan_requests,
    records_after,
    with_prefill_ends,
    with_warmup,
)
from ebbench.simulation.scheduler import Scheduler
from ebbench.simulation.state import UNSET, RequestState, table_of_records
from ebbench.simulation.step import FigureLog, StepLog
from ebbench.spec.server import EngineOptions
from vllm_eb.controller import Controller
from vllm_eb.policy import PolicySpec
from vllm_eb.strategy import LONGEST_PERIOD
from vllm_eb.theory import NO_DRAFTS

if TYPE_CHECKING:
    from ebbench.dispatch import Dispatcher
    from ebbench.simulation.drafting import Drafting

PROGRESS_INTERVAL_S = 0.1
MakeKv = Callable[[RequestState, int], KvBlocks]
"""Creates the KV manager of a unit from the requests and its number of KV blocks."""


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
    controller = Controller(
        policy,
        device.calibration,
        max_num_seqs=options.running_limit,
        block_size=options.block_size if device.kv_layout is None else device.kv_layout.scheduler_block_tokens,
        num_blocks=total_blocks,
        max_num_batched_tokens=options.max_num_batched_tokens,
        keep_records=keep_records,
        ranks=ranks,
        pass_interval=LONGEST_PERIOD if ranks > 1 else 1,
        # A policy knows no more than the number of drafts at first.
        drafts=NO_DRAFTS
        if options.drafts is None
        else replace(options.drafts.theory, acceptance=(0.0,) * options.drafts.tokens),
    )
    if options.by_priority:
        refuse_two_orders(policy.name, controller.orders_queue)
    return controller


@dataclass(frozen=True)
class SimEngine:
    """Runs a plan in virtual time: seconds of wall time for minutes of traffic.

    ``topology`` None: one instance. ``dispatch`` is for the first pool, ``decode_dispatch`` for the decode pool. Each
    instance schedules by the run's policy; instances of separate pools by vLLM's own rules, since prefill and decode
    are already separate. ``figures_only``: leave out the decisions, and of the steps all but the numbers that figures
    need. ``steps_in_parts``: give the steps of one instance as parts to be stored, since the table of a long run is
    larger than all else.
    """

    topology: TopologySpec | None = None
    dispatch: str = DEFAULT_DISPATCH
    decode_dispatch: str = DEFAULT_DISPATCH
    figures_only: bool = False
    steps_in_parts: bool = False
    name: str = "sim"

    @property
    def _disaggregated(self) -> bool:
        return self.topology is not None and self.topology.disaggregated

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None = None
    ) -> EngineResult:
        """Run to the end of the plan, or until a decode instance runs out of memory (the result is then invalid).

        Raises UsageError for a request that does not fit or a policy that has no effect here, RunError on a deadlock.
        """
        refuse_undecided(self.topology, [policy])
        if self.topology is not None:
            refuse_queue_limits(options, self.topology.label)
        if self._disaggregated and options.drafts is not None:
            raise UsageError(
                "--speculative is not simulated with separate prefill and decode pools; leave one of them out"
            )
        refuse_unsimulated(plan, self.name, options)
        with collector_paused():
            for make_kv in _kv_managers(plan, options):
                try:
                    return _Simulation(self, plan, policy, device, options, make_kv).run(observer)
                except IdentityNeeded:
                    pass  # a prompt is shorter than its session's cached history: block identities are needed
        raise AssertionError("blocks with identities are always exact")


def _kv_managers(plan: Plan, options: EngineOptions) -> list[MakeKv]:
    """The fastest KV manager that may be exact for the plan, then one that always is."""

    def counting(state: RequestState, total: int) -> CountingKv:
        return CountingKv(state, total, caching=False)

    def by_stream(state: RequestState, total: int) -> StreamKv:
        return StreamKv(state, total, options.block_size)

    def by_identity(state: RequestState, total: int) -> CachingKv:
        return CachingKv(state, total, options.block_size)

    if not options.enable_prefix_caching:
        return [counting]
    # What a drafter computes again of a cached prefix stays in the cache beside it.
    computed_twice = options.drafts is not None and options.drafts.rules.own_kv
    return [by_stream, by_identity] if streams_take_turns(plan) and not computed_twice else [by_identity]


def _nothing_shared(plan: Plan) -> bool:
    """Whether no two requests of the plan have any content in common."""
    table = plan.table
    return table["hash_ids"].null_count == len(plan) and len(table["content"].unique()) == len(plan)


class _Simulation:
    """One run. Its front stage generates, or computes prompts for the back stage."""

    def __init__(
        self,
        engine: SimEngine,
        plan: Plan,
        policy: PolicySpec,
        device: Device,
        options: EngineOptions,
        make_kv: MakeKv,
    ) -> None:
        self._engine, self._plan, self._policy = engine, plan, policy
        self._device, self._options, self._make_kv = device, options, make_kv
        self._whole = with_warmup(plan, options.warmup)
        self._log: StepLog | FigureLog = FigureLog() if engine.figures_only else StepLog()
        self._controllers: list[Controller] = []
        self._kv_totals: list[int] = []  # by unit, all stages
        self._notes: list[RunWarning] = []
        self._units: list[Device] = []  # of each pool of a topology
        self._drafting: Drafting | None = None
        topology = engine.topology
        stages = self._pools(topology) if topology is not None and topology.disaggregated else self._replicas(topology)
        self._loop = EventLoop(plan, *stages, network_ns=self._network_ns, options=options, begin=self._begin)

    def run(self, observer: Observer | None) -> EngineResult:
        """Run to the end and build the tables."""
        loop = self._loop
        if observer is not None:
            loop.tick = self._ticker(observer)
        interrupted = False
        try:
            with interruptible():
                loop.run()
        except KeyboardInterrupt:
            interrupted = True
        requests = len(self._whole)
        if not interrupted and loop.dead is None and loop.ended < requests:
            stuck = "scheduler" if len(self._kv_totals) == 1 else "cluster"
            raise RunError(f"{requests - loop.ended} of {requests} requests never ended: the {stuck} is stuck")
        return self._result(interrupted)

    def _ticker(self, observer: Observer) -> Callable[[int], None]:
        """A function for the event loop that shows progress a few times per second of wall time."""
        last_s = time.perf_counter()

        def tick(now_ns: int) -> None:
            nonlocal last_s
            wall_s = time.perf_counter()
            if wall_s - last_s >= PROGRESS_INTERVAL_S:
                last_s = wall_s
                observer.update(self._progress(now_ns))

        return tick

    def _progress(self, now_ns: int) -> Progress:
        loop, own = self._loop, slice(len(self._plan))  # warm-up requests follow the plan's rows
        state, dispatcher = loop.last.state, loop.front.dispatcher
        units = [unit for stage in loop.stages for unit in stage.units]
        outputs = int((state.next_slot[own] - state.first_slot[own]).sum())
        return Progress(
            policy=self._policy.name,
            completed=int((state.end_ns[own] != UNSET).sum()),
            planned=len(self._plan),
            output_tokens=outputs,
            total_tokens=outputs + int(state.prompt[own][state.done[own]].sum()),
            time_s=now_ns / 1e9,
            mode=units[0].gate.mode,
            running=sum(len(unit.scheduler.running) for unit in units),
            waiting=sum(len(unit.scheduler.waiting) for unit in units) + (dispatcher.waiting if dispatcher else 0),
        )

    def _begin(self, now_ns: int) -> None:
        """Called at the end of the warm-up: drop its records."""
        self._loop.beginning.begin(now_ns, self._log, self._controllers)
        if self._drafting is not None:
            self._drafting.counts.forget()
        if self._loop.handover is not None:
            self._loop.handover.fabric.forget_totals()

    # Construction.

    @property
    def _network_ns(self) -> int:
        topology = self._engine.topology
        return 0 if topology is None else round(topology.network_ms * 1e6)

    def _replicas(self, topology: TopologySpec | None) -> tuple[Stage]:
        state = RequestState(self._whole)
        if topology is None:
            return (self._stage(PoolSpec(), self._device, state, None),)
        assert topology.replicas is not None
        unit = self._unit(topology.replicas, None, topology.link)
        # Whole engines whose requests ask only for first tokens act as a prefill pool.
        generates = bool((state.max_output > 1).any())
        return (self._stage(topology.replicas, unit.device, state, self._engine.dispatch, generates=generates),)

    def _pools(self, topology: TopologySpec) -> tuple[Stage, Stage, Handover]:
        from ebbench.simulation.transfer import ReceiveStore, TransferFabric, TransferLink

        assert topology.prefill is not None
        assert topology.decode is not None
        spec = topology.transfer
        before, after = RequestState(_one_token(self._whole)), RequestState(self._whole)
        sender = saving_kv(self._unit(topology.prefill, PREFILL_UTILIZATION, topology.link), spec.save_ms_per_layer)
        receiver = self._unit(topology.decode, DECODE_UTILIZATION, topology.link)
        dispatch, decode_dispatch = self._engine.dispatch, self._engine.decode_dispatch
        front = self._stage(topology.prefill, sender.device, before, dispatch, prefill_only=True, generates=False)
        back = self._stage(topology.decode, receiver.device, after, decode_dispatch, generates=False)
        per_token = spec.kv_bytes_per_token or receiver.kv_bytes_per_token
        if per_token is None:
            raise UsageError(
                f"the KV size of {self._device.model} is unknown; set transfer.kv_bytes_per_token in the topology file"
            )
        speed = spec.bandwidth_gb_per_s * 1e9 if spec.bandwidth_gb_per_s else sender.link_bytes_per_s
        if speed is None:
            raise UsageError(
                f"how fast GPUs like {self._device.name} pass KV on is unknown: its profile names no link; set "
                "transfer.bandwidth_gb_per_s in the topology file, or add [links.NAME] to the device file"
            )
        store_bytes = spec.store_gb * 1e9 if spec.store_gb else receiver.spare_bytes or float("inf")
        fabric = TransferFabric(
            TransferLink(speed, spec.latency_ms / 1e3),
            len(front.units),
            [ReceiveStore(store_bytes) for _ in back.units],
            backpressure=spec.backpressure,
        )
        sources, targets = ([unit.scheduler for unit in stage.units] for stage in (front, back))
        return front, back, Handover(before, after, sources, targets, fabric, spec, per_token)

    def _unit(self, pool: PoolSpec, utilization: float | None, link: str) -> UnitDevice:
        options = self._pool_options(pool)
        unit = unit_device(self._device, pool, utilization, options.max_num_seqs, options.max_num_batched_tokens, link)
        self._units.append(unit.device)
        return unit

    def _pool_options(self, pool: PoolSpec) -> EngineOptions:
        return replace(
            self._options,
            max_num_seqs=pool.max_num_seqs or self._options.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens or self._options.max_num_batched_tokens,
        )

    def _stage(
        self,
        pool: PoolSpec,
        device: Device,
        state: RequestState,
        dispatch: str | None,
        *,
        prefill_only: bool = False,
        generates: bool = True,
    ) -> Stage:
        """``device``: that of one unit of ``pool``."""
        options = self._pool_options(pool)
        blocks, make_kv = self._kv(device, options)
        check_fits(self._plan, device, options)
        if options.drafts is not None:
            from ebbench.simulation.drafting import Drafting

            longest = min(options.max_model_len, longest_sequence(device, options))
            self._drafting = Drafting.of(options.drafts, state, int(self._plan.facts.get("seed", 0)), longest)
        first, size = len(self._kv_totals), pool.dp
        self._kv_totals += [blocks] * pool.units
        units = []
        for number in range(first, first + pool.units):
            scheduler = self._scheduler(state, options, make_kv(state, blocks), keep_finished=prefill_only)
            controller = make_controller(
                self._policy, device, options, blocks, keep_records=not self._engine.figures_only, ranks=size
            )
            self._controllers += [] if controller is None else [controller]
            units.append(Unit.of(number, scheduler, controller))
        parts = (units[size * place : size * (place + 1)] for place in range(pool.instances))
        engines = [EngineLoop(part, device.cost, self._log) for part in parts]
        front_ends = [FrontEnd.of(options, device.profile, size, state) for _ in engines]
        if dispatch is None:
            return Stage(state, engines, front_ends)
        return Stage(state, engines, front_ends, *self._dispatcher(dispatch, pool, device.cost, options, generates))

    def _scheduler(self, state: RequestState, options: EngineOptions, kv: KvBlocks, keep_finished: bool) -> Scheduler:
        if self._drafting is None:
            return Scheduler(state, options, kv, keep_finished=keep_finished)
        from ebbench.simulation.drafting import DraftingScheduler

        return DraftingScheduler(state, options, kv, self._drafting)

    def _dispatcher(
        self, dispatch: str, pool: PoolSpec, cost: CostModel, options: EngineOptions, generates: bool
    ) -> tuple[Dispatcher, Callable[[int], tuple[int, ...]] | None]:
        """The dispatcher of a pool, and what reads the prefixes of requests if it uses them."""
        from ebbench.dispatch import Fleet, make_dispatcher, parse_dispatch

        chunk_tokens = options.max_num_batched_tokens
        # Assumed before the first measurement: the forward time of a full chunk (the paper measures it offline).
        forward_s = cost.step_s(StepShape(((chunk_tokens, 0),), 0, 0, 1))
        dispatcher = make_dispatcher(
            parse_dispatch(dispatch),
            Fleet([pool.dp] * pool.instances),
            chunk_tokens=chunk_tokens,
            network_ns=2 * self._network_ns,
            default_forward_ns=round(forward_s * 1e9),
            seed=int(self._plan.facts.get("seed", 0)),
            generates=generates,
        )
        return dispatcher, prefix_reader(self._whole) if dispatcher.wants_prefix else None

    def _kv(self, device: Device, options: EngineOptions) -> tuple[int, MakeKv]:
        """The number of KV blocks of a unit and how they are given out.

        Where layers keep a window or a state, blocks are those of vLLM's pool. What requests share where layers keep a
        window is found by blocks that hold all layers of their tokens; then the pool counts as many of them as it holds
        at the mean length.
        """
        blocks, layout, drafts = num_kv_blocks(device, options), device.kv_layout, options.drafts
        if layout is None:
            return blocks, self._make_kv
        if layout.states_alone:
            drafter = {
                "recomputes": drafts is not None and drafts.rules.own_kv,
                "marked": drafts is not None and drafts.rules.own_kv and drafts.method != "mtp",
            }
            return blocks, lambda state, total: StatesKv(state, total, layout, options.block_size, **drafter)
        if not options.enable_prefix_caching or _nothing_shared(self._whole):
            size, caching = options.block_size, options.enable_prefix_caching
            return blocks, lambda state, total: LaidOutKv(state, total, layout, size, caching=caching)
        table = self._plan.table
        tokens = pc.add(table["input_tokens"].cast(pa.int64()), table["output_tokens"])
        mean, longest = float(pc.mean(tokens).as_py()), int(pc.max(tokens).as_py())
        effective = max(layout.effective_tokens(blocks, mean), longest) // options.block_size + 1
        kv_tokens = effective * options.block_size
        self._notes.append(warning("kv-of-mean-request", model=device.model, tokens=kv_tokens, mean_tokens=mean))
        return effective, self._make_kv

    # Results.

    def _result(self, interrupted: bool) -> EngineResult:
        loop, topology = self._loop, self._engine.topology
        records = [
            (unit, record) for unit, controller in enumerate(self._controllers) for record in controller.drain_records()
        ]
        records.sort(key=lambda item: item[1].time_s)
        requests = self._requests()
        for stage in loop.stages:
            stage.state.forget_token_times()
        several = len(self._kv_totals) > 1  # a unit that coasts makes its steps ahead of the others': they are sorted
        steps, parts, log = STEPS.empty_table(), None, self._log
        first, begin_ns = loop.beginning.first_step(log), loop.beginning.time_ns
        if isinstance(log, FigureLog):
            steps = log.table(self._kv_totals, first, begin_ns)
        else:
            ids = self._plan.table["request_id"].combine_chunks()
            parts = log.parts(ids, self._kv_totals, first, begin_ns, by_time=several)
            if several or not self._engine.steps_in_parts:
                steps, parts = parts.table(), None
        warnings = [text for unit in self._units for text in unit.warnings]
        return EngineResult(
            requests=requests,
            steps=steps,
            step_parts=parts,
            decisions=table_of_records(records_after(records, loop.beginning)),
            interrupted=interrupted,
            invalid=() if loop.dead is None else (loop.dead,),
            facts=({} if topology is None else self._facts(topology))
            | loop.front.front_ends[0].facts
            | ({} if self._drafting is None else self._drafting.counts.facts),
            warnings=tuple(dict.fromkeys([*warnings, *self._notes, *plan_notes(self._plan)])),
            device=self._units[0] if self._units else None,
        )

    def _requests(self) -> pa.Table:
        loop, count = self._loop, len(self._plan)
        state, first = loop.last.state, loop.front.state
        state.scheduled_ns, state.cached_tokens = first.scheduled_ns, first.cached_tokens
        requests = plan_requests(self._plan, state, loop)
        if self._engine.topology is None:
            return requests
        if loop.handover is not None and loop.hang_ups.any:
            requests = with_prefill_ends(requests, first, loop.beginning)
        units = loop.unit_of[:count]
        return with_columns(requests, {"worker": pa.array(units.astype(np.int32), mask=units == UNSET)})

    def _link(self, topology: TopologySpec) -> str:
        """The kind of link that the times assume; "" if no data crosses a link."""
        request, profile = self._units[0].request, self._units[0].profile
        several = topology.disaggregated or (request is not None and not request.parallel.single)
        if request is None or profile is None or not several or not profile.links:
            return ""
        return choose_link(profile, topology.link)

    def _facts(self, topology: TopologySpec) -> dict[str, Any]:
        loop, own = self._loop, slice(len(self._plan))
        dispatched_ns, scheduled_ns = loop.dispatched_ns[own], loop.front.state.scheduled_ns[own]
        facts: dict[str, Any] = {
            "topology": topology.label,
            "gpus": topology.gpus,
            "answering_units": topology.pools[-1].units,
            "answering_instances": topology.pools[-1].instances,
            **({"link": link} if (link := self._link(topology)) else {}),
            "dispatch": self._engine.dispatch,
            "dispatch_wait_ms": _mean_ms(dispatched_ns - loop.front.state.sent_ns[own], dispatched_ns),
            "device_wait_ms": _mean_ms(scheduled_ns - dispatched_ns, scheduled_ns),
        }
        if loop.handover is not None:
            fabric = loop.handover.fabric
            facts |= {
                "decode_dispatch": self._engine.decode_dispatch,
                "transfers": fabric.transfers,
                "transfer_gb": fabric.bytes / 1e9,
                "receive_store_peak_gb": max(store.peak_bytes for store in fabric.stores) / 1e9,
            }
        return facts


def _one_token(plan: Plan) -> Plan:
    """The plan as the prefill stage runs it: one output token per request."""
    return replace(plan, table=with_columns(plan.table, {"output_tokens": np.ones(len(plan), np.int32)}))


def _mean_ms(spans_ns: np.ndarray, known: np.ndarray) -> float | None:
    valid = spans_ns[known != UNSET]
    return float(valid.mean()) / 1e6 if len(valid) else None
