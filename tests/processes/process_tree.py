"""Processes that a command started and those that still run, from /proc, by process id and start time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

PATIENCE_S = 120.0


class Process(NamedTuple):
    """One process; its start time tells it from a later one with the same id."""

    pid: int
    start: str


def descendants(pid: int) -> set[Process]:
    """The processes below ``pid`` now, without itself."""
    parents = {process: parent for process, parent, _ in _all()}
    found, waiting = set[Process](), {pid}
    while waiting:
        children = {process for process, parent in parents.items() if parent in waiting} - found
        found |= children
        waiting = {process.pid for process in children}
    return found


def running() -> set[Process]:
    """All processes; without those that have ended and wait to be collected."""
    return {process for process, _, state in _all() if state != "Z"}


def left_of(processes: set[Process]) -> set[Process]:
    """Those that still run."""
    return processes & running()


def assert_gone(processes: set[Process], patience_s: float = PATIENCE_S) -> None:
    """Fail if one of them is still there after some time."""
    try:
        wait_until(lambda: not left_of(processes), "a process was left running", patience_s)
    except pytest.fail.Exception:
        left = "; ".join(_command(process.pid) for process in left_of(processes))
        pytest.fail(f"left running: {left}")


def wait_until(true: Callable[[], object], otherwise: str, patience_s: float = PATIENCE_S) -> None:
    """Fail with ``otherwise`` if it does not become true."""
    deadline = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(otherwise)
        time.sleep(0.05)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:200]
    except OSError:
        return f"{pid} (ended)"


def _all() -> list[tuple[Process, int, str]]:
    """Every process of the machine, its parent and its state."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            found.append((Process(int(entry.name), fields[19]), int(fields[1]), fields[0]))
    return found
