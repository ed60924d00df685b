"""Theoretical predictions for a workload on a device: threshold, batch, throughputs, and the EB/MB crossover.

Pure functions from lengths and cost coefficients to predictions (docs/theory.md). :mod:`ebbench.advice.simulate` has
the simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_eb.calibration import Calibration
from vllm_eb.policies.eb import THETA_MAX, THETA_MIN
from vllm_eb.theory import (
    EPSILON,
    Crossover,
    Threshold,
    base_threshold,
    crossover,
    eb_throughput,
    mb_throughput,
    memory_safe_batch,
    optimal_threshold,
)  # fmt: skip

_SHARES = tuple(round(0.02 * i, 2) for i in range(1, 50))


@dataclass(frozen=True)
class ExpectedLoad:
    """Lengths (tokens) and their source, the linear hazard, and the number of requests that the traffic keeps open.

    ``concurrency``: the maximum in a closed loop, the mean in an open one.
    """

    mu_l: float
    mu_o: float
    p0: float
    eta: float
    concurrency: int
    open_loop: bool = False
    source: str = "the plan"


@dataclass(frozen=True)
class Prediction:
    """Predictions. ``n``: batch size of the comparison. Throughputs in requests/s.

    ``concurrency_crossover``: number of sequences from which exclusive batching wins (None: never, 0: always).
    ``mix_crossovers``: decode shares r at which the better mode changes for this ``n`` and these tokens per request.
    """

    threshold: Threshold
    n_star: int
    n: int
    k_star: int
    eb_rps: float
    mb_rps: float | None
    sides: Crossover
    margin: float
    concurrency_crossover: float | None
    mix_crossovers: tuple[float, ...]

    @property
    def exclusive(self) -> bool:
        """Whether exclusive batching is predicted to win (eq. 8 without its priority margin)."""
        return self.sides.eb_wins()

    @property
    def gain(self) -> float | None:
        """Predicted throughput gain of EB over MB, as a share; None without a measured mixed cost."""
        return None if not self.mb_rps else self.eb_rps / self.mb_rps - 1


def predict(load: ExpectedLoad, calibration: Calibration, capacity_tokens: int, max_num_seqs: int) -> Prediction:
    """Evaluate the formulas. Raises TheoryError for invalid lengths or costs."""
    found = optimal_threshold(
        load.p0, calibration.alpha_p, calibration.alpha_d, eta=load.eta, beta_d=calibration.beta_d, n=max_num_seqs
    )
    theta = min(max(found.theta_star, THETA_MIN), THETA_MAX)
    n_star = min(memory_safe_batch(capacity_tokens, load.mu_l, load.p0, theta, EPSILON), max_num_seqs)
    n = max(1, min(n_star, load.concurrency))
    theta0 = max(found.theta0, THETA_MIN)
    sides = crossover(calibration, mu_l=load.mu_l, mu_o=load.mu_o, n_obs=n, theta0=theta0)
    mean_hazard = 1 / load.mu_o
    return Prediction(
        threshold=found,
        n_star=n_star,
        n=n,
        k_star=max(1, int(theta * n_star)),
        eb_rps=eb_throughput(calibration, theta=theta0, n=n, p0=mean_hazard, mu_l=load.mu_l),
        mb_rps=None if calibration.mixed is None else mb_throughput(calibration, n=n, mu_l=load.mu_l, mu_o=load.mu_o),
        sides=sides,
        margin=calibration.margin,
        concurrency_crossover=_concurrency_crossover(sides, n),
        mix_crossovers=_mix_crossovers(load, calibration, n),
    )


def _concurrency_crossover(sides: Crossover, n: int) -> float | None:
    """Batch size at which both sides are equal, ``n*rhs/lhs``: the right side falls as 1/N, the left is constant."""
    if sides.rhs <= 0:
        return 0.0 if sides.lhs >= 0 else None
    return n * sides.rhs / sides.lhs if sides.lhs > 0 else None


def _mix_crossovers(load: ExpectedLoad, calibration: Calibration, n: int) -> tuple[float, ...]:
    """Decode shares at which ``lhs - rhs`` changes sign, for constant prompt plus output length."""
    total = load.mu_l + load.mu_o

    def advantage(r: float) -> float:
        mu_o = max(r * total, 1.0)
        theta0 = max(base_threshold(min(1.0, 1 / mu_o), calibration.alpha_p, calibration.alpha_d), THETA_MIN)
        return crossover(calibration, mu_l=total - mu_o, mu_o=mu_o, n_obs=n, theta0=theta0).advantage

    return sign_changes(_SHARES, [advantage(r) for r in _SHARES])


def sign_changes(x: Sequence[float], y: Sequence[float]) -> tuple[float, ...]:
    """Values of ``x`` at which ``y`` changes sign, interpolated linearly."""
    found = []
    for i in range(1, len(x)):
        a, b = y[i - 1], y[i]
        if a * b < 0:
            found.append(x[i - 1] + (x[i] - x[i - 1]) * a / (a - b))
    return tuple(found)
