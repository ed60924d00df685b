"""Deferred prefill with a fixed departure threshold K (Mohanty et al., EuroMLSys 2025), and the best K in theory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Lengths, Strategy, Values, View
from vllm_eb.theory import TheoryError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DeferredModel:
    """Parameters of Theorem 1: batch limit, hazard, and costs in seconds. Raises TheoryError if out of range.

    Deferred prefill with a fixed departure threshold K (Mohanty et al., EuroMLSys 2025).

    A batch of C requests decodes until at least K have ended, then one prefill fills it again; output lengths are
    geometric. The best K comes from the exact chain, for all K in one pass; the paper's approximation is for
    comparison.
    """

    batch_limit: int  # C, requests in the batch
    alpha: float  # probability per token that a request ends
    c_p: float  # fixed cost of a prefill
    c_d: float  # fixed cost of a decode iteration
    t_d: float = 0.0  # further cost per request and decode iteration
    prefill_s: float = 0.0  # t_p*d0/N, prefill time of one prompt

    def __post_init__(self) -> None:
        if self.batch_limit < 1:
            raise TheoryError(f"batch_limit must be at least 1 request, not {self.batch_limit}")
        if not 0.0 < self.alpha <= 1.0:
            raise TheoryError(f"alpha must lie in (0, 1], not {self.alpha}")
        for name in ("c_p", "c_d", "t_d", "prefill_s"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise TheoryError(f"{name} must be zero or a positive number of seconds, not {value}")
        if self.c_d == 0.0:
            raise TheoryError("c_d must be above 0: otherwise waiting is free and no threshold is optimal")


@dataclass(frozen=True)
class DeferredChain:
    """Element K-1 belongs to threshold K = 1..C: iterations, requests left at the switch, requests/s."""

    e_n1: Floats
    e_x_s: Floats
    throughput: Floats

    @property
    def best_k(self) -> int:
        """K*, the smallest threshold with the highest throughput."""
        return int(np.argmax(self.throughput)) + 1


def exact_chain(model: DeferredModel) -> DeferredChain:
    """E[N1], E[X_S] and throughput (Theorem 1) for every K, from the pure-death chain of Lemma 1.

    The chain X' ~ Binomial(X, 1-alpha) only decreases, so the expected visits to a state above the switch do not depend
    on K: E[N1] is their sum over x > C-K, and on average alpha*x requests end per visit. Relative error about 1e-12;
    time is O(C**2), memory O(C) (0.03 s at C = 2048, 2 s at 16384).
    """
    c = model.batch_limit
    visits = _expected_visits(c, model.alpha)[:0:-1]  # states C, C-1, ..., 1
    states = np.arange(c, 0, -1, dtype=np.float64)
    e_n1 = np.cumsum(visits)
    ended = np.cumsum(visits * states) * model.alpha
    return DeferredChain(e_n1, c - ended, _throughput(model, e_n1, ended))


def approximate_chain(model: DeferredModel) -> DeferredChain:
    """Proposition 1: no overshoot (X_S = C-K) and deterministic decay; the last K = C never ends (throughput 0)."""
    c = model.batch_limit
    ended = np.arange(1, c + 1, dtype=np.float64)
    with np.errstate(divide="ignore"):
        e_n1 = np.log1p(-ended / c) / _log_stay(model.alpha) if model.alpha < 1.0 else np.zeros(c)
        return DeferredChain(e_n1, c - ended, _throughput(model, e_n1, ended))


def _throughput(model: DeferredModel, e_n1: Floats, ended: Floats) -> Floats:
    per_request = (model.c_p + model.c_d * e_n1) / ended + model.t_d / model.alpha + model.prefill_s
    return 1.0 / per_request


def _expected_visits(c: int, alpha: float) -> Floats:
    """Expected iterations begun in each state 0..C, starting in C (for state 0, only its arrivals)."""
    visits = np.zeros(c + 1)
    visits[c] = 1.0
    if alpha == 1.0:
        return visits
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, c + 1)))))
    log_stay, log_end = _log_stay(alpha), math.log(alpha)
    for x in range(c, 0, -1):
        visits[x] /= -math.expm1(x * log_stay)  # geometric sojourn time: 1/(1 - P(x, x))
        left = np.arange(x)
        log_pmf = log_factorial[x] - log_factorial[:x] - log_factorial[x:0:-1]
        visits[:x] += visits[x] * np.exp(log_pmf + left * log_stay + (x - left) * log_end)
    return visits


def _log_stay(alpha: float) -> float:
    return math.log1p(-alpha)


@dataclass(frozen=True, kw_only=True)
class Deferred(PolicySpec):
    """Exclusive batches; K counts idle slots of max_num_seqs, independent of the queue."""

    description = "exclusive batches, refill after K departures (Mohanty et al., EuroMLSys 2025); needs k=K"

    k: int = setting(help="idle slots at which to refill; fixes the threshold", unit="slots", at_least=1, example=32)

    def load_doubt(self, open_at_most: int, max_num_seqs: int) -> tuple[str, Values] | None:
        """K has no effect if the load leaves K slots idle all the time."""
        if not 0 < open_at_most <= max_num_seqs - self.k:
            return None
        return "k-always-met", {"open_requests": open_at_most, "max_num_seqs": max_num_seqs, "k": self.k}

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """A threshold of k idle slots."""
        return IdleSlots(engine, lengths, self.k)


class IdleSlots(Strategy):
    """A refill is due when ``k`` slots are idle, or all slots if there are fewer."""

    def __init__(self, engine: EngineFacts, lengths: Lengths, k: int) -> None:
        super().__init__(engine, lengths)
        self._k = min(k, engine.max_num_seqs)

    @property
    def slots(self) -> int:
        """The threshold k."""
        return self._k

    def refill_due(self, view: View, refill: int, idle: int) -> bool:
        """Whether k slots are idle."""
        return idle >= self._k


POLICY = Deferred
