"""From an engine's result to a stored run: the verdict, the warnings and the manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import msgspec
import pyarrow.compute as pc

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.distribution import QUANTILES, samples_needed
from ebbench.analysis.metrics import Metrics, measure
from ebbench.analysis.slo import Slo
from ebbench.analysis.steady import steady_windows
from ebbench.analysis.summary import Summary, summary_of
from ebbench.analysis.validity import Conditions, invalid_reasons
from ebbench.devices.base import Device
from ebbench.engines.base import VIRTUAL_TIME, EngineOptions, EngineResult
from ebbench.engines.versions import engine_versions
from ebbench.errors import RunError
from ebbench.records.manifest import (
    Clock,
    Manifest,
    RunWarning,
    git_commit,
    phase_facts,
    plan_hash,
    software_versions,
)
from ebbench.records.plan import Plan
from ebbench.records.run import NotStoredError, Run, RunWriter
from ebbench.records.schema import DECISIONS, REQUESTS, STEPS
from vllm_eb.policy import PolicySpec


@dataclass(frozen=True)
class Setting:
    """Everything that a result came from. ``anchor_unix_ns`` is the wall clock at the run's time 0.

    ``device_known`` False: the engine is a server started elsewhere, so that its device and options are
    not known.
    """

    plan: Plan
    policy: PolicySpec
    engine: str
    device: Device
    options: EngineOptions
    anchor_unix_ns: int
    clock: Clock | None = None  # None: by the engine's name
    slo: Slo = field(default_factory=Slo)
    device_known: bool = True
    warnings: tuple[RunWarning, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind_of_time(self) -> Clock:
        """Whether times were measured (real) or simulated (virtual)."""
        return self.clock or ("virtual" if self.engine in VIRTUAL_TIME else "real")


def begin(writer: RunWriter, setting: Setting) -> None:
    """Store what is known before a run that takes real time, for the case that it is cut off."""
    nothing = EngineResult(REQUESTS.empty_table(), STEPS.empty_table(), DECISIONS.empty_table(), interrupted=True)
    reasons = ("cut off before its end",)
    writer.begin(_manifest(setting, nothing, setting.kind_of_time, reasons, ()), setting.plan.table)


def conclude(writer: RunWriter, setting: Setting, result: EngineResult) -> Run:
    """Judge a result and store it with its plan. Raises NotStoredError, with the run, when it cannot be written."""
    return conclude_with_summary(writer, setting, result)[0]


def conclude_with_summary(writer: RunWriter, setting: Setting, result: EngineResult) -> tuple[Run, Summary]:
    """As :func:`conclude`; the summary comes from the metrics that the verdict needs anyway."""
    columns = RequestColumns.of(result.requests)
    windows = steady_windows(columns, phase_facts(setting.plan))
    metrics = measure(columns, slo=setting.slo, windows=windows)
    clock = setting.kind_of_time
    paced = clock == "real" and (setting.plan.closed_loop or setting.plan.max_concurrency is None)
    conditions = Conditions(
        interrupted=result.interrupted, paced_sends=paced, lag_limit_ms=result.facts.get("lag_limit_ms")
    )
    reasons = (
        *invalid_reasons(result.requests, setting.plan.table, columns, metrics, conditions),
        *result.invalid,
    )
    manifest = _manifest(setting, result, clock, reasons, _warnings(setting, result, metrics))
    tables = {
        "plan": setting.plan.table,
        "requests": result.requests,
        "steps": result.steps,
        "decisions": result.decisions,
    }
    if result.server_metrics is not None and result.server_metrics.num_rows:
        tables["server_metrics"] = result.server_metrics
    try:
        run = writer.finish(manifest, tables)
    except RunError as error:
        lost = msgspec.structs.replace(manifest, valid=False, reasons=(*reasons, f"not stored: {error}"))
        raise NotStoredError(str(error), Run(writer.path, lost, tables)) from error
    return run, summary_of(run, metrics, setting.slo)


def _manifest(
    setting: Setting,
    result: EngineResult,
    clock: Clock,
    reasons: tuple[str, ...],
    warnings: tuple[RunWarning, ...],
) -> Manifest:
    plan, device = setting.plan, result.device or setting.device
    facts = {**plan.facts, **result.facts}
    return Manifest(
        versions=software_versions({**engine_versions(setting.engine), **setting.versions}),
        git_commit=git_commit(),
        anchor_unix_ns=setting.anchor_unix_ns,
        workload=str(facts.get("workload", "")),
        scenario=str(facts.get("scenario", "")),
        seed=int(facts.get("seed", 0)),
        source=str(facts.get("source", "")),
        facts=facts,
        plan_hash=plan_hash(plan),
        phases=phase_facts(plan),
        max_concurrency=plan.max_concurrency,
        policy=setting.policy.name,
        engine=setting.engine,
        clock=clock,
        device=device.name,
        model=str(facts.get("served_model") or device.model),
        device_provenance=device.provenance,
        kv_capacity_tokens=(device.kv_capacity_tokens or None) if setting.device_known else None,
        calibration=asdict(device.calibration) if setting.device_known and device.costs_known else None,
        options=asdict(setting.options) if setting.device_known else {},
        slo=setting.slo.limits(),
        warnings=warnings,
        valid=not reasons,
        reasons=reasons,
        interrupted=result.interrupted,
    )


def _warnings(setting: Setting, result: EngineResult, metrics: Metrics) -> tuple[RunWarning, ...]:
    found = [
        *_of("plan", setting.plan.warnings),
        *_of("device", (result.device or setting.device).warnings),
        *_of("engine", result.warnings),
        *setting.warnings,
        *_measurement_warnings(setting.plan, metrics),
    ]
    return tuple(dict.fromkeys(found))


def _of(code: str, messages: Iterable[str]) -> list[RunWarning]:
    return [RunWarning(code, message) for message in messages]


def _measurement_warnings(plan: Plan, metrics: Metrics) -> list[RunWarning]:
    found = []
    needed = samples_needed(0.99)
    if 0 < metrics.completed < needed:
        found.append(
            RunWarning(
                "few-requests",
                f"{metrics.completed:,} completed requests are too few for p99, which takes {needed}: tables show "
                f"{_instead(metrics.completed)}.",
                _enough(plan, needed),
            )
        )
    if metrics.completed and metrics.steady is None:
        found.append(
            RunWarning(
                "no-steady-window",
                "The load never reached 95 % of its target, so there is no steady throughput.",
                _longer(plan, "Use more requests or a lower concurrency."),
            )
        )
    elif metrics.steady is not None and metrics.steady.share < 0.5:
        found.append(
            RunWarning(
                "short-steady-window",
                f"Only {metrics.steady.share:.0%} of the run is steady; warm-up and drain weigh on the whole-run "
                "throughput.",
                _longer(plan, "Use more requests."),
            )
        )
    return found


def _replayed(plan: Plan) -> bool:
    """Whether requests come as a trace has them, so that options cannot give more."""
    return str(plan.facts.get("workload", "")).startswith("trace:") and plan.facts.get("source") != "scenario"


def _longer(plan: Plan, advice: str) -> str:
    """The advice; another one for a trace, whose length no option changes."""
    return "A longer part of a trace, or a longer trace, would help." if _replayed(plan) else advice


def _enough(plan: Plan, requests: int) -> str:
    """What to ask for so that a plan like this one has so many requests: --num-prompts counts conversations."""
    if _replayed(plan):
        return f"p99 takes a trace of {requests} requests or more."
    if (duration_s := plan.facts.get("duration_s")) is not None:
        return f"Use --duration {math.ceil(requests * duration_s / len(plan))} or longer."
    sessions = pc.count_distinct(plan.table["session"]).as_py()
    asked = math.ceil(requests * sessions / len(plan))
    if sessions == len(plan):
        return f"Use --num-prompts {asked} or more."
    return f"Use --num-prompts {asked} or more: that many conversations, {len(plan) / sessions:.1f} requests in each."


def _instead(samples: int) -> str:
    """The highest percentile that so many samples carry, in words."""
    sound = [name for name, share in QUANTILES.items() if samples >= samples_needed(share)]
    return f"{sound[-1]} instead" if sound else f"no percentile, since p90 takes {samples_needed(QUANTILES['p90'])}"
