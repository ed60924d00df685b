"""Refills when one more decode step would cost more, mixed or exclusive, as measured costs say; targets come first.

When to refill and in which way is :mod:`vllm_eb.marginal`, for how many KV has room :mod:`vllm_eb.room`, what targets
ask for :mod:`vllm_eb.service`, in which order requests wait :mod:`vllm_eb.queueing`. What is kept here is what these
are asked with: lengths, contexts and batches as seen so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_eb.decisions import View
from vllm_eb.lengths import Lengths
from vllm_eb.marginal import HUGE_TOKENS, Choice, MarginalRefill, Refill
from vllm_eb.policy import PolicySpec, setting
from vllm_eb.queueing import Places, PunctualQueue, Work
from vllm_eb.room import PAID_OVER, SHORTEST_STAY, KvRoom, paying_steps, prompts_that_stay
from vllm_eb.service import AnswerLength, ServiceLevel, TokenDebt
from vllm_eb.strategy import Change, EngineFacts, PhaseState, StepChoice, Strategy

ALLOWED_EVERY = 16  # decisions between two looks at how many sequences the TPOT target allows


@dataclass(frozen=True, kw_only=True)
class MarginalSpec(PolicySpec):
    """``ttft`` and ``tpot`` are targets in seconds; None: no such target."""

    description = (
        "refills when one more decode step would cost more, mixed or exclusive as measured costs say; "
        "ttft= and tpot= (seconds) are met first"
    )
    departure = 30

    mix: bool = setting(True, "marginal may refill beside decodes where that costs less; off: exclusive batches only")
    ttft: float | None = setting(
        None, "marginal's target for the first token in seconds: requests that can still meet it are served first",
        unit="s", above=0, doubtful_from=3600,
    )  # fmt: skip
    tpot: float | None = setting(
        None, "marginal's target for the time per output token in seconds: bounds the batch",
        unit="s", above=0, doubtful_from=5,
    )  # fmt: skip
    window: int = setting(500, "completions that the estimator remembers", unit="requests", at_least=1)
    update_every: int = setting(100, "completions between updates", unit="requests", at_least=1)

    @property
    def completions_per_update(self) -> int:
        """M."""
        return self.update_every

    @property
    def needs_costs(self) -> bool:
        """Every choice compares costs."""
        return True

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """Costs, targets and room, put together."""
        return MarginalPolicy(self, engine, lengths)


class MarginalPolicy(Strategy):
    """What the next step should be under measured costs, targets and the room there is; ``lengths`` is only read."""

    bounds_mixed = True

    def __init__(self, spec: MarginalSpec, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(engine, lengths)
        self._costs, self._max_num_seqs = engine.calibration.costs, engine.max_num_seqs
        self._refills = MarginalRefill(self._costs, may_mix=spec.mix)
        self._service, self._debt = ServiceLevel(spec.ttft, spec.tpot), TokenDebt(spec.tpot)
        self._answers = AnswerLength(lengths.mu_o, spec.window)
        self._room = KvRoom(engine.capacity_tokens)
        self.queue = PunctualQueue(spec.ttft) if spec.ttft is not None else None
        self._allowed, self._tpot_in_reach, self._batch = self._max_num_seqs, True, self._max_num_seqs
        self._decisions = 0
        self.plan_batch()

    @property
    def seqs_allowed(self) -> int:
        """Sequences that the TPOT target allows."""
        return self._allowed

    @property
    def answers_behind(self) -> bool:
        """Whether prompts should wait for answers that are behind their target."""
        return self._debt.too_much

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """A request was admitted for the first time, with a prompt of that many tokens."""
        self._room.admitted()
        if self.queue is not None:
            self.queue.admitted(input_tokens)

    def on_resume(self) -> None:
        """A preempted request was admitted again."""
        self._room.admitted()

    def on_finish(self, output_tokens: int) -> None:
        """A request left its slot."""
        self._answers.ended()
        self._room.ended()

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """The mean lengths are new, and so is the batch that the target allows."""
        self.plan_batch()
        return ()

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """The next step: the one under way, or what costs least."""
        self._look(view, stepped=phases.phase != "prefill")
        if phases.phase == "prefill" and phases.refilling(view) and not self.answers_behind:
            return StepChoice("prefill", "eb")
        refill = phases.refill(view)
        choice = self._weigh(view, refill, blocked=phases.take_blocked())
        return StepChoice(
            choice.way,
            "mb" if choice.way == "mixed" else "eb",
            self._why(refill),
            refill,
            {"overhead_exclusive_s": choice.overhead_exclusive_s, "overhead_mixed_s": choice.overhead_mixed_s},
        )

    def _look(self, view: View, *, stepped: bool) -> None:
        """Update what targets and KV room are computed from. ``stepped``: the last step decoded."""
        self._decisions += 1
        if self._service.tpot_s is not None and self._decisions % ALLOWED_EVERY == 0:
            self.plan_batch()
        self._room.observe(view.decoding + view.prefilling, view.preempted)
        self._debt.observe(
            view.now_s,
            decoding=view.decoding,
            stepped=stepped,
            answer_tokens=self._answers.mean,
            in_reach=self._tpot_in_reach,
        )

    def _weigh(self, view: View, refill: int, *, blocked: bool) -> Choice:
        """The next step, where ``refill`` requests could join. ``blocked``: the last prefill found no KV blocks."""
        self._batch = max(view.decoding + view.prefilling + refill, 1)
        context_tokens = self._mean_context(view)
        choice = self._refills.choose(
            decoding=view.decoding if view.decodes else 0,
            context_tokens=context_tokens,
            refill=self.refill_now(view, refill),
            must=view.prefilling > 0 or (refill > 0 and self._service.refill_due(view.oldest_wait_s)),
        )
        if view.decodes and (blocked or self.answers_behind):
            choice = replace(choice, way="decode")
        if choice.way != "decode":
            self._refills.refilled()
        if choice.way != "prefill":
            self._refills.decoded(view.decoding, context_tokens, refill if choice.way == "decode" else 0)
            self._answers.decoded(view.decoding)
        return choice

    def _why(self, refill: int) -> str:
        """The reason for the last choice, in words."""
        if self.answers_behind:
            return "answers are behind their target"
        return f"{refill} slots to refill" if refill else "nothing to refill"

    def refill_now(self, view: View, slots: int) -> Refill:
        """A refill of ``slots`` prompts at the mean lengths."""
        return Refill(
            seqs=slots,
            prompt_tokens=max(self.lengths.mu_new, 1.0),  # KV delivered whole leaves nothing to compute
            half_computed=view.prefilling,
            queued=view.waiting > slots,
            hazard=1.0 / self._answers.mean,
        )

    def plan_batch(self) -> None:
        """Take how many sequences the TPOT target allows at the lengths seen so far."""
        allowed = self._service.seqs_allowed(
            self._costs,
            self._refills.per_token_s,
            mu_l=self.lengths.mu_l,
            mu_new=self.lengths.mu_new,
            mu_o=self._answers.mean,
            at_most=self._max_num_seqs,
        )
        self._tpot_in_reach, self._allowed = allowed > 0, allowed or self._max_num_seqs

    def prompts_that_fit(self, view: View) -> float:
        """Mean prompts that KV has room for without preemptions, and more where preemptions pay or save a first token.

        They pay in throughput where there is no latency target; they save a first token that is nearly late, as long as
        answers can pause and be in time.
        """
        active, free_tokens = view.decoding + view.prefilling, view.free_blocks * self.engine.block_size
        context_tokens, prompt_tokens = self._mean_context(view), self.lengths.mu_l
        fit = self._room.prompts(
            active=active,
            free_tokens=free_tokens,
            context_tokens=context_tokens,
            prompt_tokens=prompt_tokens,
            answer_tokens=self._answers.mean,
        )
        if not active or fit >= self._max_num_seqs - active:
            return fit
        if not self._service.has_targets:
            steps = PAID_OVER * paying_steps(
                self._costs,
                self._refills.per_token_s,
                active=active,
                context_tokens=context_tokens,
                prompt_tokens=prompt_tokens,
            )
            surplus = math.inf
        elif self._service.refill_due(view.oldest_wait_s):
            steps = SHORTEST_STAY * self._answers.mean
            surplus = self._may_pause(active + fit)
        else:
            return fit
        stay = prompts_that_stay(steps, active=active, free_tokens=free_tokens, prompt_tokens=prompt_tokens)
        return max(fit, min(stay, fit + surplus))

    def _may_pause(self, seqs: float) -> float:
        """How many beside ``seqs`` sequences may be preempted."""
        return seqs * self._service.may_pause(
            self._costs,
            self._refills.per_token_s,
            seqs,
            mu_l=self.lengths.mu_l,
            mu_new=self.lengths.mu_new,
            mu_o=self._answers.mean,
        )

    def queue_order(self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int]) -> Places:
        """The places of never-started requests in their new order; arguments as of ``Controller.queue_order``."""
        assert self.queue is not None
        mu_l, mu_o, batch = self.lengths.mu_l, self._answers.mean, self._batch
        work = Work(
            prompt_token_s=self._refills.per_token_s * self.lengths.mu_new / mu_l,
            answer_s=mu_o * self._costs.decode_s(batch, mu_l + mu_o / 2) / batch,
            lead_s=self._costs.prefill_s(HUGE_TOKENS),
        )
        return self.queue.order(now_s, seen_s, prompt_tokens, work)

    def _mean_context(self, view: View) -> float:
        """KV tokens of a running sequence."""
        active = view.decoding + view.prefilling
        return (self.engine.num_blocks - view.free_blocks) * self.engine.block_size / active if active else 0.0


POLICY = MarginalSpec
