"""What a worker does: one cell, from its settings to a summary. Plans and devices are kept between cells."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from ebbench.errors import EbbenchError
from ebbench.records.run import Run, RunWriter
from ebbench.sweep.settings import Settings

if TYPE_CHECKING:
    from ebbench.devices.base import Device
    from ebbench.devices.request import DeviceRequest
    from ebbench.records.manifest import Manifest
    from ebbench.records.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """A cell to run; ``run_dir`` None keeps the summary only."""

    key: str
    settings: Settings
    run_dir: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: a summary, or the error in one line. ``seconds`` of wall time, ``worker`` host and pid."""

    key: str
    summary: Mapping[str, Any] | None
    error: str
    seconds: float
    worker: str


def work(task: Task) -> Outcome:
    """Run a cell. Never raises for what is wrong with the cell: that becomes its error."""
    started = time.monotonic()
    try:
        summary, error = _summary(task), ""
    except EbbenchError as problem:
        summary, error = None, str(problem)
    except Exception as problem:  # a fault of ours or of an engine: this cell fails, the rest goes on
        summary, error = None, f"{type(problem).__name__}: {problem}"
    gc.collect()  # a simulation's objects refer to each other; quick, since plans and devices are frozen
    return Outcome(task.key, summary, error, time.monotonic() - started, f"{platform.node()}:{os.getpid()}")


def _summary(task: Task) -> dict[str, Any]:
    from ebbench.analysis.conclude import Setting, conclude_with_summary
    from ebbench.analysis.slo import parse_slo
    from ebbench.engines import select_engine
    from ebbench.engines.checks import check_fits, check_options
    from ebbench.engines.duration import run_plan
    from ebbench.engines.sim import SimEngine
    from ebbench.records.manifest import wall_clock_ns
    from vllm_eb.policy import parse_policy

    settings = task.settings
    policy, options = parse_policy(settings.policy), settings.options
    check_options(options, [policy])
    plan, device = _plan(_hashable(settings.plan_settings())), _device(settings)
    check_fits(plan, device, options)
    engine, _ = select_engine(settings.engine)
    if task.run_dir is None and isinstance(engine, SimEngine):
        engine = SimEngine(requests_only=True)
    with _writer(task.run_dir) as writer:
        anchor = wall_clock_ns()
        plan, result = run_plan(engine, plan, policy, device, options, None)
        setting = Setting(
            plan,
            policy,
            engine.name,
            device,
            options,
            anchor,
            slo=parse_slo([settings.goodput] if settings.goodput else []),
        )
        run, summary = conclude_with_summary(writer, setting, result)
    return summary.to_dict() | {"plan_hash": run.manifest.plan_hash, "git_commit": run.manifest.git_commit}


def _hashable(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(settings.items())


@lru_cache(maxsize=4)
def _plan(settings: tuple[tuple[str, Any], ...]) -> Plan:
    from ebbench.workloads import build_plan

    arguments = dict(settings)
    return _frozen(build_plan(arguments.pop("workload"), arguments.pop("scenario"), **arguments))


_loaded: dict[DeviceRequest, Device] = {}
KEPT_DEVICES = 8  # some 15 MB each


def _device(settings: Settings) -> Device:
    """The cell's device. Memory, batch size and budget only size its KV cache, so its tables are loaded once."""
    from ebbench.devices.loader import load, resized
    from ebbench.devices.request import DeviceRequest

    request = DeviceRequest(
        settings.device,
        settings.model,
        settings.cost,
        settings.gpu_memory_utilization,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.async_scheduling,
        settings.enforce_eager,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    key = replace(request, gpu_memory_utilization=0.9, max_num_seqs=None, max_num_batched_tokens=None)
    if (kept := _loaded.get(key)) is not None:
        return resized(kept, request)
    while len(_loaded) >= KEPT_DEVICES:
        del _loaded[next(iter(_loaded))]
    _loaded[key] = _frozen(load(request))
    return _loaded[key]


def _frozen(kept: T) -> T:
    """``kept``, hidden from the garbage collector, which would walk through it after every cell."""
    gc.freeze()
    return kept


def _writer(run_dir: Path | None) -> RunWriter:
    return _InMemory(Path()) if run_dir is None else RunWriter.create(run_dir)


class _InMemory(RunWriter):
    """Stores nothing; the run lives as long as its summary takes."""

    def finish(self, manifest: Manifest, tables: Mapping[str, pa.Table] | None = None) -> Run:
        """The run with its tables in memory."""
        held = dict(tables or {})
        rows = {name: table.num_rows for name, table in held.items()}
        return Run(self.path, msgspec.structs.replace(manifest, rows=rows), held)

    def __exit__(self, *_: object) -> None:
        """Nothing to clean up."""
