"""Runs the gateway in a child process, for engines, checks and tests."""

from __future__ import annotations

from types import TracebackType

import msgspec

from ebbench.errors import RunError, UsageError
from ebbench.gateway.settings import GatewaySettings
from ebbench.process.child import Child, NotReadyError, ready_child

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
        try:
            self.process, port = ready_child(
                "ebbench.gateway", msgspec.json.encode(settings).decode(), self._ready_timeout_s
            )
        except NotReadyError as error:
            kind = UsageError if error.status == UsageError.exit_code else RunError
            raise kind(f"the gateway did not start: {error.reason}") from None
        self.url = f"http://{settings.host}:{port}"
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
