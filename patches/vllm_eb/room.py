"""How many more requests the KV cache has room for, with what the running ones will still need (marginal policy).

Too many let in are preempted later and computed again; too few leave the batch small. Two bounds, both from what was
seen: a reserve for each running sequence that preemptions raise, and the batch that fits when answers are half done.
"""

from __future__ import annotations

# Shares of a mean answer for each running sequence. The second is divided by their number, so that a batch of ten
# recovers as fast, in its own time, as one of a thousand.
RESERVE_INCREASE, RESERVE_DECREASE = 0.03, 0.06


class KvRoom:
    """Learns from preemptions how much KV to leave free for running sequences to grow into."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._reserve_share = 0.0
        self._admitted_since_raise = False
        self._active = 1

    def admitted(self) -> None:
        """Someone was let in."""
        self._admitted_since_raise = True

    def ended(self) -> None:
        """An answer ended by itself: the reserve shrinks."""
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
        """Mean prompts that there is room for: now, with the reserve, and at half the answers.

        The second keeps a young batch, whose answers all still have to grow, from being filled with as many as fit
        today. Sequences are at least half an answer old on average when their number is steady (renewal theory), so it
        never binds there. Prefixes held in common make contexts (``context_tokens`` a sequence) smaller than prompts.
        """
        reserve_tokens = self._reserve_share * answer_tokens
        fit_now = max(free_tokens - reserve_tokens * active, 0.0) / (prompt_tokens + reserve_tokens)
        if not active:
            return fit_now
        grown_tokens = min(prompt_tokens, context_tokens) + answer_tokens / 2
        return min(fit_now, max(self._capacity_tokens / grown_tokens - active, 0.0))
