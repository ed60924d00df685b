"""Runs the gateway in a child process, for engines, checks and tests."""

from __future__ import annotations

import os
import select
import subprocess
from types import TracebackType

import msgspec

from ebbench.child import Child, child_command, child_environ
from ebbench.errors import EbbenchError, RunError, UsageError
from ebbench.gateway.settings import GatewaySettings

STOP_WAIT_S = 10.0


class GatewayProcess:
    """Starts a gateway; ``url`` is its base URL. The process ends with the context.

    Raises UsageError or RunError with the gateway's own reason if it does not start.
    """

    def __init__(self, settings: GatewaySettings, ready_timeout_s: float = 30.0) -> None:
        self._settings, self._ready_timeout_s = settings, ready_timeout_s
        self.process: Child | None = None
        self.url = ""

    def __enter__(self) -> GatewayProcess:
        settings = self._settings.checked()
        command = child_command("ebbench.gateway", msgspec.json.encode(settings).decode())
        self.process = Child(command, env=child_environ(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self._ready_timeout_s)
        line = self.process.stdout.readline() if ready else b""
        if not line.startswith(b"READY "):
            raise self._refusal()
        self.url = f"http://{settings.host}:{int(line.split()[1])}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The gateway's process id."""
        assert self.process is not None, "the gateway runs inside its context only"
        return self.process.pid

    def stop(self) -> None:
        """Send SIGTERM, wait until open requests may have ended, then kill."""
        process, self.process = self.process, None
        if process is None:
            return
        process.end(STOP_WAIT_S + self._settings.drain_s)
        process.communicate()

    def _refusal(self) -> EbbenchError:
        process, self.process = self.process, None
        assert process is not None
        if process.poll() is None:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
        _, stderr = process.communicate()
        reason = (stderr.decode(errors="replace").strip().splitlines() or ["no answer in time"])[-1]
        kind = UsageError if process.returncode == UsageError.exit_code else RunError
        return kind(f"the gateway did not start: {reason}")
