"""Runs the fake server in a child process, for checks and tests."""

from __future__ import annotations

import http.client

from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.scheduled_response import LedgerEntry, decode
from ebbench.process.child import ServerChild

STOP_WAIT_S = 5.0


class FakeServerProcess(ServerChild):
    """Starts a fake server; ``url`` is its base URL."""

    def __init__(self, config: FakeConfig | None = None, ready_timeout_s: float = 20.0) -> None:
        config = config or FakeConfig()
        origin = f"http{'' if config.ssl_certfile is None else 's'}://{config.host}"
        super().__init__("ebbench.fakeserver", "the fake server", config, origin, ready_timeout_s, STOP_WAIT_S)

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
