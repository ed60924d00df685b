"""``ebbench capacity``: the highest load within given latency limits, per policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.cli.options import grouped, opt
from ebbench.cli.run_settings import (
    RunsCommand,
    RunSettings,
    VllmOptions,
    WorkloadArgument,
)
from ebbench.config.declare import OUTPUT
from ebbench.spec.run import DEFAULTS, SET_BY_SEARCH, SearchCommand


@dataclass(frozen=True)
class OutputFlags:
    """In which form results are shown."""

    plot: Annotated[
        Path | None, opt("--plot", help="Write the latency-load curves to this .svg, .png or .pdf.", panel=OUTPUT)
    ] = None
    as_json: Annotated[bool, opt("--json", help="One JSON list on stdout, nothing else.", panel=OUTPUT)] = False
    quiet: Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=OUTPUT)] = False


@grouped
def capacity(
    context: typer.Context,
    workload: WorkloadArgument,
    settings: Annotated[dict[str, Any], RunSettings(DEFAULTS, but=SET_BY_SEARCH, also=SearchCommand)],
    output: OutputFlags,
    vllm_options: VllmOptions = None,
) -> None:
    """Find the highest load at which requests meet their latency limits, per policy, with a 95 % interval.

    Every probe is an ordinary run directory. A stopped search continues with the same --output-dir.

    A TOML file with these settings may stand for the workload, as `ebbench init capacity` writes it.
    """
    from ebbench.runs.file import SEARCH_FILE, asked_for
    from ebbench.sizing.command import CapacityOutput, capacity_search, search_all

    given = settings | ({"vllm_options": vllm_options} if vllm_options else {})
    asked = asked_for(workload, given, SEARCH_FILE)
    directory = None if asked.get("output_dir") is None else Path(asked["output_dir"])
    search_all(capacity_search(asked), CapacityOutput(directory, output.plot, output.as_json, output.quiet))


capacity.command_class = RunsCommand  # type: ignore[attr-defined]
