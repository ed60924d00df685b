"""Phases of exclusive batching: decode until a refill is due, then prefill until its requests are admitted."""

from __future__ import annotations

import math
from collections.abc import Callable

from vllm_eb.decisions import Decision, Phase, View
from vllm_eb.lengths import Lengths
from vllm_eb.modes import Mode
from vllm_eb.strategy import EngineFacts, StepChoice, Strategy, Values

GATE_MARGIN, GATE_RESERVE, GATE_MIN, GATE_MAX = 0.5, 0.0, 0.05, 0.6  # appendix D.6

Entered = Callable[[View, str, Values], None]


class Phases:
    """Current phase and mode, remaining admissions of a refill, KV gate.

    ``entered`` is called after each change of phase.
    """

    def __init__(self, engine: EngineFacts, strategy: Strategy, lengths: Lengths, entered: Entered) -> None:
        self._engine, self._strategy, self._lengths, self._entered = engine, strategy, lengths, entered
        self._max_num_seqs, self._num_blocks = engine.max_num_seqs, engine.num_blocks
        self.mode: Mode = strategy.mode
        self.phase: Phase = "decode" if self.mode == "eb" else "mixed"
        self.token_budget: int | None = None  # of the step being decided on
        self._quota = self._admitted = 0
        self._blocked = False

    def on_admission(self) -> None:
        """Record an admission, first or repeated."""
        self._admitted += 1

    def pop_blocked(self) -> bool:
        """Whether the last prefill found no KV blocks; resets the flag."""
        blocked, self._blocked = self._blocked, False
        return blocked

    def block(self, view: View) -> None:
        """Switch to decode, which frees blocks: the prefill step decided on could schedule nothing."""
        self._blocked = True
        self.enter("decode", view, "no KV blocks for a prefill")

    def enter(self, phase: Phase, view: View, reason: str, values: Values | None = None) -> None:
        """Change the phase."""
        self.phase = phase
        self._entered(view, reason, values or {})

    def switch(self, mode: Mode, view: View) -> None:
        """Change the mode. Running requests keep their KV and their place; half-computed prompts come first."""
        self.mode = mode
        self.phase = "mixed" if mode == "mb" else "prefill" if view.prefilling else "decode"
        self._quota = self._admitted = 0

    def follow(self, choice: StepChoice, view: View) -> None:
        """Apply the choice of a strategy that chooses every step."""
        self.token_budget = choice.token_budget
        if choice.phase == self.phase:
            return
        self.mode = choice.mode
        self._quota, self._admitted = choice.refill, 0
        self.enter(choice.phase, view, choice.reason, choice.values)

    def extend(self, view: View) -> None:
        """During a prefill that delays no decode, admit as many requests as there are slots."""
        if not view.decodes:
            self._quota = max(self._quota, self._admitted + self.refill(view))

    def alternate(self, view: View) -> None:
        """Change from decode to prefill when a refill is due, and back when it is complete."""
        refilled = self.phase == "prefill" and not self.refilling(view)
        if refilled:
            self.enter("decode", view, "refill complete")
        # A decode step follows a refill, unless all admitted requests have ended already.
        if self.phase != "prefill" and not (refilled and view.decodes):
            reason = None if self._blocked and view.decodes else self._refill_reason(view)
            self._blocked = False
            if reason is not None:
                self._quota, self._admitted = self.refill(view), 0
                self.enter("prefill", view, reason)

    def refilling(self, view: View) -> bool:
        """Whether the current prefill phase has requests left to admit or to compute."""
        return view.prefilling > 0 or (self._admitted < self._quota and view.waiting > 0 and self.idle(view) > 0)

    def refill(self, view: View) -> int:
        """Number of waiting requests for which there are idle slots."""
        return max(min(view.waiting, self.idle(view)), 0) if view.waiting else 0

    def idle(self, view: View) -> int:
        """Number of idle slots; negative while more requests run than are allowed."""
        strategy = self._strategy
        active = view.decoding + view.prefilling
        slots = min(strategy.seqs_allowed, self._max_num_seqs - view.idle_sessions) - active
        if slots <= 0:
            return slots
        fit = strategy.prompts_that_fit(view)
        return slots if fit == math.inf else min(slots, math.ceil(fit))

    def batch_limit(self, view: View, idle: int | None = None) -> int:
        """The current batch limit; if the strategy bounds memory, at most the number of sequences with room.

        ``idle``: what :meth:`idle` returns, if that is known already.
        """
        if not self._strategy.bounds_mixed:
            return self._strategy.seqs_allowed
        return view.decoding + view.prefilling + max(self.idle(view) if idle is None else idle, 0)

    def decision(self, view: View) -> Decision:
        """The decision for the next step."""
        limit, batch_limit = self._max_num_seqs, self.batch_limit(view)
        if self.phase == "prefill" or (self.phase == "mixed" and self._strategy.bounds_mixed):
            active = view.decoding + view.prefilling
            limit = batch_limit
            if self.phase == "prefill":
                limit = min(limit, active + self._quota - self._admitted)
            limit = max(limit, active)
        return Decision(self.phase, self.mode, limit, self._strategy.slots, batch_limit, self.token_budget)

    def gate(self) -> float:
        """The share of KV memory that must be free for a refill."""
        limit = self._strategy.seqs_allowed
        expected_share = limit * self._lengths.mu_o * GATE_MARGIN / self._engine.capacity_tokens
        return min(max(expected_share + GATE_RESERVE, GATE_MIN), GATE_MAX)

    def _refill_reason(self, view: View) -> str | None:
        """Why to change from decode to prefill now, or None."""
        if view.decoding == 0:
            return "nothing is decoding" if view.prefilling or view.waiting else None
        if view.last_tokens_out:
            return "every answer has its last token in flight" if view.prefilling or self.refill(view) else None
        if view.prefilling:
            return "prompts left half computed"
        if not view.waiting:
            return None
        idle = self.idle(view)
        refill = min(view.waiting, idle)
        if refill < 1 or not self._strategy.refill_due(view, refill, idle):
            return None
        if self._strategy.gated and view.free_blocks / self._num_blocks <= self.gate():
            return None
        return f"{refill} slots to refill beside {view.decoding} decoding"
