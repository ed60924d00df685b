"""``ebbench advise``: which policy to run for a workload on a device, its expected gain, and where that changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import GoodputCommand, grouped
from ebbench.cli.run_settings import RunSettings, Tp, setting
from ebbench.config.declare import CLUSTER, DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.spec.run import OF_A_SERVER, OF_LABELS, OF_TRAFFIC

_DEFAULTS = {"source": "profile", "api_server": "auto"}
_BUDGETS = (
    "Token budgets to try; repeat, the one to compare with first. Default: vLLM's, 8192, 2048, 4096 and 16384, as far "
    "as they hold --max-num-seqs."
)
_TOPOLOGY = "Several engines, each with the policy: dp=4, tp=1,dp=4,ep=4, ... or a TOML file."
_POLICY = "Candidates. Default: those that the policies name, rivals of other servers among them."
_PROMPTS = "Requests per run. Default: 3,000; of a log all, up to 10,000 per seed."
Workload = Annotated[
    str, typer.Argument(help="A workload, log:FILE or the path of a TOML file.", autocompletion=completion.workloads)
]
Device = Annotated[
    str, typer.Option("--device", help="GPU, see `ebbench devices list`.", autocompletion=completion.devices)
]
Model = Annotated[str, typer.Option("--model", help="Model name or config.json.", autocompletion=completion.models)]


@grouped
def advise(
    context: typer.Context,
    workload: Workload,
    *,
    device: Device = DEFAULT_DEVICE,
    model: Model = DEFAULT_MODEL,
    max_num_seqs: Annotated[int | None, setting("max_num_seqs")] = None,
    max_num_batched_tokens: Annotated[list[int] | None, typer.Option("--max-num-batched-tokens", help=_BUDGETS)] = None,
    tp: Tp = 1,
    topology: Annotated[str | None, typer.Option(help=_TOPOLOGY, rich_help_panel=CLUSTER)] = None,
    link: Annotated[str | None, setting("link")] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", "-n", help=_PROMPTS)] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Targets in ms: ttft:10000 tpot:100. Goodput then decides.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help=_POLICY, autocompletion=completion.policies)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of plans on which each candidate is run.")] = 5,
    crossover: Annotated[bool, typer.Option(help="Also search for the crossovers.")] = True,
    tune: Annotated[bool, typer.Option("--tune", help="Also try other N and B with the chosen policy.")] = False,
    settings: Annotated[dict[str, Any], RunSettings(_DEFAULTS, only=(*OF_TRAFFIC, *OF_A_SERVER, *OF_LABELS))],
    runs: Annotated[Path, typer.Option(help="Directory of stored runs.")] = Path("runs/advise"),
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Say which policy to run, its parameters, its expected gain with an interval, and where EB and MB cross.

    Policies and token budgets are searched together; the worse ones are dropped before all seeds have run.

    Theory (the papers' formulas) and simulation are shown together; the simulation decides.
    """
    from ebbench.advice import sentences
    from ebbench.advice.candidates import advice_question, cluster_settings
    from ebbench.advice.simulate import Effort, find_advice
    from ebbench.render.documents import Console
    from ebbench.runs.prepare import api_server_if_busy
    from ebbench.runs.store import RunStore

    question = advice_question(
        workload, settings, device=device, model=model, cluster=cluster_settings(topology, tp, link),
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens or (), num_prompts=num_prompts,
        goodput=goodput or (), policies=policy or (), seeds=seeds,
    )  # fmt: skip
    advice = find_advice(
        question, RunStore(runs), Effort(api_server_if_busy(settings), crossover, tune, workers, quiet)
    )
    if as_json:
        sys.stdout.write(json.dumps(sentences.as_dict(advice), indent=2) + "\n")
    else:
        sentences.print_advice(advice, Console(highlight=False))


advise.command_class = GoodputCommand  # type: ignore[attr-defined]
