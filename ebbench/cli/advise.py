"""``ebbench advise``: which policy to run for a workload on a device, its expected gain, and where that changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.config.options import AsJson, completing, grouped
from ebbench.process.command_line import GoodputCommand
from ebbench.spec.commands import OF_A_SERVER, OF_TRAFFIC, AdviceCommand, RunSettings
from ebbench.spec.run import OF_LABELS

_DEFAULTS = {
    "device": DEFAULT_DEVICE, "model": DEFAULT_MODEL, "max_num_seqs": None, "source": "profile",
}  # fmt: skip
_OF_RUNS = ("device", "model", "max_num_seqs", "link", *OF_TRAFFIC, *OF_A_SERVER, *OF_LABELS)
Workload = Annotated[
    str, typer.Argument(help="A workload, log:FILE or the path of a TOML file.", autocompletion=completing("workloads"))
]


@grouped
def advise(
    workload: Workload,
    settings: Annotated[dict[str, Any], RunSettings(_DEFAULTS, only=_OF_RUNS, also=AdviceCommand)],
    crossover: Annotated[bool, typer.Option(help="Also search for the crossovers.")] = True,
    tune: Annotated[bool, typer.Option("--tune", help="Also try other N and B with the chosen policy.")] = False,
    runs: Annotated[Path, typer.Option(help="Directory of stored runs.")] = Path("runs/advise"),
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one per core.")] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Say which policy to run, its parameters, its expected gain with an interval, and where EB and MB cross.

    Policies and token budgets are searched together; the worse ones are dropped before all seeds have run.

    Theory (the papers' formulas) and simulation are shown together; the simulation decides.
    """
    from ebbench.advice import sentences
    from ebbench.advice.candidates import advice_question
    from ebbench.advice.simulate import Effort, find_advice
    from ebbench.render.documents import Console
    from ebbench.runs.store import RunStore

    question = advice_question({**settings, "workload": workload})
    effort = Effort(crossover, tune, workers, quiet)
    advice = find_advice(question, RunStore(runs), effort)
    if as_json:
        sys.stdout.write(json.dumps(sentences.as_dict(advice), indent=2) + "\n")
    else:
        sentences.print_advice(advice, Console(highlight=False))


advise.command_class = GoodputCommand  # type: ignore[attr-defined]
