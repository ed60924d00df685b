"""P-PAS (arXiv 2608.15171): a smaller budget for prompts while several of them are computed beside decodes.

While a step would compute two or more prompts beside decoding sequences, its prompts get ``cap`` tokens together;
otherwise the whole budget is theirs. The rule is for long prompts: several at a time keep every step at the budget's
full length, and each decoding sequence waits for it.

Our reading where the published text leaves room: prompts that a step would compute are those half computed and those
waiting that a slot is free for. Under first come, first served vLLM leaves at most one prompt half computed, so that
counting only these would never find two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_eb.decisions import View
from vllm_eb.lengths import Lengths
from vllm_eb.modes import Mode
from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, PhaseState, StepChoice, Strategy


@dataclass(frozen=True, kw_only=True)
class PPas(PolicySpec):
    """``cap`` tokens of prompts per step while ``prompts`` or more are computed."""

    description = "mixed batches, prompts capped per step while several are computed beside decodes (P-PAS)"
    colour = "#332288"
    departure = 12

    cap: int = setting(2048, "prompt tokens per step while several prompts are computed", unit="tokens", at_least=1)
    prompts: int = setting(2, "prompts in a step from which on the cap holds", unit="requests", at_least=1)

    @classmethod
    def candidates(cls, targets_s: Mapping[str, float]) -> tuple[str, ...]:
        """With the published cap."""
        return (cls.kind,)

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """Mixed steps of two budgets."""
        return CappedPrompts(engine, lengths, self.cap, self.prompts)


class CappedPrompts(Strategy):
    """Every step is mixed; the budget depends on how many prompts it would compute."""

    mode: Mode = "mb"

    def __init__(self, engine: EngineFacts, lengths: Lengths, cap: int, prompts: int) -> None:
        super().__init__(engine, lengths)
        self._cap, self._prompts = cap, prompts
        self._whole = StepChoice("mixed", "mb")

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """The cap, or the whole budget."""
        free = self.engine.max_num_seqs - view.idle_sessions - view.decoding - view.prefilling
        if not view.decodes or view.prefilling + min(view.waiting, max(free, 0)) < self._prompts:
            return self._whole
        return StepChoice("mixed", "mb", token_budget=view.decoding + self._cap)


POLICY = PPas
