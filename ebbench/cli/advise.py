"""``ebbench advise``: which policy to run for a workload on a device, its expected gain, and where that changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import GoodputCommand, grouped, opt
from ebbench.cli.run_settings import (
    RunSettings,
    Tp,
    check_tp,
    setting,
)
from ebbench.config.declare import CLUSTER, DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.spec.run import OF_A_SERVER, OF_LABELS
from ebbench.spec.server import DEFAULT_CLASS
from ebbench.workloads.options import scenario_meant

if TYPE_CHECKING:
    from ebbench.advice.choice import Advice, AdviceQuestion
    from ebbench.advice.simulate import SearchResult
    from ebbench.runs.store import RunStore
    from ebbench.spec.run import RunSpec


DEFAULT_PROMPTS, MOST_OF_A_LOG = 3000, 10_000
"""Requests per run: of a workload, and most of a log, of whose further requests each seed takes another part."""


_TRAFFIC = (
    "scenario", "max_concurrency", "request_rate", "saturation_rate", "speed", "time_unit", "source", "columns",
    "input_len", "output_len", "length_distribution", "drop_too_long",
)  # fmt: skip
"""Settings that say which requests are sent, and when."""
_DEFAULTS = {"source": "profile", "api_server": "auto"}


@dataclass(frozen=True)
class ServerFlags:
    """The device and the limits of its scheduler."""

    device: Annotated[
        str, typer.Option("--device", help="GPU, see `ebbench devices list`.", autocompletion=completion.devices)
    ] = DEFAULT_DEVICE
    model: Annotated[
        str, typer.Option("--model", help="Model name or config.json.", autocompletion=completion.models)
    ] = DEFAULT_MODEL
    max_num_seqs: Annotated[int | None, setting("max_num_seqs")] = None
    max_num_batched_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--max-num-batched-tokens",
            help="Token budgets to try; repeat, the one to compare with first. Default: vLLM's, 8192, 2048, 4096 and "
            "16384, as far as they hold --max-num-seqs.",
        ),
    ] = None
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

    def cluster(self) -> dict[str, str]:
        """``--topology``, or what ``--tp`` means, and the link, if they are given. Raises UsageError."""
        from ebbench.errors import UsageError

        topology = self.topology
        if topology is None:
            check_tp(self.tp, self.link)
            topology = f"tp={self.tp}" if self.tp > 1 else None
        elif self.tp > 1:
            raise UsageError(f"--topology has the GPUs of each engine: leave out --tp {self.tp}, and write tp= there")
        return {name: value for name, value in (("topology", topology), ("link", self.link)) if value is not None}


@dataclass(frozen=True)
class AdviceFlags:
    """Candidates, the objective, and the effort."""

    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts", "-n", help="Requests per run. Default: 3,000; of a log all, up to 10,000 per seed."
        ),
    ] = None

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
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Argument(help="A workload, log:FILE or the path of a TOML file.", autocompletion=completion.workloads),
    ],
    server: ServerFlags,
    search: AdviceFlags,
    settings: Annotated[dict[str, Any], RunSettings(_DEFAULTS, only=(*_TRAFFIC, *OF_A_SERVER, *OF_LABELS))],
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
    from ebbench.runs.conclude import ApiServerBusyError, again_if_busy
    from ebbench.runs.prepare import api_server_if_busy
    from ebbench.runs.store import RunStore

    question, store = _question(workload, server, search, settings), RunStore(runs)

    def attempt(served: bool) -> tuple[AdviceQuestion, SearchResult]:
        asked = replace(question, server={**question.server, "api_server": DEFAULT_CLASS}) if served else question
        searched = _search(asked, store, workers=workers, quiet=quiet)
        busy = api_server_left_out(asked, store, searched.finalists)
        if busy is not None and api_server_if_busy(settings) and not served:
            raise ApiServerBusyError(busy)
        return asked, searched

    question, searched = again_if_busy(attempt, lambda text: None if quiet else typer.echo(text, err=True))
    if search.crossover:
        _crossovers(question, store, workers=workers, quiet=quiet)
    found = find_advice(question, store, searched, with_crossover=search.crossover)
    if search.tune:
        found = _tuned(found, store, workers=workers, quiet=quiet)
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(found), indent=2) + "\n")
    else:
        _print(found)


def _question(workload: str, server: ServerFlags, search: AdviceFlags, settings: Mapping[str, Any]) -> AdviceQuestion:
    from ebbench.advice.candidates import checked
    from ebbench.advice.choice import AdviceQuestion
    from ebbench.advice.simulate import default_budgets, default_policies
    from ebbench.analysis.metrics import parse_slo
    from ebbench.config.declare import DEFAULT_VLLM
    from ebbench.devices.capacity import batch_limits
    from ebbench.devices.profiles import find_profile
    from ebbench.engines.checks import check_counts
    from ebbench.runs.prepare import checked_server, each_once, parse_policies

    rate = settings.get("request_rate")
    check_counts(
        seeds=search.seeds,
        num_prompts=search.num_prompts,
        max_concurrency=settings.get("max_concurrency"),
        request_rate=rate,
    )
    slo = parse_slo(search.goodput or ())
    each_once("--max-num-batched-tokens", server.max_num_batched_tokens or [])
    chosen = batch_limits(find_profile(server.device), settings.get("vllm_version") or DEFAULT_VLLM)
    seqs = chosen.max_num_seqs if server.max_num_seqs is None else server.max_num_seqs
    budgets = tuple(server.max_num_batched_tokens or default_budgets(seqs, chosen.max_num_batched_tokens))
    names = checked_server(server.model, settings)
    question = AdviceQuestion(
        workload,
        server.device,
        names["model"],
        scenario_meant(workload, settings.get("scenario"), rate, None),
        plan_arguments(workload, search.num_prompts, settings),
        seqs,
        budgets[0],
        search.seeds,
        slo,
        tuple(spec.name for spec in parse_policies(search.policy))
        if search.policy
        else default_policies(slo, budgets, seqs),
        budgets=budgets[1:],
        server=server.cluster() | _of_server(settings, names["api_server"]),
    )
    return checked(question)


def _of_server(settings: Mapping[str, Any], api_server: str) -> dict[str, Any]:
    """The server's other settings that differ from their defaults, and labels, by the names of ``RunSpec.changed``."""
    from ebbench.spec.run import known_settings
    from ebbench.spec.server import version_defaults

    own = version_defaults(settings.get("vllm_version")) | {"api_server": api_server}
    own |= {name: settings[name] for name in (*OF_A_SERVER, *OF_LABELS) if name in settings and name != "api_server"}
    left_out = ("assume_decoder", "max_model_len")  # in the model's name, and in the plan
    known = known_settings()
    return {name: value for name, value in own.items() if name not in left_out and value != known[name].default}


def plan_arguments(workload: str, num_prompts: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of build_plan except workload, scenario and seed."""
    from ebbench.spec.server import EngineOptions
    from ebbench.workloads.options import is_recorded

    given = {name: settings[name] for name in _TRAFFIC if name in settings and name != "scenario"}
    longest = settings.get("max_model_len", EngineOptions.max_model_len)
    given = {"source": _DEFAULTS["source"], **given, "max_model_len": longest}
    if not is_recorded(workload):
        return given | {"num_prompts": num_prompts or DEFAULT_PROMPTS}
    asked = num_prompts or _most(workload, settings.get("columns"))
    return given | {"num_prompts": asked, "source": "auto", "redraw": True}


def _most(workload: str, columns: str | None) -> int:
    """The sessions of a log, as far as a run takes them unless more are asked for."""
    from ebbench.workloads.options import recorded_file
    from ebbench.workloads.trace import read_trace

    path = recorded_file(workload)
    assert path is not None  # the caller asked for a log
    return min(read_trace(path, columns).requests.sessions, MOST_OF_A_LOG)


def _search(question: AdviceQuestion, store: RunStore, *, workers: int | None, quiet: bool) -> SearchResult:
    """Carry out the runs of the search."""
    from ebbench.advice.simulate import objective, search
    from ebbench.runs.execute import with_progress

    def make(name: str, cells: Sequence[RunSpec]) -> None:
        with_progress(name, cells, store, whole=bool(question.slo), workers=workers, quiet=quiet)

    return search(question, make, lambda cell: objective(question, store, cell))


def _crossovers(question: AdviceQuestion, store: RunStore, *, workers: int | None, quiet: bool) -> None:
    """Carry out the runs of the crossovers."""
    from ebbench.advice.candidates import load_of
    from ebbench.advice.simulate import concurrency_cells, mix_cells
    from ebbench.runs.execute import with_progress

    load = load_of(question, store)
    pairs = [*concurrency_cells(question, load).values(), *mix_cells(question, load).values()]
    cells = [cell for pair in pairs for cell in pair]
    with_progress("crossovers", cells, store, whole=False, workers=workers, quiet=quiet)


def _tuned(found: Advice, store: RunStore, *, workers: int | None, quiet: bool) -> Advice:
    from ebbench.advice.simulate import tune, tuning_cells
    from ebbench.runs.execute import with_progress

    question, policy, budget = found.question, found.chosen.policy, found.chosen.max_num_batched_tokens
    cells = tuning_cells(question, policy, budget)
    with_progress("settings", cells, store, whole=bool(question.slo), workers=workers, quiet=quiet)
    return replace(found, tuning=tune(question, policy, store, budget))


def _print(found: Advice) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from ebbench.advice import sentences
    from ebbench.render.documents import Console

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

    from msgspec import to_builtins

    from ebbench.advice.choice import BASELINE, budget_share, level_budgets, tuned_budget

    budget = budget_share(found.scores)
    theory = asdict(found.theory) | {"exclusive": found.theory.exclusive, "gain": found.theory.gain}
    return {
        "policy": found.chosen.policy,
        "reason": to_builtins(found.reason),
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
