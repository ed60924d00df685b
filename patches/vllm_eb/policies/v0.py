"""vLLM v0's rule: exclusive batches, refilled as soon as one slot is free."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.policy import PolicySpec
from vllm_eb.strategy import EngineFacts, Lengths, Strategy


@dataclass(frozen=True, kw_only=True)
class V0(PolicySpec):
    """A policy without settings."""

    description = "exclusive batches, refill as soon as one slot is free (vLLM v0's rule)"

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """A threshold of one slot."""
        return OneSlot(engine, lengths)


class OneSlot(Strategy):
    """Refills whenever a refill is possible."""

    slots = 1


POLICY = V0
