"""Targets before throughput: how many sequences a TPOT target allows, and which waiting requests still can make TTFT.

The paper names service-level-aware switching as future work (section 5); this is one way to do it. Under overload first
come, first served makes every request wait longer than any target, so all of them miss it. Serving those first that can
still meet it gives most of them their target; the others are served when there is room, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.costs import StepCosts

TPOT_SHARE = 0.85  # of the target is planned for: single requests scatter around the mean
TTFT_SHARE = 0.6  # of the target may pass before a waiting request makes a refill due
PRIOR_ANSWERS = 4.0  # what is assumed of the length of answers weighs like so many ended ones


class AnswerLength:
    """Mean tokens of an answer: tokens made over answers ended, both fading by halves every ``window`` answers.

    The maximum-likelihood mean under a constant hazard with censored observations. It needs no ended answer to learn
    that answers are long: what still runs counts at once, so the first seconds of a burst are not planned by a guess.
    """

    def __init__(self, prior_tokens: float, window: int) -> None:
        self._tokens, self._ended, self._window = PRIOR_ANSWERS * prior_tokens, PRIOR_ANSWERS, window

    @property
    def mean(self) -> float:
        """Tokens."""
        return self._tokens / self._ended

    def decoded(self, seqs: int) -> None:
        """A step makes one token for each of that many sequences."""
        self._tokens += seqs

    def ended(self) -> None:
        """An answer ended by itself."""
        self._ended += 1.0
        if self._ended > 2 * self._window:
            self._tokens, self._ended = self._tokens / 2, self._ended / 2


@dataclass(frozen=True)
class ServiceLevel:
    """Targets in seconds; None: no such target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def orders_queue(self) -> bool:
        """Whether waiting requests are told apart by their age."""
        return self.ttft_s is not None

    def seqs_allowed(
        self, costs: StepCosts, per_token_s: float, *, mu_l: float, mu_new: float, mu_o: float, at_most: int
    ) -> int:
        """Largest batch whose time per output token, its share of prefills included, stays within the target.

        Mean tokens: ``mu_l`` of a prompt, ``mu_new`` of it to compute, ``mu_o`` of an answer. ``at_most`` when there
        is no target, or when not even one sequence could meet it.
        """
        if self.tpot_s is None:
            return at_most
        context = mu_l + mu_o / 2
        prompt_s_per_token = mu_new * per_token_s / mu_o

        def meets(seqs: int) -> bool:
            assert self.tpot_s is not None
            return costs.decode_s(seqs, context) + seqs * prompt_s_per_token <= TPOT_SHARE * self.tpot_s

        if meets(at_most) or not meets(1):
            return at_most
        low, high = 1, at_most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if meets(middle) else (low, middle)
        return low

    def expire_before_s(self, now_s: float, prefill_s: float) -> float | None:
        """Requests that came before this moment cannot get their first token in time any more."""
        return None if self.ttft_s is None else now_s + prefill_s - self.ttft_s

    def refill_due(self, oldest_wait_s: float) -> bool:
        """Whether the oldest request that can still make it should not wait longer."""
        return self.ttft_s is not None and oldest_wait_s >= TTFT_SHARE * self.ttft_s
