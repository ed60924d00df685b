"""``ebbench plan``: the cheapest deployment that serves a request rate within latency limits."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli.options import GoodputCommand, grouped, opt
from ebbench.cli.run_settings import (
    LIMITS,
    OF_A_SERVER,
    OUTPUT,
    Attainment,
    Goodput,
    RunSettings,
    WorkloadArgument,
)
from ebbench.config.declare import DEFAULT_MODEL

if TYPE_CHECKING:
    from ebbench.sizing.choose import DeploymentChoice
    from ebbench.sizing.deployments import PlanTask

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


_REQUESTS = (
    "seed", "source", "tokenizer", "columns", "keep_text", "prefix_share", "prefix_groups", "cache_hit_rate",
    "input_len", "output_len", "length_distribution", "drop_too_long",
)  # fmt: skip
"""Settings that say which requests are sent."""
SESSIONS = 2000
"""Fewest per simulation."""
DEFAULT_POLICIES = ("v1", "ebplus", "marginal")
MOST_HEADROOM = 10.0
"""More is a percentage by mistake."""


@grouped
def plan(
    context: typer.Context,
    workload: WorkloadArgument,
    target: TargetFlags,
    settings: Annotated[dict[str, Any], RunSettings({"api_server": "auto"}, only=(*_REQUESTS, *OF_A_SERVER))],
    choice: CandidateFlags,
    output: PlanOutput,
) -> None:
    """Find the devices, GPUs per replica, replicas and policy that serve a rate within limits, by simulation.

    Costs use your prices per GPU-hour; without --price the number of GPUs decides.

    Exit code 2 if no candidate carries the rate within the limits.
    """
    from ebbench.errors import UsageError
    from ebbench.runs.pool import pool_of
    from ebbench.runs.prepare import api_server_if_busy
    from ebbench.sizing import chart
    from ebbench.sizing.candidates import sized
    from ebbench.sizing.deployments import plan_notes
    from ebbench.sizing.plan_sentences import REFUSALS
    from ebbench.sizing.prices import check_prices

    if output.plot is not None:
        chart.check_suffix(output.plot)
    tasks: Sequence[PlanTask] = _tasks(workload, target, settings, choice)
    prices = check_prices(choice.price or (), dict.fromkeys(task.candidate.device for task in tasks))
    plan_notes(tasks[0])  # raises what no plan can be built from, before anything is simulated
    deployments, tasks = sized(
        tasks, prices, pool_of(output.workers, len(tasks)),
        api_server_if_busy=api_server_if_busy(settings), quiet=output.quiet,
    )  # fmt: skip
    refused, carried = deployments.refused, deployments.found
    if refused and all(reason.code == "missed_alone" for _, reason in refused) and not carried:
        candidate, reason = refused[0]
        why = reason.worded(REFUSALS)
        raise UsageError(f"no candidate meets the limits: {candidate.device} {candidate.shape} {why}")
    if output.plot is not None and carried:
        chart.save_frontier(deployments, bool(prices), output.plot)
    notes = plan_notes(tasks[0], carried[0].deployment.replicas if carried else 1)
    _show(deployments, tasks[0], choice, prices, [*_arrivals_note(workload, target, settings), *notes], output)
    if not carried:
        sys.exit(UsageError.exit_code)


def _tasks(workload: str, target: TargetFlags, settings: Mapping[str, Any], choice: CandidateFlags) -> list[PlanTask]:
    """One task per candidate. Raises UsageError for unknown names and invalid numbers or limits."""
    from ebbench.config.setting_strings import option_name
    from ebbench.devices.table import measured_devices
    from ebbench.runs.prepare import checked_server, each_once, parse_policies
    from ebbench.sizing.candidates import instance_shapes, with_candidates
    from ebbench.sizing.deployments import PlanTask
    from ebbench.sizing.limits import parse_limits
    from ebbench.spec.run import spec_of
    from ebbench.workloads.options import is_recorded

    _check_target(target)
    for option, values in vars(choice).items():
        if isinstance(values, list) and option not in ("policy", "price"):
            each_once(option_name(option), values)
    limits = parse_limits(target.goodput or (), target.attainment)
    of_workload = {"workload": workload, "scenario": target.scenario or "poisson"}
    of_workload |= {"source": "auto"} if is_recorded(workload) else {}
    spec = spec_of({**settings, **of_workload, **checked_server(choice.model, settings)}).changed(redraw=True)
    return with_candidates(
        PlanTask(spec, limits, target.request_rate, SESSIONS, target.headroom, target.spare),
        choice.device or measured_devices(),
        instance_shapes(choice.tp or (), choice.instance or ()),
        [policy.name for policy in parse_policies(choice.policy or DEFAULT_POLICIES)],
        choice.max_num_batched_tokens or (),
        choice.max_num_seqs or (),
    )


def _check_target(target: TargetFlags) -> None:
    from ebbench.engines.checks import check_counts
    from ebbench.errors import UsageError

    check_counts(request_rate=target.request_rate)
    if math.isinf(target.request_rate):
        raise UsageError("--request-rate inf: give the sessions/s to serve, a finite rate")
    if not 0 <= target.headroom <= MOST_HEADROOM:
        raise UsageError(f"--headroom is a share of the rate, such as 0.2 for 120 % of it, not {target.headroom:g}")
    if target.spare < 0:
        raise UsageError(f"--spare must be 0 or more replicas, not {target.spare}")


def _arrivals_note(workload: str, target: TargetFlags, settings: Mapping[str, Any]) -> list[str]:
    """A note if arrivals are Poisson instead of the workload's own although no others were asked for."""
    from ebbench.workloads.log_report import poisson_instead

    note = "" if target.scenario else poisson_instead(workload, settings)
    return [note] if note else []


def _show(
    deployments: DeploymentChoice, task: PlanTask, choice: CandidateFlags, prices: Mapping[str, float],
    notes: Sequence[str], output: PlanOutput,
) -> None:  # fmt: skip
    from ebbench.render.console import Console
    from ebbench.sizing import plan_sentences
    from ebbench.sizing.prices import sources

    priced_in = sources(choice.price or ())
    if output.as_json:
        result = plan_sentences.as_dict(deployments, task, prices, priced_in, notes)
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
        return
    console = Console(highlight=False)
    for part in plan_sentences.parts(deployments, task, prices, priced_in, notes):
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


plan.command_class = GoodputCommand  # type: ignore[attr-defined]
