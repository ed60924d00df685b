"""The steps of ``ebbench run``: check, run each policy on each plan, store, show, set the exit code."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbench.analysis.api_server_load import CODE, ApiServerBusyError, runs_again
from ebbench.analysis.economy import PRICE
from ebbench.cli.cluster_flags import ClusterOptions
from ebbench.cli.preflight import check_counts, check_fits, check_options
from ebbench.cli.repeats import why_stop
from ebbench.cli.run_notes import announce
from ebbench.devices.apiserver import DEFAULT_CLASS
from ebbench.engines.checks import refuse_queue_limits, refuse_undecided, stated_limits
from ebbench.engines.setup import is_server, journalled, make_engine, policy_label, with_ramp, with_step_parts
from ebbench.errors import EbbenchError, InterruptedRunError, RunError, UsageError
from ebbench.records.manifest import RunWarning, wall_clock_ns
from ebbench.records.run import NotStoredError, Run, RunWriter, default_run_dir, new_directory, slug, unused
from ebbench.termination import held

if TYPE_CHECKING:
    from ebbench.analysis.explain import Explanation
    from ebbench.analysis.slo import Slo
    from ebbench.analysis.summary import Summary
    from ebbench.cli.client_flags import ClientFlags
    from ebbench.devices.base import Device
    from ebbench.engines.base import Engine, EngineOptions, EngineResult, Progress
    from ebbench.records.plan import Plan
    from ebbench.render.console import Console
    from ebbench.runs.cell import Cell
    from vllm_eb.policy import PolicySpec


@dataclass(frozen=True)
class RunConfig:
    """The checked options of ``ebbench run``."""

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
    cluster: ClusterOptions
    all_percentiles: bool = False
    vllm_options: tuple[str, ...] = ()
    until_clear: bool = False  # stop before ``repeats`` if more would not help
    calibration: Path | None = None
    price_per_hour: float | None = None
    brief: bool = False  # one of many runs, of which only long ones are shown
    api_server_if_busy: bool = False  # simulate again with vLLM's API server if a run would keep it busy

    def with_api_server(self) -> RunConfig:
        """The same with vLLM's API server simulated."""
        return replace(self, options=replace(self.options, api_server=DEFAULT_CLASS), api_server_if_busy=False)

    def cell(self) -> Cell:
        """The settings common to all runs of the command, as the cell of the first policy and seed."""
        from ebbench.runs.cell import Cell
        from ebbench.workloads.options import PlanOptions

        plan: dict[str, Any] = self.plan_settings
        return Cell(
            PlanOptions(self.workload, self.scenario, seed=self.seed, **plan),
            self.policies[0].name,
            self.engine,
            self.device,
            self.model,
            self.options,
            calibration=None if self.calibration is None else str(self.calibration),
            vllm_options=self.vllm_options,
            client=tuple(self.client.settings().items()),
            ramp_up_s=self.client.ramp_up_s,
            **vars(self.cluster),
        )


@dataclass
class _Done:
    """The results so far; kept if the command is interrupted."""

    summaries: list[Summary] = field(default_factory=list)
    explanations: list[Explanation] = field(default_factory=list)
    phases: list[Summary] = field(default_factory=list)
    interrupted: bool = False
    stored: list[Path] = field(default_factory=list)


def run_policies(config: RunConfig, *, as_json: bool) -> None:
    """Check, run, store and show. Raises UsageError, RunError, InterruptedRunError."""
    from ebbench.render.console import Console

    messages = Console(stderr=True, highlight=False)
    _check(config)
    try:
        _run_all(config, messages, as_json=as_json)
    except ApiServerBusyError as busy:
        if not config.quiet:
            messages.print(runs_again(busy.warning), markup=False, soft_wrap=True)
        _run_all(config.with_api_server(), messages, as_json=as_json, announced=True)


def _run_all(config: RunConfig, messages: Console, *, as_json: bool, announced: bool = False) -> None:
    """Run every policy on every plan, store and show."""
    engine, sentence = engine_of(config)
    refuse_undecided(getattr(engine, "topology", None), config.policies)
    _check_prompts(config, engine)
    device = device_of(config)
    config = _saturated(config, engine, device, messages)
    plan = plan_of(config, config.seed, device, messages)
    config = with_label(config, engine)
    if not announced:
        announce(config, engine, sentence, plan, messages)
    done = _Done()
    several = len(config.policies) * config.repeats > 1
    try:
        with new_directory(config.output_dir) if several and config.output_dir is not None else nullcontext():
            _repeat(config, plan, device, engine, messages, done)
    except KeyboardInterrupt:
        done.interrupted = True
    except EbbenchError:
        _show(config, done, as_json=as_json)  # show the measurements before the error
        raise
    _show(config, done, as_json=as_json)
    _verdict(done)


def _repeat(config: RunConfig, plan: Plan, device: Device, engine: Engine, messages: Console, done: _Done) -> None:
    """Run every policy on the plan of each seed. Raises KeyboardInterrupt, once what was measured is in ``done``."""
    for offset in range(config.repeats):
        if offset:
            plan = plan_of(config, config.seed + offset, device, messages)
        if config.until_clear:
            plan = replace(plan, facts={**plan.facts, "until_clear": True})
        ramped, ramping = with_ramp(plan, engine, config.client.ramp_up_s)
        for spec in _order(config.policies, offset):
            _run_one(config, ramped, spec, device, ramping, messages, done)
            if done.interrupted:
                raise KeyboardInterrupt
        if config.until_clear and (reason := why_stop(done.summaries)):
            if not config.quiet:
                messages.print(reason, markup=False, soft_wrap=True)
            break


def _check(config: RunConfig) -> None:
    numbers = ("num_prompts", "max_concurrency", "request_rate", "input_len", "output_len", "speed")
    check_counts(
        repeats=config.repeats,
        price_per_hour=config.price_per_hour,
        **{name: config.plan_settings[name] for name in numbers},  # type: ignore[arg-type]
    )
    check_options(config.options, config.policies)
    if config.cluster.topology is not None:
        refuse_queue_limits(config.options, config.cluster.topology)
    if is_server(config.engine) and len(config.policies) > 1:
        raise UsageError(
            "a server runs the one policy it was started with; give one --policy, as a label, and one run per server"
        )
    if config.save_as_vllm is not None and len(config.policies) * config.repeats > 1:
        raise UsageError("--save-as-vllm writes one run; give one --policy and no --repeats")
    if config.save_as_vllm is not None and (config.save_as_vllm.is_dir() or not config.save_as_vllm.parent.is_dir()):
        raise UsageError(f"--save-as-vllm {config.save_as_vllm}: give a file in a directory that exists")
    if config.save_as_vllm is not None and config.save_as_vllm.exists():
        raise UsageError(f"--save-as-vllm {config.save_as_vllm} exists; give another file or remove it")
    if config.output_dir is not None and config.output_dir.exists():
        raise UsageError(f"output directory {config.output_dir} exists; give another --output-dir or remove it")


def _check_prompts(config: RunConfig, engine: Engine) -> None:
    """Raise UsageError for options of prompts that the engine, or its cache, makes no use of."""
    from ebbench.engines.base import VIRTUAL_TIME

    settings = config.plan_settings
    if settings.get("keep_text") and engine.name in VIRTUAL_TIME:
        raise UsageError(f"--keep-text sends a log's prompts to a server; {engine.name} reads none, leave it out")
    if settings.get("cache_hit_rate") is not None and not config.options.enable_prefix_caching:
        raise UsageError("--cache-hit-rate needs the prefix cache; leave out --no-prefix-caching")


def with_label(config: RunConfig, engine: Engine) -> RunConfig:
    """The configuration with the policy that a server reports, if none was given.

    Raises UsageError if it reports another one than was given, RunError if it is not ready.
    """
    if not is_server(config.engine):
        return config
    label = policy_label(engine, config.policies[0], stated=not config.default_policies)
    return replace(config, policies=[label.policy])


def _saturated(config: RunConfig, engine: Engine, device: Device, messages: Console) -> RunConfig:
    """The configuration with the saturated rate, measured here if the scenario needs it and it was not given."""
    from ebbench.cli.saturation import needs_saturation, with_saturation

    if not needs_saturation(config):
        return config
    return with_saturation(with_label(config, engine), engine, device, messages)


def device_of(config: RunConfig) -> Device:
    """The device of the command. Raises UsageError if a policy needs costs that are not known."""
    from ebbench.runs.make import device_of

    return device_of(config.cell(), config.policies)


def engine_of(config: RunConfig) -> tuple[Engine, str]:
    """The engine with its settings, and the sentence that names it."""
    from ebbench.runs.make import setup_of

    return make_engine(setup_of(config.cell()))


def plan_of(config: RunConfig, seed: int, device: Device, messages: Console) -> Plan:
    """The plan of one seed. Raises UsageError for a request that does not fit."""
    from rich.markup import escape

    from ebbench.workloads import build_plan

    reading: AbstractContextManager[object] = nullcontext()
    if messages.is_terminal and not config.quiet:
        reading = messages.status(f"reading {escape(config.workload)}")  # a data set may take seconds
    with reading:
        plan = build_plan(config.workload, config.scenario, seed=seed, **config.plan_settings)
    if config.price_per_hour is not None:
        plan = replace(plan, facts={**plan.facts, PRICE: config.price_per_hour})
    if not is_server(config.engine) and config.cluster.topology is None:  # several GPUs hold more; the engine checks
        check_fits(plan, device, config.options)
    return plan


def _order(policies: list[PolicySpec], repeat: int) -> Iterator[PolicySpec]:
    """Alternating order (ABBA), so that machine drift affects all policies equally."""
    return iter(policies) if repeat % 2 == 0 else reversed(policies)


def _run_one(
    config: RunConfig, plan: Plan, spec: PolicySpec, device: Device, engine: Engine, messages: Console, done: _Done
) -> None:
    seed = int(plan.facts.get("seed", config.seed))
    label = spec.name if config.repeats == 1 else f"{spec.name} seed {seed}"
    runs = config.repeats * len(config.policies)
    if runs > 1:
        label += f", run {len(done.summaries) + 1} of {'at most ' * config.until_clear}{runs}"
    with held():  # what was measured is in ``done`` before a signal ends the command
        try:
            stored = measure(config, plan, spec, device, engine, messages, _run_dir(config, spec, seed), label)
        except NotStoredError as error:
            if error.run is not None:
                _keep(error.run, done)  # show the run although it could not be stored
            raise
        _take_up(config, stored, done)


def _take_up(config: RunConfig, stored: Run, done: _Done) -> None:
    """Keep a stored run in ``done``, and export it if that was asked for."""
    done.stored.append(stored.path)
    if config.api_server_if_busy:
        _refuse_busy(stored, done)
    _keep(stored, done)
    if config.save_as_vllm is not None:
        from ebbench.export.vllm_json import save_vllm_result

        save_vllm_result(stored, done.summaries[-1], config.save_as_vllm)
    done.interrupted = stored.manifest.interrupted


def _refuse_busy(run: Run, done: _Done) -> None:
    """Raise ApiServerBusyError, without the runs so far, if ``run`` would have kept vLLM's API server busy."""
    warning = next((one for one in run.manifest.warnings if one.code == CODE), None)
    if warning is None or run.manifest.interrupted:
        return
    for path in done.stored:
        shutil.rmtree(path)  # a comparison holds runs with the API server, or runs without it
    raise ApiServerBusyError(warning)


def _keep(run: Run, done: _Done) -> None:
    """Keep in ``done`` what is shown at the end of the command."""
    from ebbench.analysis.explain import explain
    from ebbench.analysis.summary import summarise, summarise_phases

    done.summaries.append(summarise(run))
    done.explanations.append(explain(run))
    phases = summarise_phases(run)
    if len(phases) > 1:
        done.phases += phases


def measure(
    config: RunConfig,
    plan: Plan,
    spec: PolicySpec,
    device: Device,
    engine: Engine,
    messages: Console,
    run_dir: Path,
    label: str,
) -> Run:
    """Run one plan under one policy and store it in ``run_dir``, with a progress line named ``label``."""
    from ebbench.analysis.conclude import RunContext, begin, conclude
    from ebbench.engines.duration import run_plan
    from ebbench.render.live import reporter

    context = RunContext(
        plan,
        spec,
        engine.name,
        device,
        config.options,
        wall_clock_ns(),
        slo=config.slo,
        device_known=not is_server(config.engine),
        warnings=_warnings(config, engine, spec, plan),
    )
    with held(), RunWriter.create(run_dir) as writer:
        if context.kind_of_time == "real":
            begin(writer, context)
            engine = journalled(engine, writer)
        engine = with_step_parts(engine)
        known = plan.release_for_s is None
        with reporter(messages, label, len(plan), quiet=config.quiet, brief=config.brief, known=known) as observer:
            plan, result = run_plan(engine, plan, spec, device, config.options, observer)
            observer.update(_last_snapshot(spec, plan, result))
        return conclude(writer, replace(context, plan=plan), result)


def _warnings(config: RunConfig, engine: Engine, spec: PolicySpec, plan: Plan) -> tuple[RunWarning, ...]:
    """Warnings of the policy about this load, or about what is not known of a running server."""
    if is_server(config.engine):
        label = policy_label(engine, spec, stated=not config.default_policies)
        return (*label.warnings, *stated_limits(config.options))
    open_at_most = max((phase.max_concurrency for phase in plan.phases), default=0)
    found = spec.load_warning(open_at_most, config.options.max_num_seqs)
    return () if found is None else (RunWarning(*found),)


def _last_snapshot(spec: PolicySpec, plan: Plan, result: EngineResult) -> Progress:
    """The final state; the engine's own last snapshot is usually earlier."""
    import pyarrow.compute as pc

    from ebbench.engines.base import Progress

    counted = result.requests.select(["input_tokens", "output_tokens"])  # the gaps between tokens need not be copied
    ok = counted.filter(pc.equal(result.requests["status"], "ok"))
    prompts, outputs = (pc.sum(ok[name]).as_py() or 0 for name in ("input_tokens", "output_tokens"))
    end_ns = pc.max(result.requests["end_ns"]).as_py() or 0
    return Progress(spec.name, ok.num_rows, len(plan), outputs, prompts + outputs, end_ns / 1e9, result.last_mode, 0, 0)


def _run_dir(config: RunConfig, spec: PolicySpec, seed: int) -> Path:
    name = spec.name if config.repeats == 1 else f"{spec.name}-seed{seed}"
    if config.output_dir is None:
        return default_run_dir(config.workload, name)
    if len(config.policies) * config.repeats == 1:
        return config.output_dir
    return unused(config.output_dir / slug(name))


def _show(config: RunConfig, done: _Done, *, as_json: bool) -> None:
    from ebbench.analysis.compare.cases import cases_of

    order = {spec.name: index for index, spec in enumerate(config.policies)}
    measured = list(zip(done.summaries, done.explanations, strict=False))  # an interruption may come between the two
    measured.sort(key=lambda one: (order[one[0].policy], one[0].seed))
    summaries, explanations = [summary for summary, _ in measured], [explanation for _, explanation in measured]
    phases = sorted(done.phases, key=lambda summary: (order[summary.policy], summary.seed))
    cases = cases_of(summaries, explanations, phases)
    if as_json:
        from ebbench.analysis.summary import mean_over_repeats

        groups = sorted((group for case in cases for group in case.groups), key=lambda group: order[group.policy])
        rows = [[one.to_dict(all_percentiles=config.all_percentiles) for one in group.summaries] for group in groups]
        merged = [row[0] if config.repeats == 1 else mean_over_repeats(row) for row in rows]
        sys.stdout.write(json.dumps(merged, indent=2, allow_nan=False) + "\n")
    elif cases:
        from ebbench.render.console import Console
        from ebbench.render.report import print_report

        print_report(Console(highlight=False), cases, all_percentiles=config.all_percentiles)


def _verdict(done: _Done) -> None:
    if done.interrupted:
        kept = f"kept {len(done.summaries)} run(s)" if done.summaries else "nothing was measured yet"
        raise InterruptedRunError(f"interrupted; {kept}")
    invalid = [summary for summary in done.summaries if not summary.valid]
    if invalid:
        reasons = "; ".join(f"{summary.policy}: {', '.join(summary.reasons)}" for summary in invalid)
        raise RunError(f"INVALID run ({reasons})")
