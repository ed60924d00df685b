"""``ebbench plan``: the cheapest deployment that serves a request rate within latency limits."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.cli.options import GoodputCommand, grouped, opt
from ebbench.cli.run_settings import (
    Attainment,
    Goodput,
    RunSettings,
    WorkloadArgument,
)
from ebbench.config.declare import DEFAULT_MODEL, LIMITS, OUTPUT
from ebbench.errors import UsageError
from ebbench.spec.run import OF_A_PLAN

_CHOICE = "Candidates"


@dataclass(frozen=True)
class TargetFlags:
    """The load to serve and its limits."""

    request_rate: Annotated[float, opt("--request-rate", help="Sessions/s to serve.", panel=LIMITS)]
    goodput: Goodput = None
    attainment: Attainment = 0.95
    scenario: Annotated[
        str | None,
        opt(
            "--scenario",
            "-s",
            help="Arrivals: poisson (default), gamma, constant, or trace: a log's or fitted workload's own, scaled.",
            panel=LIMITS,
        ),
    ] = None
    headroom: Annotated[
        float, opt("--headroom", help="Carry this share more than the rate, too: 0.2 is 120 %.", panel=LIMITS)
    ] = 0.0
    spare: Annotated[int, opt("--spare", help="Replicas that may be lost at the rate; 1 is N+1.", panel=LIMITS)] = 0


@dataclass(frozen=True)
class CandidateFlags:
    """The candidates."""

    device: Annotated[
        list[str] | None, opt("--device", help="GPUs to choose from; repeat. Default: all with data.", panel=_CHOICE)
    ] = None
    model: Annotated[str, opt("--model", help="Name, or path of a config.json.", panel=_CHOICE)] = DEFAULT_MODEL
    tp: Annotated[list[int] | None, opt("--tp", help="GPUs per instance; repeat. Default: 1 2 4 8.", panel=_CHOICE)] = (
        None
    )
    instance: Annotated[
        list[str] | None,
        opt(
            "--instance",
            help="Sharing its experts: tp=8,ep=8 or dp=8,ep=8; repeat. Without --tp: only these.",
            panel=_CHOICE,
        ),
    ] = None
    policy: Annotated[
        list[str] | None, opt("--policy", "-p", help="Repeat. Default: v1, ebplus, marginal.", panel=_CHOICE)
    ] = None
    max_num_batched_tokens: Annotated[
        list[int] | None, opt("--max-num-batched-tokens", help="B; repeat. Default: vLLM's on the GPU.", panel=_CHOICE)
    ] = None
    max_num_seqs: Annotated[
        list[int] | None, opt("--max-num-seqs", help="N; repeat. Default: vLLM's on the GPU.", panel=_CHOICE)
    ] = None
    price: Annotated[
        list[str] | None,
        opt("--price", help="Per GPU-hour: h200=3.5, or a TOML file. Default: the fewest GPUs.", panel=_CHOICE),
    ] = None


@dataclass(frozen=True)
class PlanOutput:
    """Where the result goes, and in which form."""

    workers: Annotated[int | None, opt("--workers", help="Processes. Default: one per core.", panel=OUTPUT)] = None
    plot: Annotated[Path | None, opt("--plot", help="Write cost over TPOT to .svg, .png or .pdf.", panel=OUTPUT)] = None
    as_json: Annotated[bool, opt("--json", help="One JSON object on stdout, nothing else.", panel=OUTPUT)] = False
    quiet: Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=OUTPUT)] = False


@grouped
def plan(
    context: typer.Context,
    workload: WorkloadArgument,
    target: TargetFlags,
    settings: Annotated[dict[str, Any], RunSettings({"api_server": "auto"}, only=OF_A_PLAN)],
    choice: CandidateFlags,
    output: PlanOutput,
) -> None:
    """Find the devices, GPUs per replica, replicas and policy that serve a rate within limits, by simulation.

    Costs use your prices per GPU-hour; without --price the number of GPUs decides.

    Exit code 2 if no candidate carries the rate within the limits.
    """
    from ebbench.render.documents import Console
    from ebbench.sizing import chart, plan_sentences
    from ebbench.sizing.candidates import find_plan, plan_tasks

    if output.plot is not None:
        chart.check_suffix(output.plot)
    asked = {**vars(target), **vars(choice), "goodput": target.goodput or ()}
    price = asked.pop("price") or ()
    question = {**settings, "workload": workload}
    tasks = plan_tasks(question, **asked)
    sized = find_plan(
        tasks, question, price, Console(stderr=True, highlight=False), arrivals_given=target.scenario is not None,
        workers=output.workers, quiet=output.quiet,
    )  # fmt: skip
    if output.plot is not None and sized.deployments.carrying:
        chart.save_frontier(sized.deployments, bool(sized.prices), output.plot)
    if output.as_json:
        sys.stdout.write(json.dumps(plan_sentences.as_dict(*sized.shown), indent=2, allow_nan=False) + "\n")
    else:
        console = Console(highlight=False)
        for part in plan_sentences.parts(*sized.shown):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    if not sized.deployments.carrying:
        sys.exit(UsageError.exit_code)


plan.command_class = GoodputCommand  # type: ignore[attr-defined]
