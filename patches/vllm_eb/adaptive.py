"""Algorithm 1: threshold and batch size, updated from recent completions (Zhang et al. 2026, 3.4, D.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_eb.calibration import Calibration
from vllm_eb.hazard import CensoredHazard, HazardEstimate, SlidingHazard
from vllm_eb.lengths import Lengths
from vllm_eb.memory import EPSILON, memory_safe_batch
from vllm_eb.policy import PolicySpec, setting
from vllm_eb.theory import Threshold, optimal_threshold

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

    by_share = True

    @property
    def completions_per_update(self) -> int:
        """M of the paper."""
        return self.update_every

    @property
    def needs_costs(self) -> bool:
        """If the threshold is computed online, from fixed costs."""
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
        found = optimal_threshold(
            estimate.p0, cal.alpha_p, cal.alpha_d, eta=estimate.eta, beta_d=cal.beta_d, n=self.n_limit
        )
        clipped = min(max(self._target(found, estimate), self._spec.theta_min), THETA_MAX)
        weight = THETA_WEIGHT if self._updates else 1.0
        self.theta += weight * (clipped - self.theta)
        # Eq. 8 compares costs with it, so the policy's lower bound on the threshold does not apply.
        self.theta0 = max(found.theta0, THETA_MIN)
        self._updates += 1
        if self._spec.memory_safe and now_s - self._last_n_update_s >= N_UPDATE_INTERVAL_S:
            self.n_limit = min(max(self._memory_safe(estimate), 1), self._max_num_seqs)
            self._last_n_update_s = now_s
        return Update(estimate, found.theta0, found.zeta, found.delta_theta, self.theta, self.n_limit)

    def _target(self, found: Threshold, estimate: HazardEstimate) -> float:
        """The threshold to move to, before its bounds."""
        if self._spec.correction == "renewal":
            return renewal_threshold(estimate.survival, self._calibration.alpha_p, self._calibration.alpha_d)
        return found.theta0 if self._spec.correction == "off" else found.theta_star

    def _memory_safe(self, estimate: HazardEstimate) -> int:
        """Number of sequences that fit into the KV cache while they grow."""
        if estimate.mean <= 1.0:  # responses of one token do not grow, and prompts that do not fit are not admitted
            return self._max_num_seqs
        spec = self._spec
        return memory_safe_batch(
            self._capacity_tokens, self._lengths.mu_l, estimate.p0, self.theta, spec.epsilon, form=spec.memory_form
        )
