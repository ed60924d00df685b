"""How many more requests the KV cache has room for, with what the running ones will still need (marginal policy).

Too many let in are preempted later and computed again; too few leave the batch small. Two bounds, both from what was
seen, keep answers from being preempted at all: a reserve for each running sequence that preemptions raise, and the
batch that fits when answers are half done. Where answers are long and decode steps have a high fixed cost, a
sequence pays for its second prefill long before it is preempted: there only so much is left free as it needs for that.
And where a first token would come too late, while answers can pause and keep their time per token, less is left free.
"""

from __future__ import annotations

import math

from vllm_eb.costs import StepCosts

# Shares of a mean answer for each running sequence. The second is divided by their number, so that a batch of ten
# recovers as fast, in its own time, as one of a thousand.
RESERVE_INCREASE, RESERVE_DECREASE = 0.03, 0.06

# How many times over a sequence has to pay for its second prefill: those let in later shorten the stay of those let in
# before. Between 1 and 10 throughput differs by less than 1 % (NuminaMath, Qwen3-30B-A3B).
PAID_OVER = 3.0
SHORTEST_STAY = 0.02  # of a mean answer: a request that would be preempted sooner is not admitted, even if it is late
STEEPER = 1.25  # what one more sequence costs is measured up to a batch this much larger


def paying_steps(
    costs: StepCosts, per_token_s: float, *, active: int, context_tokens: float, prompt_tokens: float
) -> float:
    """Decode steps after which one more sequence has paid for computing its prompt and its answer so far once more.

    Each of its tokens costs what a step gets longer by it, and ``per_token_s`` when it is computed again; without it
    the batch of ``active`` sequences would have to make them at its mean cost. Infinite where that is no more.
    """
    alone_s = costs.decode_s(active, context_tokens)
    added_s = (costs.decode_s(STEEPER * active, context_tokens) - alone_s) / ((STEEPER - 1.0) * active)
    saved_s = alone_s / active - added_s - per_token_s
    return per_token_s * prompt_tokens / saved_s if saved_s > 0.0 else math.inf


def prompts_that_stay(steps: float, *, active: int, free_tokens: int, prompt_tokens: float) -> float:
    """Mean prompts that can stay for so many decode ``steps`` before KV runs out."""
    if not math.isfinite(steps):
        return 0.0
    return max(free_tokens - steps * active, 0.0) / (prompt_tokens + steps)


class KvRoom:
    """Learns from preemptions how much KV to leave free for running sequences to grow into."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._reserve_share = 0.0
        self._admitted_since_raise = False
        self._active = 1

    def admitted(self) -> None:
        """A request was admitted."""
        self._admitted_since_raise = True

    def ended(self) -> None:
        """An answer ended: the reserve shrinks."""
        self._reserve_share = max(self._reserve_share - RESERVE_DECREASE / self._active, 0.0)

    def observe(self, active: int, preempted: int) -> None:
        """``active`` sequences run, ``preempted`` were put out since the last call.

        A wave that grows in step is preempted for many steps by what was let in before: it raises the reserve once.
        """
        self._active = max(active, 1)
        if preempted and self._admitted_since_raise:
            self._reserve_share = min(self._reserve_share + RESERVE_INCREASE, 1.0)
            self._admitted_since_raise = False

    def prompts(
        self, *, active: int, free_tokens: int, context_tokens: float, prompt_tokens: float, answer_tokens: float
    ) -> float:
        """Mean prompts that there is room for without preemptions: now, with the reserve, and at half the answers.

        The second keeps a young batch, whose answers all still have to grow, from being filled with as many as fit
        today. Sequences are at least half an answer old on average when their number is steady (renewal theory), so it
        never binds there. Prefixes held in common make contexts (``context_tokens`` per sequence) smaller than prompts.
        """
        reserve_tokens = self._reserve_share * answer_tokens
        fit_now = max(free_tokens - reserve_tokens * active, 0.0) / (prompt_tokens + reserve_tokens)
        if not active:
            return fit_now
        grown_tokens = min(prompt_tokens, context_tokens) + answer_tokens / 2
        return min(fit_now, max(self._capacity_tokens / grown_tokens - active, 0.0))
