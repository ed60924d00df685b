"""Runs the gateway in a child process, for engines, checks and tests."""

from __future__ import annotations

from ebbench.gateway.settings import GatewaySettings
from ebbench.process.child import ServerChild

STOP_WAIT_S = 10.0


class GatewayProcess(ServerChild):
    """Starts a gateway; ``url`` is its base URL. Raises UsageError for invalid settings."""

    def __init__(self, settings: GatewaySettings, ready_timeout_s: float = 30.0) -> None:
        grace_s, origin = STOP_WAIT_S + settings.drain_s, f"http://{settings.host}"
        super().__init__("ebbench.gateway", "the gateway", settings.checked(), origin, ready_timeout_s, grace_s)
