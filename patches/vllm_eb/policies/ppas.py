"""P-PAS (arXiv 2608.15171): a smaller budget for prompts while several of them are computed beside decodes.

While a step would compute two or more prompts beside decoding sequences, its prompts get at most ``cap`` tokens
together, else the whole budget. The rule is for long prompts: several of them fill the budget of every step, and every
decoding sequence waits for these long steps.

The published text does not define the prompts that a step would compute. Here they are the partly computed ones and the
waiting ones for which a slot is free: under first come, first served, vLLM has at most one partly computed prompt, so
counting only those would never give two.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Lengths, Mode, PhaseState, StepChoice, Strategy, View


@dataclass(frozen=True, kw_only=True)
class PPas(PolicySpec):
    """At most ``cap`` prompt tokens per step while ``prompts`` or more prompts are computed."""

    description = "mixed batches, prompts capped per step while several are computed beside decodes (P-PAS)"

    cap: int = setting(
        2048, "prompt tokens per step while several prompts are computed", unit="tokens per step", at_least=1
    )
    prompts: int = setting(2, "fewest prompts in a step at which the cap applies", unit="requests", at_least=1)

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """Mixed steps with one of two budgets."""
        return CappedPrompts(engine, lengths, self.cap, self.prompts)


class CappedPrompts(Strategy):
    """Mixed steps whose token budget depends on the number of prompts that they would compute."""

    mode: Mode = "mb"

    def __init__(self, engine: EngineFacts, lengths: Lengths, cap: int, prompts: int) -> None:
        super().__init__(engine, lengths)
        self._cap, self._prompts = cap, prompts
        self._whole = StepChoice("mixed", "mb")

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """A mixed step with the cap, or with the whole budget."""
        free = self.engine.max_num_seqs - view.idle_sessions - view.decoding - view.prefilling
        if not view.decodes or view.prefilling + min(view.waiting, max(free, 0)) < self._prompts:
            return self._whole
        return StepChoice("mixed", "mb", token_budget=self.decode_tokens(view.decoding) + self._cap)


POLICY = PPas
