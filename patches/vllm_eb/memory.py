"""How many sequences fit into the KV cache (Zhang et al. 2026, section 3.3 and appendix D).

``capacity``: KV cache in tokens. ``epsilon``: allowed probability of overflow. ``p0``: hazard per iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vllm_eb.theory import TheoryError, zeta_over_theta

EPSILON = 0.01
"""Probability that the KV cache overflows, where none is given."""

Form = Literal["code", "paper"]


@dataclass(frozen=True)
class MemoryBounds:
    """Batch sizes in sequences (0: not one fits) and the KV tokens that they rest on."""

    slot_tokens: float  # D, expected KV tokens per slot at the start of decoding
    n_static: int  # from D only
    n_peak: int  # with room for the expected peak
    n_paper: int  # eq. 6
    n_code: int  # formula of the authors' code

    def n_star(self, form: Form = "code") -> int:
        """The memory-safe batch N* by the chosen formula."""
        return self.n_code if form == "code" else self.n_paper


def slot_tokens(mu_l: float, p0: float, theta: float) -> float:
    """D, the expected KV tokens per slot at the start of decoding (appendix D.2): prompt plus tokens generated so far.

    ``D = mu_l + (1-theta)*zeta/(theta*p0)``, in tokens. theta = 0 gives the limit ``mu_l + 1/p0``. Raises TheoryError.
    """
    if not 0.0 < mu_l < math.inf:
        raise TheoryError(f"mu_l must be a positive number of tokens, not {mu_l}")
    if not 0.0 < p0 <= 1.0:
        raise TheoryError(f"p0 must lie in (0, 1], not {p0}")
    if not 0.0 <= theta < 1.0:
        raise TheoryError(f"theta must lie in [0, 1), not {theta}")
    return mu_l + (1.0 - theta) * zeta_over_theta(theta) / p0


def memory_bounds(capacity: float, mu_l: float, p0: float, theta: float, epsilon: float = EPSILON) -> MemoryBounds:
    """All bounds of appendix D.5 and the published code's. ``n_paper <= n_peak <= n_static`` when epsilon <= 1/e.

    Raises TheoryError.
    """
    per_slot = slot_tokens(mu_l, p0, theta)
    if not 0.0 < capacity < math.inf:
        raise TheoryError(f"capacity must be a positive number of tokens, not {capacity}")
    if not 0.0 < epsilon < 1.0:
        raise TheoryError(f"epsilon must lie strictly between 0 and 1, not {epsilon}")
    log_odds = math.log(1.0 / epsilon)
    peak = 1.0 / (p0 * p0 * mu_l)  # nu: expected excess of the memory walk over its start (D.4)
    return MemoryBounds(
        slot_tokens=per_slot,
        n_static=_floor(capacity / per_slot),
        n_peak=_floor((capacity - peak) / per_slot),
        n_paper=_floor((capacity - peak * log_odds) / per_slot),
        n_code=_code_form(capacity, mu_l, p0, theta, per_slot, log_odds),
    )


def memory_safe_batch(
    capacity: float, mu_l: float, p0: float, theta: float, epsilon: float = EPSILON, *, form: Form = "code"
) -> int:
    """N*, the memory-safe batch in sequences; 0 if not one fits. Raises TheoryError."""
    return memory_bounds(capacity, mu_l, p0, theta, epsilon).n_star(form)


def _code_form(capacity: float, mu_l: float, p0: float, theta: float, per_slot: float, log_odds: float) -> int:
    """Largest N with ``N*D + sigma*sqrt(N*ln(1/eps)) <= C``: a quadratic in sqrt(N), solved without cancellation."""
    zeta = -math.log1p(-theta)
    sigma_squared = 2.0 * zeta * (1.0 + (p0 * mu_l + zeta_over_theta(theta)) ** 2) / (p0 * p0)
    spread = math.sqrt(sigma_squared * log_odds)
    root = 2.0 * capacity / (spread + math.sqrt(spread * spread + 4.0 * per_slot * capacity))
    return _floor(root * root)


def _floor(value: float) -> int:
    # A relative 1e-12 absorbs the rounding of quotients that are exact integers.
    return max(0, math.floor(value * (1.0 + 1e-12)))
