"""``ebbench run``: one plan, one or more policies, one engine; then the table, the verdict and the reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from ebbench.config.declare import OUTPUT
from ebbench.config.options import ALL_PERCENTILES, grouped, under
from ebbench.spec.commands import DEFAULTS, RunCommand, RunsCommand, RunSettings, VllmOptions, WorkloadArgument

output = under(OUTPUT)
_DRY_RUN = "Run nothing: print all settings as a file for `ebbench run FILE.toml`."


@grouped
def run(
    workload: WorkloadArgument,
    settings: Annotated[dict[str, Any], RunSettings(DEFAULTS, also=RunCommand)],
    all_percentiles: Annotated[bool, output("--all-percentiles", help=ALL_PERCENTILES)] = False,
    as_json: Annotated[bool, output("--json", help="One JSON list on stdout, nothing else.")] = False,
    quiet: Annotated[bool, output("--quiet", "-q", help="No progress.")] = False,
    dry: Annotated[bool, output("--dry-run", help=_DRY_RUN)] = False,
    vllm_options: VllmOptions = None,
) -> None:
    """Run a workload under one or more scheduling policies and show which is best, by how much and why.

    Every policy gets the same requests at the same intended times. Results are stored in run directories.

    A TOML file with these settings may stand for the workload; options replace what it says. `ebbench init` and
    --dry-run write one.

    Options for vLLM go after --: `ebbench run sharegpt --engine vllm -- --quantization fp8`.
    """
    from ebbench.run_policies import dry_run, run_policies, series_and_output
    from ebbench.runs.file import FURTHER, asked_for

    asked = asked_for(workload, settings | ({"vllm_options": vllm_options} if vllm_options else {}))
    series, stored = series_and_output(asked)
    destination = replace(stored, all_percentiles=all_percentiles, as_json=as_json, quiet=quiet)
    if dry:
        dry_run(series, destination, {name: asked[name] for name in FURTHER if name in asked})
    else:
        run_policies(series, destination)


run.command_class = RunsCommand  # type: ignore[attr-defined]
