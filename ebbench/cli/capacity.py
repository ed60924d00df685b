"""``ebbench capacity``: the highest load within given latency limits, per policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from ebbench.config.declare import OUTPUT
from ebbench.config.options import grouped, under
from ebbench.spec.commands import (
    DEFAULTS,
    SET_BY_SEARCH,
    RunsCommand,
    RunSettings,
    SearchCommand,
    VllmOptions,
    WorkloadArgument,
)

output = under(OUTPUT)


@grouped
def capacity(
    workload: WorkloadArgument,
    settings: Annotated[dict[str, Any], RunSettings(DEFAULTS, but=SET_BY_SEARCH, also=SearchCommand)],
    plot: Annotated[Path | None, output(help="Write the latency-load curves to this .svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, output("--json", help="One JSON list on stdout, nothing else.")] = False,
    quiet: Annotated[bool, output("--quiet", "-q", help="No progress.")] = False,
    vllm_options: VllmOptions = None,
) -> None:
    """Find the highest load at which requests meet their latency limits, per policy, with a 95 % interval.

    Every probe is an ordinary run directory. A stopped search continues with the same --output-dir.

    A TOML file with these settings may stand for the workload, as `ebbench init capacity` writes it.
    """
    from ebbench.runs.file import SEARCH_FILE, asked_for
    from ebbench.sizing.command import capacity_search, search_all

    given = settings | ({"vllm_options": vllm_options} if vllm_options else {})
    asked = asked_for(workload, given, SEARCH_FILE)
    directory = None if asked.get("output_dir") is None else Path(asked["output_dir"])
    search_all(capacity_search(asked), directory, plot, as_json=as_json, quiet=quiet)


capacity.command_class = RunsCommand  # type: ignore[attr-defined]
