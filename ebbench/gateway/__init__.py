"""The gateway: one OpenAI-compatible front door for several servers, with the dispatch policies of the simulator."""

from ebbench.gateway.settings import GatewaySettings

__all__ = ["GatewaySettings"]
