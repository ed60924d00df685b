"""How many more requests fit into the KV cache, given what running ones will still need (policy ``marginal``).

Too many admitted requests are preempted later and computed again; too few leave the batch small. Two bounds avoid
preemptions: a reserve per running sequence, raised by observed preemptions, and the batch that fits when responses are
half done. If responses are long and decode steps have a high fixed cost, a sequence pays for its second prefill long
before it is preempted: then only the memory for that time is left free. If a first token would be late while running
responses can pause within their TPOT target, less is left free.
"""

from __future__ import annotations

import math

from vllm_eb.costs import StepCosts

# Shares of a mean response per running sequence. The second is divided by their number, so that a batch of ten recovers
# in as many of its own steps as one of a thousand.
RESERVE_INCREASE, RESERVE_DECREASE = 0.03, 0.06

# A sequence must pay for its second prefill this many times: later admissions shorten the stay of earlier ones. Between
# 1 and 10 throughput differs by less than 1 % (NuminaMath, Qwen3-30B-A3B).
PAYBACK_FACTOR = 3.0
SHORTEST_STAY = 0.02  # share of a mean response: a request that would be preempted sooner is not admitted, even if late
GROWTH_RANGE = 1.25  # the cost of one more sequence is measured up to a batch larger by this factor


def payback_steps(
    costs: StepCosts, per_token_s: float, *, active: int, context_tokens: float, prompt_tokens: float
) -> float:
    """Decode steps after which one more sequence has paid for computing its prompt and its output so far again.

    Each of its tokens costs the time it adds to a step, plus ``per_token_s`` when it is recomputed; without the
    sequence, the batch of ``active`` sequences would make its tokens at the batch's mean cost. Infinite if that is not
    more.
    """
    decode_s = costs.decode_at(context_tokens)
    alone_s = decode_s(active)
    added_s = (decode_s(GROWTH_RANGE * active) - alone_s) / ((GROWTH_RANGE - 1.0) * active)
    saved_s = alone_s / active - added_s - per_token_s
    return per_token_s * prompt_tokens / saved_s if saved_s > 0.0 else math.inf


def prompts_that_stay(steps: float, *, active: int, free_tokens: int, prompt_tokens: float) -> float:
    """Number of mean prompts that can stay for ``steps`` decode steps before the KV cache is full."""
    if not math.isfinite(steps):
        return 0.0
    return max(free_tokens - steps * active, 0.0) / (prompt_tokens + steps)


class KvRoom:
    """Learns from preemptions how much KV to leave free for the growth of running sequences.

    How many more requests fit into the KV cache, given what running ones will still need (policy ``marginal``).

    Too many admitted requests are preempted later and computed again; too few leave the batch small. Two bounds avoid
    preemptions: a reserve per running sequence, raised by observed preemptions, and the batch that fits when responses
    are half done. If responses are long and decode steps have a high fixed cost, a sequence pays for its second prefill
    long before it is preempted: then only the memory for that time is left free. If a first token would be late while
    running responses can pause within their TPOT target, less is left free.
    """

    def __init__(self) -> None:
        self._reserve_share = 0.0
        self._admitted_since_raise = False
        self._active = 1

    def admitted(self) -> None:
        """Record an admission."""
        self._admitted_since_raise = True

    def ended(self) -> None:
        """Record a completion: the reserve shrinks."""
        self._reserve_share = max(self._reserve_share - RESERVE_DECREASE / self._active, 0.0)

    def observe(self, active: int, preempted: int) -> None:
        """Record ``active`` running sequences and ``preempted`` ones since the last call.

        Sequences that grow in step are preempted over many steps because of one earlier admission: that raises the
        reserve once.
        """
        self._active = max(active, 1)
        if preempted and self._admitted_since_raise:
            self._reserve_share = min(self._reserve_share + RESERVE_INCREASE, 1.0)
            self._admitted_since_raise = False

    def prompts(
        self,
        *,
        active: int,
        free_tokens: int,
        context_tokens: float,
        prompt_tokens: float,
        answer_tokens: float,
        running_tokens: float,
    ) -> float:
        """Number of mean prompts that fit without preemptions: now, with the reserve, and when responses are half done.

        The second bound keeps a young batch, whose responses all still have to grow, from being filled with as many
        requests as fit now: what running responses, of ``running_tokens`` tokens so far together, lack to half a mean
        response each is left free, and a new request takes that half beside its prompt. With a steady number of
        sequences their mean age is at least half a response (renewal theory), so the bound has no effect there. Ages
        are counted, since the mean of the last prompts is not that of the running ones: where the shortest is admitted
        first, the last of a refill are its longest. Shared prefixes make contexts (``context_tokens`` per sequence)
        shorter than prompts.
        """
        reserve_tokens = self._reserve_share * answer_tokens
        fit_now = max(free_tokens - reserve_tokens * active, 0.0) / (prompt_tokens + reserve_tokens)
        if not active:
            return fit_now
        lacking_tokens = active * answer_tokens / 2 - running_tokens
        new_tokens = min(prompt_tokens, context_tokens) + answer_tokens / 2
        return min(fit_now, max((free_tokens - lacking_tokens) / new_tokens, 0.0))
