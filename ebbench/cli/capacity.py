"""``ebbench capacity``: the highest load within given latency limits, per policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ebbench.cli import load_flags as load
from ebbench.cli.client_flags import ClientFlags
from ebbench.cli.cluster_flags import ClusterOptions
from ebbench.cli.options import GoodputCommand, grouped, opt
from ebbench.cli.run_flags import EngineFlags, LoadFlags, WorkloadFlags, plan_settings

_SEARCH, _OUTPUT = "Search", "Output"


@dataclass(frozen=True)
class LimitFlags:
    """The latency limits."""

    goodput: load.Goodput = None
    attainment: load.Attainment = 0.95


@dataclass(frozen=True)
class SearchFlags:
    """Settings of the search."""

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
        ),
    ] = None
    burstiness: load.Burstiness = None
    precision: Annotated[
        float, opt("--precision", help="Stop when half of the 95 % interval is at most this share.", panel=_SEARCH)
    ] = 0.02
    max_probes: Annotated[int, opt("--max-probes", help="Most runs per policy.", panel=_SEARCH)] = 40
    max_time: Annotated[float | None, opt("--max-time", help="Most seconds for the whole command.", panel=_SEARCH)] = (
        None
    )
    warmup: load.Warmup = 0


@dataclass(frozen=True)
class CapacityOutput:
    """Where results go, and in which form."""

    output_dir: Annotated[
        Path | None,
        opt("--output-dir", "-o", help="Directory of the probes; an existing search continues.", panel=_OUTPUT),
    ] = None
    plot: Annotated[
        Path | None, opt("--plot", help="Write the latency-load curves to this .svg, .png or .pdf.", panel=_OUTPUT)
    ] = None
    as_json: Annotated[bool, opt("--json", help="One JSON list on stdout, nothing else.", panel=_OUTPUT)] = False
    quiet: Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=_OUTPUT)] = False


@grouped
def capacity(
    context: typer.Context,
    workload: load.WorkloadArgument,
    limits: LimitFlags,
    search: SearchFlags,
    engine: EngineFlags,
    requests: WorkloadFlags,
    output: CapacityOutput,
    client: ClientFlags,
    cluster: ClusterOptions,
    vllm_options: load.VllmOptions = None,
) -> None:
    """Find the highest load at which requests meet their latency limits, per policy, with a 95 % interval.

    Every probe is an ordinary run directory. A stopped search continues with the same --output-dir.
    """
    from ebbench.cli.capacity_search import CapacityQuestion, search_all

    engine.refuse_for_server(context)
    settings = LoadFlags(scenario=search.scenario, burstiness=search.burstiness, warmup=search.warmup)
    search_all(
        CapacityQuestion(
            workload=workload,
            limits=limits.goodput or (),
            attainment=limits.attainment,
            by=search.by,
            scenario=search.scenario or ("gamma" if search.burstiness is not None else "poisson"),
            precision=search.precision,
            max_probes=search.max_probes,
            max_time_s=search.max_time,
            seed=requests.seed,
            plan_settings=plan_settings(requests, settings, engine.max_model_len),
            engine=engine,
            warmup=search.warmup,
            client=client,
            cluster=cluster,
            output_dir=output.output_dir,
            quiet=output.quiet,
            vllm_options=tuple(vllm_options or ()),
            arrivals_given=search.scenario is not None or search.burstiness is not None,
        ),
        plot=output.plot,
        as_json=output.as_json,
    )


capacity.command_class = GoodputCommand  # type: ignore[attr-defined]
