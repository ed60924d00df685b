"""``ebbench run``: one plan, one or more policies, one engine; then the table, the verdict and the reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.cli.options import ALL_PERCENTILES, grouped, opt
from ebbench.cli.run_settings import OUTPUT, RunsCommand, RunSettings, VllmOptions, WorkloadArgument, is_given
from ebbench.config.declare import LOAD
from ebbench.spec.run import DEFAULTS


@dataclass(frozen=True)
class Repeating:
    """How often each policy runs."""

    repeats: Annotated[
        str,
        opt(
            "--repeats",
            help="Runs per policy, seeds S, S+1, ...; auto: until one policy is clearly better, at most --max-repeats.",
            panel=LOAD,
        ),
    ] = "1"
    max_repeats: Annotated[int, opt("--max-repeats", help="Most repeats with --repeats auto.", panel=LOAD)] = 30


@dataclass(frozen=True)
class RunOutput:
    """Where results go, and in which form."""

    goodput: Annotated[
        list[str] | None,
        opt("--goodput", help="Limits in ms: ttft:500 tpot:50 e2el:5000.", panel=OUTPUT),
    ] = None
    price_per_hour: Annotated[
        float | None,
        opt("--price-per-hour", help="Price of everything that serves; gives cost per million tokens.", panel=OUTPUT),
    ] = None
    output_dir: Annotated[
        Path | None, opt("--output-dir", "-o", help="Directory to create for the results.", panel=OUTPUT)
    ] = None
    save_as_vllm: Annotated[
        Path | None,
        opt("--save-as-vllm", help="Write the result also as `vllm bench serve` does (JSON).", panel=OUTPUT),
    ] = None
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
    settings: Annotated[dict[str, Any], RunSettings(DEFAULTS)],
    repeating: Repeating,
    output: RunOutput,
    vllm_options: VllmOptions = None,
) -> None:
    """Run a workload under one or more scheduling policies and show which is best, by how much and why.

    Every policy gets the same requests at the same intended times. Results are stored in run directories.

    A TOML file with these settings may stand for the workload; options replace what it says. --dry-run writes one.

    Options for vLLM go after --: `ebbench run sharegpt --engine vllm -- --quantization fp8`.
    """
    from ebbench.run_policies import dry_run, run_policies, series_and_output
    from ebbench.runs.file import FURTHER

    asked = _asked(context, workload, settings, output, vllm_options)
    series, stored = series_and_output(asked)
    destination = replace(stored, all_percentiles=output.all_percentiles, as_json=output.as_json, quiet=output.quiet)
    if output.dry_run:
        dry_run(series, destination, {name: asked[name] for name in FURTHER if name in asked})
    else:
        run_policies(series, destination)


def _plain(value: Any) -> Any:
    """An option's value as a file has it."""
    return str(value) if isinstance(value, Path) else value


def _asked(
    context: typer.Context, workload: str, settings: dict[str, Any], output: RunOutput, vllm_options: list[str] | None
) -> dict[str, Any]:
    """Settings, and keys of FURTHER, that are given: by the file in place of a workload, and by options."""
    from ebbench.runs.file import FURTHER, asked_for

    given = {name for name in context.params if is_given(context, name)}
    asked = settings | {name: _plain(context.params[name]) for name in FURTHER if name in given}
    asked |= {"goodput": " ".join(output.goodput)} if output.goodput else {}
    return asked_for(workload, asked | ({"vllm_options": vllm_options} if vllm_options else {}))


run.command_class = RunsCommand  # type: ignore[attr-defined]
