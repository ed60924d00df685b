"""Prepares a run: its plan, its device, its engine."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from ebbench.config.defaults import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.devices.base import Device
from ebbench.devices.loader import load, resized
from ebbench.devices.parallel import SINGLE
from ebbench.devices.profiles import as_decoder
from ebbench.devices.request import DeviceRequest
from ebbench.devices.units import shape_of
from ebbench.engines.base import Engine
from ebbench.engines.checks import check_fits, check_options
from ebbench.engines.setup import make_engine, topology_of, unknown_device, with_ramp
from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.spec.run import RunSpec
from ebbench.spec.server import is_server
from ebbench.workloads.options import PlanOptions
from ebbench.workloads.planner import make_plan
from vllm_eb.policy import PolicySpec, parse_policy

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A run that can start. ``policy_stated``: the user named the policy, and did not leave it at its default."""

    spec: RunSpec
    policy: PolicySpec
    plan: Plan
    device: Device
    engine: Engine
    policy_stated: bool = True


def prepare(spec: RunSpec, engine: Engine | None = None) -> Prepared:
    """Plan, device and engine of a run; ``engine``: one that was started for several runs.

    Raises UsageError for settings that contradict each other, and what planner and devices raise.
    """
    policy = parse_policy(spec.policy)
    check_options(spec.server, [policy])
    plan, device = plan_of(spec), device_of(spec)
    engine = engine or make_engine(spec)[0]
    check_plan(spec, plan, device)
    return prepared(spec, policy, plan, device, engine)


def check_plan(spec: RunSpec, plan: Plan, device: Device) -> None:
    """Raise UsageError for a request that does not fit; the engine checks several GPUs, which hold more."""
    if not is_server(spec.engine) and spec.cluster.topology is None:
        check_fits(plan, device, spec.server)


def prepared(
    spec: RunSpec, policy: PolicySpec, plan: Plan, device: Device, engine: Engine, *, policy_stated: bool = True
) -> Prepared:
    """The same of parts that exist already. Raises UsageError for a ramp that the engine does not support."""
    plan, engine = with_ramp(plan, engine, spec.ramp_up_s)
    return Prepared(spec, policy, plan, device, engine, policy_stated)


def plan_of(spec: RunSpec) -> Plan:
    """The plan of a spec. Raises what the planner raises."""
    return _plan(spec.plan, spec.shuffle)


@lru_cache(maxsize=4)
def _plan(options: PlanOptions, shuffle: bool) -> Plan:
    plan = make_plan(options)
    return _frozen(shuffled(plan, options.seed) if shuffle else plan)


def shuffled(plan: Plan, seed: int) -> Plan:
    """The same requests in another order: lengths and contents move, arrival times stay."""
    order = pa.array(np.random.default_rng(seed).permutation(plan.table.num_rows))
    table = plan.table
    for name in ("input_tokens", "output_tokens", "content"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), table[name].take(order))
    return replace(plan, table=table)


_loaded: dict[DeviceRequest, Device] = {}
KEPT_DEVICES = 8  # about 15 MB each


def device_of(spec: RunSpec, policies: Sequence[PolicySpec] = ()) -> Device:
    """The run's device with a KV cache sized for the scheduler's options; a placeholder for an external server.

    For vLLM it is this machine, with the costs that ``policies`` need (empty: the run's own policy). For a topology it
    is one unit of its first pool: the model may need several GPUs. Memory, batch size, budget and
    ``num_kv_blocks`` affect only the KV cache size, so kernel tables are loaded once. Raises UsageError.
    """
    if is_server(spec.engine):
        return unknown_device(spec.device, spec.model)
    name, model = spec.device or DEFAULT_DEVICE, spec.model or DEFAULT_MODEL
    if spec.real_time and _engine_name(spec.engine) == "vllm":
        from ebbench.engines.costs import local_hardware

        policies = policies or [parse_policy(spec.policy)]
        calibration = None if spec.calibration is None else Path(spec.calibration)
        return local_hardware(
            policies, spec.server, model=model, device=spec.device, calibration=calibration,
            vllm_options=spec.vllm_options,
        )  # fmt: skip
    if spec.calibration is not None:
        raise UsageError(
            "--calibration is for vLLM on this machine (--engine vllm); a simulated device is given with --device"
        )
    topology = topology_of(spec.cluster.topology, spec.plan.scenario, spec.cluster.link)
    options = spec.server
    request = DeviceRequest(
        name,
        as_decoder(model) if spec.assume_decoder else model,
        spec.cost,
        options.gpu_memory_utilization,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.async_scheduling,
        options.enforce_eager,
        spec.host,
        SINGLE if topology is None else shape_of(topology),
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_tokens=None if options.num_kv_blocks is None else options.num_kv_blocks * options.block_size,
        vllm_version=options.vllm_version,
        drafts=options.drafts,
    )
    key = replace(
        request, gpu_memory_utilization=None, max_num_seqs=None, max_num_batched_tokens=None, kv_tokens=None,
        vllm_version=None,
    )  # fmt: skip
    if (kept := _loaded.get(key)) is not None:
        return kept if kept.profile is None else resized(kept, request)
    while len(_loaded) >= KEPT_DEVICES:
        del _loaded[next(iter(_loaded))]
    _loaded[key] = _frozen(load(request))
    return _loaded[key]


def _engine_name(engine: str) -> str:
    from ebbench.engines import select_engine

    return select_engine(engine)[0].name


def _frozen(kept: T) -> T:
    """``kept``, excluded from garbage collections, which would otherwise visit it after every spec."""
    gc.freeze()
    return kept
