"""Exclusive batching with the threshold of Zhang et al. (ICML 2026), computed online by Algorithm 1 or fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_eb.calibration import Calibration
from vllm_eb.hazard import CensoredHazard, HazardEstimate, SlidingHazard
from vllm_eb.policy import PolicyError, PolicySpec, setting, settings_of
from vllm_eb.strategy import Change, EngineFacts, Lengths, Strategy, Values, View
from vllm_eb.theory import EPSILON, Threshold, memory_safe_batch, optimal_threshold

VALUES_OF_T = 1024  # tried besides those at which answers end: every number up to about 100, then 1 in 100


def renewal_threshold(survival: NDArray[np.float64], alpha_p: float, alpha_d: float) -> float:
    """The best share of idle slots at which to refill, in (0, 1].

    ``survival[a]``: share of the answers longer than ``a`` tokens, not rising, 1 at 0; the first token comes with the
    prefill. ``alpha_p``, ``alpha_d``: fixed costs of a prefill and of a decode step in s.
    """
    steps = survival[1:]  # an answer of n tokens decodes for n - 1 steps
    if not len(steps) or steps[0] <= 0.0:
        return 1.0
    ends = 1 + np.flatnonzero(steps[1:] < steps[:-1])  # a phase that ends just before these answers do costs one more
    lasting = np.unique(np.concatenate([np.geomspace(1, len(steps), VALUES_OF_T).astype(np.int64), ends]))
    phases = np.array([steps[::phase_steps].sum() for phase_steps in lasting.tolist()]) / steps[0]
    best = int(np.argmin((alpha_p + alpha_d * lasting) * phases))
    return float(min(1.0 / phases[best], 1.0))


# After the authors' code: the paper says "a practical range" and neither smooths theta nor spaces the updates of N.
THETA_MIN, THETA_MAX = 0.01, 0.80
THETA_WEIGHT = 0.3  # weight of the new value
N_UPDATE_INTERVAL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class EstimatingSpec(PolicySpec):
    """Settings of a policy that uses Algorithm 1 (W and M of the paper are ``window`` and ``update_every``)."""

    estimator: Literal["published", "censored"] = setting(
        "published", "estimator of the completion hazard: published, or censored (also uses running requests)"
    )
    window: int = setting(500, "completions that the estimator remembers", unit="requests", at_least=1)
    update_every: int = setting(100, "completions between updates", unit="requests", at_least=1)
    min_samples: int = setting(30, "completions before the first update", unit="requests", at_least=1)
    initial_theta: float = setting(0.70, "threshold before the first update", unit="share", above=0, below=1)
    theta_min: float = setting(
        THETA_MIN, "lowest threshold the online controller may choose", unit="share", above=0, at_most=THETA_MAX
    )
    correction: Literal["published", "off", "renewal"] = setting(
        "published",
        "threshold under a hazard that changes with age: published (theorem 3.2), off (theta0), or renewal (ours: "
        "counts the ages that requests have, docs/theory.md)",
    )
    epsilon: float = setting(EPSILON, "allowed probability that the KV cache overflows", unit="share", above=0, below=1)
    kv_gate: bool = setting(True, "stay in decode while free KV memory is low")
    memory_safe: bool = setting(True, "bound N by the memory-safe batch")
    memory_form: Literal["code", "paper"] = setting("code", "formula of that bound: code (published code) or paper")

    @property
    def completions_per_update(self) -> int:
        """M of the paper."""
        return self.update_every

    @property
    def needs_costs(self) -> bool:
        """Whether the threshold is computed online, from fixed costs."""
        return self.adapts

    @property
    def adapts(self) -> bool:
        """True: Algorithm 1 sets the threshold."""
        return True

    def ineffective_settings(self) -> Mapping[str, str]:
        """The settings of the memory bound have no effect without it."""
        return {} if self.memory_safe else dict.fromkeys(("epsilon", "memory_form"), "memory_safe=false")


@dataclass(frozen=True)
class Update:
    """Inputs and results of one execution of Algorithm 1."""

    estimate: HazardEstimate
    theta0: float
    zeta: float
    delta_theta: float
    theta: float
    n_limit: int


class AdaptiveThreshold:
    """Estimates ``p0`` and ``eta``, and derives ``theta`` (share of N) and ``n_limit`` (sequences) from them."""

    def __init__(
        self, spec: EstimatingSpec, calibration: Calibration, lengths: Lengths, max_num_seqs: int, capacity_tokens: int
    ) -> None:
        self._spec, self._calibration, self._lengths = spec, calibration, lengths
        self._max_num_seqs, self._capacity_tokens = max_num_seqs, capacity_tokens
        self._hazard = (SlidingHazard if spec.estimator == "published" else CensoredHazard)(
            window=spec.window, min_samples=spec.min_samples
        )
        self.theta = self.theta0 = spec.initial_theta
        self.n_limit = max_num_seqs
        self._updates = 0
        self._last_n_update_s = float("-inf")

    def on_finish(self, output_tokens: int) -> None:
        """Record that a request left its slot after ``output_tokens`` tokens."""
        self._hazard.observe(output_tokens)

    def update(self, now_s: float, running_ages: Callable[[], Sequence[int]]) -> Update | None:
        """Run Algorithm 1 once. Returns None while the window holds too few samples.

        ``running_ages`` returns the output tokens of each running request so far; only the censored estimator calls it.
        """
        ages = running_ages() if self._spec.estimator == "censored" else ()
        estimate = self._hazard.estimate(ages)
        return None if estimate is None else self._apply(estimate, now_s)

    def _apply(self, estimate: HazardEstimate, now_s: float) -> Update:
        cal = self._calibration
        threshold = optimal_threshold(
            estimate.p0, cal.alpha_p, cal.alpha_d, eta=estimate.eta, beta_d=cal.beta_d, n=self.n_limit,
            drafts=self._lengths.drafts,
        )  # fmt: skip
        clipped = min(max(self._target(threshold, estimate), self._spec.theta_min), THETA_MAX)
        weight = THETA_WEIGHT if self._updates else 1.0
        self.theta += weight * (clipped - self.theta)
        # Eq. 8 compares costs with it, so the policy's lower bound on the threshold does not apply.
        self.theta0 = max(threshold.theta0, THETA_MIN)
        self._updates += 1
        if self._spec.memory_safe and now_s - self._last_n_update_s >= N_UPDATE_INTERVAL_S:
            self.n_limit = min(max(self._memory_safe(estimate), 1), self._max_num_seqs)
            self._last_n_update_s = now_s
        return Update(estimate, threshold.theta0, threshold.zeta, threshold.delta_theta, self.theta, self.n_limit)

    def _target(self, threshold: Threshold, estimate: HazardEstimate) -> float:
        """The threshold to move to, before its bounds."""
        if self._spec.correction == "renewal":
            costs, per_step = self._calibration, self._lengths.drafts.tokens_per_step
            return renewal_threshold(estimate.survival, costs.alpha_p, costs.alpha_d / per_step)
        return threshold.theta0 if self._spec.correction == "off" else threshold.theta_star

    def _memory_safe(self, estimate: HazardEstimate) -> int:
        """Number of sequences that fit into the KV cache while they grow."""
        if estimate.mean <= 1.0:  # responses of one token do not grow, and prompts that do not fit are not admitted
            return self._max_num_seqs
        spec, slot_tokens = self._spec, self._lengths.mu_l + self._lengths.drafts.kv_tokens
        return memory_safe_batch(
            self._capacity_tokens, slot_tokens, estimate.p0, self.theta, spec.epsilon, form=spec.memory_form
        )


# Settings that have an effect with a fixed threshold, too; the KV gate depends on output lengths.
USED_WHEN_FIXED = ("update_every", "kv_gate", "order")


@dataclass(frozen=True, kw_only=True)
class Eb(EstimatingSpec):
    """``k`` and ``theta`` fix the threshold (slots, share of N); without them it is computed online."""

    description = "exclusive batches, k* and N* computed online (Zhang et al., ICML 2026); k= or theta= fixes it"

    k: int | None = setting(None, "idle slots at which to refill; fixes the threshold", unit="slots", at_least=1)
    theta: float | None = setting(
        None, "share of N idle at which to refill; fixes the threshold", unit="share", above=0, below=1
    )

    @property
    def adapts(self) -> bool:
        """Unless k or theta is fixed."""
        return self.k is None and self.theta is None

    def check(self) -> None:
        """Raise PolicyError if both k and theta are given."""
        if self.k is not None and self.theta is not None:
            raise PolicyError("give k or theta, not both")

    def ineffective_settings(self) -> Mapping[str, str]:
        """With a fixed threshold the settings of the estimator have no effect."""
        idle = dict(super().ineffective_settings())
        fixed = next((key for key in ("k", "theta") if getattr(self, key) is not None), None)
        if fixed is not None:
            others = {*settings_of(type(self))} - {fixed, *USED_WHEN_FIXED}
            idle |= dict.fromkeys(others, f"{fixed}={getattr(self, fixed)}")
        return idle

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """The online threshold, or a fixed one."""
        if self.k is not None:
            return FixedThreshold(engine, lengths, self.kv_gate, slots=min(self.k, engine.max_num_seqs))
        if self.theta is not None:
            slots = max(1, int(self.theta * engine.max_num_seqs))
            return FixedThreshold(engine, lengths, self.kv_gate, slots=slots, theta=self.theta)
        return OnlineThreshold(self, engine, lengths)


class ShareThreshold(Strategy):
    """Refills when the requests that could join are at least theta/(1 - theta) times those decoding, with theta = k/N.

    This equals k idle slots, and also applies if the queue is short.
    """

    def __init__(self, engine: EngineFacts, lengths: Lengths, gated: bool) -> None:
        super().__init__(engine, lengths)
        self.gated = gated

    def refill_due(self, view: View, refill: int, idle: int) -> bool:
        """Whether enough requests could join."""
        slots = self.slots or 1
        return refill * (self.seqs_allowed - slots) >= slots * view.decoding


class FixedThreshold(ShareThreshold):
    """A fixed threshold: ``slots`` of max_num_seqs, or the share ``theta`` of them."""

    def __init__(
        self, engine: EngineFacts, lengths: Lengths, gated: bool, *, slots: int, theta: float | None = None
    ) -> None:
        super().__init__(engine, lengths, gated)
        self._slots, self._theta = slots, slots / engine.max_num_seqs if theta is None else theta

    @property
    def slots(self) -> int:
        """The threshold k."""
        return self._slots

    @property
    def theta(self) -> float:
        """The given share, or k/N."""
        return self._theta


class OnlineThreshold(ShareThreshold):
    """Threshold and batch size from Algorithm 1."""

    def __init__(self, spec: EstimatingSpec, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(engine, lengths, spec.kv_gate)
        self._adaptive = AdaptiveThreshold(
            spec, engine.calibration, lengths, engine.max_num_seqs, engine.capacity_tokens
        )

    @property
    def seqs_allowed(self) -> int:
        """N, the memory-safe batch."""
        return self._adaptive.n_limit

    @property
    def slots(self) -> int:
        """The threshold k."""
        adaptive = self._adaptive
        return max(1, int(adaptive.theta * adaptive.n_limit))

    @property
    def theta(self) -> float:
        """The estimated share."""
        return self._adaptive.theta

    @property
    def facts(self) -> Values:
        """``theta0``, the base threshold."""
        return {"theta0": self._adaptive.theta0}

    def on_finish(self, output_tokens: int) -> None:
        """Record an output length for the hazard estimate."""
        self._adaptive.on_finish(output_tokens)

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """Run Algorithm 1 if there are enough samples."""
        update = self._adaptive.update(view.now_s, running_ages)
        return () if update is None else (Change("update", "algorithm_1", _values(update)),)


def _values(update: Update) -> Values:
    return {
        "p0": update.estimate.p0,
        "eta": update.estimate.eta,
        "samples": update.estimate.samples,
        "zeta": update.zeta,
        "delta_theta": update.delta_theta,
    }


POLICY = Eb
