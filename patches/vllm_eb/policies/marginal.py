"""Refills, mixed or exclusive, when one more decode step would cost more by measured costs; targets come first.

:mod:`vllm_eb.refills` decides when, how and for how many requests to refill, :mod:`vllm_eb.service` what the targets
require, :mod:`vllm_eb.queueing` the order of waiting requests. This module keeps their inputs: lengths, contexts and
batch sizes so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_eb.calibration import CostGrid, StepCosts
from vllm_eb.policy import PolicyError, PolicySpec, setting
from vllm_eb.queueing import Places, PunctualQueue, Waited, Work
from vllm_eb.refills import (
    HUGE_TOKENS,
    PAYBACK_FACTOR,
    SHORTEST_STAY,
    Choice,
    JointRefill,
    KvRoom,
    MarginalRefill,
    PromptSteps,
    Refill,
    Way,
    payback_tokens,
    prompts_that_stay,
)
from vllm_eb.service import TTFT_SHARE, AnswerLength, FadingMean, ServiceLevel, TokenDebt
from vllm_eb.strategy import Change, EngineFacts, Lengths, PhaseState, StepChoice, Strategy, Values, View
from vllm_eb.theory import Drafts

ALLOWED_EVERY = 16  # decisions between two updates of the batch size that the TPOT target allows

NOTHING_TO_REFILL = Choice("decode")
KEEP_DECODING = StepChoice("decode", "eb")
DRAFT_ALL_EVERY = 16  # plans of draft lengths
NEXT_SIZE = 1.1  # batch sizes for which a draft length is chosen
ONE_TOKEN = 1.5
"""A mean response of fewer tokens is mostly one token: it does not grow, and has no time per further token."""


@dataclass(frozen=True, kw_only=True)
class MarginalSpec(PolicySpec):
    """``ttft`` and ``tpot`` are targets in seconds; None: no target."""

    description = (
        "refills when one more decode step would cost more, mixed or exclusive as measured costs say; "
        "ttft= and tpot= (seconds) are met first"
    )
    aligns_ranks = True

    mix: bool = setting(True, "allow refills in mixed steps if they cost less; off: exclusive batches only")
    ttft: float | None = setting(
        None, "target for the time to first token in seconds; requests that can still meet it are served first",
        unit="s", above=0, doubtful_from=3600,
    )  # fmt: skip
    tpot: float | None = setting(
        None, "target for the time per output token in seconds; limits the batch size",
        unit="s", above=0, doubtful_from=5,
    )  # fmt: skip
    draft: Literal["full", "adaptive"] = setting(
        "full", "drafted tokens per sequence: full (all that the server drafts), or adaptive (fewer in larger batches)"
    )
    window: int = setting(500, "completions that the estimator remembers", unit="requests", at_least=1)
    update_every: int = setting(100, "completions between updates", unit="requests", at_least=1)

    def check(self) -> None:
        """A target for the first token has an order of its own."""
        if self.ttft is not None and self.order != "fcfs":
            raise PolicyError("marginal with ttft= orders the queue itself: leave order= out")

    @property
    def orders_queue(self) -> bool:
        """Whether a target or ``order`` says which waiting request goes first."""
        return self.ttft is not None or super().orders_queue

    @property
    def completions_per_update(self) -> int:
        """M of the paper."""
        return self.update_every

    needs_costs = True
    """Every choice compares costs."""

    @property
    def varies_drafts(self) -> bool:
        """Whether the number of drafted tokens changes with the batch."""
        return self.draft == "adaptive"

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """The strategy, from costs, targets and KV memory. Raises PolicyError for costs that do not tell what drafts
        cost."""
        if self.varies_drafts and not lengths.drafts.acceptance:
            raise PolicyError(
                f"policy {self.name}: the server drafts no tokens; leave draft= out, or give --speculative (vLLM: "
                "--speculative-config)"
            )
        if self.varies_drafts and engine.calibration.undrafted is None:
            raise PolicyError(
                f"policy {self.name} needs step times with drafts and without them; give a device with kernel tables"
            )
        return MarginalPolicy(self, engine, lengths)


class AdaptiveDrafts:
    """How many tokens to draft by the number of sequences, and the step times with as many: a StepCosts.

    A step of ``n`` sequences with ``j`` drafts takes what lies between the steps without drafts and with all ``d`` of
    them, in proportion to ``j/d``: every drafted token is as much work. Chosen is the ``j`` with the most tokens per
    second, ``(1 + r_1 + ... + r_j) / time``. While the batch is small, a step loads the weights whatever it computes,
    so drafts are nearly free; in a full batch they displace tokens that are certain.
    """

    def __init__(self, with_all: CostGrid, without: CostGrid, drafts: Drafts, max_num_seqs: int) -> None:
        self._all, self._none, self._most = with_all, without, (most := len(drafts.acceptance))
        self.lengths: Sequence[int] = (most,) * (max_num_seqs + 1)
        self._plans = 0
        self._drafts = [drafts.cut(length) for length in range(most + 1)]  # by their length

    @staticmethod
    def of(spec: MarginalSpec, engine: EngineFacts, lengths: Lengths) -> AdaptiveDrafts | None:
        """None where all drafts are wanted."""
        costs = engine.calibration
        if not spec.varies_drafts:
            return None
        assert costs.grid is not None  # undrafted is
        assert costs.undrafted is not None  # checked by the specification
        return AdaptiveDrafts(costs.grid, costs.undrafted, lengths.drafts, engine.max_num_seqs)

    def plan(self, drafts: Drafts, context_tokens: float) -> None:
        """Choose the lengths anew. Every so often all tokens are drafted: what is never drafted has no known rate."""
        self._plans += 1
        self._drafts = [drafts.cut(length) for length in range(self._most + 1)]
        size, chosen = 1, list(self.lengths)
        full = self._plans % DRAFT_ALL_EVERY == 0
        while size < len(chosen):
            until = max(size + 1, int(size * NEXT_SIZE))
            length = self._most if full else self._best(size, context_tokens)
            chosen[size:until] = [length] * (min(until, len(chosen)) - size)
            size = until
        self.lengths = tuple(chosen)

    def _best(self, seqs: int, context_tokens: float) -> int:
        none_s, all_s = self._none.decode_s(seqs, context_tokens), self._all.decode_s(seqs, context_tokens)
        each_s = (all_s - none_s) / self._most
        return max(
            range(self._most + 1), key=lambda length: self._drafts[length].tokens_per_step / (none_s + length * each_s)
        )

    def length_at(self, seqs: float) -> int:
        """Drafted tokens per sequence of a step with so many sequences."""
        return self.lengths[min(max(round(seqs), 0), len(self.lengths) - 1)]

    def drafts_at(self, seqs: float) -> Drafts:
        """The drafts of a step with so many sequences."""
        return self._drafts[self.length_at(seqs)]

    def _between(self, seqs: float, none_s: float, all_s: float) -> float:
        return none_s + (all_s - none_s) * self.length_at(seqs) / self._most

    def prefill_s(self, tokens: float) -> float:
        """See StepCosts."""
        return self._all.prefill_s(tokens)

    def decode_s(self, seqs: float, context_tokens: float) -> float:
        """See StepCosts."""
        return self.decode_at(context_tokens)(seqs)

    def decode_at(self, context_tokens: float) -> Callable[[float], float]:
        """See StepCosts."""
        none_s, all_s = self._none.decode_at(context_tokens), self._all.decode_at(context_tokens)
        return lambda seqs: self._between(seqs, none_s(seqs), all_s(seqs))

    def mixed_s(self, tokens: float, seqs: float, context_tokens: float) -> float:
        """See StepCosts."""
        grids = (self._none, self._all)
        return self._between(seqs, *(grid.mixed_s(tokens, seqs, context_tokens) for grid in grids))


class MarginalPolicy(Strategy):
    """Chooses every step from measured costs, targets and free KV memory; only reads ``lengths``."""

    bounds_mixed = True
    slots = None
    seqs_allowed = 0
    """Number of sequences that the TPOT target allows."""

    def __init__(self, spec: MarginalSpec, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(engine, lengths)
        self._max_num_seqs = engine.max_num_seqs
        self._drafts = AdaptiveDrafts.of(spec, engine, lengths)
        self._costs: StepCosts = engine.calibration.costs if self._drafts is None else self._drafts
        self._service, self._debt = ServiceLevel(spec.ttft, spec.tpot), TokenDebt(spec.tpot)
        self._has_targets = self._service.has_targets
        self._answers = AnswerLength(lengths.mu_o, spec.window, product_limit=not self._has_targets)
        self._room = KvRoom()
        self._punctual = None if spec.ttft is None else PunctualQueue(spec.ttft, urgent_s=TTFT_SHARE * spec.ttft)
        self.queue = self._punctual
        self._largest_prefill_s = self._costs.prefill_s(HUGE_TOKENS)
        self._tpot_in_reach, self._batch = True, self._max_num_seqs
        # Figures of one view, which a decision needs several times.
        self._seen: View | None = None
        self._context_tokens = 0.0
        self._payback_tokens: float | None = None
        self._decisions = 0
        self._began_empty = False  # whether nothing decoded when the last refill began
        self._steps = PromptSteps(self._costs, engine.max_num_batched_tokens)
        self._joint = self._joint_refill(spec) if engine.ranks > 1 else None
        self._may_mix = spec.mix
        self._refills = self._joint or MarginalRefill(self._costs, may_mix=spec.mix)
        self.plan_batch()

    def _joint_refill(self, spec: MarginalSpec) -> JointRefill:
        """The rule for a rank that makes every pass together with others."""
        engine = self.engine
        return JointRefill(
            self._costs,
            may_mix=spec.mix,
            ranks=engine.ranks,
            interval=engine.pass_interval,
            step_tokens=self._steps.cheapest or engine.max_num_batched_tokens,
            prior=FadingMean(self.lengths.mu_o, spec.window),
        )

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """Record the first admission of a request with ``input_tokens`` prompt tokens."""
        self._seen = None  # the mean lengths have changed
        self._room.admitted()
        if self._punctual is not None:
            self._punctual.admitted(input_tokens)

    def on_resume(self) -> None:
        """Record that a preempted request was admitted again."""
        self._room.admitted()

    def on_accepted(self, by_position: Sequence[int]) -> None:
        """Record the further tokens of a step."""
        self._answers.accepted(by_position)

    def on_finish(self, output_tokens: int) -> None:
        """Record that a request left its slot."""
        self._answers.ended(output_tokens)
        if self._joint is not None:
            self._joint.ended(output_tokens)
        self._room.ended()

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """Estimate the mean answer again, and the batch size that the target allows."""
        self._answers.update(running_ages)
        if self._drafts is not None:
            self._drafts.plan(self.lengths.drafts, self._mean_context(view))
        self.plan_batch()
        return ()

    @property
    def draft_lengths(self) -> Sequence[int] | None:  # type: ignore[override]
        """See Strategy; all tokens until the acceptance is known."""
        return None if self._drafts is None else self._drafts.lengths

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """The next step: continue the current refill, or take the cheapest step."""
        self._update_inputs(view, stepped=phases.phase != "prefill")
        if phases.phase == "prefill" and phases.refilling(view) and not self._debt.exceeded:
            refill = phases.refill(view)
            if not self._cheaper_mixed(view, refill):
                return StepChoice("prefill", "eb", token_budget=self._refill_budget())
            self._took("mixed", view, self._mean_context(view))
            budget = self._token_budget(view, "mixed", refill)
            return StepChoice("mixed", "mb", "mixed_costs_less", refill, token_budget=budget)
        refill = phases.refill(view)
        choice = self._cheapest_step(view, refill, blocked=phases.pop_blocked())
        if choice.way == "decode" == phases.phase:
            return KEEP_DECODING
        return StepChoice(
            choice.way,
            "mb" if choice.way == "mixed" else "eb",
            "responses_behind" if self._debt.exceeded else "slots_free" if refill else "nothing_to_refill",
            refill,
            self._values(choice),
            self._token_budget(view, choice.way, refill),
        )

    def _cheaper_mixed(self, view: View, refill: int) -> bool:
        """Whether the rest of the exclusive refill, ``refill`` requests, costs less as a mixed one.

        Answers of one length that begin together end together, so the whole batch is refilled at once, and nothing
        decodes at the moment when both ways are compared. With more requests than slots, only then: else both are
        compared at their best. Less than one step stays as it is.
        """
        rule, step_tokens = self._refills, self._steps.cheapest or self.engine.max_num_batched_tokens
        if not self._may_mix or self._has_targets or not isinstance(rule, MarginalRefill) or not view.decodes:
            return False
        prompt_tokens = (refill + view.prefilling) * max(self.lengths.mu_new, 1.0)
        if prompt_tokens < step_tokens or (view.waiting > refill and not self._began_empty):
            return False
        batch, context_tokens = view.decoding + view.prefilling + refill, self._mean_context(view)
        return rule.cheaper_beside(step_tokens, view.decoding, batch, context_tokens)

    def _token_budget(self, view: View, way: Way, refill: int) -> int | None:
        """Tokens of a step with prompts, where fewer than the engine's budget cost less per token.

        ``refill``: how many requests may join.
        """
        if way == "prefill":
            self._steps.begin((refill + view.prefilling) * max(self.lengths.mu_new, 1.0))
            return self._refill_budget()
        cheapest = self._steps.cheapest
        return None if cheapest is None or way == "decode" else self.decode_tokens(view.decoding) + cheapest

    def _refill_budget(self) -> int | None:
        """Tokens of the next step of an exclusive refill.

        Even steps are for throughput alone: with targets, steps of the cheapest size leave fewer answers late. Ranks in
        lockstep count the passes of a refill in steps of that size.
        """
        even = self._joint is None and not self._has_targets
        return self._steps.next_budget() if even else self._steps.cheapest

    def _update_inputs(self, view: View, *, stepped: bool) -> None:
        """Update the inputs of targets and KV room. ``stepped``: the last step decoded."""
        self._decisions += 1
        if self._service.tpot_s is not None and self._decisions % ALLOWED_EVERY == 0:
            self.plan_batch()
        self._room.active = view.decoding + view.prefilling
        if view.preempted:
            self._room.preempted()
        # A rank in lockstep that holds its prompts back alone does not make the pass shorter.
        if self._service.tpot_s is not None and self._joint is None:
            self._debt.observe(
                view.now_s,
                decoding=view.decoding,
                stepped=self._drafts_of(view.decoding).tokens_per_step if stepped else 0.0,
                answer_tokens=self._answers.mean,
                reachable=self._tpot_in_reach and self.lengths.mu_o >= ONE_TOKEN,
            )

    def _cheapest_step(self, view: View, refill: int, *, blocked: bool) -> Choice:
        """The cheapest next step if ``refill`` requests could join.

        ``blocked``: the last prefill found no KV blocks.
        """
        self._batch = max(view.decoding + view.prefilling + refill, 1)
        context_tokens = self._mean_context(view)
        choice = NOTHING_TO_REFILL
        if refill or view.prefilling:
            decodes = view.decodes
            self._began_empty = not decodes
            choice = self._refills.choose(
                decoding=view.decoding if decodes else 0,
                context_tokens=context_tokens,
                refill=self.possible_refill(view, refill),
                must=view.prefilling > 0 or self._service.refill_due(view.oldest_wait_s),
                pass_number=view.pass_number,
            )
            if decodes and (blocked or self._debt.exceeded):
                choice = choice._replace(way="decode")
            elif self._fills_passes and choice.way == "prefill":
                choice = choice._replace(way="mixed")
        self._took(choice.way, view, context_tokens, refill if choice.way == "decode" else 0)
        return choice

    def _took(self, way: Way, view: View, context_tokens: float, left_out: int = 0) -> None:
        """Count the step that was chosen, ``left_out``: requests that could be in it."""
        if way != "decode":
            self._refills.refilled()
        if way != "prefill":
            self._refills.decoded(view.decoding, context_tokens, left_out)
            self._answers.decoded(view.decoding)

    @property
    def _fills_passes(self) -> bool:
        """Whether prompts join in every pass, as with answers of one token: there, ending a refill saves
        nothing, and its last, partly filled pass lasts as long as the slowest rank's."""
        return self._joint is not None and self.lengths.mu_o < ONE_TOKEN and self._may_mix

    def _values(self, choice: Choice) -> Values:
        """What the choice was made from; of ranks in lockstep also from how many passes on they refill together."""
        period = {} if self._joint is None else {"period_passes": self._joint.plan.period}
        overheads = {"overhead_exclusive_s": choice.overhead_exclusive_s, "overhead_mixed_s": choice.overhead_mixed_s}
        return overheads | period

    def possible_refill(self, view: View, slots: int) -> Refill:
        """A refill of ``slots`` prompts with the mean lengths."""
        return Refill(
            seqs=slots,
            # KV blocks received from a prefill instance leave nothing to compute.
            prompt_tokens=max(self.lengths.mu_new, 1.0),
            half_computed=view.prefilling,
            queued=view.waiting > slots,
            hazard=min(1.0 / self._answers.mean if self._joint is None else self._joint.hazard, 1.0),
            drafts=self._drafts_of(view.decoding),
        )

    def _drafts_of(self, seqs: int) -> Drafts:
        """The drafts of a step with so many sequences."""
        return self.lengths.drafts if self._drafts is None else self._drafts.drafts_at(seqs)

    def plan_batch(self) -> None:
        """Compute how many sequences the TPOT target allows at the mean lengths so far."""
        allowed = self._service.seqs_allowed(
            self._costs,
            self._refills.per_token_s,
            mu_l=self.lengths.mu_l,
            mu_new=self.lengths.mu_new,
            mu_o=self._answers.mean,
            at_most=self._max_num_seqs,
            per_step=self._drafts_of(self._batch).tokens_per_step,
        )
        if self.lengths.mu_o < ONE_TOKEN:
            allowed = self._max_num_seqs
        self._tpot_in_reach, self.seqs_allowed = allowed > 0, allowed or self._max_num_seqs

    def prompts_that_fit(self, view: View) -> float:
        """Number of mean prompts that fit into the KV cache without preemptions, plus those whose preemption is
        worthwhile.

        Without a latency target preemptions can raise throughput; with one they can save a first token that is nearly
        late, while running responses can pause without missing their TPOT target. No bound if responses have one
        token, since none grows.
        """
        if self.lengths.mu_o < ONE_TOKEN:
            return math.inf
        active, free_tokens = view.decoding + view.prefilling, view.free_blocks * self.engine.block_size
        context_tokens, prompt_tokens, answers = self._mean_context(view), self.lengths.mu_l, self._answers
        # With targets the mean of the last prompts is taken for that of the running ones. Where the shortest come first
        # that leaves more memory free, and a preempted response stands still: counted tokens cost up to 5 points of
        # attainment in distribution shifts.
        running_tokens = (
            active * max(context_tokens - prompt_tokens, 0.0) if self._has_targets else answers.running_tokens
        )
        fit = self._room.prompts(
            active=active,
            free_tokens=free_tokens,
            context_tokens=context_tokens,
            prompt_tokens=prompt_tokens,
            answer_tokens=answers.mean,
            running_tokens=running_tokens,
        )
        if not active or fit >= self.seqs_allowed - active:  # for more there are no slots
            return fit
        if not self._has_targets:
            if self._payback_tokens is None:
                self._payback_tokens = payback_tokens(
                    self._costs,
                    self._refills.per_token_s,
                    active=active,
                    context_tokens=context_tokens,
                    prompt_tokens=prompt_tokens,
                    per_step=self._drafts_of(active).tokens_per_step,
                )
            tokens = PAYBACK_FACTOR * self._payback_tokens
            surplus = math.inf
        elif self._service.refill_due(view.oldest_wait_s):
            tokens = SHORTEST_STAY * self._answers.mean
            surplus = self._may_pause(active + fit)
        else:
            return fit
        stay = prompts_that_stay(tokens, active=active, free_tokens=free_tokens, prompt_tokens=prompt_tokens)
        return max(fit, min(stay, fit + surplus))

    def _may_pause(self, seqs: float) -> float:
        """How many sequences may be preempted beside ``seqs`` running ones."""
        return seqs * self._service.may_pause(
            self._costs,
            self._refills.per_token_s,
            seqs,
            mu_l=self.lengths.mu_l,
            mu_new=self.lengths.mu_new,
            mu_o=self._answers.mean,
            per_step=self._drafts_of(self._batch).tokens_per_step,
        )

    def queue_order(
        self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int], oldest: Waited | None
    ) -> Places:
        """New order of never-started requests; arguments as in ``Controller.queue_order``."""
        assert self._punctual is not None
        lengths, mu_o, batch = self.lengths, self._answers.mean, self._batch
        work = Work(
            prompt_token_s=self._refills.per_token_s * lengths.mu_new / lengths.mu_l,
            answer_s=mu_o
            * self._costs.decode_s(batch, lengths.mu_l + mu_o / 2)
            / (batch * self._drafts_of(batch).tokens_per_step),
            lead_s=self._largest_prefill_s,
        )
        return self._punctual.order(now_s, seen_s, prompt_tokens, work, oldest)

    def _mean_context(self, view: View) -> float:
        """Mean KV tokens per running sequence."""
        if view is not self._seen:
            active = view.decoding + view.prefilling
            used_tokens = (self.engine.num_blocks - view.free_blocks) * self.engine.block_size
            self._seen, self._payback_tokens = view, None
            self._context_tokens = used_tokens / active if active else 0.0
        return self._context_tokens


POLICY = MarginalSpec
