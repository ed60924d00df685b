"""``ebbench capacity``: the highest load within given latency limits, per policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from ebbench.spec.run import DEFAULTS

_SEARCH = "Search"
_NOT_TAKEN = (
    "scenario", "max_concurrency", "request_rate", "saturation_rate", "rate_scale", "speed", "time_unit", "duration_s",
    "think_time", "tool_time", "tool_share", "sub_agents", "abandon_after", "thinking_len", "lora_assignment", "images",
)  # fmt: skip
"""The search sets the load."""


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
    settings: Annotated[dict[str, Any], RunSettings(DEFAULTS, but=_NOT_TAKEN)],
    output: OutputFlags,
    vllm_options: VllmOptions = None,
) -> None:
    """Find the highest load at which requests meet their latency limits, per policy, with a 95 % interval.

    Every probe is an ordinary run directory. A stopped search continues with the same --output-dir.
    """
    from ebbench.errors import UsageError
    from ebbench.runs.prepare import series_of
    from ebbench.sizing.command import CapacityOutput, CapacitySearch, search_all
    from ebbench.sizing.limits import parse_limits

    if searching.by not in ("rate", "concurrency"):
        raise UsageError(f"--by is rate or concurrency, not {searching.by!r}")
    limits = parse_limits(searching.goodput or (), searching.attainment)
    arrivals = searching.scenario or ("gamma" if "burstiness" in settings else "poisson")
    settings |= {"workload": workload, "scenario": arrivals, "vllm_options": vllm_options}
    series = series_of(settings)
    goodput = " ".join(f"{metric}:{limit_ms!r}" for metric, limit_ms in limits.slo.limits().items())
    search_all(
        CapacitySearch(
            replace(series, spec=series.spec.changed(redraw=True, goodput=goodput)),
            limits,
            by_concurrency=searching.by == "concurrency",
            precision=searching.precision,
            max_probes=searching.max_probes,
            max_time_s=searching.max_time,
            arrivals_given=searching.scenario is not None or "burstiness" in settings,
        ),
        CapacityOutput(output.output_dir, output.plot, output.as_json, output.quiet),
    )


capacity.command_class = RunsCommand  # type: ignore[attr-defined]
