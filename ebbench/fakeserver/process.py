"""Runs the fake server in a child process, for checks and tests."""

from __future__ import annotations

import http.client
from types import TracebackType

from ebbench.errors import RunError
from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.scheduled_response import LedgerEntry, decode
from ebbench.fakeserver.server import encode_config
from ebbench.process.child import Child, NotReadyError, ready_child

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
        try:
            self.process, port = ready_child("ebbench.fakeserver", encode_config(self._config), self._ready_timeout_s)
        except NotReadyError as error:
            raise RunError(f"the fake server did not start: {error.reason}") from None
        scheme = "http" if self._config.ssl_certfile is None else "https"
        self.url = f"{scheme}://{self._config.host}:{port}"
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

    def ledger(self) -> list[LedgerEntry]:
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
