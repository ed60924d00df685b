"""Creates the cells of published figures from their protocols."""

from __future__ import annotations

from typing import Any

from ebbench.papers.protocols import ASYNC_SCHEDULING, Protocol
from ebbench.runs.cell import Cell, simulated


def protocol_cells(
    protocol: Protocol, device: str, model: str, num_prompts: int | None = None, weight: float = 1.0, seed: int = 0
) -> tuple[Cell, ...]:
    """The cells of one published figure; ``num_prompts`` replaces the protocol's number."""
    cells = []
    for plan in protocol.plans():
        arguments: dict[str, Any] = dict(plan) | ({} if num_prompts is None else {"num_prompts": num_prompts})
        cell = simulated(
            arguments.pop("workload"), protocol.policy, device, model, protocol.max_num_seqs,
            protocol.max_num_batched_tokens, warmup=protocol.warmup, async_scheduling=ASYNC_SCHEDULING,
            shuffle=protocol.shuffle, weight=weight, seed=seed, **arguments,
        )  # fmt: skip
        cells.append(cell)
    return tuple(cells)
