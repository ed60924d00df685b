"""Algorithm 1: threshold and batch size, kept current from what finished lately (Zhang et al. 2026, 3.4, D.7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_eb.calibration import Calibration
from vllm_eb.hazard import CensoredHazard, HazardEstimate, SlidingHazard
from vllm_eb.memory import memory_safe_batch
from vllm_eb.policy import THETA_MAX, THETA_MIN, PolicySpec
from vllm_eb.theory import optimal_threshold

THETA_WEIGHT = 0.3  # of the new value
MU_L_WEIGHT = 0.05  # per admitted prompt
MU_O_WEIGHT = 0.2  # per update, of the mean over the completions since the last one
N_UPDATE_INTERVAL_S = 2.0
# Before anything was seen, as the authors' code assumes.
INITIAL_MU_L, INITIAL_MU_O = 512.0, 100.0


@dataclass(frozen=True)
class Update:
    """One pass of Algorithm 1: what went in, what came out."""

    estimate: HazardEstimate
    theta0: float
    zeta: float
    delta_theta: float
    theta: float
    n_limit: int
    mu_l: float
    mu_o: float


class AdaptiveThreshold:
    """Estimates ``p0, eta, mu_l, mu_o`` and derives ``theta`` (share of N) and ``n_limit`` (sequences).

    A fixed policy keeps its threshold; the length statistics are followed all the same, the KV gate needs them.
    """

    def __init__(self, spec: PolicySpec, calibration: Calibration, max_num_seqs: int, capacity_tokens: int) -> None:
        self._spec, self._calibration = spec, calibration
        self._max_num_seqs, self._capacity_tokens = max_num_seqs, capacity_tokens
        self._hazard = (SlidingHazard if spec.estimator == "published" else CensoredHazard)(
            window=spec.window, min_samples=spec.min_samples
        )
        self.online = spec.kind == "ebplus" or (spec.kind == "eb" and spec.k is None and spec.theta is None)
        self.theta = spec.initial_theta if spec.theta is None else spec.theta
        self.theta0 = self.theta
        self.n_limit = max_num_seqs
        self.mu_l, self.mu_o = INITIAL_MU_L, INITIAL_MU_O
        self.mu_new = INITIAL_MU_L  # prompt tokens that were not in the prefix cache
        self._prompts = self._batches = 0
        self._batch_count = self._batch_tokens = 0
        self._updates = 0
        self._last_n_update_s = float("-inf")

    def on_prompt(self, input_tokens: int, cached_tokens: int = 0) -> None:
        """A prompt of that many tokens, so many of them cached, was admitted for the first time."""
        weight = MU_L_WEIGHT if self._prompts else 1.0
        self.mu_l += weight * (input_tokens - self.mu_l)
        self.mu_new += weight * (input_tokens - cached_tokens - self.mu_new)
        self._prompts += 1

    def on_finish(self, output_tokens: int) -> None:
        """A request left its slot after that many output tokens: what refills wait for, whatever the reason."""
        self._hazard.observe(output_tokens)
        self._batch_count += 1
        self._batch_tokens += output_tokens

    @property
    def update_due(self) -> bool:
        """Whether M completions have passed since the last update."""
        return self._batch_count >= self._spec.update_every

    def update(self, now_s: float, running_ages: Callable[[], Sequence[int]]) -> Update | None:
        """Run Algorithm 1 once. None while the policy is fixed or the window holds too few samples.

        ``running_ages`` gives the output tokens of each running request so far; asked only by the censored estimator.
        """
        weight = MU_O_WEIGHT if self._batches else 1.0
        self.mu_o += weight * (self._batch_tokens / self._batch_count - self.mu_o)
        self._batches += 1
        self._batch_count = self._batch_tokens = 0
        if not self.online:
            return None
        ages = running_ages() if self._spec.estimator == "censored" else ()
        estimate = self._hazard.estimate(ages)
        if estimate is None:
            return None
        return self._apply(estimate, now_s)

    def _apply(self, estimate: HazardEstimate, now_s: float) -> Update:
        cal = self._calibration
        found = optimal_threshold(
            estimate.p0, cal.alpha_p, cal.alpha_d, eta=estimate.eta, beta_d=cal.beta_d, n=self.n_limit
        )
        clipped = min(max(found.theta_star, self._spec.theta_min), THETA_MAX)
        weight = THETA_WEIGHT if self._updates else 1.0
        self.theta += weight * (clipped - self.theta)
        self.theta0 = max(found.theta0, THETA_MIN)  # eq. 8 compares costs: a floor on refilling is no part of it
        self._updates += 1
        if self._spec.memory_safe and now_s - self._last_n_update_s >= N_UPDATE_INTERVAL_S:
            safe = memory_safe_batch(
                self._capacity_tokens,
                self.mu_l,
                estimate.p0,
                self.theta,
                self._spec.epsilon,
                form=self._spec.memory_form,
            )
            self.n_limit = min(max(safe, 1), self._max_num_seqs)
            self._last_n_update_s = now_s
        return Update(
            estimate,
            found.theta0,
            found.zeta,
            found.delta_theta,
            self.theta,
            self.n_limit,
            self.mu_l,
            self.mu_o,
        )
