"""Executes runs. Nothing else in ebbench begins or concludes one."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.environment import API_SERVER
from ebbench.analysis.metrics import Slo, parse_class_slo, refuse_unknown_classes
from ebbench.analysis.summary import Drafted, Summary, metrics_dict, several_phases
from ebbench.analysis.validity import of_device
from ebbench.devices.base import Device
from ebbench.engines.base import Engine, EngineResult, stated_limits, uses_priorities
from ebbench.engines.setup import journalled, policy_label, recording, simulated_pools
from ebbench.process.interpreter import collector_paused
from ebbench.process.termination import held, interruptible, raise_if_stopped, signals_here
from ebbench.records.files import TableParts
from ebbench.records.manifest import RunLabels, wall_clock_ns
from ebbench.records.plan import Observer, Plan, Progress
from ebbench.records.run import Run, RunWriter
from ebbench.records.warnings import SERVER_BUSY, SERVER_LIMITS, SERVER_SIMULATED, RunWarning, warning
from ebbench.render.documents import Console
from ebbench.render.live import Work, reporter, shown
from ebbench.runs.conclude import RunContext, begin, conclude, pool_figures
from ebbench.runs.prepare import Prepared, Series, prepare
from ebbench.spec.run import RunSpec
from ebbench.spec.server import AUTO, DEFAULT_CLASS, OFF, VIRTUAL_TIME, EngineOptions, is_server
from vllm_eb.policy import PolicySpec

if TYPE_CHECKING:
    from ebbench.records.manifest import Manifest


def run_plan(
    engine: Engine, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
) -> tuple[Plan, EngineResult]:
    """Run ``plan``; returns the result and the plan, or its part that was released in time.

    Every simulated run of a command comes through here: vLLM's API server stands before its engine if that was asked
    for, or under ``auto`` if a run without it would keep it busy. Raises what the engine raises.
    """

    if engine.name not in VIRTUAL_TIME:
        return _released_in_time(engine, plan, policy, device, options, observer)

    def run(api_server: str) -> tuple[Plan, EngineResult, RunWarning | None]:
        chosen = replace(options, api_server=api_server)
        part, result = _released_in_time(engine, plan, policy, device, chosen, observer)
        return part, result, api_server_warning(result, chosen)

    asked = options.api_server
    simulated = OFF if asked == AUTO else asked
    part, result, busy = run(simulated)
    told = [busy]
    if asked == AUTO and busy is not None:
        simulated = DEFAULT_CLASS
        part, result, limit = run(simulated)
        told = [msgspec.structs.replace(busy, code=SERVER_SIMULATED), limit]
    warnings = (*result.warnings, *(said for said in told if said is not None))
    return part, replace(result, facts={**result.facts, API_SERVER: simulated}, warnings=warnings)


BUSY = 0.8
"""Share of a process's time from which its queue delays answers noticeably."""
LIMITING = 0.9
"""Share of the whole time of a run, its beginning and end included, from which the processes limit it."""


def api_server_warning(result: EngineResult, options: EngineOptions) -> RunWarning | None:
    """A warning if the API servers limit a simulated run, or would be busy for most of it where they are left out.

    vLLM starts one process per data-parallel unit, unless their number per engine is set.
    """
    if result.interrupted or result.invalid:
        return None
    from ebbench.simulation.front_end import find_api_server

    units, instances = (int(result.facts.get(f"answering_{what}", 1)) for what in ("units", "instances"))
    needed = processes_needed(result, options.api_server)
    if options.api_server == OFF:
        values = {"needed": needed, "processes": units, "token_us": find_api_server(DEFAULT_CLASS).token_us}
        return warning(SERVER_BUSY, **values) if needed >= BUSY * units else None
    processes = units if options.api_server_count is None else options.api_server_count * instances
    if needed < LIMITING * processes:
        return None
    return warning(SERVER_LIMITS, busy=needed / processes, processes=max(1, processes // instances))


def processes_needed(result: EngineResult, name: str) -> float:
    """Processes of vLLM's API server, of class ``name``, whose event loops or tokenizers a run's requests keep busy."""
    from ebbench.simulation.front_end import find_api_server

    costs = find_api_server(DEFAULT_CLASS if name == OFF else name)
    columns = result.requests.select(["status", "input_tokens", "output_tokens", "intended_ns", "last_token_ns"])
    answered = columns.filter(pc.equal(columns["status"], "ok"))
    if not answered.num_rows:
        return 0.0
    drafted = Drafted.of(result.facts)
    accepted = 0 if drafted is None else drafted.accepted_tokens  # which leave in the message of another token
    streamed = max(pc.sum(answered["output_tokens"]).as_py() - accepted, 0)
    prompts_us = costs.prompt_token_us * pc.sum(answered["input_tokens"]).as_py()
    busy_us = max(costs.request_us * answered.num_rows + costs.token_us * streamed, prompts_us)
    span_ns = pc.max(answered["last_token_ns"]).as_py() - pc.min(columns["intended_ns"]).as_py()
    return float(1e3 * busy_us / span_ns) if span_ns else 0.0


# `--duration` in a closed loop: stop the release of sessions after so many seconds, on any engine.
#
# The number of released sessions depends on how fast they end, so the plan holds more sessions than are released. The
# released ones become the run's plan; the original plan is kept, so that runs can be compared.


def _released_in_time(
    engine: Engine, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
) -> tuple[Plan, EngineResult]:
    if plan.release_for_s is None:
        return plan, engine.run(plan, policy, device, options, observer)
    if engine.name not in VIRTUAL_TIME:
        result = engine.run(plan, policy, device, options, observer)
        return (plan, result) if result.interrupted else _released(plan, result)
    return _in_virtual_time(engine, plan, policy, device, options, observer)


def _released(plan: Plan, result: EngineResult) -> tuple[Plan, EngineResult]:
    """The sessions that the load generator released before it stopped.

    One machine releases them in plan order; several do so each with its own sessions.
    """
    never_released = result.requests.filter(pc.equal(result.requests["error_class"], "not_released"))[
        "session"
    ].unique()
    kept_rows = pc.invert(pc.is_in(plan.table["session"], value_set=never_released))
    if pc.all(kept_rows).as_py():
        return exhausted(plan, result)
    part = plan_part(plan, plan.table.filter(kept_rows))
    kept = pc.is_in(result.requests["request_id"], value_set=part.table["request_id"].combine_chunks())
    return part, replace(result, requests=result.requests.filter(kept))


def _in_virtual_time(
    engine: Engine, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
) -> tuple[Plan, EngineResult]:
    """Run again with exactly the sessions that a longer run released in time.

    Sessions are released in plan order, and events up to a time do not depend on later releases. So a run of only those
    sessions equals the run that stops releasing at that time.
    """
    assert plan.release_for_s is not None  # checked by the caller
    order = _sessions_in_order(plan)
    tried = min(len(order), 4 * max(phase.max_concurrency for phase in plan.phases))
    while True:
        part = _first_sessions(plan, order, tried)
        result = engine.run(part, policy, device, options, None)
        if result.interrupted:
            return part, result
        in_time = _released_before(result.requests, order[:tried], plan.release_for_s)
        if in_time < tried:
            break
        if tried == len(order):
            return exhausted(plan, engine.run(plan, policy, device, options, observer))
        tried = min(len(order), 2 * tried)
    part = _first_sessions(plan, order, in_time)
    return part, engine.run(part, policy, device, options, observer)


def _sessions_in_order(plan: Plan) -> list[int]:
    """Sessions in release order: the order of their first rows."""
    return list(dict.fromkeys(plan.table["session"].to_pylist()))


def _released_before(requests: pa.Table, sessions: list[int], seconds: float) -> int:
    """How many of these sessions began within the first ``seconds``."""
    begun = requests.filter(pc.less(requests["intended_ns"], round(seconds * 1e9)))
    first = set(begun.filter(pc.equal(begun["turn"], 0))["session"].to_pylist())
    return sum(session in first for session in sessions)


def _first_sessions(plan: Plan, order: list[int], count: int) -> Plan:
    chosen = pa.array(order[:count], plan.table.schema.field("session").type)
    return plan_part(plan, plan.table.filter(pc.is_in(plan.table["session"], value_set=chosen)))


def plan_part(plan: Plan, table: pa.Table) -> Plan:
    """The plan with only the rows of ``table``; ``cut_from`` keeps the whole plan."""
    sessions = np.unique(table["session"].to_numpy()).size
    facts = {**plan.facts, "released_sessions": int(sessions), "released_requests": table.num_rows}
    return replace(plan, table=table, facts=facts, cut_from=plan.cut_from or plan)


def exhausted(plan: Plan, result: EngineResult) -> tuple[Plan, EngineResult]:
    """Add a warning if all sessions were released before the time was over."""
    sessions = len(_sessions_in_order(plan))
    note = warning("plan-exhausted", sessions=sessions, duration_s=plan.release_for_s)
    return plan, replace(result, warnings=(*result.warnings, note))


@dataclass(frozen=True)
class Executed:
    """A concluded run. ``plan``: the part of the plan that was released in time."""

    run: Run
    summary: Summary
    plan: Plan
    result: EngineResult


def execute(
    ready: Prepared, directory: Path | None, observer: Observer | None = None, *, keep_interrupted: bool = True
) -> Executed:
    """Execute a run and store it in ``directory``; None keeps it in memory, and of a simulation only its requests.

    An interrupted run is concluded with what was measured, or raises KeyboardInterrupt without ``keep_interrupted``.
    Raises UsageError, RunError, NotStoredError.
    """
    spec, engine = ready.spec, ready.engine
    observer = stoppable(observer)
    context = RunContext(
        ready.plan, ready.policy, engine.name, ready.device, spec.server, wall_clock_ns(),
        slo=_limits(ready), device_known=not is_server(spec.engine),
        warnings=_warnings(ready), labels=_labels(spec),
    )  # fmt: skip
    with held(), _writer(directory) as writer:
        if context.kind_of_time == "real" and directory is not None:
            begin(writer, context)
            engine = journalled(engine, writer)
        engine = recording(engine, stored=directory is not None)
        plan, result = run_plan(engine, ready.plan, ready.policy, ready.device, spec.server, observer)
        if not keep_interrupted:
            result.uninterrupted()
        if observer is not None:
            observer.update(_last_snapshot(ready.policy, plan, result))
        run, summary = conclude(writer, replace(context, plan=plan), result)
    return Executed(run, summary, plan, result)


def stoppable(observer: Observer | None) -> Observer | None:
    """The observer; in a thread that another one may stop, one that also looks whether it has."""
    own = threading.current_thread() is not threading.main_thread() and signals_here() is not None
    return _Stoppable(observer) if own else observer


@dataclass(frozen=True)
class _Stoppable:
    inner: Observer | None

    def update(self, progress: Progress) -> None:
        """Raise KeyboardInterrupt if the run was stopped, else pass the snapshot on."""
        raise_if_stopped()
        if self.inner is not None:
            self.inner.update(progress)


def _limits(ready: Prepared) -> Slo:
    """The limits of the run. Raises UsageError for those of a class that no request has."""
    slo = parse_class_slo(ready.spec.goodput, ready.plan.facts.get("classes") or {})
    if slo.classes:
        table = ready.plan.table
        known = table["class"].unique().drop_null().to_pylist() if "class" in table.column_names else []
        refuse_unknown_classes([name for name, _ in slo.classes], known)
    return slo


def _labels(spec: RunSpec) -> RunLabels:
    """The labels that the user gave, and those of the CI job."""
    given = asdict(spec.labels.in_job(os.environ))
    return RunLabels(**{name: value for name, value in given.items() if value})


def _warnings(ready: Prepared) -> tuple[RunWarning, ...]:
    """Warnings of the policy about this load, or about what is not known of a running server."""
    if is_server(ready.spec.engine):
        label = policy_label(ready.engine, ready.policy, stated=ready.policy_stated)
        priorities = [warning("priorities-unverified")] if uses_priorities(ready.plan) else []
        return (*label.warnings, *stated_limits(ready.spec.server), *priorities)
    open_at_most = max((phase.max_concurrency for phase in ready.plan.phases), default=0)
    doubt = ready.policy.load_doubt(open_at_most, ready.spec.server.max_num_seqs)
    return () if doubt is None else (warning(doubt[0], **doubt[1]),)


def _last_snapshot(policy: PolicySpec, plan: Plan, result: EngineResult) -> Progress:
    """The final state; the engine's own last snapshot is usually earlier."""
    counted = result.requests.select(["input_tokens", "output_tokens"])  # the gaps between tokens need not be copied
    ok = counted.filter(pc.equal(result.requests["status"], "ok"))
    prompts, outputs = (pc.sum(ok[name]).as_py() or 0 for name in ("input_tokens", "output_tokens"))
    end_ns = pc.max(result.requests["end_ns"]).as_py() or 0
    return Progress(
        policy.name, ok.num_rows, len(plan), outputs, prompts + outputs, end_ns / 1e9, result.last_mode, 0, 0
    )


@dataclass(frozen=True)
class Task:
    """A run of which figures are wanted. ``directory``: where the whole run is stored; None keeps only its figures."""

    cell: RunSpec
    directory: Path | None = None


@dataclass(frozen=True)
class Made:
    """Figures of a run under the keys of a summary, and those of each phase if it has several.

    ``caveats``: those of the device, which are among the figures' ``warnings`` too, there without their codes.
    """

    figures: Mapping[str, Any]
    phases: tuple[Mapping[str, Any], ...] = ()
    caveats: tuple[RunWarning, ...] = ()


def make(task: Task, engine: Engine | None = None) -> Made:
    """The figures of a run, on an engine that was started for several runs if one is given.

    Raises UsageError, RunError; KeyboardInterrupt where the run was interrupted.
    """
    if task.cell.real_time:
        return _made(task, engine)
    with collector_paused():
        made = _made(task, engine)
        # A simulation's objects form reference cycles. While the collector pauses, what is made counts as young: only
        # that is searched, and not the objects of the calling program, which may have millions.
        gc.collect(0)
    return made


def _made(task: Task, engine: Engine | None) -> Made:
    with interruptible():  # reading a workload may take minutes
        ready = prepare(task.cell, engine)
    return _figures(ready, execute(ready, task.directory, keep_interrupted=False))


def _figures(ready: Prepared, done: Executed) -> Made:
    run, engine = done.run, ready.engine
    figures = done.summary.to_dict() | {"plan_hash": run.manifest.plan_hash, "git_commit": run.manifest.git_commit}
    pools = simulated_pools(engine)
    if "topology" in done.result.facts and pools is not None:
        figures |= pool_figures(done.result, pools, ready.spec.server.max_num_batched_tokens)
    return Made(figures, phase_figures(run), of_device(run.manifest.engine, run.manifest.warnings))


def phase_figures(run: Run) -> tuple[Mapping[str, Any], ...]:
    """The figures of each phase under the keys of a summary, if there are several."""
    return tuple({"phase": part.phase, **metrics_dict(part.metrics)} for part in several_phases(run))


def _writer(directory: Path | None) -> RunWriter:
    return _InMemory(Path()) if directory is None else RunWriter.create(directory)


class _InMemory(RunWriter):
    """A RunWriter that stores nothing; the run is kept in memory until it is summarised."""

    def finish(self, manifest: Manifest, tables: Mapping[str, pa.Table | TableParts] | None = None) -> Run:
        """The run with its tables in memory."""
        stored = {
            name: table if isinstance(table, pa.Table) else pa.concat_tables(table)
            for name, table in (tables or {}).items()
        }
        rows = {name: table.num_rows for name, table in stored.items()}
        return Run(self.path, msgspec.structs.replace(manifest, rows=rows), stored)

    def __exit__(self, *_: object) -> None:
        """Nothing to clean up."""


def planned(series: Series, seed: int, device: Device, messages: Console, *, quiet: bool) -> Plan:
    """The plan of one seed; its reading is shown. Raises UsageError for a request that does not fit."""
    with shown(messages, Work(f"reading {series.spec.plan.workload}"), quiet=quiet):
        return series.plan(seed, device)


def measured(
    ready: Prepared, directory: Path, label: str, messages: Console, *, quiet: bool, brief: bool = False
) -> Executed:
    """Execute a run and store it in ``directory``, with a progress line named ``label``.

    ``brief``: it is one run of many, of which only long ones are shown.
    """
    known = ready.plan.release_for_s is None
    with reporter(messages, label, len(ready.plan), quiet=quiet, brief=brief, known=known) as observer:
        return execute(ready, directory, observer)
