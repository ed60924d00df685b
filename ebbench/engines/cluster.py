"""The ``sim`` engine for several instances: replicas, DP+EP units, prefill and decode pools, behind a dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ebbench.collector import collector_paused
from ebbench.config.topology import DECODE_UTILIZATION, PREFILL_UTILIZATION, PoolSpec, TopologySpec
from ebbench.devices.base import Device
from ebbench.devices.collectives import choose_link
from ebbench.devices.units import UnitDevice, saving_kv, unit_device
from ebbench.dispatch import DispatchSpec
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
from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.simulation.assemble import StagePlan, Wiring, build_stage
from ebbench.simulation.cluster import Cluster, Outcome
from ebbench.simulation.handover import Handover
from ebbench.simulation.kv import IdentityNeeded
from ebbench.simulation.pools import DecodeInstance, PrefillInstance
from ebbench.simulation.stage import Stage
from ebbench.simulation.state import UNSET, RequestState
from ebbench.simulation.tables import decisions_table, requests_table, steps_table
from ebbench.simulation.transfer import Link, ReceiveStore, TransferFabric
from vllm_eb.controller import Controller
from vllm_eb.decisions import Record
from vllm_eb.policy import PolicySpec


@dataclass(frozen=True)
class ClusterEngine:
    """Runs a plan on a cluster in virtual time.

    ``dispatch`` is in front of the first pool, ``decode_dispatch`` in front of the decode pool. Each instance schedules
    by the run's policy; instances of separated pools by vLLM's own rules, since their phases are apart already.
    """

    topology: TopologySpec
    dispatch: DispatchSpec = field(default_factory=lambda: DispatchSpec("least-outstanding"))
    decode_dispatch: DispatchSpec = field(default_factory=lambda: DispatchSpec("least-outstanding"))
    name: str = "sim"

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None = None
    ) -> EngineResult:
        """Run to the end of the plan, or to the death of a decode instance (the result then is invalid).

        Raises UsageError for a request that can never fit or a policy that makes no sense here, RunError on a deadlock.
        """
        if self.topology.disaggregated and not policy.native:
            raise UsageError(
                f"topology {self.topology.label} separates prefill from decode, so there is nothing for policy "
                f"{policy.name} to decide; use --policy v1"
            )
        if options.warmup:
            raise UsageError("--warmup is for one instance; a simulated cluster has none: leave out --topology or it")
        simulation = _Simulation(self, plan, policy, device, options, observer)
        with collector_paused():
            if options.enable_prefix_caching and not _shares_content(plan):
                try:
                    return simulation.run(identity=False)
                except IdentityNeeded:
                    pass  # as in the sim engine: someone was preempted, so block identities count
            return simulation.run(identity=options.enable_prefix_caching)


@dataclass
class _Simulation:
    engine: ClusterEngine
    plan: Plan
    policy: PolicySpec
    device: Device
    options: EngineOptions
    observer: Observer | None
    units: list[Device] = field(default_factory=list)  # of each pool

    def run(self, *, identity: bool) -> EngineResult:
        topology, wiring = self.engine.topology, Wiring()
        controllers: list[Controller] = []
        if topology.disaggregated:
            cluster = self._pools(wiring, identity)
        else:
            assert topology.replicas is not None
            unit = self._unit(topology.replicas, None)
            state = RequestState(self.plan)
            front, controllers = self._stage("replicas", 0, topology.replicas, unit, state, wiring, identity)
            cluster = Cluster(self.plan, front, network_ns=self._network_ns, tick=None)
        wiring.cluster = cluster
        cluster.tick = ticker(self.observer, partial(self._show, cluster))
        interrupted = run_through(cluster)
        if not interrupted and cluster.outcome.dead is None:
            check_all_ended(cluster.ended, len(self.plan), "cluster")
        return self._result(cluster, wiring, controllers, interrupted)

    @property
    def _network_ns(self) -> int:
        return round(self.engine.topology.network_ms * 1e6)

    def _unit(self, pool: PoolSpec, utilization: float | None) -> UnitDevice:
        options = self._pool_options(pool)
        unit = unit_device(
            self.device,
            pool,
            utilization,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            self.engine.topology.link,
        )
        self.units.append(unit.device)
        return unit

    def _pool_options(self, pool: PoolSpec) -> EngineOptions:
        return replace(
            self.options,
            max_num_seqs=pool.max_num_seqs or self.options.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens or self.options.max_num_batched_tokens,
        )

    def _stage(
        self,
        kind: str,
        index: int,
        pool: PoolSpec,
        unit: UnitDevice,
        state: RequestState,
        wiring: Wiring,
        identity: bool,
    ) -> tuple[Stage, list[Controller]]:
        options = self._pool_options(pool)
        blocks = num_kv_blocks(unit.device, options)
        check_fits(self.plan, options, blocks)
        spec = StagePlan(
            kind=kind,
            index=index,
            pool=pool,
            unit=unit,
            limits=scheduler_limits(options),
            kv_blocks=blocks,
            identity=identity,
            caching=options.enable_prefix_caching,
            dispatch=self.engine.dispatch if index == 0 else self.engine.decode_dispatch,
            network_ns=self._network_ns,
            make_controller=lambda total: make_controller(self.policy, unit.device, options, total),
        )
        return build_stage(self.plan, state, spec, wiring, seed=int(self.plan.facts.get("seed", 0)))

    def _pools(self, wiring: Wiring, identity: bool) -> Cluster:
        topology = self.engine.topology
        assert topology.prefill is not None
        assert topology.decode is not None
        spec = topology.transfer
        before, after = RequestState(_one_token(self.plan)), RequestState(self.plan)
        sender = saving_kv(self._unit(topology.prefill, PREFILL_UTILIZATION), spec.save_ms_per_layer)
        receiver = self._unit(topology.decode, DECODE_UTILIZATION)
        front, _ = self._stage("prefill", 0, topology.prefill, sender, before, wiring, identity)
        back, _ = self._stage("decode", 1, topology.decode, receiver, after, wiring, identity)
        per_token = spec.kv_bytes_per_token or receiver.kv_bytes_per_token
        if per_token is None:
            raise UsageError(
                f"the KV size of {self.device.model} is unknown; set transfer.kv_bytes_per_token in the topology file"
            )
        speed = spec.bandwidth_gb_per_s * 1e9 if spec.bandwidth_gb_per_s else sender.link_bytes_per_s
        if speed is None:
            raise UsageError(
                f"how fast GPUs like {self.device.name} pass KV on is unknown: its profile names no link; set "
                "transfer.bandwidth_gb_per_s in the topology file, or add [links.NAME] to the device file"
            )
        store_bytes = spec.store_gb * 1e9 if spec.store_gb else receiver.spare_bytes or float("inf")
        fabric = TransferFabric(
            Link(speed, spec.latency_ms / 1e3),
            len(front.units),
            [ReceiveStore(store_bytes) for _ in back.units],
            backpressure=spec.backpressure,
        )
        sources = [unit for unit in front.units if isinstance(unit, PrefillInstance)]
        targets = [unit for unit in back.units if isinstance(unit, DecodeInstance)]
        handover = Handover(before, after, sources, targets, fabric, spec, per_token)
        return Cluster(self.plan, front, back, handover, network_ns=self._network_ns)

    def _link(self) -> str:
        """The kind of link that the times are those of; "" where nothing crosses one."""
        request, profile = self.units[0].request, self.units[0].profile
        several = self.engine.topology.disaggregated or (request is not None and not request.parallel.single)
        if request is None or profile is None or not several or not profile.links:
            return ""
        return choose_link(profile, self.engine.topology.link)

    def _show(self, cluster: Cluster, now_ns: int) -> Progress:
        units = [unit for stage in cluster.stages for unit in stage.units]
        return snapshot(
            self.policy,
            self.plan,
            cluster.last.state,
            units,
            now_ns,
            completed=cluster.ended,
            undispatched=cluster.front.dispatcher.waiting,
        )

    def _result(
        self, cluster: Cluster, wiring: Wiring, controllers: list[Controller], interrupted: bool
    ) -> EngineResult:
        records: list[tuple[int, Record]] = [(i, r) for i, c in enumerate(controllers) for r in c.drain_records()]
        records.sort(key=lambda item: item[1].time_s)
        request_ids = self.plan.table["request_id"].combine_chunks()
        state, first = cluster.last.state, cluster.front.state
        state.scheduled_ns, state.cached_tokens = first.scheduled_ns, first.cached_tokens
        requests = _with_failures(requests_table(self.plan, state), cluster.outcome)
        units = pa.array(cluster.unit_of.astype(np.int32), mask=cluster.unit_of == UNSET)
        requests = requests.set_column(requests.column_names.index("worker"), "worker", units)
        return EngineResult(
            requests=requests,
            steps=steps_table(wiring.log.steps, request_ids, wiring.kv_totals),
            decisions=decisions_table(records),
            interrupted=interrupted,
            invalid=() if cluster.outcome.dead is None else (cluster.outcome.dead,),
            facts=self._facts(cluster),
            warnings=tuple(dict.fromkeys(text for unit in self.units for text in unit.warnings)),
            device=self.units[0],
        )

    def _facts(self, cluster: Cluster) -> dict[str, Any]:
        topology = self.engine.topology
        facts: dict[str, Any] = {
            "topology": topology.label,
            "gpus": topology.gpus,
            **({"link": link} if (link := self._link()) else {}),
            "dispatch": self.engine.dispatch.name,
            "dispatch_wait_ms": _mean_ms(cluster.dispatched_ns - cluster.front.state.sent_ns, cluster.dispatched_ns),
            "device_wait_ms": _mean_ms(
                cluster.front.state.scheduled_ns - cluster.dispatched_ns, cluster.front.state.scheduled_ns
            ),
        }
        if cluster.handover is not None:
            fabric = cluster.handover.fabric
            facts |= {
                "decode_dispatch": self.engine.decode_dispatch.name,
                "transfers": fabric.transfers,
                "transfer_gb": fabric.bytes / 1e9,
                "receive_store_peak_gb": max(store.peak_bytes for store in fabric.stores) / 1e9,
            }
        return facts


def _shares_content(plan: Plan) -> bool:
    """Whether requests of the plan have prompt prefixes in common."""
    table = plan.table
    return table["hash_ids"].null_count < len(plan) or len(table["content"].unique()) < len(plan)


def _one_token(plan: Plan) -> Plan:
    """The plan as the prefill side sees it."""
    index = plan.table.column_names.index("output_tokens")
    ones = pa.array(np.ones(len(plan), np.int32))
    return replace(plan, table=plan.table.set_column(index, plan.table.schema.field(index), ones))


def _with_failures(requests: pa.Table, outcome: Outcome) -> pa.Table:
    if not outcome.failed:
        return requests
    count = requests.num_rows
    columns = {
        name: requests[name].to_pylist()
        for name in ("status", "finish_reason", "error_class", "error_body", "http_status")
    }
    for row, (kind, message, status) in outcome.failed.items():
        assert row < count
        columns["status"][row], columns["finish_reason"][row] = "failed", None
        columns["error_class"][row], columns["error_body"][row], columns["http_status"][row] = kind, message, status
    for name, values in columns.items():
        index = requests.column_names.index(name)
        requests = requests.set_column(
            index, requests.schema.field(index), pa.array(values, requests.schema.field(index).type)
        )
    return requests


def _mean_ms(spans_ns: np.ndarray, known: np.ndarray) -> float | None:
    valid = spans_ns[known != UNSET]
    return float(valid.mean()) / 1e6 if len(valid) else None
