"""Refill when one more decode step would cost more than refilling now, in whichever way is cheaper.

A cycle of exclusive batching pays a fixed overhead for its refill and one, ``alpha_d``, for each decode step; the more
sequences share a step, the less each of its tokens pays. What is paid per token is least when the refill comes as soon
as the next step's overhead per token reaches the average of the cycle so far (the marginal value theorem of optimal
foraging, Charnov 1976)::

    alpha_d / n  >=  (refill overhead + alpha_d * steps) / tokens decoded in the cycle

With a constant hazard the fluid limit of this rule is Prop. 3.1's equation for theta0. It needs no hazard: the batch's
own decline is watched instead of predicted, so it holds for any distribution of lengths and at once after a shift.

The refill's overhead is what it costs beyond its prompt tokens' share of a large prefill. Exclusive: the prefill step
alone. Mixed: what the step beside the decodes takes longer. Measured costs at the current batch and context decide;
where mixing costs less than nothing (the prefill hides behind decodes bound by memory), the refill comes at once, as in
vLLM v1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_eb.costs import StepCosts

Way = Literal["decode", "prefill", "mixed"]

# Where a prefill's cost is taken to be proportional to its tokens.
LARGE_TOKENS, HUGE_TOKENS = 4096, 8192


@dataclass(frozen=True)
class Choice:
    """What the next step should be; overheads in seconds, None where they were not needed."""

    way: Way
    overhead_exclusive_s: float | None = None
    overhead_mixed_s: float | None = None


class MarginalRefill:
    """Watches one cycle at a time: decode steps since the last refill and the tokens they made."""

    def __init__(self, costs: StepCosts, alpha_d: float, *, may_mix: bool) -> None:
        self._costs, self._alpha_d, self._may_mix = costs, alpha_d, may_mix
        self.per_token_s = (costs.prefill_s(HUGE_TOKENS) - costs.prefill_s(LARGE_TOKENS)) / (HUGE_TOKENS - LARGE_TOKENS)
        self._steps = self._tokens = 0

    def decoded(self, seqs: int) -> None:
        """A decode step of that many sequences is about to run."""
        self._steps += 1
        self._tokens += seqs

    def refilled(self) -> None:
        """A refill begins: a new cycle."""
        self._steps = self._tokens = 0

    def choose(self, *, decoding: int, context_tokens: float, refill_tokens: float, must: bool) -> Choice:
        """The next step, with ``refill_tokens`` of prompts ready to go in (0: none).

        ``must``: half-computed prompts wait to be finished, so only the way is open, not the moment.
        """
        if refill_tokens <= 0:
            return Choice("decode")
        if decoding == 0:
            return Choice("prefill")
        exclusive, mixed = self._overheads(decoding, context_tokens, refill_tokens)
        way: Way = "mixed" if self._may_mix and mixed < exclusive else "prefill"
        overhead = min(exclusive, mixed) if self._may_mix else exclusive
        due = self._tokens * self._alpha_d >= decoding * (overhead + self._alpha_d * self._steps)
        return Choice(way if due or must else "decode", exclusive, mixed)

    def _overheads(self, decoding: int, context_tokens: float, refill_tokens: float) -> tuple[float, float]:
        costs, share = self._costs, self.per_token_s * refill_tokens
        exclusive = costs.prefill_s(refill_tokens) - share
        beside = costs.mixed_s(refill_tokens, decoding, context_tokens) - costs.decode_s(decoding, context_tokens)
        return max(exclusive, 0.0), beside - share
