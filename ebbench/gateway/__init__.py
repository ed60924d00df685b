"""Gateway: one OpenAI-compatible endpoint in front of several servers, with the simulator's dispatch policies."""

from ebbench.gateway.settings import GatewaySettings

__all__ = ["GatewaySettings"]
