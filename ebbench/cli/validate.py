"""``ebbench validate``: measure how accurate simulated results are on this machine, in a given time."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.calibrate import Contexts, Seqs, Tokens
from ebbench.cli.options import Command, grouped, opt
from ebbench.cli.run_settings import RunSettings, VllmOptions
from ebbench.spec.run import OF_LABELS, Labels

if TYPE_CHECKING:
    from ebbench.validation.question import ValidationQuestion

_WHAT, _HOW, _OUTPUT = "What is validated", "How much is measured", "Output"
MAX_TIME_S = 1200.0


@dataclass(frozen=True)
class WhatFlags:
    """Model, policies, engine."""

    model: Annotated[
        str,
        opt(
            "--model",
            "-m",
            help="Name, folder or its config.json. Without weights random ones are used: step times are the same.",
            panel=_WHAT,
            complete=completion.models,
        ),
    ]
    policy: Annotated[
        list[str] | None,
        opt(
            "--policy",
            "-p",
            help="A policy; repeat. Gains are relative to the first. Default: v1 eb ebplus marginal.",
            panel=_WHAT,
            complete=completion.policies,
        ),
    ] = None
    engine: Annotated[
        str, opt("--engine", help="vllm; or sim or emulated with --device, as a rehearsal.", panel=_WHAT)
    ] = "vllm"
    device: Annotated[
        str | None,
        opt(
            "--device",
            help="The simulated device, with --engine sim or emulated.",
            panel=_WHAT,
            complete=completion.devices,
        ),
    ] = None
    api_server: Annotated[
        str | None,
        opt(
            "--api-server",
            help="vLLM's API server in the predictions: datacenter (default), FILE.toml or off. With --engine vllm.",
            panel=_WHAT,
            complete=completion.api_servers,
        ),
    ] = None


@dataclass(frozen=True)
class HowFlags:
    """Loads, lengths, rounds and time."""

    loads: Annotated[
        str | None, opt("--loads", help="Open requests, e.g. 64,256. Default: derived from --seqs.", panel=_HOW)
    ] = None
    rounds: Annotated[
        int,
        opt(
            "--rounds",
            help="Number of times each run is measured; fewer if time is short. More in a later call add to it.",
            panel=_HOW,
        ),
    ] = 3
    input_len: Annotated[int | None, opt("--input-len", help="Mean prompt tokens.", panel=_HOW)] = None
    output_len: Annotated[int | None, opt("--output-len", help="Mean output tokens.", panel=_HOW)] = None
    tokens: Tokens = None
    seqs: Seqs = None
    contexts: Contexts = None
    max_time: Annotated[
        float, opt("--max-time", help="Most seconds for this call; the same command continues later.", panel=_HOW)
    ] = MAX_TIME_S
    run_time: Annotated[float, opt("--run-time", help="Most seconds per run, approximately.", panel=_HOW)] = 40.0
    lag_limit_ms: Annotated[
        float | None,
        opt(
            "--lag-limit-ms",
            help="Largest p99 lag of the client; above it a run is INVALID. See `ebbench run`.",
            panel=_HOW,
        ),
    ] = None
    seed: Annotated[int, opt("--seed", help="Seed of the first round's requests.", panel=_HOW)] = 0


@dataclass(frozen=True)
class ValidationOutputFlags:
    """Where results go, and in which form."""

    output: Annotated[
        Path, opt("--output", "-o", help="Directory of the results; an existing validation continues.", panel=_OUTPUT)
    ] = Path("validation")
    as_json: Annotated[bool, opt("--json", help="One JSON document on stdout, nothing else.", panel=_OUTPUT)] = False
    quiet: Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=_OUTPUT)] = False


@grouped
def validate(
    context: typer.Context,
    what: WhatFlags,
    how: HowFlags,
    output: ValidationOutputFlags,
    labels: Annotated[dict[str, Any], RunSettings(only=OF_LABELS)],
    vllm_options: VllmOptions = None,
) -> None:
    """Measure how accurate simulated results are on this machine.

    Measures step times, predicts runs from them, makes the same runs with vLLM under each policy, and compares.

    Exit code 0 with a verdict, whatever it is; 5 if noise or lack of time leaves it undecided; 4 if vLLM cannot run.
    """
    from ebbench.validation.command import run_validation

    question = replace(question_of(what, how, tuple(vllm_options or ())), labels=Labels(**labels))
    word = run_validation(question, output.output, how.max_time, as_json=output.as_json, quiet=output.quiet)
    sys.exit(5 if word == "undecided" else 0)


validate.command_class = Command  # type: ignore[attr-defined]


def question_of(what: WhatFlags, how: HowFlags, vllm_options: tuple[str, ...]) -> ValidationQuestion:
    """The question that the options ask. Raises UsageError for invalid options."""
    from ebbench.calibration.measure import grid_of
    from ebbench.config.declare import DEFAULT_DEVICE
    from ebbench.engines.checks import check_counts
    from ebbench.engines.vllm_command import check_vllm_options, random_weight_options
    from ebbench.errors import UsageError
    from ebbench.spec.server import DEFAULT_CLASS, OFF
    from ebbench.validation.question import POLICIES, ValidationQuestion

    if how.max_time <= 0:
        raise UsageError(f"--max-time must be positive, not {how.max_time:g}")
    check_counts(input_len=how.input_len, output_len=how.output_len, run_time=how.run_time)
    check_vllm_options(vllm_options)
    if what.engine != "vllm" and vllm_options:
        raise UsageError(f"options after -- are for vLLM, which engine {what.engine} does not start")
    if what.engine == "vllm" and what.device is not None:
        raise UsageError("--device is for engines sim and emulated; engine vllm measures this machine")
    if what.engine != "vllm" and what.api_server is not None:
        raise UsageError(f"--api-server is for engine vllm; with engine {what.engine} neither side has one")
    grid = grid_of(what.engine, how.tokens, how.seqs, how.contexts)
    needed = random_weight_options(what.model, vllm_options) if what.engine == "vllm" else ()
    return ValidationQuestion(
        model=what.model,
        grid=grid,
        loads=_loads(how.loads) or (max(grid.seqs[-1] // 8, 1), max(grid.seqs[-1] // 2, 2)),
        policies=tuple(what.policy or POLICIES),
        rounds=how.rounds,
        input_tokens=how.input_len or max(grid.tokens[-1] // 4, 4),
        output_tokens=how.output_len or max(grid.contexts[-1] // 4, 8),
        engine=what.engine,
        device=what.device if what.engine == "vllm" else what.device or DEFAULT_DEVICE,
        seed=how.seed,
        longest_run_s=how.run_time,
        lag_limit_ms=how.lag_limit_ms,
        vllm_options=(*needed, *vllm_options),
        api_server=(what.api_server or DEFAULT_CLASS) if what.engine == "vllm" else OFF,
    )


def _loads(text: str | None) -> tuple[int, ...]:
    from ebbench.config.declare import Setting, values_of

    found = values_of("--loads", text or "", Setting("", at_least=1, kind=int, example="64,256"))
    return tuple(sorted(set(found)))
