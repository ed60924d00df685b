"""The steps of ``ebbench capacity``: check, search for each policy, store probes, show."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ebbench.analysis.api_server_load import ApiServerBusyError, left_out, runs_again
from ebbench.capacity.drive import THERE_ARE, SearchBudget, SearchConfig, SearchOutcome, search_capacity
from ebbench.capacity.limits import LatencyLimits, parse_limits
from ebbench.cli.capacity_probes import RunProber, one_server
from ebbench.cli.preflight import check_counts, check_options, default_policies, is_server, parse_policies
from ebbench.cli.run_policies import RunConfig, device_of, engine_of, with_label
from ebbench.devices.apiserver import DEFAULT_CLASS, OFF
from ebbench.engines.base import VIRTUAL_TIME, Engine
from ebbench.engines.setup import topology_of
from ebbench.engines.sim import SimEngine
from ebbench.errors import EbbenchError, InterruptedRunError, RunError, UsageError
from ebbench.records import files
from ebbench.records.lock import sole_use
from ebbench.records.run import default_run_dir

if TYPE_CHECKING:
    from ebbench.capacity.probe import ProbeReading
    from ebbench.capacity.search_types import Estimate
    from ebbench.cli.client_flags import ClientFlags
    from ebbench.cli.cluster_flags import ClusterOptions
    from ebbench.cli.run_flags import EngineFlags
    from ebbench.devices.base import Device
    from ebbench.render.console import Console
    from vllm_eb.policy import PolicySpec

SETTINGS = "capacity.json"
_LONGEST = {"virtual": 16, "real": 4}
"""A probe gets at most this many times its least number of sessions."""
_FEWEST = {"virtual": 4000, "real": 300}
_PROBE_S = {"virtual": 0.0, "real": 30.0}
"""Least sessions per probe, and least duration of their arrivals: a server in real time costs minutes."""


@dataclass(frozen=True)
class CapacityQuestion:
    """The options of ``ebbench capacity``. ``arrivals_given``: the scenario was asked for."""

    workload: str
    limits: Sequence[str]
    attainment: float
    by: str
    scenario: str
    precision: float
    max_probes: int
    max_time_s: float | None
    seed: int
    plan_settings: Mapping[str, object]
    engine: EngineFlags
    warmup: int
    client: ClientFlags
    cluster: ClusterOptions
    output_dir: Path | None
    quiet: bool
    vllm_options: tuple[str, ...] = ()
    arrivals_given: bool = False

    @property
    def notes(self) -> list[str]:
        """What holds for all probes: that their arrivals are not the workload's own, where nobody asked for others."""
        from ebbench.workloads.own_arrivals import poisson_instead

        if self.by_concurrency or self.arrivals_given:
            return []
        return [note for note in [poisson_instead(self.workload, self.plan_settings)] if note]

    @property
    def by_concurrency(self) -> bool:
        """Whether the load is a number of open sessions instead of a rate."""
        return self.by == "concurrency"


def search_all(question: CapacityQuestion, *, plot: Path | None, as_json: bool) -> None:
    """Search for every policy, store and show the results. Raises UsageError, RunError, InterruptedRunError."""
    from ebbench.capacity import chart
    from ebbench.render.console import Console

    messages = Console(stderr=True, highlight=False)
    limits = _checked(question)
    if plot is not None:
        chart.check_suffix(plot)
    system = _system(question, limits)
    folder, begun = _folder(question, limits), time.monotonic()
    with sole_use(folder):
        _search_in(folder, begun, question, limits, system, messages, plot=plot, as_json=as_json)


def _search_in(
    folder: Path, begun: float, question: CapacityQuestion, limits: LatencyLimits, system: _System, messages: Console,
    *, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    try:
        _search_all(question, limits, system, messages, folder, folder, begun, plot=plot, as_json=as_json)
    except ApiServerBusyError as busy:
        if not question.quiet:
            messages.print(runs_again(busy.warning), markup=False, soft_wrap=True)
        served = replace(question, engine=replace(question.engine, api_server=DEFAULT_CLASS))
        probes = folder / f"api-server-{DEFAULT_CLASS}"  # apart from the probes without it
        probes.mkdir(exist_ok=True)
        system = _system(served, limits)
        _search_all(served, limits, system, messages, folder, probes, begun, plot=plot, as_json=as_json)


@dataclass(frozen=True)
class _System:
    """What is searched, checked. ``sentence`` names the engine."""

    config: RunConfig
    engine: Engine
    device: Device
    sentence: str


def _system(question: CapacityQuestion, limits: LatencyLimits) -> _System:
    topology = topology_of(question.cluster.topology, question.scenario, None)
    policies = parse_policies(question.engine.policy or default_policies(question.engine.engine, topology))
    config = _template(question, limits, policies)
    check_options(config.options, policies)
    engine, sentence = engine_of(config)
    device = device_of(config)
    return _System(with_label(config, engine), engine, device, sentence)


def _search_all(
    question: CapacityQuestion, limits: LatencyLimits, system: _System, messages: Console, folder: Path, probes: Path,
    begun: float, *, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Results go to ``folder``, runs to ``probes``. ``begun``: when the command began, on the monotonic clock."""
    from ebbench.capacity import sentences

    config, engine = system.config, system.engine
    processes_left_out = _api_servers_left_out(config, engine)
    if not question.quiet:
        messages.print(system.sentence, markup=False, soft_wrap=True)
        messages.print(sentences.announce(limits, question.by_concurrency), markup=False, soft_wrap=True)
    found: dict[str, SearchOutcome] = {}
    try:
        for index, spec in enumerate(config.policies):
            prober = RunProber(
                replace(config, policies=[spec]), question.scenario, question.by_concurrency, spec, system.device,
                engine, messages, probes,
            )  # fmt: skip
            budget = _budget(question, begun, len(config.policies) - index)
            with one_server(prober, quiet=question.quiet) as kept:
                most = processes_left_out if config.api_server_if_busy else 0
                found[spec.name] = _search(question, limits, kept, budget, messages, most)
            busy = sentences.beyond_api_servers(found, processes_left_out)
            if config.api_server_if_busy and busy is not None:
                raise ApiServerBusyError(busy)
    except KeyboardInterrupt:
        _show(found, limits, question, folder, processes_left_out, as_json=as_json, plot=plot)
        raise InterruptedRunError(
            f"interrupted; probes are kept in {folder}, continue with the same command and --output-dir {folder}"
        ) from None
    except EbbenchError:
        _show({name: outcome for name, outcome in found.items() if outcome.readings}, limits, question, folder,
              processes_left_out, as_json=False, plot=plot)  # fmt: skip
        raise
    _refuse_nothing(found)
    _show(found, limits, question, folder, processes_left_out, as_json=as_json, plot=plot)


def _budget(question: CapacityQuestion, begun: float, policies_left: int) -> SearchBudget:
    """An equal share of the remaining time for each policy that is still to be searched."""
    if question.max_time_s is None:
        return SearchBudget(question.max_probes)
    now = time.monotonic()
    left_s = max(0.0, question.max_time_s - (now - begun))
    return SearchBudget(question.max_probes, left_s / policies_left, named_s=question.max_time_s, begun=now)


def _refuse_nothing(found: Mapping[str, SearchOutcome]) -> None:
    """Raise UsageError if no policy can meet the limits, RunError if no probe of any policy was usable."""
    outcomes = list(found.values())
    if all(outcome.refused for outcome in outcomes):
        raise UsageError("; ".join(dict.fromkeys(outcome.refused for outcome in outcomes)))
    if not any(outcome.decided for outcome in outcomes):
        why = next((outcome.stopped for outcome in outcomes if outcome.stopped), "no probe was long enough")
        longer = (
            "use a longer source, or --source profile"
            if THERE_ARE in why
            else "give more --num-prompts or a larger budget"
        )
        raise RunError(f"no probe was usable ({why}); {longer}")


def _checked(question: CapacityQuestion) -> LatencyLimits:
    if question.by not in ("rate", "concurrency"):
        raise UsageError(f"--by is rate or concurrency, not {question.by!r}")
    if question.by_concurrency and question.scenario != "poisson":
        raise UsageError("--by concurrency is a closed loop: leave out --scenario and --burstiness")
    check_counts(max_probes=question.max_probes, num_prompts=question.plan_settings["num_prompts"])  # type: ignore[arg-type]
    if not 0 < question.precision < 0.5:
        raise UsageError(f"--precision is a share between 0 and 0.5, such as 0.02, not {question.precision:g}")
    if question.max_time_s is not None and not question.max_time_s > 0:
        raise UsageError(f"--max-time must be positive, not {question.max_time_s:g}")
    _check_workload(question.workload)
    return parse_limits(question.limits, question.attainment)


def _check_workload(workload: str) -> None:
    """Raise UsageError for a workload that does not exist or has no valid lengths, before anything is announced."""
    from ebbench.workloads.options import is_recorded, recorded_file
    from ebbench.workloads.spec import load_workload

    if not is_recorded(workload):
        load_workload(workload)
    elif (path := recorded_file(workload)) is None or not path.exists():
        raise UsageError(f"{workload}: no such file")


def _template(question: CapacityQuestion, limits: LatencyLimits, policies: list[PolicySpec]) -> RunConfig:
    """The configuration of a run; each probe sets its own load, size and seed."""
    flags = question.engine
    if is_server(flags.engine) and len(policies) > 1:
        raise UsageError("a server runs the one policy it was started with; give one --policy, as a label")
    return RunConfig(
        workload=question.workload,
        scenario=question.scenario,
        seed=question.seed,
        repeats=1,
        plan_settings={**question.plan_settings, "max_model_len": flags.length_limit, "redraw": True},
        policies=policies,
        **flags.settings(question.warmup),
        slo=limits.slo,
        output_dir=None,
        save_as_vllm=None,
        quiet=question.quiet,
        brief=True,
        client=question.client,
        cluster=question.cluster,
        vllm_options=question.vllm_options,
    )


def _folder(question: CapacityQuestion, limits: LatencyLimits) -> Path:
    """Directory of the probes: a new one, or that of an earlier search with the same settings."""
    flags = {name: value for name, value in vars(question.engine).items() if name != "policy"}
    settings = {
        "workload": question.workload, "limits": str(limits), "by": question.by, "scenario": question.scenario,
        "seed": question.seed, "plan": dict(question.plan_settings), "engine": flags, "warmup": question.warmup,
        "client": vars(question.client), "cluster": vars(question.cluster),
    }  # fmt: skip
    if question.vllm_options:
        settings["vllm_options"] = list(question.vllm_options)
    text = json.dumps(settings, indent=1, sort_keys=True, default=str).encode() + b"\n"
    folder = question.output_dir or default_run_dir(question.workload, "capacity")
    stored = folder / SETTINGS
    if stored.exists():
        if stored.read_bytes() != text:
            raise UsageError(f"{folder} holds a search with other settings; give another --output-dir")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"output directory {folder} exists and holds no search; give another --output-dir")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_bytes(text, stored)
    return folder


def _search(
    question: CapacityQuestion, limits: LatencyLimits, prober: RunProber, budget: SearchBudget, messages: Console,
    api_servers: int,
) -> SearchOutcome:  # fmt: skip
    """Raises ApiServerBusyError at a load within the limits that so many API servers (0: any number) cannot stream."""
    from ebbench.capacity import sentences

    kind = "virtual" if prober.engine.name in ("sim", "emulated") else "real"
    given = question.plan_settings["num_prompts"]
    config = SearchConfig(
        limits=limits,
        by_concurrency=question.by_concurrency,
        sessions=given if isinstance(given, int) else _FEWEST[kind],
        seconds=0.0 if isinstance(given, int) else _PROBE_S[kind],
        precision=question.precision,
        seed=question.seed,
        real_time=kind == "real",
        longest=_LONGEST[kind],
    )

    def seen(reading: ProbeReading, estimate: Estimate) -> None:
        if not question.quiet:
            line = sentences.progress(prober.spec.name, reading, estimate, question.by_concurrency)
            messages.print(line, markup=False, soft_wrap=True)
        carried = reading.decides and reading.met
        if api_servers and carried and (busy := left_out(reading.api_servers, api_servers)) is not None:
            raise ApiServerBusyError(busy)

    if kind == "real" and not question.quiet:
        line = f"{prober.spec.name}: first {config.alone} sessions one at a time, which shows what can be had at best"
        messages.print(line, markup=False, soft_wrap=True)
    return search_capacity(config, prober, budget, prober.earlier(), seen)


def _show(
    found: Mapping[str, SearchOutcome], limits: LatencyLimits, question: CapacityQuestion, folder: Path,
    api_servers_left_out: int, *, as_json: bool, plot: Path | None,
) -> None:  # fmt: skip
    """Store the results beside the probes, then print or draw them."""
    from ebbench.capacity import result_rows, sentences
    from ebbench.render.console import Console
    from ebbench.render.documents import section_tables
    from ebbench.render.report import notes

    rows = result_rows.rows_of(found, question.by_concurrency, limits, question.notes)
    if rows:
        result_rows.store(rows, folder)
    if plot is not None and rows:
        from ebbench.capacity.chart import save_curves

        save_curves(rows, plot)
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2, allow_nan=False) + "\n")
    elif found:
        console = Console(highlight=False)
        for piece in section_tables(sentences.table(found, question.by_concurrency), console.width):
            console.print(piece)
        for line in sentences.remarks(found, limits, question.by_concurrency, api_servers_left_out):
            console.print(line, markup=False, soft_wrap=True)
        for part in notes("Keep in mind", [*question.notes, *sentences.caveats(found, question.by_concurrency)]):
            console.print(part)


def _api_servers_left_out(config: RunConfig, engine: Engine) -> int:
    """Processes of vLLM's API server that the simulation leaves out; 0 where it has them, or a real server does."""
    if config.options.api_server != OFF or engine.name not in VIRTUAL_TIME:
        return 0
    topology = engine.topology if isinstance(engine, SimEngine) else None
    return topology.pools[-1].units if topology is not None else 1
