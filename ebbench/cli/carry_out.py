"""Carrying out ``ebbench run``: check everything, run each policy on each plan, store, show, judge."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ebbench.cli.cluster_flags import ClusterAsked
from ebbench.cli.preflight import check_counts, check_fits, check_options
from ebbench.cli.repeats import beforehand, why_stop
from ebbench.engines.setup import (
    POLICY_IS_A_LABEL,
    EngineSetup,
    is_server,
    journalled,
    make_engine,
    unknown_device,
    with_ramp,
)
from ebbench.errors import EbbenchError, InterruptedRunError, RunError, UsageError
from ebbench.records.manifest import RunWarning, wall_clock_ns
from ebbench.records.run import NotStoredError, Run, RunWriter, default_run_dir, slug, unused

if TYPE_CHECKING:
    from rich.console import Console

    from ebbench.analysis.explain import Explanation
    from ebbench.analysis.slo import Slo
    from ebbench.analysis.summary import Summary
    from ebbench.cli.client_flags import ClientFlags
    from ebbench.devices.base import Device
    from ebbench.engines.base import Engine, EngineOptions, EngineResult, Progress
    from ebbench.records.plan import Plan
    from vllm_eb.policy import PolicySpec


DEFAULT_DEVICE, DEFAULT_MODEL = "rtx-pro-6000", "qwen3-8b"


@dataclass(frozen=True)
class Asked:
    """A checked command line."""

    workload: str
    scenario: str | None
    seed: int
    repeats: int
    plan_settings: dict[str, object]
    policies: list[PolicySpec]
    engine: str
    device: str | None
    model: str | None
    options: EngineOptions
    slo: Slo
    output_dir: Path | None
    quiet: bool
    default_policies: bool
    save_as_vllm: Path | None
    client: ClientFlags
    cluster: ClusterAsked
    all_percentiles: bool = False
    vllm_options: tuple[str, ...] = ()
    until_clear: bool = False  # stop before ``repeats`` where more would say no more
    calibration: Path | None = None


@dataclass
class _Done:
    """What has been measured so far; it outlives an interruption."""

    summaries: list[Summary] = field(default_factory=list)
    explanations: list[Explanation] = field(default_factory=list)
    phases: list[Summary] = field(default_factory=list)
    interrupted: bool = False


def carry_out(asked: Asked, *, as_json: bool) -> None:
    """Check, run, store and show. Raises UsageError, RunError, InterruptedRunError."""
    from rich.console import Console

    messages = Console(stderr=True, highlight=False)
    _check(asked)
    engine, sentence = engine_of(asked)
    device = device_of(asked, engine)
    asked = _saturated(asked, engine, device, messages)
    plan = plan_of(asked, asked.seed, device, messages)
    _announce(asked, engine, sentence, plan, messages)
    done = _Done()
    try:
        for offset in range(asked.repeats):
            if offset:
                plan = plan_of(asked, asked.seed + offset, device, messages)
            if asked.until_clear:
                plan = replace(plan, facts={**plan.facts, "until_clear": True})
            ramped, ramping = with_ramp(plan, engine, asked.client.ramp_up_s)
            for spec in _order(asked.policies, offset):
                _run_one(asked, ramped, spec, device, ramping, messages, done)
                if done.interrupted:
                    raise KeyboardInterrupt
            if asked.until_clear and (reason := why_stop(done.summaries)):
                if not asked.quiet:
                    messages.print(reason, markup=False, soft_wrap=True)
                break
    except KeyboardInterrupt:
        done.interrupted = True
    except EbbenchError:
        _show(asked, done, as_json=as_json)  # what was measured before stays worth seeing
        raise
    _show(asked, done, as_json=as_json)
    _verdict(done)


def _check(asked: Asked) -> None:
    numbers = ("num_prompts", "max_concurrency", "request_rate", "input_len", "output_len", "speed")
    check_counts(
        repeats=asked.repeats,
        **{name: asked.plan_settings[name] for name in numbers},  # type: ignore[arg-type]
    )
    check_options(asked.options, asked.policies)
    if is_server(asked.engine) and len(asked.policies) > 1:
        raise UsageError(
            "a server runs the one policy it was started with; give one --policy, as a label, and run once a server"
        )
    if asked.save_as_vllm is not None and len(asked.policies) * asked.repeats > 1:
        raise UsageError("--save-as-vllm writes one run; give one --policy and no --repeats")
    if asked.save_as_vllm is not None and (asked.save_as_vllm.is_dir() or not asked.save_as_vllm.parent.is_dir()):
        raise UsageError(f"--save-as-vllm {asked.save_as_vllm}: give a file in a directory that exists")
    if asked.output_dir is not None and asked.output_dir.exists():
        raise UsageError(f"output directory {asked.output_dir} exists; give another --output-dir or remove it")


def _saturated(asked: Asked, engine: Engine, device: Device, messages: Console) -> Asked:
    """The command line with the saturated rate measured, where the scenario needs one and none was given."""
    from ebbench.cli.saturation import needs_saturation, with_saturation

    if not needs_saturation(asked, engine):
        return asked
    asked, sentence = with_saturation(asked, engine, device)
    if not asked.quiet:
        messages.print(sentence, markup=False, soft_wrap=True)
    return asked


def device_of(asked: Asked, engine: Engine) -> Device:
    """The device that the command line names; for vLLM this machine, and a placeholder for a server of others.

    For a topology it is one unit of its first pool: the model may need more than one GPU. Raises UsageError where a
    policy needs costs that are not known.
    """
    from ebbench.devices import load_device
    from ebbench.devices.parallel import SINGLE
    from ebbench.devices.units import shape_of
    from ebbench.engines.sim import SimEngine

    if is_server(asked.engine):
        return unknown_device(asked.device, asked.model)
    if engine.name == "vllm":
        from ebbench.engines.costs import local_hardware

        model = asked.model or DEFAULT_MODEL
        return local_hardware(
            asked.policies, asked.options, model=model, device=asked.device, calibration=asked.calibration
        )
    if asked.calibration is not None:
        raise UsageError(
            "--calibration is for vLLM on this machine (--engine vllm); a simulated device is given with --device"
        )
    topology = engine.topology if isinstance(engine, SimEngine) else None
    return load_device(
        asked.device or DEFAULT_DEVICE,
        asked.model or DEFAULT_MODEL,
        max_num_seqs=asked.options.max_num_seqs,
        max_num_batched_tokens=asked.options.max_num_batched_tokens,
        async_scheduling=asked.options.async_scheduling,
        eager=asked.options.enforce_eager,
        parallel=shape_of(topology) if topology is not None else SINGLE,
        quantization=asked.options.quantization,
        kv_cache_dtype=asked.options.kv_cache_dtype,
    )


def engine_of(asked: Asked) -> tuple[Engine, str]:
    """The engine with its settings, and the sentence that names it."""
    limit = asked.plan_settings["max_model_len"]
    return make_engine(
        EngineSetup(
            asked.engine,
            asked.model,
            asked.client.settings(),
            asked.scenario,
            max_model_len=limit if isinstance(limit, int) else None,
            drop_too_long=bool(asked.plan_settings["drop_too_long"]),
            vllm_options=asked.vllm_options,
            **vars(asked.cluster),
        )
    )


def plan_of(asked: Asked, seed: int, device: Device, messages: Console) -> Plan:
    """The requests of one seed. Raises UsageError for a request that can never fit."""
    from rich.markup import escape

    from ebbench.workloads import build_plan

    reading: AbstractContextManager[object] = nullcontext()
    if messages.is_terminal and not asked.quiet:
        reading = messages.status(f"reading {escape(asked.workload)}")  # a data set may take seconds
    with reading:
        plan = build_plan(asked.workload, asked.scenario, seed=seed, **asked.plan_settings)
    if not is_server(asked.engine) and asked.cluster.topology is None:  # several GPUs hold more; the engine checks
        check_fits(plan, device, asked.options)
    return plan


def _announce(asked: Asked, engine: Engine, sentence: str, plan: Plan, messages: Console) -> None:
    from ebbench.engines.base import VIRTUAL_TIME
    from ebbench.workloads.trace import time_note

    if asked.quiet:
        return
    messages.print(sentence, markup=False, soft_wrap=True)
    for note in filter(None, (time_note(plan.facts), _at_once(plan))):
        messages.print(note, markup=False, soft_wrap=True)
    virtual = engine.name in VIRTUAL_TIME
    said = beforehand(
        plan.facts, asked.repeats, policies=len(asked.policies), until_clear=asked.until_clear, virtual=virtual
    )
    if said:
        messages.print(said, markup=False, soft_wrap=True)
    if asked.default_policies and not is_server(asked.engine):
        messages.print("No --policy given: running ebplus, and v1 as its baseline.", markup=False, soft_wrap=True)


def _at_once(plan: Plan) -> str:
    """What an infinite request rate means for this plan; empty where there is none."""
    if not plan.facts.get("all_at_once"):
        return ""
    sessions, open_at_most = int(plan.facts["sessions"]), max(phase.max_concurrency for phase in plan.phases)
    if open_at_most < sessions:
        return f"--request-rate inf: all {sessions:,} sessions wait for one of the {open_at_most:,} open at a time"
    return (
        f"--request-rate inf: all {sessions:,} sessions are released at once, as by `vllm bench serve`; TTFT counts "
        "the wait in the server's queue (--max-concurrency limits how many are open)"
    )


def _order(policies: list[PolicySpec], repeat: int) -> Iterator[PolicySpec]:
    """Back and forth (ABBA), so that a drift of the machine falls on all policies alike."""
    return iter(policies) if repeat % 2 == 0 else reversed(policies)


def _run_one(
    asked: Asked, plan: Plan, spec: PolicySpec, device: Device, engine: Engine, messages: Console, done: _Done
) -> None:
    seed = int(plan.facts.get("seed", asked.seed))
    label = spec.name if asked.repeats == 1 else f"{spec.name} seed {seed}"
    try:
        stored = measure(asked, plan, spec, device, engine, messages, _run_dir(asked, spec, seed), label)
    except NotStoredError as error:
        if error.run is not None:
            _keep(error.run, done)  # what was measured is shown though the disk is full
        raise
    _keep(stored, done)
    if asked.save_as_vllm is not None:
        from ebbench.export.vllm_json import save_vllm_result

        save_vllm_result(stored, done.summaries[-1], asked.save_as_vllm)
    done.interrupted = stored.manifest.interrupted


def _keep(run: Run, done: _Done) -> None:
    """Keep of a run what is shown at the end."""
    from ebbench.analysis.explain import explain
    from ebbench.analysis.summary import summarise, summarise_phases

    done.summaries.append(summarise(run))
    done.explanations.append(explain(run))
    phases = summarise_phases(run)
    if len(phases) > 1:
        done.phases += phases


def measure(
    asked: Asked,
    plan: Plan,
    spec: PolicySpec,
    device: Device,
    engine: Engine,
    messages: Console,
    run_dir: Path,
    label: str,
) -> Run:
    """Run one plan under one policy and store it in ``run_dir``, with a progress line called ``label``."""
    from ebbench.analysis.conclude import Setting, begin, conclude
    from ebbench.engines.duration import run_plan
    from ebbench.render.live import reporter

    setting = Setting(
        plan,
        spec,
        engine.name,
        device,
        asked.options,
        wall_clock_ns(),
        slo=asked.slo,
        device_known=not is_server(asked.engine),
        warnings=(POLICY_IS_A_LABEL,) if is_server(asked.engine) else _cautions(spec, plan, asked.options),
    )
    with RunWriter.create(run_dir) as writer:
        if setting.kind_of_time == "real":
            begin(writer, setting)
            engine = journalled(engine, writer)
        with reporter(messages, label, len(plan), quiet=asked.quiet) as observer:
            plan, result = run_plan(engine, plan, spec, device, asked.options, observer)
            observer.update(_last_snapshot(spec, plan, result))
        return conclude(writer, replace(setting, plan=plan), result)


def _cautions(spec: PolicySpec, plan: Plan, options: EngineOptions) -> tuple[RunWarning, ...]:
    """What the policy itself warns of under this load."""
    open_at_most = max((phase.max_concurrency for phase in plan.phases), default=0)
    found = spec.caution(open_at_most, options.max_num_seqs)
    return () if found is None else (RunWarning(*found),)


def _last_snapshot(spec: PolicySpec, plan: Plan, result: EngineResult) -> Progress:
    """The state at the end, which an engine's own snapshots, now and then, rarely show."""
    import pyarrow.compute as pc

    from ebbench.engines.base import Progress

    ok = result.requests.filter(pc.equal(result.requests["status"], "ok"))
    prompts, outputs = (pc.sum(ok[name]).as_py() or 0 for name in ("input_tokens", "output_tokens"))
    end_ns = pc.max(result.requests["end_ns"]).as_py() or 0
    mode = result.steps["mode"][-1].as_py() if result.steps.num_rows else ""
    return Progress(spec.name, ok.num_rows, len(plan), outputs, prompts + outputs, end_ns / 1e9, mode, 0, 0)


def _run_dir(asked: Asked, spec: PolicySpec, seed: int) -> Path:
    name = spec.name if asked.repeats == 1 else f"{spec.name}-seed{seed}"
    if asked.output_dir is None:
        return default_run_dir(asked.workload, name)
    if len(asked.policies) * asked.repeats == 1:
        return asked.output_dir
    return unused(asked.output_dir / slug(name))


def _show(asked: Asked, done: _Done, *, as_json: bool) -> None:
    from ebbench.analysis.compare.cases import cases_of

    order = {spec.name: index for index, spec in enumerate(asked.policies)}
    measured = list(zip(done.summaries, done.explanations, strict=False))  # an interruption may fall between the two
    measured.sort(key=lambda one: (order[one[0].policy], one[0].seed))
    summaries, explanations = [summary for summary, _ in measured], [explanation for _, explanation in measured]
    phases = sorted(done.phases, key=lambda summary: (order[summary.policy], summary.seed))
    cases = cases_of(summaries, explanations, phases)
    if as_json:
        from ebbench.analysis.summary import mean_over_repeats

        groups = sorted((group for case in cases for group in case.groups), key=lambda group: order[group.policy])
        rows = [[one.to_dict(all_percentiles=asked.all_percentiles) for one in group.summaries] for group in groups]
        merged = [row[0] if asked.repeats == 1 else mean_over_repeats(row) for row in rows]
        sys.stdout.write(json.dumps(merged, indent=2, allow_nan=False) + "\n")
    elif cases:
        from rich.console import Console

        from ebbench.render.report import print_report

        print_report(Console(highlight=False), cases, all_percentiles=asked.all_percentiles)


def _verdict(done: _Done) -> None:
    if done.interrupted:
        kept = f"kept {len(done.summaries)} run(s)" if done.summaries else "nothing was measured yet"
        raise InterruptedRunError(f"interrupted; {kept}")
    invalid = [summary for summary in done.summaries if not summary.valid]
    if invalid:
        reasons = "; ".join(f"{summary.policy}: {', '.join(summary.reasons)}" for summary in invalid)
        raise RunError(f"INVALID run ({reasons})")
