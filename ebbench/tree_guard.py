"""Ends what a process has started once that process is gone, killed or not: ``python tree_guard.py PID``.

For clusters that a library starts inside this program, where no supervisor can stand between (Ray: its agents notice
after a minute that their parent has ended, and their parent ends with this program). Looks at the descendants of PID
every second and remembers them by process id and start time, so that another process with the same id is never meant.
When its own standard input closes (:mod:`ebbench.child`), those that still run are killed, with what they have started
since. SIGTERM ends it without that.

Standard library only and nothing of ebbench, so that it starts in milliseconds and needs no import path.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from pathlib import Path

LIFELINE = 0
INTERVAL_S = 1.0
Process = tuple[int, str]
"""Process id and start time in clock ticks since boot."""


def main(root: int) -> None:
    """Watch the descendants of ``root`` until the lifeline closes, then kill those that are left."""
    seen: set[Process] = set()
    while True:
        seen = descendants({root}, seen)
        ready, _, _ = select.select([LIFELINE], [], [], INTERVAL_S)
        if ready and not os.read(LIFELINE, 1):
            break
    for pid, _ in descendants({pid for pid, _ in seen}, seen):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(roots: set[int], known: set[Process]) -> set[Process]:
    """What runs below ``roots``, and of ``known`` what still runs; without this process."""
    running = {process: parent for process, parent in _processes() if process[0] != os.getpid()}
    found, waiting = known & running.keys(), set(roots)
    while waiting:
        children = {process for process, parent in running.items() if parent in waiting} - found
        found |= children
        waiting = {pid for pid, _ in children}
    return found


def _processes() -> list[tuple[Process, int]]:
    """Every process of this machine with its parent's id; nothing where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state ppid ...": the name may hold anything, a parenthesis too
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        found.append(((int(entry.name), fields[19]), int(fields[1])))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
