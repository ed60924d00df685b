"""Targets before throughput: how many sequences a TPOT target allows, and which waiting requests still can make TTFT.

The paper names service-level-aware switching as future work (section 5); this is one way to do it. Under overload first
come, first served makes every request wait longer than any target, so all of them miss it. Serving those first that can
still meet it gives most of them their target; the others are served when there is room, in their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_eb.costs import StepCosts

TPOT_SHARE = 0.85  # of the target is planned for: single requests scatter around the mean
TTFT_SHARE = 0.6  # of the target may pass before a waiting request makes a refill due
PAUSE_SHARE = 0.7  # of the TPOT target is what tokens and pauses together may take where answers are to be preempted
PRIOR_ANSWERS = 4.0  # what is assumed of the length of answers weighs like so many ended ones
DEBT_PAID = 0.95  # of the target is what a token may take
# Shares of a mean answer's time at the target: when prompts have to wait, when they may come again, what is given up.
DEBT_HIGH, DEBT_LOW, DEBT_FORGOTTEN = 0.025, 0.0125, 0.25


class AnswerLength:
    """Mean tokens of an answer: tokens made over answers ended, the longer of a long and a short memory.

    The maximum-likelihood mean under a constant hazard with censored observations. It needs no ended answer to learn
    that answers are long: what still runs counts at once, so the first seconds of a burst are not planned by a guess.
    The short memory (a quarter) sees after a shift to longer answers that they do not end. Answers taken for too long
    leave a few slots empty, answers taken for too short are preempted and computed again: so the longer one counts.
    """

    def __init__(self, prior_tokens: float, window: int) -> None:
        self._memories = (_FadingMean(prior_tokens, window), _FadingMean(prior_tokens, max(window // 4, 1)))

    @property
    def mean(self) -> float:
        """Tokens."""
        return max(memory.tokens / memory.ended for memory in self._memories)

    def decoded(self, seqs: int) -> None:
        """A step makes one token for each of that many sequences."""
        for memory in self._memories:
            memory.tokens += seqs

    def ended(self) -> None:
        """An answer ended."""
        for memory in self._memories:
            memory.end()


class _FadingMean:
    """Tokens and ended answers, both halved whenever there are twice ``window`` answers."""

    def __init__(self, prior_tokens: float, window: int) -> None:
        self.tokens, self.ended, self._window = PRIOR_ANSWERS * prior_tokens, PRIOR_ANSWERS, window

    def end(self) -> None:
        self.ended += 1.0
        if self.ended > 2 * self._window:
            self.tokens, self.ended = self.tokens / 2, self.ended / 2


@dataclass(frozen=True)
class ServiceLevel:
    """Targets in seconds; None: no such target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def has_targets(self) -> bool:
        """Whether there is a target."""
        return self.ttft_s is not None or self.tpot_s is not None

    @property
    def orders_queue(self) -> bool:
        """Whether the queue is ordered by the age of its requests."""
        return self.ttft_s is not None

    def seqs_allowed(
        self, costs: StepCosts, per_token_s: float, *, mu_l: float, mu_new: float, mu_o: float, at_most: int
    ) -> int:
        """Largest batch whose time per output token, its share of prefills included, stays within the target.

        Mean tokens: ``mu_l`` of a prompt, ``mu_new`` of it to compute, ``mu_o`` of an answer. ``at_most`` when there
        is no target; 0 when not even one sequence could meet it.
        """
        if self.tpot_s is None:
            return at_most

        def meets(seqs: int) -> bool:
            assert self.tpot_s is not None
            token_s = _token_s(costs, per_token_s, seqs, mu_l=mu_l, mu_new=mu_new, mu_o=mu_o)
            return token_s <= TPOT_SHARE * self.tpot_s

        if meets(at_most):
            return at_most
        low, high = 0, at_most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if meets(middle) else (low, middle)
        return low

    def may_pause(
        self, costs: StepCosts, per_token_s: float, seqs: float, *, mu_l: float, mu_new: float, mu_o: float
    ) -> float:
        """Sequences for each of ``seqs`` that may be preempted and still meet the TPOT target; lengths as above.

        While the n others end and grow at the same rate, what gets free are their prompts, n mu_l tokens in the time
        of a mean answer. p preempted sequences, each half an answer old, are thus all back after p (mu_l + mu_o / 2) /
        (n mu_l) of that time, which is to be what their tokens leave of the target. Infinite without a target.
        """
        token_s = _token_s(costs, per_token_s, seqs, mu_l=mu_l, mu_new=mu_new, mu_o=mu_o)
        if self.tpot_s is None or token_s == 0.0:
            return math.inf
        return max(PAUSE_SHARE * self.tpot_s / token_s - 1.0, 0.0) * mu_l / (mu_l + mu_o / 2)

    def refill_due(self, oldest_wait_s: float) -> bool:
        """Whether the oldest request that can still make it should not wait longer."""
        return self.ttft_s is not None and oldest_wait_s >= TTFT_SHARE * self.ttft_s


def _token_s(costs: StepCosts, per_token_s: float, seqs: float, *, mu_l: float, mu_new: float, mu_o: float) -> float:
    """Time per output token of ``seqs`` sequences, their share of prefills included."""
    return costs.decode_s(seqs, mu_l + mu_o / 2) + seqs * mu_new * per_token_s / mu_o


class TokenDebt:
    """How far running answers are behind their TPOT target: time adds to it, every token pays some of it back.

    The batch that :meth:`ServiceLevel.seqs_allowed` finds meets the target on average; this keeps prompts from coming
    all at once, in a burst or one after the other, which would slow down answers that have just begun. Never below
    zero: what old answers have saved does not help young ones. Never above a quarter of a mean answer: an answer
    further behind has missed the target, and waiting for it would help no other.
    """

    def __init__(self, tpot_s: float | None) -> None:
        self._tpot_s = tpot_s
        self._debt_s = self._last_s = 0.0
        self._too_much = False

    @property
    def too_much(self) -> bool:
        """Whether prompts should wait."""
        return self._too_much

    def observe(self, now_s: float, *, decoding: int, stepped: bool, answer_tokens: float, in_reach: bool) -> None:
        """It is ``now_s``. ``stepped``: each of the ``decoding`` sequences was given a token since the last call.

        ``answer_tokens``: of a mean answer; ``in_reach``: whether the target can be met at all.
        """
        passed_s, self._last_s = now_s - self._last_s, now_s
        if self._tpot_s is None or not decoding or not in_reach:
            self._debt_s, self._too_much = 0.0, False
            return
        allowance_s = answer_tokens * self._tpot_s
        paid_s = DEBT_PAID * self._tpot_s if stepped else 0.0
        self._debt_s = min(max(self._debt_s + passed_s - paid_s, 0.0), DEBT_FORGOTTEN * allowance_s)
        # Two marks, so that refills come in bulk.
        self._too_much = self._debt_s >= (DEBT_LOW if self._too_much else DEBT_HIGH) * allowance_s
