"""Prompt chunks limited so that a mixed step keeps a target for the time per output token.

Each mixed step gets the most prompt tokens with which it takes at most ``tpot`` seconds by the measured costs (with
drafts, for each token that a sequence gets of it), and at least ``least``, so that prompts always advance. This greedy
rule is common to recent SLO chunk controllers: predict the step's time, take the largest chunk within the target.
SlidingServe (arXiv 2606.05933) also plans one step ahead, sorts requests by urgency and selects them by dynamic
programming; this policy does not (see ``order=shortest`` and the targets of marginal).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Lengths, Mode, PhaseState, StepChoice, Strategy, View


@dataclass(frozen=True, kw_only=True)
class SloChunk(PolicySpec):
    """``tpot``: most seconds per mixed step, with drafts per token; ``least``: fewest prompt tokens of a step."""

    description = "mixed batches, prompt chunks as large as a TPOT target allows by measured costs; needs tpot="

    tpot: float = setting(
        help="target for a mixed step", unit="s", above=0, doubtful_from=5, example=0.05,
    )  # fmt: skip
    least: int = setting(128, "prompt tokens that a step may always have", unit="tokens per step", at_least=1)

    needs_costs = True
    """The chunk is computed from measured costs."""

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """Mixed steps, each with its own token budget."""
        return FittedChunk(engine, lengths, self.tpot, self.least)


class FittedChunk(Strategy):
    """Mixed steps with the largest token budget that keeps the target."""

    mode: Mode = "mb"

    def __init__(self, engine: EngineFacts, lengths: Lengths, tpot_s: float, least: int) -> None:
        super().__init__(engine, lengths)
        self._tpot_s, self._least = tpot_s, least
        self._costs = engine.calibration.costs
        self._whole = StepChoice("mixed", "mb")

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """A mixed step with the budget that keeps the target."""
        if not view.decodes or not (view.waiting or view.prefilling):
            return self._whole
        decodes = self.decode_tokens(view.decoding)
        chunk = self._fitting(view.decoding, self.engine.max_num_batched_tokens - decodes)
        return StepChoice("mixed", "mb", token_budget=decodes + max(chunk, self._least))

    def _fitting(self, seqs: int, most: int) -> int:
        """Most prompt tokens with which a step with ``seqs`` decodes keeps the target, by bisection; 0 if none."""
        context = self.lengths.mu_l + self.lengths.mu_o / 2.0
        step_s = self._tpot_s * self.lengths.drafts.tokens_per_step
        low, high = 0, max(most, 0) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._costs.mixed_s(middle, seqs, context) <= step_s:
                low = middle
            else:
                high = middle
        return low


POLICY = SloChunk
