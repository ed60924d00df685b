"""``ebbench plan``: the cheapest deployment that serves a request rate within latency limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from ebbench.config.declare import DEFAULT_MODEL, OUTPUT
from ebbench.config.options import grouped, under
from ebbench.errors import UsageError
from ebbench.process.command_line import GoodputCommand
from ebbench.spec.commands import OF_A_PLAN, PlanCommand, RunSettings, WorkloadArgument

output = under(OUTPUT)
_OF_RUNS = ("request_rate", "goodput", "attainment", "scenario", "headroom", "spare", *OF_A_PLAN)


@grouped
def plan(
    workload: WorkloadArgument,
    settings: Annotated[dict[str, Any], RunSettings({"model": DEFAULT_MODEL}, only=_OF_RUNS, also=PlanCommand)],
    workers: Annotated[int | None, output(help="Processes. Default: one per core.")] = None,
    plot: Annotated[Path | None, output(help="Write cost over TPOT to .svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, output("--json", help="One JSON object on stdout, nothing else.")] = False,
    quiet: Annotated[bool, output("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Find the devices, GPUs per replica, replicas and policy that serve a rate within limits, by simulation.

    Costs use your prices per GPU-hour; without --price the number of GPUs decides.

    Exit code 2 if no candidate carries the rate within the limits.
    """
    from ebbench.render import figures
    from ebbench.render.documents import Console
    from ebbench.sizing import chart, plan_sentences
    from ebbench.sizing.candidates import find_plan

    if plot is not None:
        figures.check_plot(plot)
    messages = Console(stderr=True, highlight=False)
    sized = find_plan({**settings, "workload": workload}, messages, workers=workers, quiet=quiet)
    if plot is not None and sized.deployments.carrying:
        figures.save_plot(chart.frontiers(sized), plot)
    if as_json:
        sys.stdout.write(json.dumps(plan_sentences.as_dict(sized), indent=2, allow_nan=False) + "\n")
    else:
        console = Console(highlight=False)
        for part in plan_sentences.parts(sized):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    if not sized.deployments.carrying:
        sys.exit(UsageError.exit_code)


plan.command_class = GoodputCommand  # type: ignore[attr-defined]
