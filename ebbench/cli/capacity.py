"""``ebbench capacity``: the highest load within given latency limits, per policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import grouped, opt
from ebbench.cli.run_settings import (
    OUTPUT,
    Attainment,
    Goodput,
    RunsCommand,
    RunSettings,
    VllmOptions,
    WorkloadArgument,
)
from ebbench.spec.run import DEFAULTS, SET_BY_SEARCH

_SEARCH = "Search"


@dataclass(frozen=True)
class SearchFlags:
    """Limits, and settings of the search."""

    goodput: Goodput = None
    attainment: Attainment = 0.95
    by: Annotated[
        str, opt("--by", help="rate (sessions/s, open loop) or concurrency (closed loop).", panel=_SEARCH)
    ] = "rate"
    scenario: Annotated[
        str | None,
        opt(
            "--scenario",
            "-s",
            help="Arrivals: poisson (default), gamma, constant, or trace: a log's or fitted workload's own, scaled.",
            panel=_SEARCH,
            complete=completion.scenarios,
        ),
    ] = None
    precision: Annotated[
        float, opt("--precision", help="Stop when half of the 95 % interval is at most this share.", panel=_SEARCH)
    ] = 0.02
    max_probes: Annotated[int, opt("--max-probes", help="Most runs per policy.", panel=_SEARCH)] = 40
    max_time: Annotated[float | None, opt("--max-time", help="Most seconds for the whole command.", panel=_SEARCH)] = (
        None
    )


@dataclass(frozen=True)
class OutputFlags:
    """Where results go, and in which form."""

    output_dir: Annotated[
        Path | None,
        opt("--output-dir", "-o", help="Directory of the probes; an existing search continues.", panel=OUTPUT),
    ] = None
    plot: Annotated[
        Path | None, opt("--plot", help="Write the latency-load curves to this .svg, .png or .pdf.", panel=OUTPUT)
    ] = None
    as_json: Annotated[bool, opt("--json", help="One JSON list on stdout, nothing else.", panel=OUTPUT)] = False
    quiet: Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=OUTPUT)] = False


@grouped
def capacity(
    context: typer.Context,
    workload: WorkloadArgument,
    searching: SearchFlags,
    settings: Annotated[dict[str, Any], RunSettings(DEFAULTS, but=SET_BY_SEARCH)],
    output: OutputFlags,
    vllm_options: VllmOptions = None,
) -> None:
    """Find the highest load at which requests meet their latency limits, per policy, with a 95 % interval.

    Every probe is an ordinary run directory. A stopped search continues with the same --output-dir.
    """
    from ebbench.sizing.command import CapacityOutput, capacity_search, search_all

    settings |= {"workload": workload, "vllm_options": vllm_options}
    search = capacity_search(settings, **{**vars(searching), "goodput": searching.goodput or ()})
    search_all(search, CapacityOutput(output.output_dir, output.plot, output.as_json, output.quiet))


capacity.command_class = RunsCommand  # type: ignore[attr-defined]
