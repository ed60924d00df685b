"""Refill rule of the policy ``marginal``: refill when one more decode step would cost more than refilling now.

A decode step costs ``D(n)``, less per token the more sequences share it, so delaying a refill wastes time. A refill
wastes its overhead ``P``: its cost beyond its prompts' share of a large prefill. The sum is minimal if the refill
begins when waiting has wasted as much as the refill will. The waste of waiting is measured in two ways:

- against the batch of each step so far: the tokens since the last refill at the current price, ``D(n)/n``, minus their
  actual cost. The refill is due when the next step would cost more per token than the cycle so far (the marginal value
  theorem of optimal foraging, Charnov 1976), which is optimal for any decline of the batch, if later cycles decline in
  the same way;
- against the ``w`` requests left out: per step, the cost of their tokens at that step's price minus what they would
  have added, ``w D(n)/n - (D(n+w) - D(n))``. This is the economic order quantity (Harris 1913). It reacts to arrivals:
  a batch that grows or stays does not decline, although requests wait.

With linear costs and a constant hazard, ``n = N exp(-p0 s)`` and ``w = N - n`` after s steps, both give ``alpha_d
((e^(p0 s) - 1)/p0 - s)`` and exactly theta0 of Prop. 3.1. Otherwise the larger one is used. No hazard is needed:
completions and arrivals are counted instead of predicted, so the rule holds for any length distribution and reacts to a
shift at once.

For an exclusive refill P is the overhead of the prefill step; for a mixed one it is what the prompts add to the decode
step. Which is cheaper depends on the number of slots refilled, and each has its own best number: exclusive refills are
best in bulk, mixed ones one at a time. While requests queue, both are compared at their best
(:meth:`MarginalRefill._plan`), with measured costs at the current batch and context; if the queue limits the refill,
with the requests that wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from vllm_eb.costs import StepCosts

Way = Literal["decode", "prefill", "mixed"]

# From this size on the cost of a prefill is taken as proportional to its tokens.
LARGE_TOKENS, HUGE_TOKENS = 4096, 8192
PLAN_EVERY = 16  # choices between two comparisons of both ways at their best
MAX_REFILLED_SHARE = 0.8  # share of the batch, in that comparison


class Refill(NamedTuple):
    """A possible refill now.

    ``seqs`` requests with ``prompt_tokens`` to compute per request, and ``half_computed`` ones with as many left.
    ``queued``: more requests wait than fit. ``hazard``: probability per sequence and step that a response ends.
    """

    seqs: float
    prompt_tokens: float
    half_computed: int = 0
    queued: bool = False
    hazard: float = 0.0

    @property
    def tokens(self) -> float:
        """Prompt tokens of a refill now."""
        return min((self.seqs + self.half_computed) * self.prompt_tokens, HUGE_TOKENS)


class Choice(NamedTuple):
    """The chosen step; overheads in seconds, None if they were not needed."""

    way: Way
    overhead_exclusive_s: float | None = None
    overhead_mixed_s: float | None = None


class MarginalRefill:
    """State of one cycle: the decode steps since the last refill and the waste of waiting."""

    def __init__(self, costs: StepCosts, *, may_mix: bool) -> None:
        self._costs, self._may_mix = costs, may_mix
        self.per_token_s = (costs.prefill_s(HUGE_TOKENS) - costs.prefill_s(LARGE_TOKENS)) / (HUGE_TOKENS - LARGE_TOKENS)
        self._left_out_s = self._decode_s = 0.0
        self._tokens = 0
        # Times of decode steps by their sequences, at one context for the whole cycle: growing contexts cost the same
        # whenever the refill occurs. None until the cycle's first decode step.
        self._cycle_decode_s: Callable[[float], float] | None = None
        self._context_tokens = 0.0  # of the next function, which most steps need more than once
        self._decode_s_here = costs.decode_at(0.0)
        self._choices = 0
        self._planned: Way = "prefill"

    def decoded(self, seqs: int, context_tokens: float, left_out: float) -> None:
        """Record that a step with ``seqs`` decodes will run without ``left_out`` requests that could be in it."""
        if self._cycle_decode_s is None:
            self._cycle_decode_s = self._decode_at(context_tokens)
        self._tokens += seqs
        self._decode_s += self._cycle_decode_s(seqs)
        if left_out > 0 and seqs > 0:
            decode_s = self._decode_at(context_tokens)
            alone_s, together_s = decode_s(seqs), decode_s(seqs + left_out)
            self._left_out_s += max(alone_s * (1 + left_out / seqs) - together_s, 0.0)

    def refilled(self) -> None:
        """Record that a refill begins: start a new cycle."""
        self._left_out_s = self._decode_s = 0.0
        self._tokens, self._cycle_decode_s = 0, None

    def choose(
        self, *, decoding: int, context_tokens: float, refill: Refill, must: bool, pass_number: int = 0
    ) -> Choice:
        """Choose the next step. ``must``: the refill is due for other reasons; only choose exclusive or mixed.

        ``pass_number`` is for ranks in lockstep (:mod:`vllm_eb.lockstep`), which this rule does not look at.
        """
        tokens = refill.tokens
        if tokens <= 0:
            return Choice("decode")
        if decoding == 0:
            return Choice("prefill")
        exclusive = self._exclusive_s(tokens)
        alone_s = self._decode_at(context_tokens)(decoding)
        mixed = self._mixed_s(tokens, decoding, context_tokens, alone_s)
        way = self._way(decoding, context_tokens, refill, mixed < exclusive)
        overhead = mixed if way == "mixed" else exclusive
        if must:
            return Choice(way, exclusive, mixed)
        # Part of the overhead grows with the refill: the cost of one more prompt tells how much. A larger refill would
        # not save it, so only the rest counts.
        more = tokens + refill.prompt_tokens
        grown = self._mixed_s(more, decoding, context_tokens, alone_s) if way == "mixed" else self._exclusive_s(more)
        fixed_s = overhead - (grown - overhead) * tokens / refill.prompt_tokens
        return Choice(way if self._wasted_s(decoding) >= fixed_s else "decode", exclusive, mixed)

    def cheaper_beside(self, tokens: float, decoding: int, batch: int, context_tokens: float) -> bool:
        """Whether a step of ``tokens`` prompt tokens makes tokens of ``decoding`` sequences beside them for less, per
        token, than decode steps of ``batch`` sequences after the refill will."""
        decode_s = self._decode_at(context_tokens)
        beside_s = self._costs.mixed_s(tokens, decoding, context_tokens) - self._costs.prefill_s(tokens)
        return beside_s / decoding < decode_s(batch) / batch

    def _wasted_s(self, decoding: int) -> float:
        """Time (s) wasted by waiting since the last refill, the larger of the two measures."""
        if self._cycle_decode_s is None:
            return max(0.0, self._left_out_s)
        return max(self._tokens * self._cycle_decode_s(decoding) / decoding - self._decode_s, self._left_out_s)

    def _way(self, decoding: int, context_tokens: float, refill: Refill, mixed_is_cheaper_now: bool) -> Way:
        if not self._may_mix:
            return "prefill"
        if not refill.queued or refill.hazard <= 0.0:
            return "mixed" if mixed_is_cheaper_now else "prefill"
        if self._choices % PLAN_EVERY == 0:
            self._planned = self._plan(decoding + refill.seqs, context_tokens, refill)
        self._choices += 1
        return self._planned

    def _plan(self, batch: float, context_tokens: float, refill: Refill) -> Way:
        """The way whose best cycle costs least per token, with ``batch`` sequences after each refill."""

        decode_s = self._decode_at(context_tokens)

        def per_token_s(overhead_s: float, seqs: int) -> float:
            # With a constant hazard h, a batch declines from N to N-k in ln(N/(N-k))/h steps and makes k/h tokens.
            steps = math.log(batch / (batch - seqs)) / refill.hazard
            tokens = seqs / refill.hazard
            return (overhead_s + steps * decode_s(tokens / steps)) / tokens

        best: dict[Way, float] = {"prefill": math.inf, "mixed": math.inf}
        seqs = 1
        while seqs <= max(MAX_REFILLED_SHARE * batch, 1) and seqs < batch:
            tokens = seqs * refill.prompt_tokens
            best["prefill"] = min(best["prefill"], per_token_s(self._exclusive_s(tokens), seqs))
            mixed_s = self._mixed_s(tokens, batch - seqs, context_tokens, decode_s(batch - seqs))
            best["mixed"] = min(best["mixed"], per_token_s(mixed_s, seqs))
            seqs *= 2
        return "mixed" if best["mixed"] < best["prefill"] else "prefill"

    def _decode_at(self, context_tokens: float) -> Callable[[float], float]:
        if context_tokens != self._context_tokens:
            self._context_tokens, self._decode_s_here = context_tokens, self._costs.decode_at(context_tokens)
        return self._decode_s_here

    def _exclusive_s(self, tokens: float) -> float:
        return self._costs.prefill_s(tokens) - self.per_token_s * tokens

    def _mixed_s(self, tokens: float, decoding: float, context_tokens: float, alone_s: float) -> float:
        """Overhead of prompts in a decode step that takes ``alone_s`` without them."""
        return self._costs.mixed_s(tokens, decoding, context_tokens) - alone_s - self.per_token_s * tokens
