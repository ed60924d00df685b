"""Refills of the policy ``marginal``: when, mixed or exclusive, in steps of what size, for how many requests.

:class:`MarginalRefill` decides for one engine, :class:`JointRefill` for data-parallel ranks that make every pass
together, :class:`PromptSteps` how many prompt tokens a step computes, :class:`KvRoom` how many requests fit into the KV
cache. The rule: refill when one more decode step would cost more than refilling now.

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
from statistics import NormalDist
from typing import Literal, NamedTuple

from vllm_eb.calibration import StepCosts
from vllm_eb.service import FadingMean
from vllm_eb.strategy import LONGEST_PERIOD
from vllm_eb.theory import NO_DRAFTS, Drafts

Way = Literal["decode", "prefill", "mixed"]

# From this size on the cost of a prefill is taken as proportional to its tokens.
LARGE_TOKENS, HUGE_TOKENS = 4096, 8192
PLAN_EVERY = 16  # choices between two comparisons of both ways at their best
MAX_REFILLED_SHARE = 0.8  # share of the batch, in that comparison


class Refill(NamedTuple):
    """A possible refill now.

    ``seqs`` requests with ``prompt_tokens`` to compute per request, and ``half_computed`` ones with as many left.
    ``queued``: more requests wait than fit. ``hazard``: probability per token that a response ends; with ``drafts`` a
    step makes several.
    """

    seqs: float
    prompt_tokens: float
    half_computed: int = 0
    queued: bool = False
    hazard: float = 0.0
    drafts: Drafts = NO_DRAFTS

    @property
    def hazard_per_step(self) -> float:
        """Probability per sequence and step that a response ends."""
        return self.drafts.per_step(self.hazard)

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

        ``pass_number`` is for ranks in lockstep (:mod:`vllm_eb.refills`), which this rule does not look at.
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

        decode_s, hazard = self._decode_at(context_tokens), refill.hazard_per_step

        def per_token_s(overhead_s: float, seqs: int) -> float:
            # With a constant hazard h, a batch declines from N to N-k in ln(N/(N-k))/h steps and makes k/h tokens.
            steps = math.log(batch / (batch - seqs)) / hazard
            tokens = seqs / hazard
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


SIZES = (1024, 2048, 4096, 8192)  # tokens
SIZE_GAIN = 0.01  # share by which smaller steps must be cheaper


def cheapest_size(costs: StepCosts, most: int) -> int | None:
    """Prompt tokens per step, fewer than ``most``, at which prompts cost least per token.

    None if that is less than SIZE_GAIN cheaper than steps of ``most`` tokens.
    """
    sizes = [size for size in SIZES if size < most]
    best = min(sizes, key=lambda size: costs.prefill_s(size) / size, default=most)
    cheaper = costs.prefill_s(best) / best < (1.0 - SIZE_GAIN) * costs.prefill_s(most) / most
    return best if cheaper else None


def even_steps(costs: StepCosts, tokens: float, most: int) -> int:
    """Number of equal steps, of at most ``most`` tokens, in which ``tokens`` > 0 prompt tokens cost least.

    The fewest possible if that is less than SIZE_GAIN dearer.
    """
    fewest = max(1, math.ceil(tokens / most))
    counts = {fewest}
    for size in SIZES:
        if size < most:
            counts |= {max(fewest, math.floor(tokens / size)), max(fewest, math.ceil(tokens / size))}

    def cost_s(count: int) -> float:
        return count * costs.prefill_s(tokens / count)

    best = min(sorted(counts), key=cost_s)
    return best if cost_s(best) < (1.0 - SIZE_GAIN) * cost_s(fewest) else fewest


class PromptSteps:
    """Token budgets of steps with prompts; None: the engine's budget of ``most`` tokens.

    How many prompt tokens a step computes, where fewer than the engine's budget cost less per token.

    Times of matrix products do not grow evenly: on some GPUs a prompt token costs 5 % less in steps of 2,048 tokens
    than in steps of 16,384. But a small step costs more again, so a refill that is cut into steps of the cheapest size,
    with a small rest, loses what they gain. An exclusive refill is therefore divided into equal steps, as many as cost
    least together: of all divisions into so many steps the even one is the cheapest where the cost is convex (Jensen
    1906). The tokens of a refill are known on average only, so its last step takes whatever is left.
    """

    def __init__(self, costs: StepCosts, most: int) -> None:
        self._costs, self._most = costs, most
        self.cheapest = cheapest_size(costs, most)
        """Tokens per step at which prompts cost least; None if no size is cheaper than full steps."""
        self._size, self._steps_left = 0, 0

    def begin(self, tokens: float) -> None:
        """Divide an exclusive refill of about ``tokens`` prompt tokens, which begins with the next step."""
        if self.cheapest is not None and tokens > 0:
            self._steps_left = even_steps(self._costs, tokens, self._most)
            self._size = math.ceil(tokens / self._steps_left)

    def next_budget(self) -> int | None:
        """Most tokens of the next step of an exclusive refill."""
        self._steps_left -= 1
        if self._steps_left > 0:
            return self._size
        return None if self._steps_left == 0 else self.cheapest


# Shares of a mean response per running sequence. The second is divided by their number, so that a batch of ten recovers
# in as many of its own steps as one of a thousand.
RESERVE_INCREASE, RESERVE_DECREASE = 0.03, 0.06

# A sequence must pay for its second prefill this many times: later admissions shorten the stay of earlier ones. Between
# 1 and 10 throughput differs by less than 1 % (NuminaMath, Qwen3-30B-A3B).
PAYBACK_FACTOR = 3.0
SHORTEST_STAY = 0.02  # share of a mean response: a request that would be preempted sooner is not admitted, even if late
GROWTH_RANGE = 1.25  # the cost of one more sequence is measured up to a batch larger by this factor


def payback_tokens(
    costs: StepCosts, per_token_s: float, *, active: int, context_tokens: float, prompt_tokens: float,
    per_step: float = 1.0,
) -> float:  # fmt: skip
    """Tokens after which one more sequence has paid for computing its prompt and its output so far again.

    Each of its tokens costs the time it adds to a step, plus ``per_token_s`` when it is recomputed; without the
    sequence, the batch of ``active`` sequences would make its tokens at the batch's mean cost. Infinite if that is not
    more.
    """
    decode_s = costs.decode_at(context_tokens)
    alone_s = decode_s(active) / per_step
    added_s = (decode_s(GROWTH_RANGE * active) / per_step - alone_s) / ((GROWTH_RANGE - 1.0) * active)
    saved_s = alone_s / active - added_s - per_token_s
    return per_token_s * prompt_tokens / saved_s if saved_s > 0.0 else math.inf


def prompts_that_stay(tokens: float, *, active: int, free_tokens: int, prompt_tokens: float) -> float:
    """Number of mean prompts that can stay for ``tokens`` of each sequence before the KV cache is full."""
    if not math.isfinite(tokens):
        return 0.0
    return max(free_tokens - tokens * active, 0.0) / (prompt_tokens + tokens)


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
        self.active = 0
        """Running sequences."""

    def admitted(self) -> None:
        """Record an admission."""
        self._admitted_since_raise = True

    def ended(self) -> None:
        """Record a completion: the reserve shrinks."""
        self._reserve_share = max(self._reserve_share - RESERVE_DECREASE / max(self.active, 1), 0.0)

    def preempted(self) -> None:
        """Record that sequences were preempted in the last step.

        Those that grow in step are preempted over many steps because of one earlier admission: that raises the reserve
        once.
        """
        if self._admitted_since_raise:
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


PLAN_EVERY_PASSES = 16  # passes between two comparisons of ways and periods
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
    """Chooses the steps of one of several ranks in lockstep; see the module. It takes the place of MarginalRefill.

    Refills of data-parallel ranks that make every pass together: all begin in the same passes, without communication.

    Ranks of a mixture-of-experts model wait for each other in every pass (for a dense model: up to vLLM 0.13), so a
    pass lasts as long as the slowest rank's step: a prompt of one rank costs all of them its time. If R ranks refill in
    passes of their own, each cycle has R long passes; if they refill in the same ones, it has one. This is the joint
    replenishment problem: several stocks share the fixed cost of an order. Power-of-two policies solve it to within a
    few per cent (Jackson, Maxwell and Muckstadt 1985; Roundy 1985): each stock is refilled every 2**m periods, counted
    from a common start, with its own m. Such schedules nest, so ranks meet without knowing each other's choice: a rank
    that refills every 16 passes refills only in passes in which one that refills every 8 does so, too. Ranks are alike,
    so most choose the same period.

    The period and the way (exclusive or mixed) are those with the least time per generated token, by measured costs.
    With N sequences per rank when all slots are refilled, hazard h (1 / mean answer), prompts of u tokens in steps of
    at most c:

    - during T passes k = h S n sequences end per rank, with n = N / (1 + h S / 2) decoding on average in S decode
      steps: waiting requests are missing for half a period;
    - a mixed refill decodes in every pass (S = T), but its prompts come in over k u / c passes, in which those that
      wait are missing, too: n = N / (1 + h T / 2 + h k u / (2 c)); an exclusive one decodes in S = T - k u / c of them;
    - passes with prompts last as long as the rank with most prompts needs: the largest of R Poisson counts of mean k.
      For T = 1 and k below 1 that is up to R times the mean, which is what mixed batches cost in lockstep; its excess
      over the mean falls with the root of k.

    Among the periods within TIE of the cheapest the shortest is taken: the cost is flat there, and prompts wait less.
    The hazard is that of ended answers. The estimate that counts running ones (:class:`vllm_eb.service.AnswerLength`)
    is far too long after a start with a full batch, and so would the period be.
    """

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

    @property
    def hazard(self) -> float:
        """Probability per token that an answer ends."""
        return self._answers.ended / self._answers.tokens

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
        if self._planned_in != pass_number // PLAN_EVERY_PASSES:
            self._planned_in = pass_number // PLAN_EVERY_PASSES
            batch = decoding + refill.seqs + refill.half_computed
            share = refill.prompt_tokens / self._step_tokens
            self.plan = self._best(
                _Workload(batch, refill.hazard_per_step, refill.prompt_tokens, share, context_tokens)
            )
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
