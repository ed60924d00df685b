"""Stand-ins for running a cell, importable by worker processes; they leave a line in a file for every execution."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ebbench.sweep.work import Outcome, Task

SUMMARY = {"valid": True, "request_throughput": 1.0, "plan_hash": "p", "git_commit": "c"}


def _note(task: Task) -> Path:
    """The folder for notes rides in ``tokenizer``, which no simulated cell reads."""
    folder = Path(str(task.settings.tokenizer))
    with (folder / task.key).open("a") as file:
        file.write("ran\n")
    return folder


def slow(task: Task) -> Outcome:
    """A cell of a third of a second."""
    time.sleep(0.3)
    _note(task)
    return Outcome(task.key, SUMMARY, "", 0.3, f"{os.getpid()}")


def deadly(task: Task) -> Outcome:
    """Seed 2 kills its process every time, seed 3 the first time."""
    folder = _note(task)
    executions = len((folder / task.key).read_text().splitlines())
    if task.settings.seed == 2 or (task.settings.seed == 3 and executions == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome(task.key, SUMMARY, "", 0.0, f"{os.getpid()}")
