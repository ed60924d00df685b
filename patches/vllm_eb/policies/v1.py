"""vLLM v1: mixed batches by vLLM's own rules, unchanged or with a smaller token budget per step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Lengths, Mode, PhaseState, StepChoice, Strategy, Values, View


@dataclass(frozen=True, kw_only=True)
class V1(PolicySpec):
    """``budget``: the most tokens per step, as if the server had been started with that max_num_batched_tokens."""

    description = "mixed batches: vLLM v1, untouched; budget= is a max_num_batched_tokens of its own"

    budget: int | None = setting(
        None, "tokens per step, at most max_num_batched_tokens", unit="tokens per step", at_least=1,
        published="max_num_batched_tokens",
    )  # fmt: skip

    @property
    def native(self) -> bool:
        """Without settings nothing but vLLM decides."""
        return self.budget is None and self.order == "fcfs"

    def load_doubt(self, open_at_most: int, max_num_seqs: int) -> tuple[str, Values] | None:
        """A budget below the number of sequences, which a vLLM server would not start with."""
        seqs = min(open_at_most or max_num_seqs, max_num_seqs)
        if self.budget is None or self.budget >= seqs:
            return None
        return "budget-below-seqs", {"budget": self.budget, "seqs": seqs, "max_num_seqs": max_num_seqs}

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """vLLM's steps with a budget."""
        return MixedSteps(engine, lengths, self.budget)


class MixedSteps(Strategy):
    """Every step is vLLM's own, of at most ``budget`` tokens."""

    mode: Mode = "mb"

    def __init__(self, engine: EngineFacts, lengths: Lengths, budget: int | None) -> None:
        super().__init__(engine, lengths)
        self._choice = StepChoice("mixed", "mb", token_budget=budget)

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """The same for every step."""
        return self._choice


POLICY = V1
