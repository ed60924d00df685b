"""vLLM v1: mixed batches by vLLM's own rules, unchanged or with a smaller token budget per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Lengths, Mode, PhaseState, StepChoice, Strategy, View


@dataclass(frozen=True, kw_only=True)
class V1(PolicySpec):
    """``budget``: the most tokens per step, as if the server had been started with that max_num_batched_tokens."""

    description = "mixed batches: vLLM v1, untouched; budget= is a max_num_batched_tokens of its own"
    colour = "#0072B2"
    departure = 0

    budget: int | None = setting(
        None, "tokens per step, at most max_num_batched_tokens", unit="tokens per step", at_least=1,
        published="max_num_batched_tokens",
    )  # fmt: skip

    @property
    def native(self) -> bool:
        """Without settings nothing but vLLM decides."""
        return self.budget is None and self.order == "fcfs"

    @property
    def vllm_option(self) -> str:
        """The budget is an option of vLLM's."""
        return "" if self.budget is None else f"--max-num-batched-tokens {self.budget} does it without the plugin."

    @classmethod
    def candidates(cls, targets_s: Mapping[str, float]) -> tuple[str, ...]:
        """The baseline, and smaller token budgets: which is best moves with the load (P-PAS, arXiv 2608.15171)."""
        return (cls.kind, *(f"{cls.kind}:budget={budget}" for budget in (2048, 4096, 8192)))

    def load_warning(self, open_at_most: int, max_num_seqs: int) -> tuple[str, str, str] | None:
        """A budget below the number of sequences, which a vLLM server would not start with."""
        seqs = min(open_at_most or max_num_seqs, max_num_seqs)
        if self.budget is None or self.budget >= seqs:
            return None
        return (
            "budget_below_seqs",
            f"At most {self.budget} of up to {seqs} sequences decode per step under budget={self.budget}; vLLM refuses "
            "a token budget below --max-num-seqs.",
            f"Use budget={max_num_seqs} or more, or lower --max-num-seqs to {self.budget}.",
        )

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
