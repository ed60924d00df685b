"""``ebbench validate``: measure how accurate simulated results are on this machine, in a given time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.calibrate import Contexts, Seqs, Tokens
from ebbench.cli.options import Command, grouped, opt
from ebbench.cli.run_settings import RunSettings, VllmOptions
from ebbench.spec.run import OF_LABELS, Labels

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
    from ebbench.validation.question import validation_question

    asked = {**vars(what), **vars(how)}
    question = validation_question(**asked, vllm_options=tuple(vllm_options or ()), labels=Labels(**labels))
    word = run_validation(question, output.output, how.max_time, as_json=output.as_json, quiet=output.quiet)
    sys.exit(5 if word == "undecided" else 0)


validate.command_class = Command  # type: ignore[attr-defined]
