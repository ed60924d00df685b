"""Refills of data-parallel ranks that make every pass together: all begin in the same passes, without communication.

Ranks of a mixture-of-experts model wait for each other in every pass (for a dense model: up to vLLM 0.13), so a pass
lasts as long as the slowest rank's step: a prompt of one rank costs all of them its time. If R ranks refill in passes
of their own, each cycle has R long passes; if they refill in the same ones, it has one. This is the joint replenishment
problem: several stocks share the fixed cost of an order. Power-of-two policies solve it to within a few per cent
(Jackson, Maxwell and Muckstadt 1985; Roundy 1985): each stock is refilled every 2**m periods, counted from a common
start, with its own m. Such schedules nest, so ranks meet without knowing each other's choice: a rank that refills every
16 passes refills only in passes in which one that refills every 8 does so, too. Ranks are alike, so most choose the
same period.

The period and the way (exclusive or mixed) are those with the least time per generated token, by measured costs. With N
sequences per rank when all slots are refilled, hazard h (1 / mean answer), prompts of u tokens in steps of at most c:

- during T passes k = h S n sequences end per rank, with n = N / (1 + h S / 2) decoding on average in S decode steps:
  waiting requests are missing for half a period;
- a mixed refill decodes in every pass (S = T), but its prompts come in over k u / c passes, in which those that wait
  are missing, too: n = N / (1 + h T / 2 + h k u / (2 c)); an exclusive one decodes in S = T - k u / c of them;
- passes with prompts last as long as the rank with most prompts needs: the largest of R Poisson counts of mean k. For
  T = 1 and k below 1 that is up to R times the mean, which is what mixed batches cost in lockstep; its excess over the
  mean falls with the root of k.

Among the periods within TIE of the cheapest the shortest is taken: the cost is flat there, and prompts wait less.
The hazard is that of ended answers. The estimate that counts running ones (:class:`vllm_eb.service.AnswerLength`) is
far too long after a start with a full batch, and so would the period be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

from vllm_eb.costs import StepCosts
from vllm_eb.marginal import HUGE_TOKENS, LARGE_TOKENS, Choice, Refill, Way
from vllm_eb.service import FadingMean

LONGEST_PERIOD = 64  # passes
PLAN_EVERY = 16  # passes between two comparisons of ways and periods
TIE = 0.01  # share of the cost that is not worth a longer period
FEW = 6.0  # prompts per refill up to which their number is taken as Poisson; above, as normal
BISECTIONS = 12
CERTAIN = 0.995  # probability at which sums over the number of prompts end


def longest_period(interval: int) -> int:
    """The longest period (passes) that ranks keep in step if their pass numbers agree modulo ``interval``."""
    return min(interval & -interval, LONGEST_PERIOD)


class PassCount:
    """Number of the pass being scheduled, equal on all ranks modulo ``interval``.

    vLLM's data-parallel engine core counts passes, also those in which a rank has nothing to do and its scheduler is
    not called. It tells the scheduler only whether the number is a multiple of ``--prefill-schedule-interval``. The
    passes between are counted here, and every multiple corrects the count.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._number = interval, -1

    def next(self, *, multiple: bool) -> int:
        """The number of the next pass. ``multiple``: it is a multiple of the interval."""
        self._number += 1
        missing = -self._number % self._interval
        if multiple:
            self._number += missing
        elif not missing:  # passes were missed; this one is after a multiple that was not seen
            self._number += 1
        return self._number


class Plan(NamedTuple):
    """``way`` of refilling, every ``period`` passes; ``token_s``: seconds per generated token of a rank."""

    token_s: float
    way: Way
    period: int


class _Workload(NamedTuple):
    """``batch``: sequences per rank when all slots are refilled; ``share``: prompt tokens per token of a full step."""

    batch: float
    hazard: float
    prompt_tokens: float
    share: float
    context_tokens: float


class JointRefill:
    """Chooses the steps of one of several ranks in lockstep; see the module. It takes the place of MarginalRefill."""

    def __init__(
        self, costs: StepCosts, *, may_mix: bool, ranks: int, interval: int, step_tokens: int, prior: FadingMean
    ) -> None:
        """``interval``: the ranks' pass numbers agree modulo it. ``step_tokens``: most prompt tokens of a step.

        ``prior``: tokens per ended answer, before any has ended.
        """
        self._costs, self._ranks, self._step_tokens = costs, ranks, step_tokens
        self._ways: tuple[Way, ...] = ("prefill", "mixed") if may_mix else ("prefill",)
        self.per_token_s = (costs.prefill_s(HUGE_TOKENS) - costs.prefill_s(LARGE_TOKENS)) / (HUGE_TOKENS - LARGE_TOKENS)
        self._longest, self._answers = longest_period(interval), prior
        self._spread = largest_normal(ranks)
        self._planned_in: int | None = None
        self._refill_ends = -1  # last pass of the mixed refill
        self.plan = Plan(math.inf, self._ways[-1], 1)

    def ended(self, output_tokens: int) -> None:
        """Record an answer of ``output_tokens`` that has ended."""
        self._answers.tokens += output_tokens
        self._answers.end()

    def decoded(self, seqs: int, context_tokens: float, left_out: float) -> None:
        """Do nothing: the rule looks ahead only."""

    def refilled(self) -> None:
        """Do nothing: the rule looks ahead only."""

    def choose(
        self, *, decoding: int, context_tokens: float, refill: Refill, must: bool, pass_number: int = 0
    ) -> Choice:
        """Choose the next step, which is in the ranks' pass ``pass_number``. ``must``: the refill is due anyway."""
        if refill.tokens <= 0:
            return Choice("decode")
        if decoding == 0:
            return Choice("prefill")
        if self._planned_in != pass_number // PLAN_EVERY:
            self._planned_in = pass_number // PLAN_EVERY
            batch = decoding + refill.seqs + refill.half_computed
            share = refill.prompt_tokens / self._step_tokens
            hazard = self._answers.ended / self._answers.tokens
            self.plan = self._best(_Workload(batch, hazard, refill.prompt_tokens, share, context_tokens))
        begins = pass_number % self.plan.period == 0
        if begins:
            # Prompts that end with a step leave none half computed, so what is left of a mixed refill is counted.
            tokens = (refill.seqs + refill.half_computed) * refill.prompt_tokens
            self._refill_ends = pass_number + math.ceil(tokens / self._step_tokens) - 1
        going_on = self.plan.way == "mixed" and pass_number <= self._refill_ends
        return Choice(self.plan.way if must or begins or going_on else "decode")

    def _best(self, work: _Workload) -> Plan:
        decode_s = self._costs.decode_at(work.context_tokens)
        plans, period = [], 1
        while period <= self._longest:
            for way in self._ways:
                plans.append(Plan(self._token_s(work, way, period, decode_s), way, period))
            period *= 2
        enough = min(plans).token_s * (1.0 + TIE)
        period = min((plan.period for plan in plans if plan.token_s <= enough), default=1)
        return min(plan for plan in plans if plan.period == period)

    def _token_s(self, work: _Workload, way: Way, period: int, decode_s: Callable[[float], float]) -> float:
        """Seconds per generated token."""
        steps = float(period) if way == "mixed" else decode_steps(work.batch, work.hazard, work.share, period)
        missing = 1.0 + work.hazard * steps / 2
        if way == "mixed":
            # n with n * missing + (h k u / 2 c) n = N, where k = h T n
            square = work.hazard**2 * period * work.share / 2
            decoding = (math.sqrt(missing**2 + 4 * square * work.batch) - missing) / (2 * square)
        else:
            decoding = work.batch / missing
        refilled = work.hazard * steps * decoding
        if refilled * work.share > period:  # prompts come in no faster, so fewer sequences decode
            refilled = period / work.share
            decoding = refilled / (work.hazard * steps)
        alone_s = decode_s(decoding)

        def added_s(prompts: float) -> float:
            passes = min(max(prompts * work.share, 1.0), period)
            tokens = min(prompts * work.prompt_tokens, self._step_tokens)
            if way == "mixed":
                return passes * (self._costs.mixed_s(tokens, decoding, work.context_tokens) - alone_s)
            return passes * max(self._costs.prefill_s(tokens) - alone_s, 0.0)  # other ranks decode meanwhile

        tokens = refilled / work.hazard
        return (period * alone_s + self._largest_s(refilled, added_s)) / tokens

    def _largest_s(self, mean: float, cost_s: Callable[[float], float]) -> float:
        """Expected cost of the largest of the ranks' numbers of prompts, which are ``mean`` on average."""
        if mean >= FEW:
            return cost_s(mean + self._spread * math.sqrt(mean))
        chance = below = math.exp(-mean)
        before, expected_s, prompts = below**self._ranks, 0.0, 0
        while before < CERTAIN:
            prompts += 1
            chance *= mean / prompts
            below = min(below + chance, 1.0)
            upto = below**self._ranks
            expected_s += (upto - before) * cost_s(prompts)
            before = upto
        return expected_s


def decode_steps(batch: float, hazard: float, share: float, period: int) -> float:
    """Decode steps of a rank in ``period`` passes if its refill takes passes of its own; arguments as in _Workload."""
    low, high = 0.0, float(period)
    for _ in range(BISECTIONS):
        steps = (low + high) / 2
        refilled = hazard * steps * batch / (1.0 + hazard * steps / 2)
        if steps + max(refilled * share, -math.expm1(-refilled)) > period:
            high = steps
        else:
            low = steps
    return (low + high) / 2


def largest_normal(count: int) -> float:
    """Expected largest of ``count`` independent standard normal numbers."""
    width, below = 0.01, NormalDist().cdf
    places = [(place + 0.5) * width for place in range(800)]
    return width * sum(1.0 - below(x) ** count - below(-x) ** count for x in places)
