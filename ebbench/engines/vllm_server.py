"""A server process under a supervisor: starts it, waits until it is ready, stops it with all its child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from ebbench.engines.server_log import explain
from ebbench.errors import RunError
from ebbench.process.child import KILL_WAIT_S, Child, supervised

POLL_S = 0.25
TERM_WAIT_S = 15.0  # time for the server to end its own children
TAIL_LINES = 15
READ_BYTES = 2**20  # of the log's end: the tracebacks of eight workers take 80 kB


class ServerProcess:
    """Runs ``command`` with its output in ``log``. Leaving the context stops it and all processes it started.

    ``kept_log``: where the log will be once the run is over, for messages; None: it stays where it is.
    """

    kept_log: Path | None = None

    def __init__(self, command: Sequence[str], url: str, log: Path, env: Mapping[str, str]) -> None:
        self.url, self.log = url, log
        self._command, self._env = list(command), dict(env)
        self._process: Child | None = None

    def __enter__(self) -> ServerProcess:
        """Start the server."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            output.write((" ".join(self._command) + "\n\n").encode())
            output.flush()
            self._process = Child(
                supervised(self._command, TERM_WAIT_S), stdout=output, stderr=subprocess.STDOUT,
                env=self._env, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    @property
    def group(self) -> int:
        """The process group of everything it starts."""
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, timeout_s: float, waiting: Callable[[float], None]) -> None:
        """Return once /health responds with 200; ``waiting`` is called at intervals with the seconds waited so far.

        Raises RunError with the server's first error if that does not happen.
        """
        began = time.monotonic()
        # One client for all questions: making one takes 25 ms of CPU, which the server needs to start.
        with httpx.Client(timeout=2.0) as client:
            while (waited_s := time.monotonic() - began) < timeout_s:
                self.check_alive("did not come up")
                waiting(waited_s)
                if _answers(client, self.url):
                    return
                time.sleep(POLL_S)
        raise RunError(f"the server was not ready after {timeout_s:g} s{self.reason()}")

    def check_alive(self, what: str, patience_s: float = 0.0) -> None:
        """Raise RunError if the process has ended, or ends within ``patience_s``."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        status = self._process.poll()
        if status is not None:
            raise RunError(f"the server {what} ({_status(status)}){self.reason()}")

    def reason(self) -> str:
        """The first error in the log and the log's path, as the end of a sentence; without an error its last lines."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - READ_BYTES))
            output = file.read().decode(errors="replace")
        if said := explain(output):
            return f": {said}; its log: {self.kept_log or self.log}"
        return "\n".join([f"; its log: {self.kept_log or self.log}, which ends:", *output.splitlines()[-TAIL_LINES:]])

    def stop(self) -> None:
        """Stop the server: SIGTERM lets it end its own children; remaining processes are then killed."""
        process, self._process = self._process, None
        if process is None:
            return
        process.end(TERM_WAIT_S + KILL_WAIT_S)
        with contextlib.suppress(ProcessLookupError):  # the group is empty, unless the supervisor itself was killed
            os.killpg(process.pid, signal.SIGKILL)


def _status(status: int) -> str:
    """An exit status in words. The kernel's answer to lack of memory is SIGKILL."""
    number = -status if status < 0 else status - 128
    if number == signal.SIGKILL:
        return "killed, as the kernel does when memory runs out"
    return f"exit status {status}"


def free_port() -> int:
    """A free TCP port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
