"""Substitutes for running a cell, importable by worker processes; each execution appends a line to a file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ebbench.runs.execute import Made, Task

FIGURES = {"valid": True, "request_throughput": 1.0, "plan_hash": "p", "git_commit": "c"}


def _note(task: Task) -> Path:
    """The file of executions; its folder is passed in ``tokenizer``, which no simulated cell reads."""
    folder = Path(str(task.cell.plan.tokenizer))
    with (folder / str(task.cell.plan.seed)).open("a") as file:
        file.write("ran\n")
    return folder


def slow(task: Task) -> Made:
    """A cell of a third of a second."""
    time.sleep(0.3)
    _note(task)
    return Made(FIGURES)


def deadly(task: Task) -> Made:
    """Seed 2 kills its process every time, seed 3 the first time."""
    folder = _note(task)
    executions = len((folder / str(task.cell.plan.seed)).read_text().splitlines())
    if task.cell.plan.seed == 2 or (task.cell.plan.seed == 3 and executions == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return Made(FIGURES)
