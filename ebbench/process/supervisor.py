"""Runs a program and ends all of its descendants: ``python supervisor.py GRACE_S PROGRAM [ARGUMENT ...]``.

For servers that start processes of their own (vLLM's engine core), which outlive a killed parent. Descendants whose
parent has ended become children of this process (Linux: PR_SET_CHILD_SUBREAPER), so it can find and end them.

It ends the program when its own standard input closes (the process that started it has ended), or on SIGTERM, SIGINT or
SIGHUP: the program gets SIGTERM and GRACE_S seconds, then all descendants are killed. A further signal is passed on as
another SIGTERM and leaves the program ten seconds at most: it may be storing what it measured. When the program ends
by itself, remaining descendants are killed. Exit status: the program's, or 128 plus the number of its signal.

Standard library only, no import from ebbench: it starts in milliseconds and needs no import path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

LIFELINE = 0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CANNOT_START = 127
_HASTE_S = 10.0
_LINUX = sys.platform.startswith("linux")


def main(grace_s: float, command: list[str]) -> int:
    """Run ``command`` to its end, or end it. Returns the exit status for this process."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeups = _signals_as_bytes()
    program = _started(command)
    status = _until_ended(program, wakeups, grace_s)
    _kill_descendants()
    return status


def _signals_as_bytes() -> int:
    """A descriptor that yields the number of each arriving signal as one byte."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (*_STOPPING, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    return reader


def _started(command: list[str]) -> int:
    """Start the program; returns its process id. Forking is safe because this process has one thread."""
    supervisor = os.getpid()
    program = os.fork()
    if program:
        return program
    try:
        if _LINUX:  # if this process is killed with SIGKILL, the program is killed too
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(_CANNOT_START)
        for number in (*_STOPPING, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), LIFELINE)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_CANNOT_START)


def _until_ended(program: int, wakeups: int, grace_s: float) -> int:
    """Wait for the program, ending it when asked to. Returns its exit status."""
    watched, deadline = [LIFELINE, wakeups], float("inf")
    while True:
        status = _reaped(program)
        if status is not None:
            return status
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(program, signal.SIGKILL)
            left_s = float("inf")
        ready, _, _ = select.select(watched, [], [], None if left_s == float("inf") else left_s)
        if _asked_to_end(ready, wakeups):
            if LIFELINE in ready:
                watched = [wakeups]  # closed: it would always be ready
            first = deadline == float("inf")
            deadline = min(deadline, time.monotonic() + (grace_s if first else _HASTE_S))
            with contextlib.suppress(ProcessLookupError):
                os.kill(program, signal.SIGTERM)


def _asked_to_end(ready: list[int], wakeups: int) -> bool:
    asked = LIFELINE in ready and not os.read(LIFELINE, 1)
    if wakeups in ready:
        asked = asked or any(number in _STOPPING for number in os.read(wakeups, 4096))
    return asked


def _reaped(program: int) -> int | None:
    """Reap all children that have ended; returns the program's exit status once it is among them."""
    exit_code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_code
        if ended == 0:
            return exit_code
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            exit_code = code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    """Kill the program's descendants.

    Children of killed processes become children of this process and are killed too.
    """
    if not _LINUX:  # descendants can only be found through the process group, which this process leads
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.killpg(0, signal.SIGTERM)
        return
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Process ids of this process's children."""
    pids, parent = [], str(os.getpid())
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # "pid (name) state ppid ...": the name may contain anything, also a parenthesis
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == parent:
                pids.append(int(entry.name))
    return pids


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
