"""Runs the fake server in a child process, for checks and tests."""

from __future__ import annotations

import http.client
import os
import select
import subprocess
from types import TracebackType

from ebbench.child import Child, child_command, child_environ
from ebbench.errors import RunError
from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.ledger import Entry, decode
from ebbench.fakeserver.server import encode_config

STOP_WAIT_S = 5.0


class FakeServerProcess:
    """Starts a fake server; ``url`` is its base URL. The process ends with the context.

    Raises RunError if the server does not start within ``ready_timeout_s``.
    """

    def __init__(self, config: FakeConfig | None = None, ready_timeout_s: float = 20.0) -> None:
        self._config = config or FakeConfig()
        self._ready_timeout_s = ready_timeout_s
        self.process: Child | None = None
        self.url = ""

    def __enter__(self) -> FakeServerProcess:
        command = child_command("ebbench.fakeserver", encode_config(self._config))
        self.process = Child(command, env=child_environ(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self._ready_timeout_s)
        line = self.process.stdout.readline() if ready else b""
        if not line.startswith(b"READY "):
            self.process.kill()
            _, stderr = self.process.communicate()
            reason = stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no answer in time"]
            raise RunError(f"the fake server did not start: {reason[0]}")
        scheme = "http" if self._config.ssl_certfile is None else "https"
        self.url = f"{scheme}://{self._config.host}:{int(line.split()[1])}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is None:
            return
        self.process.end(STOP_WAIT_S)
        self.process.communicate()

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self.process is not None, "the server runs inside its context only"
        return self.process.pid

    def ledger(self) -> list[Entry]:
        """The entries of all requests so far."""
        return decode(self._ask("GET"))

    def clear_ledger(self) -> None:
        """Delete all entries."""
        self._ask("DELETE")

    def _ask(self, method: str) -> bytes:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30.0)
        try:
            connection.request(method, "/ledger")
            return connection.getresponse().read()
        finally:
            connection.close()
