"""Turns an engine's result into a stored run: validity, warnings and manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.api_server_load import api_server_warning
from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.device_caveats import Batches, batches_of, said_of_run, shown_by_servers
from ebbench.analysis.kv_pressure import STEP_COLUMNS, KvPressure, kv_pressure, kv_pressure_by_metrics
from ebbench.analysis.metrics import QUANTILES, Metrics, Slo, latency_columns, measure, samples_needed
from ebbench.analysis.steady import steady_windows
from ebbench.analysis.summary import Summary, summary_of
from ebbench.analysis.validity import Conditions, invalid_reasons
from ebbench.devices.base import Device
from ebbench.engines.base import EngineResult
from ebbench.engines.checks import start_notes
from ebbench.engines.machine import engine_versions
from ebbench.errors import RunError
from ebbench.records.manifest import (
    Clock,
    Manifest,
    git_commit,
    phase_facts,
    plan_hash,
    software_versions,
)
from ebbench.records.plan import Plan
from ebbench.records.run import NotStoredError, Run, RunWriter
from ebbench.records.schema import DECISIONS, REQUEST_LATENCIES, REQUESTS, STEPS
from ebbench.records.warnings import Caveat, RunWarning, warning
from ebbench.spec.server import VIRTUAL_TIME, EngineOptions
from vllm_eb.policy import PolicySpec


@dataclass(frozen=True)
class RunContext:
    """Everything that determines a result. ``anchor_unix_ns``: wall-clock time (ns) of the run's time 0.

    ``device_known`` False: the engine is a server that ebbench did not start; its device and options are unknown.
    """

    plan: Plan
    policy: PolicySpec
    engine: str
    device: Device
    options: EngineOptions
    anchor_unix_ns: int
    clock: Clock | None = None  # None: derived from the engine's name
    slo: Slo = field(default_factory=Slo)
    device_known: bool = True
    warnings: tuple[RunWarning, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind_of_time(self) -> Clock:
        """Whether times are measured (real) or simulated (virtual)."""
        return self.clock or ("virtual" if self.engine in VIRTUAL_TIME else "real")


def begin(writer: RunWriter, context: RunContext) -> None:
    """Store what is known before a run in real time, so that an interrupted run can be rebuilt."""
    nothing = EngineResult(REQUESTS.empty_table(), STEPS.empty_table(), DECISIONS.empty_table(), interrupted=True)
    reasons = ("cut off before its end",)
    writer.begin(_manifest(context, nothing, context.kind_of_time, reasons, ()), context.plan.table)


def conclude(writer: RunWriter, context: RunContext, result: EngineResult) -> Run:
    """Check a result and store it with its plan.

    Raises NotStoredError, which holds the run, if it cannot be written.
    """
    return conclude_with_summary(writer, context, result)[0]


def conclude_with_summary(writer: RunWriter, context: RunContext, result: EngineResult) -> tuple[Run, Summary]:
    """:func:`conclude`, also returning the summary, whose metrics are computed for the validity check anyway."""
    columns = RequestColumns.of(result.requests)
    windows = steady_windows(columns, phase_facts(context.plan))
    metrics = measure(columns, slo=context.slo, windows=windows)
    clock = context.kind_of_time
    paced = clock == "real" and (context.plan.closed_loop or context.plan.max_concurrency is None)
    conditions = Conditions(
        interrupted=result.interrupted, paced_sends=paced, lag_limit_ms=result.facts.get("lag_limit_ms")
    )
    reasons = (
        *invalid_reasons(result.requests, context.plan.table, columns, metrics, conditions),
        *result.invalid,
    )
    steps = _plain_steps(result)
    kv = _kv_pressure(context, result, steps)
    warnings = (
        *_warnings(context, result, metrics, batches_of(steps, columns)),
        *_one_token_warnings(columns, context.slo),
        *(kv.warnings if kv is not None else ()),
    )
    result = replace(result, facts={**result.facts, **(kv.figures if kv is not None else {})})
    manifest = _manifest(context, result, clock, reasons, warnings)
    tables = {
        "plan": context.plan.table,
        "requests": _with_latencies(result.requests, columns, context.slo),
        "steps": result.steps if result.step_parts is None else result.step_parts,
        "decisions": result.decisions,
    }
    if result.server_metrics is not None and result.server_metrics.num_rows:
        tables["server_metrics"] = result.server_metrics
    summary = summary_of(Run(writer.path, manifest, tables), metrics, context.slo)
    tables["summary"] = summary.to_table()
    try:
        run = writer.finish(manifest, tables)
    except NotStoredError:
        raise  # it holds the run, stored elsewhere
    except RunError as error:
        lost = msgspec.structs.replace(manifest, valid=False, reasons=(*reasons, f"not stored: {error}"))
        whole = tables if result.step_parts is None else tables | {"steps": result.step_parts.table()}
        raise NotStoredError(str(error), Run(writer.path, lost, whole)) from error
    return run, replace(summary, run_dir=str(run.path), warnings=run.manifest.warnings)


def _plain_steps(result: EngineResult) -> pa.Table:
    """The steps without the lists of their requests, which are most of a long run."""
    names = [*STEP_COLUMNS, "phase"]
    return pa.concat_tables([part.select(names) for part in result.step_parts or [result.steps]])


def _kv_pressure(context: RunContext, result: EngineResult, steps: pa.Table) -> KvPressure | None:
    options = asdict(context.options) if context.device_known else {}
    if steps.num_rows or result.server_metrics is None:
        return kv_pressure(steps, result.requests, options)
    return kv_pressure_by_metrics(result.server_metrics, result.requests.num_rows, options.get("max_num_seqs"))


def _with_latencies(requests: pa.Table, columns: RequestColumns, slo: Slo) -> pa.Table:
    for name, values in latency_columns(columns, slo).items():
        requests = requests.append_column(REQUEST_LATENCIES.field(name), values)
    return requests


def _manifest(
    context: RunContext,
    result: EngineResult,
    clock: Clock,
    reasons: tuple[str, ...],
    warnings: tuple[RunWarning, ...],
) -> Manifest:
    plan, device = context.plan, result.device or context.device
    facts = {**plan.facts, **result.facts, **(dict(device.identity) if context.device_known else {})}
    return Manifest(
        versions=software_versions({**engine_versions(context.engine), **context.versions}),
        git_commit=git_commit(),
        anchor_unix_ns=context.anchor_unix_ns,
        workload=str(facts.get("workload", "")),
        scenario=str(facts.get("scenario", "")),
        seed=int(facts.get("seed", 0)),
        source=str(facts.get("source", "")),
        facts=facts,
        plan_hash=plan_hash(plan),
        phases=phase_facts(plan),
        max_concurrency=plan.max_concurrency,
        policy=context.policy.name,
        engine=context.engine,
        clock=clock,
        device=device.name,
        model=str(facts.get("served_model") or device.model),
        device_provenance=device.sources,
        kv_capacity_tokens=_kv_tokens(context, device, facts),
        calibration=asdict(device.calibration) if context.device_known and device.costs_known else None,
        options=asdict(context.options) if context.device_known else {},
        slo=context.slo.limits(),
        warnings=warnings,
        valid=not reasons,
        reasons=reasons,
        interrupted=result.interrupted,
    )


def _kv_tokens(context: RunContext, device: Device, facts: Mapping[str, Any]) -> int | None:
    """KV cache of an instance in tokens; None if it is unknown, as behind a server that ebbench did not start.

    That of a server that it did start is what the server reports: its tokens, or of older versions its blocks, which
    hold so many tokens if every layer keeps them all.
    """
    if not context.device_known:
        return None
    if context.engine != "vllm":
        return device.kv_capacity_tokens or None
    reports = facts.get("server_reports") or {}
    blocks, size = reports.get("num_kv_blocks"), reports.get("block_size")
    return reports.get("kv_cache_tokens") or (blocks * size if blocks and size else None)


def _warnings(context: RunContext, result: EngineResult, metrics: Metrics, batches: Batches) -> tuple[RunWarning, ...]:
    simulated = context.engine in VIRTUAL_TIME
    of_device, of_engine = _caveats(context, result, batches)
    found = [
        *_of("plan", context.plan.warnings),
        *_of("device", of_device),
        *_of("engine", of_engine),
        *result.about_server,
        *_of("engine", start_notes(result.device or context.device, context.options) if simulated else ()),
        *context.warnings,
        *_measurement_warnings(context.plan, metrics),
    ]
    if limit := api_server_warning(context.engine, context.options, result.facts, metrics):
        found.append(limit)
    once: dict[str, RunWarning] = {}
    for one in found:
        once.setdefault(str(one), one)
    return tuple(once.values())


def _caveats(context: RunContext, result: EngineResult, batches: Batches) -> tuple[list[str], list[str]]:
    """The warnings of the device, and of the engine about its units, that matter to this run.

    Measured times depend on the device's caveats only if the policy computes with its costs.
    """
    device = result.device or context.device
    if context.engine not in VIRTUAL_TIME:
        return (list(device.warnings) if context.policy.needs_costs else []), list(result.warnings)
    of_device = [*said_of_run(device, batches, device.warnings), *shown_by_servers(device, batches)]
    return of_device, said_of_run(device, batches, result.warnings)


def _of(about: str, said: Iterable[str]) -> list[RunWarning]:
    return [
        RunWarning(each.code, each.values, about) if isinstance(each, Caveat) else RunWarning(about, message=each)
        for each in said
    ]


_LONGER = 3.0
"""Sessions over those of warm-up and drain in a run that is asked for: two thirds of it are steady then."""


def _measurement_warnings(plan: Plan, metrics: Metrics) -> list[RunWarning]:
    found = []
    needed = samples_needed(0.99)
    if 0 < metrics.completed < needed:
        sound = [name for name, share in QUANTILES.items() if metrics.completed >= samples_needed(share)]
        enough = _enough(plan, needed) | {"shown": sound[-1] if sound else ""}
        p90_needs = samples_needed(QUANTILES["p90"])
        found.append(warning("few-requests", completed=metrics.completed, p90_needs=p90_needs, **enough))
    if metrics.completed and metrics.steady is None:
        longer = _longer(plan, 2 * _sessions(plan))
        found.append(warning("no-steady-window", closed_loop=plan.closed_loop, **longer))
    elif metrics.steady is not None and metrics.steady.share < 0.5:
        longer = _longer(plan, math.ceil(_LONGER * (1 - metrics.steady.share) * _sessions(plan)))
        found.append(warning("short-steady-window", share=metrics.steady.share, **longer))
    return found


def _one_token_warnings(columns: RequestColumns, slo: Slo) -> list[RunWarning]:
    """How many answers a limit on TPOT does not concern, where these are at least one in a hundred."""
    single = int((columns.ok & (columns.sent_tokens < 2)).sum())
    if slo.tpot is None or single < 0.01 * columns.ok.sum() or not single:
        return []
    return [warning("one-token-answers", single=single, answers=int(columns.ok.sum()), tpot_ms=slo.tpot)]


def _sessions(plan: Plan) -> int:
    return int(pc.count_distinct(plan.table["session"]).as_py())


def _longer(plan: Plan, sessions: int) -> dict[str, Any]:
    """The option with which a plan like this one has that many sessions, and how many its log holds."""
    option = "log" if _texts_of_a_log(plan) else "num_prompts"
    return {"option": option, "asked": sessions, "log_sessions": plan.facts.get("log_sessions")}


def _texts_of_a_log(plan: Plan) -> bool:
    """Whether the prompts are a log's own, which are sent once."""
    return "log_sessions" in plan.facts and plan.table["prompt"].null_count < len(plan)


def _enough(plan: Plan, requests: int) -> dict[str, Any]:
    """The option with which a plan like this one has that many requests; --num-prompts counts conversations."""
    duration_s, sessions = plan.facts.get("duration_s"), _sessions(plan)
    asked = _longer(plan, math.ceil(requests * sessions / len(plan))) | {"needed": requests}
    if asked["option"] == "log":
        return asked
    if duration_s is not None and (plan.closed_loop or "log_sessions" in plan.facts):
        return asked | {"option": "both"}
    if duration_s is not None:
        return asked | {"option": "duration", "asked": math.ceil(requests * duration_s / len(plan))}
    return asked | {"per_session": len(plan) / sessions}
