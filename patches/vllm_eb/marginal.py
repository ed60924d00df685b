"""Refill when one more decode step would cost more than refilling now, in whichever way is cheaper.

A decode step costs ``D(n)``, less per token the more sequences share it, so waiting with a refill wastes something. A
refill wastes its fixed cost ``P``, what it costs beyond its prompts' share of a large prefill. The sum of the two is
least when the refill comes as soon as as much has been wasted by waiting as it will cost. Waiting is measured twice:

- against the batch of each step so far: the tokens since the last refill at today's price, ``D(n)/n``, less what they
  cost. The moment is where the next step would cost more per token than the cycle so far (the marginal value theorem of
  optimal foraging, Charnov 1976), which is best for any way in which a batch declines, if the next ones do the same.
- against the ``w`` requests that were left out: in each step, what their tokens cost at that step's price less what
  they would have added, ``w D(n)/n - (D(n+w) - D(n))``. The moment is that of the economic order quantity (Harris
  1913). It sees arrivals: a batch that grows, or stays, does not decline, and requests still wait.

With linear costs and a constant hazard, ``n = N exp(-p0 s)`` and ``w = N - n`` after s steps, both come to ``alpha_d
((e^(p0 s) - 1)/p0 - s)`` and the moment is theta0 of Prop. 3.1 exactly. Elsewhere the larger one counts. No hazard is
needed: completions and arrivals are counted instead of predicted, so the rule holds for any lengths, and at once after
a shift.

Exclusive, P is the prefill step alone; mixed, what the step beside the decodes takes longer. Which way is cheaper
depends on how many slots a refill fills, and each way has its own best number: exclusive refills pay in bulk, mixed
ones at once. So as long as requests queue, the ways are compared at their best (:meth:`MarginalRefill._plan`), by
measured costs at the current batch and context; where the queue is what limits a refill, at what is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vllm_eb.costs import StepCosts

Way = Literal["decode", "prefill", "mixed"]

# Where a prefill's cost is taken to be proportional to its tokens.
LARGE_TOKENS, HUGE_TOKENS = 4096, 8192
PLAN_EVERY = 16  # choices between two comparisons of the ways at their best
MOST_REFILLED = 0.8  # of the batch, in that comparison


@dataclass(frozen=True)
class Refill:
    """What could go in now.

    ``seqs`` requests with ``prompt_tokens`` to compute each, beside ``half_computed`` ones that lack as many.
    ``queued``: more wait than can go in; ``hazard`` says how many answers end, per sequence and step.
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


@dataclass(frozen=True)
class Choice:
    """What the next step should be; overheads in seconds, None where they were not needed."""

    way: Way
    overhead_exclusive_s: float | None = None
    overhead_mixed_s: float | None = None


class MarginalRefill:
    """Watches one cycle at a time: its decode steps since the last refill, and what they have wasted."""

    def __init__(self, costs: StepCosts, *, may_mix: bool) -> None:
        self._costs, self._may_mix = costs, may_mix
        self.per_token_s = (costs.prefill_s(HUGE_TOKENS) - costs.prefill_s(LARGE_TOKENS)) / (HUGE_TOKENS - LARGE_TOKENS)
        self._left_out_s = self._decode_s = 0.0
        self._tokens = 0
        # One context for the whole cycle: that contexts grow costs the same whenever the refill comes.
        self._context_tokens: float | None = None
        self._choices = 0
        self._planned: Way = "prefill"

    def decoded(self, seqs: int, context_tokens: float, left_out: float) -> None:
        """A step that decodes ``seqs`` sequences is about to run, without ``left_out`` requests that could be in it."""
        if self._context_tokens is None:
            self._context_tokens = context_tokens
        self._tokens += seqs
        self._decode_s += self._costs.decode_s(seqs, self._context_tokens)
        if left_out > 0 and seqs > 0:
            alone_s = self._costs.decode_s(seqs, context_tokens)
            together_s = self._costs.decode_s(seqs + left_out, context_tokens)
            self._left_out_s += max(alone_s * (1 + left_out / seqs) - together_s, 0.0)

    def refilled(self) -> None:
        """A refill begins: a new cycle."""
        self._left_out_s = self._decode_s = 0.0
        self._tokens, self._context_tokens = 0, None

    def choose(self, *, decoding: int, context_tokens: float, refill: Refill, must: bool) -> Choice:
        """The next step. ``must``: the refill is due for other reasons, so only the way is open, not the moment."""
        if refill.tokens <= 0:
            return Choice("decode")
        if decoding == 0:
            return Choice("prefill")
        exclusive = self._exclusive_s(refill.tokens)
        mixed = self._mixed_s(refill.tokens, decoding, context_tokens)
        way = self._way(decoding, context_tokens, refill, mixed < exclusive)
        overhead = mixed if way == "mixed" else exclusive
        fixed_s = overhead - self._in_bulk_s(way, overhead, decoding, context_tokens, refill)
        due = must or self._wasted_s(decoding, context_tokens) >= fixed_s
        return Choice(way if due else "decode", exclusive, mixed)

    def _wasted_s(self, decoding: int, context_tokens: float) -> float:
        """What waiting has wasted since the last refill, seen from the batch before and from those left out."""
        context = context_tokens if self._context_tokens is None else self._context_tokens
        declined_s = self._tokens * self._costs.decode_s(decoding, context) / decoding - self._decode_s
        return max(declined_s, self._left_out_s)

    def _in_bulk_s(self, way: Way, overhead_s: float, decoding: int, context_tokens: float, refill: Refill) -> float:
        """The part of the overhead that grows with the refill, by what one more prompt would add: no fixed cost."""
        tokens = refill.tokens + refill.prompt_tokens
        grown_s = self._mixed_s(tokens, decoding, context_tokens) if way == "mixed" else self._exclusive_s(tokens)
        return (grown_s - overhead_s) * refill.tokens / refill.prompt_tokens

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

        def per_token_s(overhead_s: float, seqs: int) -> float:
            # A batch that declines from N to N-k under a constant hazard h takes ln(N/(N-k))/h steps, makes k/h tokens.
            steps = math.log(batch / (batch - seqs)) / refill.hazard
            tokens = seqs / refill.hazard
            return (overhead_s + steps * self._costs.decode_s(tokens / steps, context_tokens)) / tokens

        best: dict[Way, float] = {"prefill": math.inf, "mixed": math.inf}
        seqs = 1
        while seqs <= max(MOST_REFILLED * batch, 1) and seqs < batch:
            tokens = seqs * refill.prompt_tokens
            best["prefill"] = min(best["prefill"], per_token_s(self._exclusive_s(tokens), seqs))
            best["mixed"] = min(best["mixed"], per_token_s(self._mixed_s(tokens, batch - seqs, context_tokens), seqs))
            seqs *= 2
        return "mixed" if best["mixed"] < best["prefill"] else "prefill"

    def _exclusive_s(self, tokens: float) -> float:
        return self._costs.prefill_s(tokens) - self.per_token_s * tokens

    def _mixed_s(self, tokens: float, decoding: float, context_tokens: float) -> float:
        beside = self._costs.mixed_s(tokens, decoding, context_tokens) - self._costs.decode_s(decoding, context_tokens)
        return beside - self.per_token_s * tokens
