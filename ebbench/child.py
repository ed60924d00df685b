"""Starting other processes, so that none of them outlives this one, however it ends.

Every process started here has as its standard input a pipe whose other end only this process holds: its lifeline.
Nothing is ever written to it. The kernel closes it when this process is gone, killed outright or not, and the child
sees the end of the file. Modules of this program then end themselves (:func:`end_with_parent`); programs that know
nothing of lifelines run under a supervisor (:mod:`ebbench.supervisor`), which ends them and whatever they have started.
Workers of a ``ProcessPoolExecutor`` have such a pipe from multiprocessing (:func:`begin_pool_worker`).
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STDIN = 0
KILL_WAIT_S = 15.0
"""How long a supervisor may take to collect what it has killed."""
SUPERVISOR = Path(__file__).with_name("supervisor.py")


class Child(subprocess.Popen[bytes]):
    """A process with a lifeline. Takes what ``Popen`` takes, except ``stdin``.

    The lifeline is also closed when this object is collected, so keep it for as long as the process is to run.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        lifeline, ours = os.pipe()  # neither is inherited by programs, so no other child keeps it open
        self._close_lifeline = weakref.finalize(self, os.close, ours)
        try:
            super().__init__(command, stdin=lifeline, **options)
        finally:
            os.close(lifeline)

    def end(self, grace_s: float) -> None:
        """Ask it to end (SIGTERM), kill it where it has not after ``grace_s``, and wait until it is gone."""
        self.terminate()
        try:
            self.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
        self._close_lifeline()


def child_command(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module``, which calls :func:`end_with_parent`.

    The working directory is no place to import from: a file of the user's called like a module of the standard library
    must not be taken for it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def supervised(command: Sequence[str], grace_s: float) -> list[str]:
    """The command that runs another program under the supervisor.

    When the supervisor gets SIGTERM, the program gets SIGTERM and ``grace_s`` seconds; then it is killed with all of
    its descendants. These are killed too when the program has ended by itself. The exit status is the program's.
    """
    return [sys.executable, "-I", "-S", str(SUPERVISOR), f"{grace_s:g}", *command]


def run_supervised(command: Sequence[str], grace_s: float, **options: Any) -> tuple[int, str]:
    """Run another program to its end; returns its exit status and its stderr, where that is a pipe.

    ``options`` go to ``Popen``. A KeyboardInterrupt ends the program, which has ``grace_s`` seconds for it, and is
    raised again. Raises FileNotFoundError where there is no such program.
    """
    if shutil.which(command[0], path=(options.get("env") or os.environ).get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    process = Child(supervised(command, grace_s), start_new_session=True, **options)
    try:
        _, errors = process.communicate()
    except KeyboardInterrupt:
        process.end(grace_s + KILL_WAIT_S)
        raise
    return process.returncode, (errors or b"").decode(errors="replace")


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with this process's own import path, so that the child finds the same modules."""
    return {**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def end_with_parent() -> None:
    """End this process at once when its lifeline closes; for the main program of a module that ``Child`` runs.

    A standard input that is no pipe is no lifeline: somebody runs the module by hand.
    """
    if stat.S_ISFIFO(os.fstat(STDIN).st_mode):
        _exit_after(lambda: os.read(STDIN, 1))


def begin_pool_worker() -> None:
    """Initializer of pools of processes: Ctrl-C and hang-ups are the parent's to decide, SIGTERM ends the worker, and
    the worker ends with its parent."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        _exit_after(parent.join)


def _exit_after(wait: Callable[[], object]) -> None:
    """Exit as soon as ``wait`` returns, whatever else this process does meanwhile."""

    def watch() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
