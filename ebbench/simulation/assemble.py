"""From a topology to stages of instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ebbench.config.topology import PoolSpec
from ebbench.devices.base import StepShape
from ebbench.devices.units import UnitDevice
from ebbench.dispatch import DispatchSpec, Fleet, make_dispatcher
from ebbench.records.plan import Plan
from ebbench.simulation.barrier import BarrierGroup, BarrierUnit
from ebbench.simulation.cluster import Cluster
from ebbench.simulation.instance import Instance
from ebbench.simulation.kv import CachingKv, CountingKv, KvBlocks
from ebbench.simulation.pools import BarrierDecode, BarrierPrefill, DecodeInstance, PrefillInstance
from ebbench.simulation.stage import Node, Stage, prefix_reader
from ebbench.simulation.state import RequestState
from ebbench.simulation.step import SchedulerLimits, Step
from ebbench.simulation.tables import StepLog
from vllm_eb.controller import Controller

MakeController = Callable[[int], Controller | None]
"""From the number of KV blocks of a unit to its policy; None is vLLM's own."""

_CLASSES: dict[tuple[str, bool], type[Instance]] = {
    ("replicas", False): Instance,
    ("replicas", True): BarrierUnit,
    ("prefill", False): PrefillInstance,
    ("prefill", True): BarrierPrefill,
    ("decode", False): DecodeInstance,
    ("decode", True): BarrierDecode,
}


@dataclass
class Wiring:
    """Joins sinks, which are made first, to the cluster, which is made last."""

    log: StepLog = field(default_factory=StepLog)
    cluster: Cluster | None = None
    kv_totals: list[int] = field(default_factory=list)  # by unit, all stages

    def pass_ended(self, stage: int, node: int, start_ns: int, end_ns: int) -> None:
        """Tell the cluster when a pass will end."""
        assert self.cluster is not None
        self.cluster.pass_ended(stage, node, start_ns, end_ns)


@dataclass(frozen=True)
class _Sink:
    wiring: Wiring
    stage: int
    node: int

    def step(self, instance: int, step: Step) -> None:
        """Log the step and tell when it ends."""
        self.wiring.log.step(instance, step)
        self.wiring.pass_ended(self.stage, self.node, step.start_ns, step.end_ns)


@dataclass(frozen=True)
class StagePlan:
    """Everything one stage is made of. ``kind``: replicas, prefill or decode."""

    kind: str
    index: int
    pool: PoolSpec
    unit: UnitDevice
    limits: SchedulerLimits
    kv_blocks: int
    identity: bool
    caching: bool
    dispatch: DispatchSpec
    network_ns: int
    make_controller: MakeController


def build_stage(
    plan: Plan, state: RequestState, spec: StagePlan, wiring: Wiring, seed: int
) -> tuple[Stage, list[Controller]]:
    """Make the instances of one stage and their dispatcher."""
    grouped = spec.pool.dp > 1
    units: list[Instance] = []
    controllers: list[Controller] = []
    first = len(wiring.kv_totals)
    for unit in range(spec.pool.units):
        controller = spec.make_controller(spec.kv_blocks)
        sink = wiring.log if grouped else _Sink(wiring, spec.index, unit)
        kv = _kv(state, spec)
        made = _CLASSES[spec.kind, grouped](
            state, spec.limits, spec.unit.device.cost, kv, controller, sink, index=first + unit
        )
        if controller is not None:
            controller.follow_ages(made.running_ages)
            controllers.append(controller)
        units.append(made)
        wiring.kv_totals.append(spec.kv_blocks)
    nodes: Sequence[Node] = _groups(units, spec, wiring) if grouped else units
    fleet = Fleet([spec.pool.dp] * spec.pool.instances)
    dispatcher = make_dispatcher(
        spec.dispatch,
        fleet,
        chunk_tokens=spec.limits.max_num_batched_tokens,
        network_ns=2 * spec.network_ns,
        default_forward_ns=_first_guess_ns(spec),
        seed=seed,
        # Whole engines that are asked for nothing but first tokens are a prefill pool by use.
        generates=spec.kind == "replicas" and bool((state.max_output > 1).any()),
    )
    prefixes = prefix_reader(plan) if dispatcher.wants_prefix else None
    node_of_unit = [unit // spec.pool.dp for unit in range(len(units))]
    stage = Stage(state, units, list(nodes), node_of_unit, dispatcher, spec.limits.block_size, prefixes)
    return stage, controllers


def _kv(state: RequestState, spec: StagePlan) -> KvBlocks:
    if spec.identity:
        return CachingKv(state, spec.kv_blocks, spec.limits.block_size)
    return CountingKv(state, spec.kv_blocks, caching=spec.caching)


def _groups(units: list[Instance], spec: StagePlan, wiring: Wiring) -> list[Node]:
    def hook(node: int) -> Callable[[int, int], None]:
        return lambda start_ns, end_ns: wiring.pass_ended(spec.index, node, start_ns, end_ns)

    depth = 2 if spec.limits.async_scheduling else 1
    size = spec.pool.dp
    members = [unit for unit in units if isinstance(unit, BarrierUnit)]
    return [
        BarrierGroup(members[size * node : size * (node + 1)], depth=depth, on_pass=hook(node))
        for node in range(spec.pool.instances)
    ]


def _first_guess_ns(spec: StagePlan) -> int:
    """Forward time before the first is measured (the paper takes it from offline tests): a full chunk."""
    chunk = spec.limits.max_num_batched_tokens
    return round(spec.unit.device.cost.step_s(StepShape(((chunk, 0),), 0, 0, 1)) * 1e9)
