"""Deferred prefill with a fixed departure threshold K (Mohanty et al., EuroMLSys 2025); :mod:`vllm_eb.deferred` has the
theory of the best K."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.decisions import View
from vllm_eb.lengths import Lengths
from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Strategy


@dataclass(frozen=True, kw_only=True)
class Deferred(PolicySpec):
    """Exclusive batches; K counts idle slots of max_num_seqs, independent of the queue."""

    description = "exclusive batches, refill after K departures (Mohanty et al., EuroMLSys 2025); needs k=K"
    colour = "#CC79A7"
    departure = 60

    k: int = setting(help="idle slots at which to refill; fixes the threshold", unit="slots", at_least=1, example=32)

    def load_warning(self, open_at_most: int, max_num_seqs: int) -> tuple[str, str, str] | None:
        """A warning that K has no effect if the load leaves K slots idle all the time."""
        if not 0 < open_at_most <= max_num_seqs - self.k:
            return None
        return (
            "k-always-met",
            f"At most {open_at_most:,} requests are open, so {max_num_seqs - open_at_most:,} of {max_num_seqs:,} "
            f"slots are always idle and k={self.k} never delays a refill: the policy behaves like v0.",
            f"Give --max-num-seqs {open_at_most} to wait for {self.k} departures.",
        )

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """A threshold of k idle slots."""
        return IdleSlots(engine, lengths, self.k)


class IdleSlots(Strategy):
    """A refill is due when ``k`` slots are idle, or all slots if there are fewer."""

    def __init__(self, engine: EngineFacts, lengths: Lengths, k: int) -> None:
        super().__init__(engine, lengths)
        self._k = min(k, engine.max_num_seqs)

    @property
    def slots(self) -> int:
        """The threshold k."""
        return self._k

    def refill_due(self, view: View, refill: int, idle: int) -> bool:
        """Whether k slots are idle."""
        return idle >= self._k


POLICY = Deferred
