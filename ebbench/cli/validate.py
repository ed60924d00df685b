"""``ebbench validate``: measure how accurate simulated results are on this machine, in a given time."""

from __future__ import annotations

import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any

from ebbench.config.declare import OUTPUT
from ebbench.config.options import grouped, under
from ebbench.spec.commands import EFFORT, RunSettings, ValidationCommand, VllmOptions
from ebbench.spec.run import OF_LABELS

_WHAT = RunSettings(
    {"model": MISSING, "engine": "vllm", "api_server": None},
    only=("model", "policy", "engine", "device", "api_server"),
    panel="What is validated",
    helps={
        "model": "Name, folder or its config.json. Without weights random ones are used: step times are the same.",
        "policy": "A policy; repeat. Gains are relative to the first. Default: v1 eb ebplus marginal.",
        "engine": "vllm; or sim or emulated with --device, as a rehearsal.",
        "device": "The simulated device, with --engine sim or emulated.",
        "api_server": "vLLM's API server in the predictions: datacenter (default), FILE.toml or off. "
        "With --engine vllm.",
    },
    completes={"api_server": "api_servers"},
)
_HOW = RunSettings(
    only=("loads", "rounds", "input_len", "output_len", "max_time", "run_time", "lag_limit_ms", "seed"),
    also=ValidationCommand,
    panel=EFFORT,
    helps={
        "lag_limit_ms": "Largest p99 lag of the client; above it a run is INVALID. See `ebbench run`.",
        "seed": "Seed of the first round's requests.",
    },
)
output = under(OUTPUT)


@grouped
def validate(
    *,
    what: Annotated[dict[str, Any], _WHAT],
    how: Annotated[dict[str, Any], _HOW],
    folder: Annotated[
        Path, output("--output", "-o", help="Directory of the results; an existing validation continues.")
    ] = Path("validation"),
    as_json: Annotated[bool, output("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, output("--quiet", "-q", help="No progress.")] = False,
    labels: Annotated[dict[str, Any], RunSettings(only=OF_LABELS)],
    vllm_options: VllmOptions = None,
) -> None:
    """Measure how accurate simulated results are on this machine.

    Measures step times, predicts runs from them, makes the same runs with vLLM under each policy, and compares.

    Exit code 0 with a verdict, whatever it is; 5 if noise or lack of time leaves it undecided; 4 if vLLM cannot run.
    """
    from ebbench.validation.command import run_validation
    from ebbench.validation.question import validation_question

    asked = {**what, **how, **labels, "vllm_options": vllm_options}
    max_time_s = how.get("max_time", ValidationCommand.max_time)
    word = run_validation(validation_question(asked), folder, max_time_s, as_json=as_json, quiet=quiet)
    sys.exit(5 if word == "undecided" else 0)
