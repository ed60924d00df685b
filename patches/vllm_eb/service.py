"""Latency targets: how many sequences a TPOT target allows, and when a TTFT target makes a refill due.

The paper names service-level-aware switching as future work (section 5); this is one implementation. Under overload,
first come, first served makes every request wait longer than any target, so all of them miss it. Serving first those
that can still meet the target lets most of them meet it; the others are served when there is room, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_eb.calibration import StepCosts
from vllm_eb.hazard import CensoredHazard

TPOT_SHARE = 0.85  # share of the target that is planned for: single requests vary around the mean
TTFT_SHARE = 0.6  # share of the target after which a waiting request makes a refill due
PAUSE_SHARE = 0.7  # share of the TPOT target that tokens and pauses together may take if responses are to be preempted
PRIOR_ANSWERS = 4.0  # weight of the assumed output length, in completed responses
# Before the first unbiased estimate, a mean response is at most this many times the assumed one, or the oldest one.
MOST_ASSUMED, MOST_OLDEST = 4.0, 2.0
DEBT_PAID = 0.95  # share of the target that a token may take
# Shares of a mean answer's time at the target: when prompts have to wait, when they may come again, what is given up.
DEBT_HIGH, DEBT_LOW, DEBT_FORGOTTEN = 0.025, 0.0125, 0.25


class AnswerLength:
    """Mean tokens per response: the longer of a long memory, for the level, and a short one, for growth.

    The short memory (a quarter) is tokens generated over responses ended: the maximum-likelihood mean under a constant
    hazard with censored observations. Running responses count at once, so that long responses are detected before the
    first one ends. Where the hazard rises with age, as that of most responses does, it is too long while the batch is
    young: all of a full start's tokens count, and hardly a response has ended.

    The long memory is the same at first. With ``product_limit`` it is then the mean under the survival curve of Kaplan
    and Meier (1958), which holds for any distribution: running responses count as censored at their age
    (:class:`~vllm_eb.hazard.CensoredHazard`). The short memory begins anew with the first of these estimates. Until
    then both are limited: a thousand responses of 50 tokens, of which none has ended, do not make a mean of 12,000. The
    limit is twice the oldest response, since nothing is known of what comes after it, or four times the assumed mean.

    Overestimated lengths leave slots empty; underestimated ones cause preemptions and recomputation. With latency
    targets a preempted response stands still, so there the estimate that errs to the long side is kept.

    With drafts, tokens beyond the end of a response are counted, and steps that were scheduled before its end was
    known. Every update takes off what the running responses do not have.
    """

    def __init__(self, prior_tokens: float, window: int, *, product_limit: bool) -> None:
        self._long = FadingMean(prior_tokens, window)
        self._short = FadingMean(prior_tokens, max(window // 4, 1))
        self._lengths = CensoredHazard(window) if product_limit else None
        self._level: float | None = None
        self._prior_tokens = prior_tokens
        self._oldest = 0  # tokens that the oldest response can have
        self._drafted = False
        self._open_tokens = 0  # counted since the first step, without those of ended responses
        self.mean = prior_tokens
        """The estimate in tokens."""
        self.running_tokens = 0
        """Tokens so far of all running responses: counted, and with ``product_limit`` read anew with every update."""

    def decoded(self, seqs: int) -> None:
        """Record a step with one token for each of ``seqs`` sequences."""
        self._oldest += 1
        self.running_tokens += seqs
        self._open_tokens += seqs
        self._long.tokens += seqs
        self._short.tokens += seqs
        self._estimate()

    def accepted(self, by_position: Sequence[int]) -> None:
        """Record further tokens of a step, drafted ones: how many sequences got one or more, two or more, ..."""
        tokens = sum(by_position)
        self._drafted = True
        self._oldest += len(by_position) - by_position.count(0)
        self.running_tokens += tokens
        self._open_tokens += tokens
        self._long.tokens += tokens
        self._short.tokens += tokens

    def ended(self, output_tokens: int) -> None:
        """Record a response that has ended after ``output_tokens``."""
        self.running_tokens = max(self.running_tokens - output_tokens, 0)
        self._open_tokens -= output_tokens
        self._long.end()
        self._short.end()
        if self._lengths is not None:
            self._lengths.observe(output_tokens)
        self._estimate()

    def update(self, running_ages: Callable[[], Sequence[int]]) -> None:
        """Estimate the survival curve again. ``running_ages``: returns the tokens so far of each running response."""
        if self._lengths is None and not self._drafted:
            return
        ages = running_ages()
        self.running_tokens = sum(ages)
        if self._drafted:
            for mean in (self._long, self._short):
                mean.tokens = max(mean.tokens - self._open_tokens + self.running_tokens, mean.ended)
            self._open_tokens = self.running_tokens
        if self._lengths is None:
            self._estimate()
            return
        estimated = self._lengths.estimate(ages)
        if estimated is None:
            return
        if self._level is None:
            self._short.tokens = self._short.ended * estimated.mean
        self._level = estimated.mean
        self._estimate()

    def _estimate(self) -> None:
        long, short = self._long, self._short
        level = long.tokens / long.ended if self._level is None else self._level
        self.mean = max(level, short.tokens / short.ended)
        if self._lengths is not None and self._level is None:
            self.mean = min(self.mean, max(MOST_ASSUMED * self._prior_tokens, MOST_OLDEST * self._oldest))


class FadingMean:
    """Tokens and ended responses, both halved whenever there are 2 * ``window`` responses."""

    def __init__(self, prior_tokens: float, window: int) -> None:
        self.tokens, self.ended, self._window = PRIOR_ANSWERS * prior_tokens, PRIOR_ANSWERS, window

    def end(self) -> None:
        """Record a response that has ended."""
        self.ended += 1.0
        if self.ended > 2 * self._window:
            self.tokens, self.ended = self.tokens / 2, self.ended / 2


@dataclass(frozen=True)
class ServiceLevel:
    """Targets in seconds; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def has_targets(self) -> bool:
        """Whether there is any target."""
        return self.ttft_s is not None or self.tpot_s is not None

    def seqs_allowed(
        self, costs: StepCosts, per_token_s: float, *, mu_l: float, mu_new: float, mu_o: float, at_most: int,
        per_step: float = 1.0,
    ) -> int:  # fmt: skip
        """Largest batch whose time per output token, with its share of prefills, stays within the target.

        Mean tokens: ``mu_l`` per prompt, ``mu_new`` of it to compute, ``mu_o`` per response, ``per_step`` of a sequence
        in a decode step. ``at_most`` without a target; 0 if not even one sequence could meet it.
        """
        if self.tpot_s is None:
            return at_most
        most_s, decode_s = TPOT_SHARE * self.tpot_s, costs.decode_at(mu_l + mu_o / 2)

        def meets(seqs: int) -> bool:
            return decode_s(seqs) / per_step + seqs * mu_new * per_token_s / mu_o <= most_s

        if meets(at_most):
            return at_most
        low, high = 0, at_most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if meets(middle) else (low, middle)
        return low

    def may_pause(
        self, costs: StepCosts, per_token_s: float, seqs: float, *, mu_l: float, mu_new: float, mu_o: float,
        per_step: float = 1.0,
    ) -> float:  # fmt: skip
        """Number of sequences per ``seqs`` that may be preempted and still meet the TPOT target; lengths as above.

        While the n others end and grow at the same rate, their prompts free n mu_l tokens in the time of a mean
        response. p preempted sequences, each half a response old, are then all back after p (mu_l + mu_o / 2) / (n
        mu_l) of that time, which must equal the part of the target not used by their tokens. Infinite without a target.
        """
        # Time (s) per output token, with its share of prefills.
        token_s = costs.decode_s(seqs, mu_l + mu_o / 2) / per_step + seqs * mu_new * per_token_s / mu_o
        if self.tpot_s is None or token_s == 0.0:
            return math.inf
        return max(PAUSE_SHARE * self.tpot_s / token_s - 1.0, 0.0) * mu_l / (mu_l + mu_o / 2)

    def refill_due(self, oldest_wait_s: float) -> bool:
        """Whether the oldest request that can still meet its target should not wait longer."""
        return self.ttft_s is not None and oldest_wait_s >= TTFT_SHARE * self.ttft_s


class TokenDebt:
    """How far running responses are behind their TPOT target: elapsed time adds to the debt, every token reduces it.

    The batch from :meth:`ServiceLevel.seqs_allowed` meets the target on average; the debt prevents many prompts at once
    or in sequence from slowing down responses that have just begun. It is never below zero: the lead of old responses
    does not help young ones. It is never above a quarter of a mean response: a response further behind has missed its
    target, and waiting for it would not help others.
    """

    def __init__(self, tpot_s: float | None) -> None:
        self._tpot_s = tpot_s
        self._debt_s = self._last_s = 0.0
        self.exceeded = False
        """Whether prompts should wait."""

    def observe(self, now_s: float, *, decoding: int, stepped: float, answer_tokens: float, reachable: bool) -> None:
        """Update the debt at ``now_s``. ``stepped``: tokens that each of the ``decoding`` sequences got since the last
        call.

        ``answer_tokens``: tokens of a mean response. ``reachable``: whether the target can be met at all.
        """
        passed_s, self._last_s = now_s - self._last_s, now_s
        if self._tpot_s is None or not decoding or not reachable:
            self._debt_s, self.exceeded = 0.0, False
            return
        allowance_s = answer_tokens * self._tpot_s
        paid_s = stepped * DEBT_PAID * self._tpot_s
        self._debt_s = min(max(self._debt_s + passed_s - paid_s, 0.0), DEBT_FORGOTTEN * allowance_s)
        # Two thresholds (hysteresis), so that refills come in bulk.
        self.exceeded = self._debt_s >= (DEBT_LOW if self.exceeded else DEBT_HIGH) * allowance_s
