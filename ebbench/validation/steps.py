"""Step times for a validation: ``ebbench calibrate`` in a process of its own, which frees the GPU at its end."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain
from pathlib import Path

from ebbench.engines.vllm import server_environment
from ebbench.errors import DataError, EbbenchError, RunError, UsageError
from ebbench.process.child import child_environ, run_supervised
from ebbench.records import files
from ebbench.validation.cpu_server import server_processors, starting_on
from ebbench.validation.question import StepTimes, ValidationQuestion

RESULT = "steps.json"
GRACE_S = 15.0
_TAIL_LINES = 8


def steps_folder(folder: Path, number: int) -> Path:
    """Where a validation in ``folder`` keeps the step times of a round, counted from 0."""
    return folder / "steps" / f"round-{number + 1}"


def is_measured(folder: Path) -> bool:
    """Whether step times are stored under ``folder``."""
    return (folder / RESULT).exists()


def measure_step_times(question: ValidationQuestion, folder: Path) -> StepTimes:
    """Measure step times on this machine and store them under ``folder``, unless an earlier call stored them there.

    Raises UsageError for options that calibrate refuses, RunError if vLLM cannot be measured.
    """
    if is_measured(folder):
        return stored_step_times(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log, out = folder / "calibrate.log", folder / "calibrate.json"
    began = time.monotonic()
    with log.open("wb") as errors, out.open("wb") as output, starting_on(server_processors(question)):
        environ = child_environ(server_environment() if question.engine == "vllm" else os.environ)
        status, _ = run_supervised(command(question, folder), GRACE_S, stdout=output, stderr=errors, env=environ)
    if status:
        raise _failed(status, log)
    found = json.loads(out.read_bytes()) | {"seconds": time.monotonic() - began}
    files.write_bytes(json.dumps(found, indent=1).encode() + b"\n", folder / RESULT)
    return stored_step_times(folder)


def command(question: ValidationQuestion, folder: Path) -> list[str]:
    """The arguments of the `ebbench calibrate` process."""
    grid = question.grid
    sizes = {"--tokens": grid.tokens, "--seqs": grid.seqs, "--contexts": grid.contexts}
    given = [word for name, values in sizes.items() for word in (name, ",".join(map(str, values)))]
    device = ["--device", question.device] if question.device is not None else []
    words = ["calibrate", "--engine", question.engine, "--model", question.model, *device, *given]
    words += ["--repeats", str(question.repeats), "--check", "0", "--output-dir", str(folder / "profile"), "--json"]
    return [sys.executable, "-m", "ebbench", *words, *(["--", *question.vllm_options] if question.vllm_options else [])]


def stored_step_times(folder: Path) -> StepTimes:
    """Read what :func:`measure_step_times` stored. Raises DataError for a damaged file."""
    path = folder / RESULT
    found = files.read_stored_json(path)
    try:
        profile = folder / "profile" / "profile.toml"
        grid = found["calibration"]["grid"]
        return StepTimes(
            profile,
            profile.with_name("calibration.json"),
            int(found["kv_capacity_tokens"]),
            int(found["largest_batch_seqs"]),
            found["drift"],
            found["steps"],
            found["prefill_r2"],
            found["decode_r2"],
            found["mixed_r2"],
            found["request_s"],
            (*grid["prefill"], *chain.from_iterable(grid["decode"])),
            found["start_s"],
            found["seconds"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); delete {folder} to measure again") from None


def _failed(status: int, log: Path) -> EbbenchError:
    """The error of a failed calibration, with the last lines of its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.startswith("error: ")), "").removeprefix("error: ")
    if status == UsageError.exit_code and last:
        return UsageError(last)
    if last:
        return RunError(f"step times could not be measured: {last} (log {log})")
    end = "\n".join(lines[-_TAIL_LINES:])
    return RunError(f"step times could not be measured (exit status {status}); log {log}, its end:\n{end}")
