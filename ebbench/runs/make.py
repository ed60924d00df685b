"""Executes one cell in the calling process."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from ebbench.analysis.caveats import of_device
from ebbench.analysis.conclude import RunContext, begin, conclude_with_summary
from ebbench.analysis.pools import pool_figures
from ebbench.analysis.slo import parse_slo
from ebbench.analysis.summary import metrics_dict, summarise_phases
from ebbench.config.defaults import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.devices.base import Device
from ebbench.devices.loader import load, resized
from ebbench.devices.parallel import SINGLE
from ebbench.devices.request import DeviceRequest
from ebbench.devices.units import shape_of
from ebbench.engines.checks import check_fits, check_options
from ebbench.engines.duration import run_plan
from ebbench.engines.setup import (
    EngineSetup,
    is_server,
    journalled,
    make_engine,
    policy_label,
    topology_of,
    unknown_device,
    with_ramp,
    with_step_parts,
)
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.records.files import TableParts
from ebbench.records.manifest import wall_clock_ns
from ebbench.records.plan import Plan
from ebbench.records.run import Run, RunWriter
from ebbench.runs.cell import Cell
from ebbench.termination import held, interruptible
from ebbench.workloads.options import PlanOptions
from ebbench.workloads.planner import make_plan
from vllm_eb.policy import PolicySpec, parse_policy

if TYPE_CHECKING:
    from ebbench.engines.base import Engine
    from ebbench.records.manifest import Manifest

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """A cell to run. ``directory``: where the whole run is stored; None keeps only its figures."""

    cell: Cell
    directory: Path | None = None


@dataclass(frozen=True)
class Made:
    """The result of a cell: figures under the keys of a summary, and those of each phase if it has several.

    ``caveats``: those of the device, which are among the figures' ``warnings`` too, there without their codes.
    """

    figures: Mapping[str, Any]
    phases: tuple[Mapping[str, Any], ...] = ()
    caveats: tuple[str, ...] = ()


def make(task: Task, engine: Engine | None = None) -> Made:
    """Run a cell, on an engine that was started for several cells if one is given.

    Raises UsageError, RunError; KeyboardInterrupt where the run was interrupted.
    """
    cell = task.cell
    policy, server = parse_policy(cell.policy), is_server(cell.engine)
    check_options(cell.options, [policy])
    with interruptible():  # reading a workload may take minutes
        plan, device = plan_of(cell), device_of(cell)
    engine = engine or make_engine(setup_of(cell))[0]
    if not server and cell.topology is None:
        check_fits(plan, device, cell.options)
    plan, engine = with_ramp(plan, engine, cell.ramp_up_s)
    if task.directory is None and isinstance(engine, SimEngine) and engine.topology is None:
        engine = replace(engine, figures_only=True)
    if task.directory is not None:
        engine = with_step_parts(engine)
    with held(), _writer(task.directory) as writer:
        made = _measured(cell, plan, policy, device, engine, writer)
    gc.collect()  # a simulation's objects form reference cycles; collecting is fast, since plans and devices are frozen
    return made


def _measured(cell: Cell, plan: Plan, policy: PolicySpec, device: Device, engine: Engine, writer: RunWriter) -> Made:
    server, anchor_ns = is_server(cell.engine), wall_clock_ns()
    context = RunContext(
        plan,
        policy,
        engine.name,
        device,
        cell.options,
        anchor_ns,
        slo=parse_slo([cell.goodput] if cell.goodput else []),
        device_known=not server,
        warnings=policy_label(engine, policy).warnings if server else (),
    )
    if context.kind_of_time == "real" and not isinstance(writer, _InMemory):
        begin(writer, context)
        engine = journalled(engine, writer)
    planned, result = run_plan(engine, plan, policy, device, cell.options, None)
    context = replace(context, plan=planned)
    if result.interrupted:
        raise KeyboardInterrupt  # the engine returns the finished part, which is not a result of the cell
    run, summary = conclude_with_summary(writer, context, result)
    phases = summarise_phases(run) if _several_phases(planned) else ()
    figures = summary.to_dict() | {"plan_hash": run.manifest.plan_hash, "git_commit": run.manifest.git_commit}
    if "topology" in result.facts and isinstance(engine, SimEngine) and engine.topology is not None:
        figures |= pool_figures(result, engine.topology, cell.options.max_num_batched_tokens)
    parts = [{"phase": part.phase, **metrics_dict(part.metrics)} for part in phases] if len(phases) > 1 else []
    return Made(figures, tuple(parts), of_device(run.manifest.engine, run.manifest.warnings))


def _several_phases(plan: Plan) -> bool:
    return len(plan.table["phase"].unique()) > 1


def setup_of(cell: Cell) -> EngineSetup:
    """The engine settings of a cell."""
    return EngineSetup(
        cell.engine,
        cell.model,
        dict(cell.client),
        cell.plan.scenario,
        cell.topology,
        cell.link,
        cell.dispatch,
        cell.decode_dispatch,
        cell.replicas,
        cell.plan.max_model_len,
        cell.plan.drop_too_long,
        cell.vllm_options,
    )


def plan_of(cell: Cell) -> Plan:
    """The plan of a cell. Raises what the planner raises."""
    return _plan(cell.plan, cell.shuffle)


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


def device_of(cell: Cell, policies: Sequence[PolicySpec] = ()) -> Device:
    """The cell's device with a KV cache sized for the scheduler's options; a placeholder for an external server.

    For vLLM it is this machine, with the costs that ``policies`` need (empty: the cell's own policy). For a topology it
    is one unit of its first pool: the model may need several GPUs. Memory, batch size, budget and
    ``num_kv_blocks`` affect only the KV cache size, so kernel tables are loaded once. Raises UsageError.
    """
    if is_server(cell.engine):
        return unknown_device(cell.device, cell.model)
    name, model = cell.device or DEFAULT_DEVICE, cell.model or DEFAULT_MODEL
    if cell.real_time and _engine_name(cell.engine) == "vllm":
        from ebbench.engines.costs import local_hardware

        policies = policies or [parse_policy(cell.policy)]
        calibration = None if cell.calibration is None else Path(cell.calibration)
        return local_hardware(
            policies, cell.options, model=model, device=cell.device, calibration=calibration,
            vllm_options=cell.vllm_options,
        )  # fmt: skip
    if cell.calibration is not None:
        raise UsageError(
            "--calibration is for vLLM on this machine (--engine vllm); a simulated device is given with --device"
        )
    topology = topology_of(cell.topology, cell.plan.scenario, cell.link)
    options = cell.options
    request = DeviceRequest(
        name,
        model,
        cell.cost,
        options.gpu_memory_utilization,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.async_scheduling,
        options.enforce_eager,
        cell.host,
        SINGLE if topology is None else shape_of(topology),
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_tokens=None if options.num_kv_blocks is None else options.num_kv_blocks * options.block_size,
        vllm_version=options.vllm_version,
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
    """``kept``, excluded from garbage collections, which would otherwise visit it after every cell."""
    gc.freeze()
    return kept


def _writer(directory: Path | None) -> RunWriter:
    return _InMemory(Path()) if directory is None else RunWriter.create(directory)


class _InMemory(RunWriter):
    """A RunWriter that stores nothing; the run is kept in memory until it is summarised."""

    def finish(self, manifest: Manifest, tables: Mapping[str, pa.Table | TableParts] | None = None) -> Run:
        """The run with its tables in memory."""
        held = {
            name: table if isinstance(table, pa.Table) else pa.concat_tables(table)
            for name, table in (tables or {}).items()
        }
        rows = {name: table.num_rows for name, table in held.items()}
        return Run(self.path, msgspec.structs.replace(manifest, rows=rows), held)

    def __exit__(self, *_: object) -> None:
        """Nothing to clean up."""
