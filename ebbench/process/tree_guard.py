"""Ends what a process has started once that process is gone, killed or not: ``python tree_guard.py PID MARK``.

For clusters that a library starts inside this program, where no supervisor can stand between (Ray: its agents notice
after a minute that their parent has ended, and their parent ends with this program). Looks at the descendants of PID
every second and remembers them by process id and start time, so that another process with the same id is never meant.
When its own standard input closes (:mod:`ebbench.process.child`), those that still run are killed, with what they have
started since, and every process with MARK in its environment: one that began and lost its parent between two looks is
no descendant any more. SIGTERM ends it without that.

Standard library only and nothing of ebbench, so that it starts in milliseconds and needs no import path.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

LIFELINE = 0
INTERVAL_S = 1.0
PAUSE_S = 0.1
LOOKS = 100
Process = tuple[int, str]
"""Process id and start time in clock ticks since boot."""


def main(root: int, mark: str) -> None:
    """Watch the descendants of ``root`` until the lifeline closes, then kill those that are left and those marked."""
    seen: set[Process] = set()
    while True:
        seen = descendants({root}, seen)
        ready, _, _ = select.select([LIFELINE], [], [], INTERVAL_S)
        if ready and not os.read(LIFELINE, 1):
            break
    for _ in range(LOOKS):
        seen = descendants({pid for pid, _ in seen}, seen) | marked(mark)
        if not seen:
            return
        for pid, _ in seen:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)  # processes that these started just before are found by the next look


def descendants(roots: set[int], known: set[Process]) -> set[Process]:
    """Running descendants of ``roots``, and the processes of ``known`` that still run; without this process."""
    running = {process: parent for process, parent in _processes() if process[0] != os.getpid()}
    below, waiting = known & running.keys(), set(roots)
    while waiting:
        children = {process for process, parent in running.items() if parent in waiting} - below
        below |= children
        waiting = {pid for pid, _ in children}
    return below


def marked(mark: str) -> set[Process]:
    """The processes with ``mark`` in their environment; without this process."""
    return {process for process, _ in _processes() if process[0] != os.getpid() and mark in _environ(process[0])}


def _environ(pid: int) -> str:
    """The environment a process began with; empty where it has ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def _processes() -> list[tuple[Process, int]]:
    """Every process of this machine that has not ended, with its parent's id; nothing where there is no /proc."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state ppid ...": the name may hold anything, a parenthesis too
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "XZ":
            processes.append(((int(entry.name), fields[19]), int(fields[1])))
    return processes


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
