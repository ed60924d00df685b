"""Refills, mixed or exclusive, when one more decode step would cost more by measured costs; targets come first.

:mod:`vllm_eb.refills` decides when, how and for how many requests to refill, :mod:`vllm_eb.service` what the targets
require, :mod:`vllm_eb.queueing` the order of waiting requests. This module keeps their inputs: lengths, contexts and
batch sizes so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    payback_steps,
    prompts_that_stay,
)
from vllm_eb.service import AnswerLength, FadingMean, ServiceLevel, TokenDebt
from vllm_eb.strategy import Change, EngineFacts, Lengths, PhaseState, StepChoice, Strategy, Values, View

ALLOWED_EVERY = 16  # decisions between two updates of the batch size that the TPOT target allows

NOTHING_TO_REFILL = Choice("decode")
KEEP_DECODING = StepChoice("decode", "eb")
ONE_TOKEN = 1.5  # tokens; a mean response below it is mostly one token


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
    window: int = setting(500, "completions that the estimator remembers", unit="requests", at_least=1)
    update_every: int = setting(100, "completions between updates", unit="requests", at_least=1)

    def check(self) -> None:
        """A target for the first token has an order of its own."""
        if self.ttft is not None and self.order != "fcfs":
            raise PolicyError("marginal with ttft= orders the queue itself: leave order= out")

    @property
    def completions_per_update(self) -> int:
        """M of the paper."""
        return self.update_every

    @property
    def needs_costs(self) -> bool:
        """Always: every choice compares costs."""
        return True

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """The strategy, from costs, targets and KV memory."""
        return MarginalPolicy(self, engine, lengths)


class MarginalPolicy(Strategy):
    """Chooses every step from measured costs, targets and free KV memory; only reads ``lengths``."""

    bounds_mixed = True

    def __init__(self, spec: MarginalSpec, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(engine, lengths)
        self._costs, self._max_num_seqs = engine.calibration.costs, engine.max_num_seqs
        self._service, self._debt = ServiceLevel(spec.ttft, spec.tpot), TokenDebt(spec.tpot)
        self._has_targets = self._service.has_targets
        self._answers = AnswerLength(lengths.mu_o, spec.window, product_limit=not self._has_targets)
        self._room = KvRoom()
        self._punctual = PunctualQueue(spec.ttft) if spec.ttft is not None else None
        self.queue = self._punctual
        self._largest_prefill_s = self._costs.prefill_s(HUGE_TOKENS)
        self._allowed, self._tpot_in_reach, self._batch = self._max_num_seqs, True, self._max_num_seqs
        # Figures of one view, which a decision needs several times.
        self._seen: View | None = None
        self._context_tokens = 0.0
        self._payback_steps: float | None = None
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

    @property
    def seqs_allowed(self) -> int:
        """Number of sequences that the TPOT target allows."""
        return self._allowed

    @property
    def responses_behind(self) -> bool:
        """Whether prompts should wait because running responses are behind their TPOT target."""
        return self._debt.exceeded

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """Record the first admission of a request with ``input_tokens`` prompt tokens."""
        self._seen = None  # the mean lengths have changed
        self._room.admitted()
        if self._punctual is not None:
            self._punctual.admitted(input_tokens)

    def on_resume(self) -> None:
        """Record that a preempted request was admitted again."""
        self._room.admitted()

    def on_finish(self, output_tokens: int) -> None:
        """Record that a request left its slot."""
        self._answers.ended(output_tokens)
        if self._joint is not None:
            self._joint.ended(output_tokens)
        self._room.ended()

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """Estimate the mean answer again, and the batch size that the target allows."""
        self._answers.update(running_ages)
        self.plan_batch()
        return ()

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """The next step: continue the current refill, or take the cheapest step."""
        self._update_inputs(view, stepped=phases.phase != "prefill")
        if phases.phase == "prefill" and phases.refilling(view) and not self.responses_behind:
            refill = phases.refill(view)
            if not self._cheaper_mixed(view, refill):
                return StepChoice("prefill", "eb", token_budget=self._refill_budget())
            self._took("mixed", view)
            budget = self._token_budget(view, "mixed", refill)
            return StepChoice("mixed", "mb", "mixed_costs_less", refill, token_budget=budget)
        refill = phases.refill(view)
        choice = self._cheapest_step(view, refill, blocked=phases.pop_blocked())
        if choice.way == "decode" == phases.phase:
            return KEEP_DECODING
        return StepChoice(
            choice.way,
            "mb" if choice.way == "mixed" else "eb",
            "responses_behind" if self.responses_behind else "slots_free" if refill else "nothing_to_refill",
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
        return None if cheapest is None or way == "decode" else view.decoding + cheapest

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
        self._room.observe(view.decoding + view.prefilling, view.preempted)
        # A rank in lockstep that holds its prompts back alone does not make the pass shorter.
        if self._service.tpot_s is not None and self._joint is None:
            self._debt.observe(
                view.now_s,
                decoding=view.decoding,
                stepped=stepped,
                answer_tokens=self._answers.mean,
                reachable=self._tpot_in_reach and not self._one_token,
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
            if decodes and (blocked or self.responses_behind):
                choice = choice._replace(way="decode")
            elif self._fills_passes and choice.way == "prefill":
                choice = choice._replace(way="mixed")
        self._took(choice.way, view, refill if choice.way == "decode" else 0)
        return choice

    def _took(self, way: Way, view: View, left_out: int = 0) -> None:
        """Count the step that was chosen, ``left_out``: requests that could be in it."""
        if way != "decode":
            self._refills.refilled()
        if way != "prefill":
            self._refills.decoded(view.decoding, self._mean_context(view), left_out)
            self._answers.decoded(view.decoding)

    @property
    def _fills_passes(self) -> bool:
        """Whether prompts join in every pass, as with answers of one token: there, ending a refill saves
        nothing, and its last, partly filled pass lasts as long as the slowest rank's."""
        return self._joint is not None and self._one_token and self._may_mix

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
            hazard=self.lengths.drafts.per_step(min(1.0 / self._answers.mean, 1.0)),
        )

    @property
    def _one_token(self) -> bool:
        """Whether responses have one token: they do not grow, and have no time per further token."""
        return self.lengths.mu_o < ONE_TOKEN

    def plan_batch(self) -> None:
        """Compute how many sequences the TPOT target allows at the mean lengths so far."""
        allowed = self._service.seqs_allowed(
            self._costs,
            self._refills.per_token_s,
            mu_l=self.lengths.mu_l,
            mu_new=self.lengths.mu_new,
            mu_o=self._answers.mean,
            at_most=self._max_num_seqs,
            per_step=self.lengths.drafts.tokens_per_step,
        )
        if self._one_token:
            allowed = self._max_num_seqs
        self._tpot_in_reach, self._allowed = allowed > 0, allowed or self._max_num_seqs

    def prompts_that_fit(self, view: View) -> float:
        """Number of mean prompts that fit into the KV cache without preemptions, plus those whose preemption is
        worthwhile.

        Without a latency target preemptions can raise throughput; with one they can save a first token that is nearly
        late, while running responses can pause without missing their TPOT target. No bound if responses have one
        token, since none grows.
        """
        if self._one_token:
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
        if not active or fit >= self._allowed - active:  # for more there are no slots
            return fit
        if not self._has_targets:
            if self._payback_steps is None:
                self._payback_steps = payback_steps(
                    self._costs,
                    self._refills.per_token_s,
                    active=active,
                    context_tokens=context_tokens,
                    prompt_tokens=prompt_tokens,
                )
            steps = PAYBACK_FACTOR * self._payback_steps
            surplus = math.inf
        elif self._service.refill_due(view.oldest_wait_s):
            steps = SHORTEST_STAY * self._answers.mean
            surplus = self._may_pause(active + fit)
        else:
            return fit
        stay = prompts_that_stay(steps, active=active, free_tokens=free_tokens, prompt_tokens=prompt_tokens)
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
            per_step=self.lengths.drafts.tokens_per_step,
        )

    def order_stands(self, now_s: float, oldest_s: float, waiting: int, prompt_tokens: int) -> bool:
        """See Strategy."""
        assert self._punctual is not None
        return self._punctual.stands(now_s, oldest_s, waiting, prompt_tokens, self._work())

    def queue_order(
        self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int], oldest: Waited | None
    ) -> Places:
        """New order of never-started requests; arguments as in ``Controller.queue_order``."""
        assert self._punctual is not None
        return self._punctual.order(now_s, seen_s, prompt_tokens, self._work(), oldest)

    def _work(self) -> Work:
        """Engine time per waiting request, at the mean lengths so far."""
        mu_l, mu_o, batch = self.lengths.mu_l, self._answers.mean, self._batch
        return Work(
            prompt_token_s=self._refills.per_token_s * self.lengths.mu_new / mu_l,
            answer_s=mu_o
            * self._costs.decode_s(batch, mu_l + mu_o / 2)
            / (batch * self.lengths.drafts.tokens_per_step),
            lead_s=self._largest_prefill_s,
        )

    def _mean_context(self, view: View) -> float:
        """Mean KV tokens per running sequence."""
        if view is not self._seen:
            active = view.decoding + view.prefilling
            used_tokens = (self.engine.num_blocks - view.free_blocks) * self.engine.block_size
            self._seen, self._payback_steps = view, None
            self._context_tokens = used_tokens / active if active else 0.0
        return self._context_tokens


POLICY = MarginalSpec
