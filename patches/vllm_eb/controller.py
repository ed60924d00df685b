"""The one policy core: from counts, lengths, KV occupancy and a clock to what the next step may contain.

The simulator and the vLLM scheduler both call it once per scheduling step and tell it about admissions and
completions; no scheduling rule is written anywhere else. It never reads a clock or a random number, so a run is a
function of what it is told. Every change of phase or mode and every update of its parameters leaves a record with
all intermediate values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from vllm_eb.adaptive import AdaptiveThreshold
from vllm_eb.cadence import Cadence
from vllm_eb.calibration import Calibration
from vllm_eb.decisions import Decision, Phase, Record, View
from vllm_eb.marginal_policy import MarginalPolicy
from vllm_eb.modes import Mode, ModeSelector
from vllm_eb.policy import PolicySpec
from vllm_eb.queueing import Places, PunctualQueue

GATE_MARGIN, GATE_RESERVE, GATE_MIN, GATE_MAX = 0.5, 0.0, 0.05, 0.6  # appendix D.6


def _no_ages() -> Sequence[int]:
    return ()


class Controller:
    """Phase machine, KV gate, Algorithm 1 and EB+ mode selection for one engine instance."""

    def __init__(
        self,
        spec: PolicySpec,
        calibration: Calibration,
        *,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int,
    ) -> None:
        self._spec = spec
        self._max_num_seqs, self._num_blocks = max_num_seqs, num_blocks
        self._capacity_tokens = block_size * num_blocks
        self._running_ages: Callable[[], Sequence[int]] = _no_ages
        self._adaptive = AdaptiveThreshold(spec, calibration, max_num_seqs, self._capacity_tokens)
        self._selector: ModeSelector | None = None
        if spec.kind == "ebplus":
            self._selector = ModeSelector(calibration, spec.margin, spec.sticky, max_num_seqs)
        self._cadence = Cadence(spec.every) if spec.every is not None else None
        self._marginal: MarginalPolicy | None = None
        if spec.kind == "marginal":
            self._marginal = MarginalPolicy(
                spec,
                calibration.costs,
                self._adaptive,
                max_num_seqs=max_num_seqs,
                block_size=block_size,
                num_blocks=num_blocks,
            )
        self._mode: Mode = "eb" if spec.kind in ("v0", "deferred", "eb", "marginal") else "mb"
        self._phase: Phase = "decode" if self._mode == "eb" else "mixed"
        self._quota = self._admitted = 0
        self._blocked = False
        self._records: list[Record] = []

    @property
    def mode(self) -> Mode:
        """Mode in force."""
        return self._mode

    def follow_ages(self, running_ages: Callable[[], Sequence[int]]) -> None:
        """Say how to learn the output tokens so far of every running request (for the censored estimator)."""
        self._running_ages = running_ages

    def on_prompt(self, input_tokens: int, cached_tokens: int = 0) -> None:
        """A request was admitted for the first time: tokens of its prompt, and how many of them need no computing."""
        self._adaptive.on_prompt(input_tokens, cached_tokens)
        self._admitted += 1
        if self._cadence is not None:
            self._cadence.on_prompt(input_tokens, cached_tokens)
        if self._marginal is not None:
            self._marginal.on_prompt(input_tokens)

    def on_resume(self) -> None:
        """A preempted request was admitted again."""
        self._admitted += 1
        if self._cadence is not None:
            self._cadence.on_resume()
        if self._marginal is not None:
            self._marginal.on_resume()

    def on_finish(self, output_tokens: int) -> None:
        """A request left its slot after that many output tokens, one or more, by itself or aborted."""
        self._adaptive.on_finish(output_tokens)
        if self._marginal is not None:
            self._marginal.on_finish()

    def drain_records(self) -> list[Record]:
        """Records since the last call."""
        records, self._records = self._records, []
        return records

    def decide(self, view: View) -> Decision:
        """What the next step may contain."""
        if self._selector is not None:
            self._selector.observe(view.decoding + view.prefilling)
        if self._adaptive.update_due:
            self._update(view)
        if self._marginal is not None:
            return self._decide_by_margin(view, self._marginal)
        if self._cadence is not None:
            return self._decide_by_cadence(view, self._cadence)
        if self._mode == "mb":
            return self._decision()
        refilled = self._phase == "prefill" and not self._refilling(view)
        if refilled:
            self._enter("decode", view, "refill complete")
        # A decode step follows a refill, unless all that was admitted has ended already.
        if self._phase != "prefill" and not (refilled and view.decoding):
            reason = None if self._blocked and view.decoding else self._refill_reason(view)
            self._blocked = False
            if reason is not None:
                self._quota, self._admitted = max(min(view.waiting, self._idle(view)), 0), 0
                self._enter("prefill", view, reason)
        return self._decision(view)

    def prefill_blocked(self, view: View) -> None:
        """The prefill step just decided on could schedule nothing: ask again, for completions free blocks."""
        self._blocked = True
        self._enter("decode", view, "no KV blocks for a prefill")

    # Phases.

    def _refilling(self, view: View) -> bool:
        return view.prefilling > 0 or (self._admitted < self._quota and view.waiting > 0 and self._idle(view) > 0)

    def _refill_reason(self, view: View) -> str | None:
        """Why to leave decode for prefill now; None to stay."""
        if view.decoding == 0:
            return "nothing is decoding" if view.prefilling or view.waiting else None
        if view.prefilling:
            return "prompts left half computed"
        refill = min(view.waiting, self._idle(view))
        if refill < 1 or not self._threshold_met(refill, view):
            return None
        if not self._gate_open(view):
            return None
        return f"{refill} slots to refill beside {view.decoding} decoding"

    def _threshold_met(self, refill: int, view: View) -> bool:
        if self._spec.kind == "v0":
            return True
        k = self._k() or 1
        if self._spec.kind == "deferred":
            return self._idle(view) >= k
        # refill/decoding >= theta/(1-theta) with theta = k/N: as if k slots were idle, also when the queue is short.
        return refill * (self._limit() - k) >= k * view.decoding

    def _gate_open(self, view: View) -> bool:
        if self._spec.kind in ("v0", "deferred") or not self._spec.kv_gate:
            return True
        return view.free_blocks / self._num_blocks > self._gate()

    def _gate(self) -> float:
        expected_share = self._limit() * self._adaptive.mu_o * GATE_MARGIN / self._capacity_tokens
        return min(max(expected_share + GATE_RESERVE, GATE_MIN), GATE_MAX)

    def _idle(self, view: View) -> int:
        active = view.decoding + view.prefilling
        slots = min(self._limit(), self._max_num_seqs - view.idle_sessions) - active
        return slots if self._marginal is None else min(slots, math.ceil(self._marginal.prompts_that_fit(view)))

    def _limit(self) -> int:
        if self._marginal is not None:
            return self._marginal.seqs_allowed
        return self._adaptive.n_limit if self._adaptive.online else self._max_num_seqs

    def _limit_at(self, view: View | None) -> int:
        """The batch limit in force: under the marginal policy what memory has room for, too."""
        if self._marginal is None or view is None:
            return self._limit()
        return view.decoding + view.prefilling + max(self._idle(view), 0)

    def _k(self) -> int | None:
        if self._spec.kind in ("marginal", "cadence"):
            return None
        if self._spec.kind == "v0":
            return 1
        if self._spec.k is not None:
            return min(self._spec.k, self._limit())
        return max(1, int(self._adaptive.theta * self._limit()))

    def _decision(self, view: View | None = None) -> Decision:
        limit = self._max_num_seqs
        if view is not None and self._phase != "decode":
            active = view.decoding + view.prefilling
            limit = self._limit_at(view)
            if self._phase == "prefill":
                limit = min(limit, active + self._quota - self._admitted)
            limit = max(limit, active)
        return Decision(self._phase, self._mode, limit, self._k(), self._limit_at(view))

    def _enter(self, phase: Phase, view: View, reason: str) -> None:
        self._phase = phase
        self._record("phase", view, reason, {})

    # The marginal policy.

    @property
    def orders_queue(self) -> bool:
        """Whether requests that were never started are to be put into the order of :meth:`queue_order`."""
        return self._marginal is not None and self._marginal.orders_queue

    @property
    def queue(self) -> PunctualQueue:
        """When the queue is to be ordered, and how long its oldest punctual request has waited."""
        assert self._marginal is not None
        return self._marginal.queue

    def queue_order(self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int]) -> Places:
        """The places of never-started requests in their new order; to be asked when ``queue`` says it is due.

        ``seen_s``: when each came, in the order of the queue; ``prompt_tokens``: its prompt's length.
        """
        assert self._marginal is not None
        return self._marginal.queue_order(now_s, seen_s, prompt_tokens)

    def _decide_by_margin(self, view: View, marginal: MarginalPolicy) -> Decision:
        marginal.observe(view, stepped=self._phase != "prefill")
        if self._phase == "prefill" and self._refilling(view) and not marginal.answers_behind:
            return self._decision(view)
        refill = max(min(view.waiting, self._idle(view)), 0)
        choice = marginal.choose(view, refill, blocked=self._blocked)
        self._blocked = False
        if choice.way != self._phase:
            self._phase, self._mode = choice.way, "mb" if choice.way == "mixed" else "eb"
            self._quota, self._admitted = refill, 0
            values = {"overhead_exclusive_s": choice.overhead_exclusive_s, "overhead_mixed_s": choice.overhead_mixed_s}
            self._record("phase", view, marginal.why(refill), values)
        return self._decision(view)

    def _decide_by_cadence(self, view: View, cadence: Cadence) -> Decision:
        held = cadence.hold(view)
        phase: Phase = "decode" if held else "mixed"
        if phase != self._phase:
            self._enter(phase, view, "the interval is not over" if held else "prompts may come")
        return self._decision()

    # Parameters and mode.

    def _update(self, view: View) -> None:
        update = self._adaptive.update(view.now_s, self._running_ages)
        if update is not None:
            self._record(
                "update",
                view,
                "Algorithm 1",
                {
                    "p0": update.estimate.p0,
                    "eta": update.estimate.eta,
                    "samples": update.estimate.samples,
                    "zeta": update.zeta,
                    "delta_theta": update.delta_theta,
                },
            )
        if self._selector is not None:
            self._evaluate(view)
        if self._marginal is not None:
            self._marginal.plan_batch()

    def _evaluate(self, view: View) -> None:
        assert self._selector is not None
        adaptive = self._adaptive
        found = self._selector.evaluate(mu_l=adaptive.mu_l, mu_o=adaptive.mu_o, theta0=adaptive.theta0)
        self._mode = found.mode
        if found.switched:
            # Requests in flight keep their KV and their place: half-computed prompts are finished first.
            self._phase = "mixed" if found.mode == "mb" else "prefill" if view.prefilling else "decode"
            self._quota = self._admitted = 0
        values: dict[str, float | int | None] = {"margin": found.margin}
        if found.crossover is not None:
            sides = found.crossover
            values |= {
                "lhs": sides.lhs,
                "rhs": sides.rhs,
                "r": sides.r,
                "beta_mb": sides.beta_mb,
                "beta_eb": sides.beta_eb,
            }
        self._record("mode", view, found.reason, values)

    def _theta(self) -> float | None:
        if self._adaptive.online or self._spec.theta is not None:
            return self._adaptive.theta
        k = self._k()
        return None if k is None else k / self._limit()

    def _record(
        self,
        kind: Literal["phase", "update", "mode"],
        view: View,
        reason: str,
        values: dict[str, float | int | None],
    ) -> None:
        adaptive = self._adaptive
        common: dict[str, float | int | None] = {
            "decoding": view.decoding,
            "prefilling": view.prefilling,
            "waiting": view.waiting,
            "idle": max(self._idle(view), 0),
            "k": self._k(),
            "n_limit": self._limit_at(view),
            "theta": self._theta(),
            "theta0": adaptive.theta0 if adaptive.online else None,
            "mu_l": adaptive.mu_l,
            "mu_o": adaptive.mu_o,
            "n_obs": self._selector.n_obs if self._selector is not None else None,
            "kv_free_share": view.free_blocks / self._num_blocks,
            "kv_gate": self._gate(),
        }
        self._records.append(Record(view.now_s, view.step_id, kind, reason, self._mode, self._phase, common | values))
