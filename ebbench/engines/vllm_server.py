"""A server process of our own: started in its own process group, waited for, stopped with everything it started."""

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

from ebbench.errors import RunError

POLL_S = 0.25
TERM_WAIT_S = 15.0
TAIL_LINES = 15
TAIL_BYTES = 65536


class ServerProcess:
    """Runs ``command`` and keeps its output in ``log``. Leaving the context stops the whole process group."""

    def __init__(self, command: Sequence[str], url: str, log: Path, env: Mapping[str, str]) -> None:
        self.url, self.log = url, log
        self._command, self._env = list(command), dict(env)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        """Start it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            output.write((" ".join(self._command) + "\n\n").encode())
            output.flush()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=self._env, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it, also when something else failed."""
        self.stop()

    @property
    def group(self) -> int:
        """The process group everything it starts belongs to."""
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, timeout_s: float, waiting: Callable[[float], None]) -> None:
        """Return once /health answers 200; ``waiting`` is told now and then for how many seconds it has not.

        Raises RunError with the end of the log when that does not happen.
        """
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < timeout_s:
            self.check_alive("did not come up")
            waiting(waited_s)
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_S)
        raise RunError(f"the server was not ready after {timeout_s:g} s; {self.tail()}")

    def check_alive(self, what: str) -> None:
        """Raise RunError when the process has ended."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise RunError(f"the server {what} (exit status {status}); {self.tail()}")

    def tail(self) -> str:
        """The last lines of the log, and where the rest is."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return f"log {self.log}, its end:\n" + "\n".join(lines[-TAIL_LINES:])

    def stop(self) -> None:
        """End it: ask the server, which ends its own children in order, then kill what is left of the group."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_WAIT_S)
        deadline = time.monotonic() + TERM_WAIT_S
        while _group_alive(process.pid) and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(POLL_S / 5)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
