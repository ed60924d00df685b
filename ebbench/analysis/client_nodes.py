"""The clients that sent a run's requests: machines, where there were several, and connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClientNodes:
    """Nodes of a Ray cluster that sent a run's requests; ``count`` 0: the machine that reports it sent them itself.

    ``alignment_error_ms``: the largest error of a node's times on the reporting machine's clock. ``lost``: nodes lost
    during the run. ``connections`` is the most connections to the server at a time, ``connections_used`` the most with
    an open request, both summed over the client's processes; None for a run without requests to a server.
    """

    count: int = 0
    workers: int = 0
    lost: int = 0
    alignment_error_ms: float | None = None
    connections: int | None = None
    connections_used: int | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ClientNodes:
        """From the facts of a manifest."""
        nodes, connected = facts.get("client_nodes") or (), facts.get("client_connections") or {}
        held, used = connected.get("most_held") or None, connected.get("most_used")
        if not nodes:
            return cls(connections=held, connections_used=used)
        workers, lost = sum(one["workers"] for one in nodes), sum(one["lost"] for one in nodes)
        return cls(len(nodes), workers, lost, facts.get("clock_alignment_error_ms"), held, used)

    def to_dict(self) -> dict[str, Any]:
        """Flat values for JSON and SQL; None without several machines."""
        return {
            "client_nodes": self.count or None,
            "client_nodes_lost": self.lost if self.count else None,
            "clock_alignment_error_ms": self.alignment_error_ms,
            "client_connections": self.connections,
            "client_connections_used": self.connections_used,
        }

    def __str__(self) -> str:
        held = f"{self.connections:,} connections at most, {self.connections_used:,} in use" if self.connections else ""
        if not self.count:
            return held
        lost = f", {self.lost} lost" if self.lost else ""
        aligned = "" if self.alignment_error_ms is None else f", clocks aligned to {self.alignment_error_ms:.2g} ms"
        return f"{self.count} client nodes with {self.workers} processes{lost}{aligned}" + (f", {held}" if held else "")
