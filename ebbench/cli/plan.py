"""``ebbench plan``: the cheapest deployment that serves a request rate within latency limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.cli.options import GoodputCommand, grouped, opt
from ebbench.cli.run_settings import LIMITS, OUTPUT, Attainment, Goodput, RunSettings, WorkloadArgument, setting
from ebbench.config.defaults import DEFAULT_MODEL

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
    assume_decoder: Annotated[bool, setting("assume_decoder")] = False
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
        list[int] | None, opt("--max-num-batched-tokens", help="B; repeat. Default: 8192.", panel=_CHOICE)
    ] = None
    max_num_seqs: Annotated[
        list[int] | None, opt("--max-num-seqs", help="N; repeat. Default: 1024.", panel=_CHOICE)
    ] = None
    max_model_len: Annotated[int | None, setting("max_model_len")] = None
    gpu_memory_utilization: Annotated[float | None, setting("gpu_memory_utilization")] = None
    vllm_version: Annotated[str | None, setting("vllm_version")] = None
    quantization: Annotated[str | None, setting("quantization")] = None
    kv_cache_dtype: Annotated[str, setting("kv_cache_dtype")] = "auto"
    api_server: Annotated[str, setting("api_server")] = "auto"
    api_server_count: Annotated[int | None, setting("api_server_count")] = None
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


REQUESTS = (
    "seed", "source", "tokenizer", "columns", "keep_text", "prefix_share", "prefix_groups", "cache_hit_rate",
    "input_len", "output_len", "length_distribution", "drop_too_long",
)  # fmt: skip
"""Settings that say which requests are sent."""


@grouped
def plan(
    context: typer.Context,
    workload: WorkloadArgument,
    target: TargetFlags,
    requests: Annotated[dict[str, Any], RunSettings(only=REQUESTS)],
    choice: CandidateFlags,
    output: PlanOutput,
) -> None:
    """Find the devices, GPUs per replica, replicas and policy that serve a rate within limits, by simulation.

    Costs use your prices per GPU-hour; without --price the number of GPUs decides.

    Exit code 2 if no candidate carries the rate within the limits.
    """
    import json
    import sys

    from ebbench.analysis.api_server_load import runs_again
    from ebbench.capacity import chart, plan_sentences
    from ebbench.capacity.choose import choose
    from ebbench.capacity.deployments import MISSED_ALONE, plan_notes
    from ebbench.capacity.prices import check_prices, sources
    from ebbench.cli.plan_tasks import arrivals_note, tasks_of, with_api_server
    from ebbench.errors import UsageError
    from ebbench.render.console import Console
    from ebbench.render.live import Work, shown
    from ebbench.runs.pool import pool_of
    from ebbench.spec.server import only_if_busy

    if output.plot is not None:
        chart.check_suffix(output.plot)
    tasks = tasks_of(workload, target, requests, choice)
    prices = check_prices(choice.price or (), dict.fromkeys(task.candidate.device for task in tasks))
    plan_notes(tasks[0])  # raises what no plan can be built from, before anything is simulated
    pool = pool_of(output.workers, len(tasks))
    messages = Console(stderr=True, highlight=False)
    with shown(messages, Work("plan", unit="candidates"), quiet=output.quiet) as work:
        found = choose(tasks, prices, pool, work.reached)
        busy = plan_sentences.api_servers_left_out(found, tasks[0])
        if busy is not None and only_if_busy(choice.api_server, choice.api_server_count):
            if not output.quiet:
                messages.print(f"Per replica: {runs_again(busy)}", markup=False, soft_wrap=True)
            tasks = with_api_server(tasks)
            found = choose(tasks, prices, pool, work.reached)
    if found.refused and all(reason.startswith(MISSED_ALONE) for _, reason in found.refused) and not found.found:
        candidate, reason = found.refused[0]
        raise UsageError(f"no candidate meets the limits: {candidate.device} {candidate.shape} {reason}")
    if output.plot is not None and found.found:
        chart.save_frontier(found, bool(prices), output.plot)
    replicas = found.found[0].deployment.replicas if found.found else 1
    notes = [*arrivals_note(workload, target, requests), *plan_notes(tasks[0], replicas)]
    priced_in = sources(choice.price or ())
    if output.as_json:
        result = plan_sentences.as_dict(found, tasks[0], prices, priced_in, notes)
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
    else:
        console = Console(highlight=False)
        for part in plan_sentences.parts(found, tasks[0], prices, priced_in, notes):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    if not found.found:
        sys.exit(UsageError.exit_code)


plan.command_class = GoodputCommand  # type: ignore[attr-defined]
