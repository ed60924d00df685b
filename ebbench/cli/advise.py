"""``ebbench advise``: which policy to run for a workload on a device, its expected gain, and where that changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import GoodputCommand, grouped, opt
from ebbench.cli.run_settings import Tp, check_tp, setting
from ebbench.config.declare import CLUSTER
from ebbench.config.defaults import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.devices.apiserver import chosen_api_server
from ebbench.spec.server import DEFAULT_CLASS, OFF, first_choice, only_if_busy
from ebbench.traffic.choice import scenario_meant

if TYPE_CHECKING:
    from ebbench.advice.halving import SearchResult
    from ebbench.advice.results import Advice, AdviceQuestion
    from ebbench.runs.store import RunStore
    from ebbench.spec.run import RunSpec


DEFAULT_PROMPTS, MOST_OF_A_LOG = 3000, 10_000
"""Requests per run: of a workload, and most of a log, of whose further requests each seed takes another part."""


@dataclass(frozen=True)
class TrafficFlags:
    """Which requests are sent, and when."""

    scenario: Annotated[str | None, setting("scenario")] = None
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts", "-n", help="Requests per run. Default: 3,000; of a log all, up to 10,000 per seed."
        ),
    ] = None
    max_concurrency: Annotated[int | None, setting("max_concurrency")] = None
    request_rate: Annotated[float | None, setting("request_rate")] = None
    saturation_rate: Annotated[float | None, setting("saturation_rate")] = None
    speed: Annotated[float | None, setting("speed")] = None
    time_unit: Annotated[str | None, setting("time_unit")] = None
    source: Annotated[str, setting("source")] = "profile"
    columns: Annotated[str | None, setting("columns")] = None
    input_len: Annotated[int | None, setting("input_len")] = None
    output_len: Annotated[int | None, setting("output_len")] = None
    length_distribution: Annotated[str | None, setting("length_distribution")] = None
    drop_too_long: Annotated[bool, setting("drop_too_long")] = False

    def scenario_of(self, workload: str) -> str | None:
        """The scenario that `ebbench run` would use for these options."""
        return scenario_meant(workload, self.scenario, self.request_rate, None)

    def plan(self, workload: str) -> dict[str, str | int | float | None]:
        """Arguments of build_plan except workload, scenario, seed and length limit."""
        from ebbench.workloads.options import is_recorded

        given = {name: value for name, value in vars(self).items() if name != "scenario"}
        if not is_recorded(workload):
            return given | {"num_prompts": self.num_prompts or DEFAULT_PROMPTS}
        asked = self.num_prompts or self._most(workload)
        return given | {"num_prompts": asked, "source": "auto", "redraw": True}

    def _most(self, workload: str) -> int:
        """The sessions of a log, as far as a run takes them unless more are asked for."""
        from ebbench.workloads.options import recorded_file
        from ebbench.workloads.trace import read_trace

        path = recorded_file(workload)
        assert path is not None  # the caller asked for a log
        return min(read_trace(path, self.columns).requests.sessions, MOST_OF_A_LOG)


@dataclass(frozen=True)
class ServerFlags:
    """The device and the limits of its scheduler."""

    device: Annotated[
        str, typer.Option("--device", help="GPU, see `ebbench devices list`.", autocompletion=completion.devices)
    ] = DEFAULT_DEVICE
    model: Annotated[
        str, typer.Option("--model", help="Model name or config.json.", autocompletion=completion.models)
    ] = DEFAULT_MODEL
    assume_decoder: Annotated[bool, setting("assume_decoder")] = False
    max_num_seqs: Annotated[int, setting("max_num_seqs")] = 1024
    max_num_batched_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--max-num-batched-tokens",
            help="Token budgets to try; repeat, the one to compare with first. Default: 8192, 2048, 4096 and 16384, as "
            "far as they hold --max-num-seqs.",
        ),
    ] = None
    max_model_len: Annotated[int | None, setting("max_model_len")] = None
    gpu_memory_utilization: Annotated[float | None, setting("gpu_memory_utilization")] = None
    vllm_version: Annotated[str | None, setting("vllm_version")] = None
    quantization: Annotated[str | None, setting("quantization")] = None
    kv_cache_dtype: Annotated[str, setting("kv_cache_dtype")] = "auto"
    api_server: Annotated[str, setting("api_server")] = "auto"
    api_server_count: Annotated[int | None, setting("api_server_count")] = None
    tp: Tp = 1
    topology: Annotated[
        str | None,
        opt(
            "--topology",
            help="Several engines, each with the policy: dp=4, tp=1,dp=4,ep=4, ... or a TOML file.",
            panel=CLUSTER,
        ),
    ] = None
    link: Annotated[str | None, setting("link")] = None

    @property
    def settings(self) -> dict[str, str | float]:
        """What was given of the server's other settings, by the names of ``RunSpec.changed``. Raises UsageError."""
        topology = self._topology()
        api_server = first_choice(self.api_server, self.api_server_count)
        chosen_api_server(api_server, self.api_server_count)
        given = {
            "topology": topology,
            "link": self.link,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "vllm_version": self.vllm_version,
            "quantization": self.quantization,
            "kv_cache_dtype": None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            "api_server": None if api_server == OFF else api_server,
            "api_server_count": self.api_server_count,
        }
        return {name: value for name, value in given.items() if value is not None}

    def _topology(self) -> str | None:
        """``--topology``, or what ``--tp`` means."""
        from ebbench.errors import UsageError

        if self.topology is None:
            check_tp(self.tp, self.link)
            return f"tp={self.tp}" if self.tp > 1 else None
        if self.tp > 1:
            raise UsageError(f"--topology has the GPUs of each engine: leave out --tp {self.tp}, and write tp= there")
        return self.topology

    @property
    def longest(self) -> int:
        """Longest prompt plus output in tokens."""
        from ebbench.spec.server import EngineOptions

        return EngineOptions.max_model_len if self.max_model_len is None else self.max_model_len


@dataclass(frozen=True)
class AdviceFlags:
    """Candidates, the objective, and the effort."""

    goodput: Annotated[
        list[str] | None, typer.Option("--goodput", help="Targets in ms: ttft:10000 tpot:100. Goodput then decides.")
    ] = None
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="Candidates. Default: those that the policies name, rivals of other servers among them.",
            autocompletion=completion.policies,
        ),
    ] = None
    seeds: Annotated[int, typer.Option("--seeds", help="Number of plans on which each candidate is run.")] = 5
    crossover: Annotated[bool, typer.Option("--crossover/--no-crossover", help="Also search for the crossovers.")] = (
        True
    )
    tune: Annotated[bool, typer.Option("--tune", help="Also try other N and B with the chosen policy.")] = False


@grouped
def advise(
    workload: Annotated[
        str,
        typer.Argument(help="A workload, log:FILE or the path of a TOML file.", autocompletion=completion.workloads),
    ],
    server: ServerFlags,
    search: AdviceFlags,
    traffic: TrafficFlags,
    runs: Annotated[Path, typer.Option("--runs", help="Directory of stored runs.")] = Path("runs/advise"),
    workers: Annotated[int | None, typer.Option("--workers", help="Processes. Default: one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Say which policy to run, its parameters, its expected gain with an interval, and where EB and MB cross.

    Policies and token budgets are searched together; the worse ones are dropped before all seeds have run.

    Theory (the papers' formulas) and simulation are shown together; the simulation decides.
    """
    from ebbench.advice.simulate import advise as find_advice
    from ebbench.advice.simulate import api_server_left_out
    from ebbench.analysis.api_server_load import runs_again
    from ebbench.runs.store import RunStore

    question, store = _question(workload, server, search, traffic), RunStore(runs)
    searched = _search(question, store, workers=workers, quiet=quiet)
    busy = api_server_left_out(question, store, searched.finalists)
    if busy is not None and only_if_busy(server.api_server, server.api_server_count):
        if not quiet:
            typer.echo(runs_again(busy), err=True)
        question = replace(question, server={**question.server, "api_server": DEFAULT_CLASS})
        searched = _search(question, store, workers=workers, quiet=quiet)
    if search.crossover:
        _crossovers(question, store, workers=workers, quiet=quiet)
    found = find_advice(question, store, searched, with_crossover=search.crossover)
    if search.tune:
        found = _tuned(found, store, workers=workers, quiet=quiet)
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(found), indent=2) + "\n")
    else:
        _print(found)


def _question(workload: str, server: ServerFlags, search: AdviceFlags, traffic: TrafficFlags) -> AdviceQuestion:
    from ebbench.advice.candidates import checked
    from ebbench.advice.results import AdviceQuestion
    from ebbench.advice.simulate import default_budgets, default_policies
    from ebbench.analysis.slo import parse_slo
    from ebbench.cli.preflight import check_counts, each_once, parse_policies
    from ebbench.devices.profiles import as_decoder

    check_counts(
        seeds=search.seeds,
        num_prompts=traffic.num_prompts,
        max_concurrency=traffic.max_concurrency,
        request_rate=traffic.request_rate,
    )
    slo = parse_slo(search.goodput or ())
    each_once("--max-num-batched-tokens", server.max_num_batched_tokens or [])
    budgets = tuple(server.max_num_batched_tokens or default_budgets(server.max_num_seqs))
    question = AdviceQuestion(
        workload,
        server.device,
        as_decoder(server.model) if server.assume_decoder else server.model,
        traffic.scenario_of(workload),
        traffic.plan(workload) | {"max_model_len": server.longest},
        server.max_num_seqs,
        budgets[0],
        search.seeds,
        slo,
        tuple(spec.name for spec in parse_policies(search.policy))
        if search.policy
        else default_policies(slo, budgets, server.max_num_seqs),
        budgets=budgets[1:],
        server=server.settings,
    )
    return checked(question)


def _search(question: AdviceQuestion, store: RunStore, *, workers: int | None, quiet: bool) -> SearchResult:
    """Carry out the runs of the search."""
    from ebbench.advice.halving import search
    from ebbench.advice.simulate import objective
    from ebbench.cli.make_runs import with_progress

    def make(name: str, cells: Sequence[RunSpec]) -> None:
        with_progress(name, cells, store, whole=bool(question.slo), workers=workers, quiet=quiet)

    return search(question, make, lambda cell: objective(question, store, cell))


def _crossovers(question: AdviceQuestion, store: RunStore, *, workers: int | None, quiet: bool) -> None:
    """Carry out the runs of the crossovers."""
    from ebbench.advice.candidates import load_of
    from ebbench.advice.simulate import concurrency_cells, mix_cells
    from ebbench.cli.make_runs import with_progress

    load = load_of(question, store)
    pairs = [*concurrency_cells(question, load).values(), *mix_cells(question, load).values()]
    cells = [cell for pair in pairs for cell in pair]
    with_progress("crossovers", cells, store, whole=False, workers=workers, quiet=quiet)


def _tuned(found: Advice, store: RunStore, *, workers: int | None, quiet: bool) -> Advice:
    from ebbench.advice.simulate import tune, tuning_cells
    from ebbench.cli.make_runs import with_progress

    question, policy, budget = found.question, found.chosen.policy, found.chosen.max_num_batched_tokens
    cells = tuning_cells(question, policy, budget)
    with_progress("settings", cells, store, whole=bool(question.slo), workers=workers, quiet=quiet)
    return replace(found, tuning=tune(question, policy, store, budget))


def _print(found: Advice) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from ebbench.advice import sentences
    from ebbench.render.console import Console

    console = Console(highlight=False)
    question = found.question
    on = f"{question.workload}, {question.model} on {question.device} {sentences.server_options(question)}"
    console.print(on.rstrip(), style="bold", markup=False)
    for index, line in enumerate(sentences.headline(found)):
        console.print(line, style="bold green" if not index else None, markup=False)

    def section(title: str, lines: Sequence[str]) -> None:
        console.print(f"\n{title}", style="bold", markup=False)
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2)))

    section("Parameters", sentences.parameters(found))
    how_many = f"means over {question.seeds} seeds" if question.seeds > 1 else "one seed"
    section(f"Simulation, which decides ({how_many})", [])
    console.print(sentences.candidates(found))
    for line in sentences.left_out(found):
        console.print(line, markup=False)
    for table, crossing in sentences.probes(found):
        console.print()
        console.print(table)
        console.print(crossing, markup=False)
    agreement = sentences.agreement(found)
    section("Theory", [*sentences.theory_lines(found), *([agreement] if agreement else [])])
    section("Keep in mind", sentences.limits_of_it(found))


def _as_dict(found: Advice) -> dict[str, Any]:
    from dataclasses import asdict

    from ebbench.advice.choice import BASELINE, budget_share, level_budgets, tuned_budget

    budget = budget_share(found.scores)
    theory = asdict(found.theory) | {"exclusive": found.theory.exclusive, "gain": found.theory.gain}
    return {
        "policy": found.chosen.policy,
        "reason": found.reason,
        "equal_budgets": level_budgets(found.chosen, found.scores),
        "objective": "goodput" if found.question.slo else "total_token_throughput",
        "slo_ms": found.question.slo.limits() or None,
        "load": asdict(found.load),
        "theory": theory,
        "scores": [_finite(asdict(score)) for score in found.scores],
        "concurrency": None if found.concurrency is None else asdict(found.concurrency),
        "mix": None if found.mix is None else asdict(found.mix),
        "tuned_budget": None
        if budget is None
        else {
            "max_num_batched_tokens": tuned_budget(budget[0]),
            "share_of_gain": budget[1],
        },
        "tuning": None if found.tuning is None else asdict(found.tuning),
        "server": dict(found.question.server),
        "max_num_seqs": found.question.max_num_seqs,
        "max_num_batched_tokens": found.chosen.max_num_batched_tokens,
        "compared_with": {"policy": BASELINE, "max_num_batched_tokens": found.question.max_num_batched_tokens},
        "dropped": [one._asdict() for one in found.dropped],
        "engines": found.engines,
        "seeds": found.question.seeds,
        "seeds_alike": found.question.seeds_alike,
        "notes": list(found.notes),
    }


def _finite(value: Any) -> Any:
    """``value`` with infinite numbers replaced by null, which JSON needs."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and abs(value) == float("inf") else value


advise.command_class = GoodputCommand  # type: ignore[attr-defined]
