"""``ebbench run``: one plan, one or more policies, one engine; then the table, the verdict and the reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from ebbench.cli.options import ALL_PERCENTILES, grouped, opt
from ebbench.cli.run_settings import RunsCommand, RunSettings, VllmOptions, WorkloadArgument
from ebbench.config.declare import OUTPUT
from ebbench.spec.run import DEFAULTS, RunCommand


@dataclass(frozen=True)
class RunOutput:
    """In which form results are shown."""

    all_percentiles: Annotated[bool, opt("--all-percentiles", help=ALL_PERCENTILES, panel=OUTPUT)] = False
    as_json: Annotated[bool, opt("--json", help="One JSON list on stdout, nothing else.", panel=OUTPUT)] = False
    quiet: Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=OUTPUT)] = False
    dry_run: Annotated[
        bool,
        opt("--dry-run", help="Run nothing: print all settings as a file for `ebbench run FILE.toml`.", panel=OUTPUT),
    ] = False


@grouped
def run(
    context: typer.Context,
    workload: WorkloadArgument,
    settings: Annotated[dict[str, Any], RunSettings(DEFAULTS, also=RunCommand)],
    output: RunOutput,
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
    destination = replace(stored, all_percentiles=output.all_percentiles, as_json=output.as_json, quiet=output.quiet)
    if output.dry_run:
        dry_run(series, destination, {name: asked[name] for name in FURTHER if name in asked})
    else:
        run_policies(series, destination)


run.command_class = RunsCommand  # type: ignore[attr-defined]
