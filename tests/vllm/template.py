"""A process that has imported vLLM once, and forks the commands of tests and the servers that these start.

A vLLM server spends most of its start on imports: 8 CPU seconds, for each server anew. A command that a test starts
through this process is a fork of it, and so are the supervisor and the server below that command: each calls
:func:`become` where it would call ``exec``. Parents, children, signals, descriptors and environment are those of an
``exec``; only the imports have been done before.

One template serves all processes of pytest. Run as ``python -m tests.vllm.template NAME KIND``; it listens on the
abstract Unix socket NAME and ends with the last connection. :mod:`tests.vllm.forked_command` is its client, and
``tests/vllm/shim.py`` that of shell scripts.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = {
    "vllm": (
        "ebbench.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu_worker",
    ),
    "ebbench": (
        "ebbench.cli.main", "ebbench.cli.run", "ebbench.cli.gate", "ebbench.cli.show", "ebbench.run_policies",
        "ebbench.runs.execute", "ebbench.runs.conclude", "ebbench.engines.sim", "ebbench.engines.endpoint",
        "ebbench.devices.loader", "ebbench.gate.interleave", "ebbench.fakeserver.server", "ebbench.client.worker",
    ),
}  # fmt: skip
"""What a process of a kind has imported: the one of ``ebbench`` forks commands that start no vLLM."""
SERVER = "ebbench.engines.vllm_cli"
FORKED = (SERVER, "calibrate")
"""What is started as a fork, and the supervisor of it: vLLM servers, and the engine that a validation calibrates."""
MESSAGE_BYTES = 1 << 17
_CANNOT_START = 127
_EXEC, _FORK_EXEC = os.execvp, subprocess._fork_exec  # type: ignore[attr-defined]


def environment_path(environment: Mapping[str, str]) -> list[str]:
    """What PYTHONPATH adds to the places of imports."""
    return [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]


_OWN_PATH = set(environment_path(os.environ))
_PATH = [place for place in sys.path[1:] if place not in _OWN_PATH]


def is_forked(words: Sequence[str]) -> bool:
    """Whether a command is one that :func:`become` runs."""
    return words[0] == sys.executable and any(name in words for name in FORKED)


def run_python(words: Sequence[str]) -> None:
    """Run the module or the script of a Python command in this process."""
    rest = list(words[1:])
    while rest[0] in ("-I", "-S", "-P"):
        rest.pop(0)
    if rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        exec(compile(rest[1], "<string>", "exec"), {"__name__": "__main__"})
    elif rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")


def become(words: Sequence[str], environment: Mapping[str, str], keep: Callable[[int], bool]) -> NoReturn:
    """Run a Python command in this process, just forked, as after ``execve``: end with it.

    ``keep`` says of an open descriptor whether the command has it.
    """
    try:
        _forget_signals()
        _forget_what_ends_with_the_parent()
        _close(keep)
        with contextlib.suppress(ImportError):
            importlib.import_module("setproctitle").setproctitle(" ".join(words))  # for /proc; vLLM brings it
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = [*environment_path(environment), *_PATH]
        importlib.invalidate_caches()
        if logger := sys.modules.get("vllm.logger"):  # its level is a variable of the environment, read at import
            logger._configure_vllm_root_logger()
        status = _status_of(words)
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    finally:
        os._exit(_CANNOT_START)


def _status_of(words: Sequence[str]) -> int:
    """Run the command; its exit status, as the interpreter would set it."""
    try:
        run_python(words)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
            return 1
        return int(end.code or 0)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _forget_signals() -> None:
    """Signals that were handled have their default effect, ignored ones stay ignored; then as Python sets them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _forget_what_ends_with_the_parent() -> None:
    """The temporary folders and processes of the parent are not this process's to remove at its end."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    gc.freeze()  # nor are its objects searched for garbage, whose collection may close a descriptor


def _close(keep: Callable[[int], bool]) -> None:
    """Close what the command does not have. The numbers stay taken, as objects of the parent may close them later."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            if number > 2 and number != nothing and not keep(number):
                os.dup2(nothing, number, inheritable=False)
        except OSError:  # the descriptor of the list itself
            continue


def fork_exec(*arguments: Any) -> int:
    """In place of the function of the same name below ``subprocess.Popen``; other commands are left to it."""
    words = [os.fsdecode(word) for word in arguments[0]]
    if not is_forked(words):
        return int(_FORK_EXEC(*arguments))
    _, _, close_fds, kept, folder, environment = arguments[:6]
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        ends = {0: arguments[6], 1: arguments[9], 2: arguments[11]}
        for target, source in {number: os.dup(source) for number, source in ends.items() if source != -1}.items():
            os.dup2(source, target)
        if folder is not None:
            os.chdir(folder)
        if arguments[15]:
            os.setsid()
        variables = dict(os.fsdecode(one).split("=", 1) for one in environment) if environment else dict(os.environ)
        wanted = set(kept) - {arguments[13]}  # the error pipe tells the parent, by its end, that the command has begun
        become(words, variables, lambda number: number in wanted or (not close_fds and os.get_inheritable(number)))
    finally:
        os._exit(_CANNOT_START)


def execvp(file: str, arguments: Sequence[str]) -> None:
    """In place of ``os.execvp``; other commands are left to it."""
    if is_forked(list(arguments)):
        become(arguments, dict(os.environ), os.get_inheritable)
    _EXEC(file, list(arguments))


class Template:
    """Forks a command per connection that brings one, and tells that connection how the command ended."""

    def __init__(self, name: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + name)
        self._listener.listen(64)
        self._open: set[socket.socket] = set()
        self._commands: dict[int, socket.socket] = {}

    def serve(self) -> None:
        """Return after the last connection has been closed."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        while True:
            watched: list[Any] = [self._listener, reader, *self._open]
            ready, _, _ = select.select(watched, [], [])
            if reader in ready:
                os.read(reader, 4096)
                self._reap()
            if self._listener in ready:
                self._open.add(self._listener.accept()[0])
            for connection in self._open & set(ready):
                self._read(connection)
            if not self._open:
                return

    def _read(self, connection: socket.socket) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        except ConnectionResetError:  # the test has ended without reading how its command ended
            message, descriptors = b"", []
        if message:
            child = os.fork()
            if not child:
                _run(json.loads(message), descriptors)
            for number in descriptors:
                os.close(number)
            self._commands[child] = connection
            _tell(connection, child)
            return
        for child, waiting in list(self._commands.items()):
            if waiting is connection:  # the test has ended, its command has not
                os.kill(child, signal.SIGTERM)
        self._open.discard(connection)
        connection.close()

    def _reap(self) -> None:
        while self._commands:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            connection = self._commands.pop(child)
            if connection in self._open:
                _tell(connection, os.waitstatus_to_exitcode(status))


def _tell(connection: socket.socket, number: int) -> None:
    """Send a process id or an exit code; the test may have ended."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(json.dumps(number).encode())


def _run(command: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """The command of a message, a Python command, in a session of its own with these standard streams."""
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.chdir(command["folder"])
        become(command["words"], command["environment"], lambda _number: False)
    finally:
        os._exit(_CANNOT_START)


def main(name: str, kind: str) -> None:
    """Listen, import, serve."""
    template = Template(name)
    gc.disable()
    for module in IMPORTED[kind]:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    os.execvp = execvp  # type: ignore[assignment]
    # A child would pass its signals on to the event loop of its parent, through the descriptor that both have.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    template.serve()


if __name__ == "__main__":
    # As a module with a name, so that the functions above are those of one module whatever runs as __main__ later.
    importlib.import_module("tests.vllm.template").main(*sys.argv[1:])
