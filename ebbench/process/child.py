"""Starts child processes that end with this process, however it ends.

Each child's standard input is a pipe whose other end only this process holds (its lifeline). Nothing is written to it.
When this process ends, even by SIGKILL, the kernel closes the pipe and the child reads end of file. Modules of ebbench
then exit (:func:`end_with_parent`). Other programs run under a supervisor (:mod:`ebbench.process.supervisor`), which
ends them and their descendants. What a library starts inside this process is watched by
:mod:`ebbench.process.tree_guard`. Workers of a ``ProcessPoolExecutor`` have such a pipe from multiprocessing
(:func:`begin_pool_worker`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import multiprocessing
import os
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from ebbench.errors import RunError, UsageError
from ebbench.process.interpreter import is_process_of_ebbench, no_full_collections, process_of_ebbench
from ebbench.process.termination import SIGNALS, hastened

OTHER_FILES = 64
"""Descriptors that a process of the client needs beside its connections."""


def allow_open_files(wanted: int) -> int:
    """Raise the soft limit to ``wanted``, as far as the hard limit lets; returns how many may be open then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a limit of the kernel below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else soft


_ROOM = 16_384


def make_room_for_files() -> None:
    """Make the kernel's table of this process's files large now.

    It is doubled when it is full, at 64, 256, 512 files and so on, and the thread that opens the file waits 5 to 20 ms
    for that if the process has others. In a load generator no answer is timed meanwhile.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    last = (_ROOM if soft == resource.RLIM_INFINITY else min(soft, _ROOM)) - 1
    null = os.open(os.devnull, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, last))
    os.close(null)


STDIN, STDERR = 0, 2
KILL_WAIT_S = 15.0
"""How long a supervisor may take to reap killed processes."""
EXIT_WAIT_S = 1.0
"""How long a child that closed its output may take to end."""
KEPT_BYTES = 65536
"""How much of a program's output is kept to look for the reason of a failure."""
SUPERVISOR = Path(__file__).with_name("supervisor.py")
TREE_GUARD = Path(__file__).with_name("tree_guard.py")


class Child(subprocess.Popen[bytes]):
    """A process with a lifeline. Takes the options of ``Popen`` except ``stdin``.

    The lifeline also closes when this object is garbage-collected, so keep it while the process runs.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        lifeline, ours = os.pipe()  # neither end is inherited on exec, so no other child keeps it open
        self._close_lifeline = weakref.finalize(self, os.close, ours)
        try:
            super().__init__(command, stdin=lifeline, **options)
        finally:
            os.close(lifeline)

    def end(self, grace_s: float) -> None:
        """Send SIGTERM, kill the process if it has not ended after ``grace_s``, and wait for it.

        No signal interrupts this; each is passed on as another SIGTERM, which asks the process for haste.
        """
        with hastened(self.terminate):
            self.terminate()
            try:
                self.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.kill()
                self.wait()
            self._close_lifeline()


def child_command(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module``, which must call :func:`end_with_parent`.

    Modules are not imported from the working directory: a user's file could have the name of a standard module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def supervised(command: Sequence[str], grace_s: float) -> list[str]:
    """The command that runs another program under the supervisor.

    On SIGTERM to the supervisor, the program gets SIGTERM and ``grace_s`` seconds; then it and all descendants are
    killed. Descendants are also killed when the program ends by itself. The exit status is the program's.
    """
    return [sys.executable, "-I", "-S", str(SUPERVISOR), f"{grace_s:g}", *command]


def run_supervised(
    command: Sequence[str], grace_s: float, *, shows_errors: bool = False, **options: Any
) -> tuple[int, str]:
    """Run another program to its end; returns its exit status, and its stderr if that is a pipe.

    ``options`` go to ``Popen``. ``shows_errors``: what it writes to stderr is written to this process's stderr at
    once, and the last ``KEPT_BYTES`` of it are returned. On KeyboardInterrupt the program gets ``grace_s`` seconds to
    end, then the exception is raised again. Raises FileNotFoundError if the program does not exist.
    """
    if shutil.which(command[0], path=(options.get("env") or os.environ).get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if shows_errors:
        options["stderr"] = subprocess.PIPE
    process = Child(supervised(command, grace_s), start_new_session=True, **options)
    shown = _Shown(process) if shows_errors else None
    try:
        errors = process.communicate()[1] if shown is None else shown.to_the_end()
    except KeyboardInterrupt:
        process.end(grace_s + KILL_WAIT_S)
        raise
    return process.returncode, (errors or b"").decode(errors="replace")


class _Shown:
    """Writes the stderr of a process to this process's stderr, and keeps its end."""

    def __init__(self, process: Child) -> None:
        self._process, self._kept = process, b""
        # A thread of its own: while the process is being ended it still writes, and would wait for a full pipe.
        self._thread = threading.Thread(target=self._copy, name="stderr", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        assert self._process.stderr is not None
        pipe = self._process.stderr.fileno()
        while piece := os.read(pipe, KEPT_BYTES):
            self._kept = (self._kept + piece)[-KEPT_BYTES:]
            with contextlib.suppress(OSError):  # the reader of our stderr is gone
                while piece:
                    piece = piece[os.write(STDERR, piece) :]

    def to_the_end(self) -> bytes:
        """Wait for the end of the process; returns the last bytes that it wrote."""
        self._process.wait()
        self._thread.join(EXIT_WAIT_S)
        return self._kept


@contextmanager
def descendants_guarded() -> Iterator[None]:
    """Inside, whatever this process and its libraries start is killed when this process is gone, killed or not.

    For what cannot be started as a :class:`Child`. Sets two environment variables by which the guard knows a process
    that has begun and lost its parent between two of its looks.
    """
    mark = uuid.uuid4().hex
    guard = Child([sys.executable, "-I", "-S", str(TREE_GUARD), str(os.getpid()), mark], start_new_session=True)
    try:
        with environment(EBBENCH_GUARDED=mark, SPT_NOENV="1"):  # setproctitle writes over the environment without it
            yield
    finally:
        guard.end(KILL_WAIT_S)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Inside, environment variables have these values; afterwards their old ones."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with this process's import path, so that the child finds the same modules."""
    return {**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class ServerChild:
    """A server of ebbench in a child process: ``module`` with ``settings`` as its argument, in JSON.

    ``url``: ``origin`` with the port that it announces. The process ends with the context. Entering raises UsageError
    or RunError with the server's own reason if it does not start within ``ready_timeout_s``. ``grace_s``: how long it
    may take to end.
    """

    def __init__(
        self, module: str, what: str, settings: object, origin: str, ready_timeout_s: float, grace_s: float
    ) -> None:
        self._module, self._what, self._settings, self._origin = module, what, settings, origin
        self._ready_timeout_s, self._grace_s = ready_timeout_s, grace_s
        self.process: Child | None = None
        self.url = ""

    def __enter__(self) -> Self:
        command = child_command(self._module, msgspec.json.encode(self._settings).decode())
        child = Child(command, env=child_environ(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], self._ready_timeout_s)
        line = child.stdout.readline() if ready else b""
        if not line.startswith(b"READY "):
            try:
                child.wait(EXIT_WAIT_S if ready else 0.0)
            except subprocess.TimeoutExpired:
                child.kill()
            _, stderr = child.communicate()
            reason = (stderr.decode(errors="replace").strip().splitlines() or ["no answer in time"])[-1]
            kind = UsageError if child.returncode == UsageError.exit_code else RunError
            raise kind(f"{self._what} did not start: {reason}")
        self.process, self.url = child, f"{self._origin}:{int(line.split()[1])}"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self.process is not None, "the server runs inside its context only"
        return self.process.pid

    def stop(self) -> None:
        """Send SIGTERM, wait until open requests may have ended, then kill."""
        process, self.process = self.process, None
        if process is not None:
            process.end(self._grace_s)
            process.communicate()


def announce(port: int) -> None:
    """Tell :class:`ServerChild` that this process listens on ``port``; from now on it collects young garbage only."""
    no_full_collections()
    print(f"READY {port}", flush=True)


def end_with_parent() -> None:
    """End this process as soon as its lifeline closes; for main programs run by ``Child``.

    If standard input is not a pipe, the module was started by hand and there is no lifeline.
    """
    process_of_ebbench()
    if stat.S_ISFIFO(os.fstat(STDIN).st_mode):
        _exit_after(lambda: os.read(STDIN, 1))


def begin_pool_worker() -> None:
    """Initializer of process pools: ignore SIGINT and SIGHUP; end on SIGTERM and with the parent."""
    process_of_ebbench()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        _exit_after(parent.join)


_NOT_FORKED = frozenset({"torch", "ray", "datasets", "tokenizers", "grpc"})
"""Libraries whose threads do not take a fork."""


def may_fork() -> bool:
    """Whether a child can go on with the modules that are loaded here, instead of loading them again.

    Only in a process of ebbench, whose threads are known: others may hold locks, which no thread of the child frees.
    numpy's and Arrow's threads are idle between their calls, and both libraries start new ones after a fork.
    """
    main = threading.current_thread() is threading.main_thread()
    return main and is_process_of_ebbench() and _NOT_FORKED.isdisjoint(sys.modules)


class ForkedChild:
    """A child that is a copy of this process and runs ``work``; it ends with this process, as :class:`Child` does.

    Of the files that are open here it keeps the standard streams and ``descriptors``. It has a process group of its own
    and ignores SIGINT, SIGTERM and SIGHUP.
    """

    def __init__(self, work: Callable[[], object], descriptors: Sequence[int]) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=(work, descriptors), daemon=True)
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child ignores them
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: see may_fork
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for its end. Raises TimeoutExpired."""
        if timeout_s is not None and not _ended(self._process.sentinel, timeout_s):
            raise subprocess.TimeoutExpired("a worker", timeout_s)
        self._process.join()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


def _work(work: Callable[[], object], descriptors: Sequence[int]) -> None:
    gc.freeze()  # the parent's objects: looking through them would copy their memory
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None  # multiprocessing started this process
    kept = {*range(STDERR + 1), *descriptors, parent.sentinel}
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - kept:
        os.dup2(null, descriptor)  # not closed: its number would be given again, and an object of the parent's close it
    # Another thread of the parent may have held the locks of its streams.
    sys.stdout = sys.stderr = os.fdopen(STDERR, "w", closefd=False)
    _exit_after(lambda: _ended(parent.sentinel))
    work()


def _ended(sentinel: int, timeout_s: float | None = None) -> bool:
    """Whether a process ends in time, by multiprocessing's sentinel; its own wait loads modules for 5 ms."""
    poll = select.poll()
    poll.register(sentinel, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def _exit_after(wait: Callable[[], object]) -> None:
    """Exit the process as soon as ``wait`` returns, in a thread of its own."""

    def watch() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
