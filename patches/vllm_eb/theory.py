"""Switching threshold, throughput and the EB/MB crossover (Zhang et al. 2026, sections 3.2 and 3.5).

Plain float arithmetic without numpy, since the online controller calls these functions on every update. Units are
seconds, tokens and iterations; names are the paper's symbols, spelled out. :func:`memory_bounds` says how many
sequences fit into the KV cache (section 3.3, appendix D); :mod:`vllm_eb.policies.deferred` has the deferred-prefill
chain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from vllm_eb.calibration import Calibration
from vllm_eb.settings import GivenValueError

DELTA_CAP = 5.0  # the authors' bound of the hazard correction, as a multiple of theta0
_BELOW_ONE = math.nextafter(1.0, 0.0)
_SERIES_LIMIT = 1.0  # below this value expm1(y) - y loses digits and its power series is used
_SERIES_TERMS = 18  # 1/20! is far below double precision at y = 1


class TheoryError(GivenValueError):
    """A parameter outside the domain of a formula; the message names it."""


def _probability(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise TheoryError(f"{name} must lie in (0, 1], not {value}")


def _share(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise TheoryError(f"{name} must lie in [0, 1), not {value}")


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise TheoryError(f"{name} must be a positive number, not {value}")


def _non_negative(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise TheoryError(f"{name} must be zero or a positive number, not {value}")


@dataclass(frozen=True)
class Drafts:
    """Speculative decoding: each decode step verifies ``len(acceptance)`` drafted tokens per sequence.

    ``acceptance``: per position, the share of drafts that are accepted at least that far; it cannot rise. Every step
    samples one more token. ``alpha_s`` and ``beta_s``: cost of drafting in s, per step and per sequence, where the
    calibration does not hold it. ``lookahead_tokens``: KV slots per sequence that the drafter needs beyond the drafted
    tokens. Without acceptance rates there are no drafts. Raises TheoryError.
    """

    acceptance: tuple[float, ...] = ()
    alpha_s: float = 0.0
    beta_s: float = 0.0
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s", "lookahead_tokens"):
            _non_negative(name, getattr(self, name))
        for position, rate in enumerate(self.acceptance, 1):
            if not 0.0 <= rate <= 1.0:
                raise TheoryError(f"acceptance at position {position} must lie in [0, 1], not {rate}")
            if position > 1 and rate > (before := self.acceptance[position - 2]):
                raise TheoryError(
                    f"acceptance must not rise from position to position, but is {before} and then {rate}: a drafted "
                    "token counts only if all before it are accepted"
                )

    @property
    def query_tokens(self) -> int:
        """Tokens per sequence that a decode step computes: ``1 + d``."""
        return 1 + len(self.acceptance)

    @cached_property
    def tokens_per_step(self) -> float:
        """a, the mean number of tokens that a sequence gets in a decode step."""
        return 1.0 + math.fsum(self.acceptance)

    def cut(self, length: int) -> Drafts:
        """The same with at most ``length`` drafted tokens."""
        return replace(self, acceptance=self.acceptance[:length])

    @property
    def kv_tokens(self) -> int:
        """KV slots that a decoding sequence needs beyond those of its tokens."""
        return len(self.acceptance) + self.lookahead_tokens

    def per_step(self, p0: float) -> float:
        """Hazard per decode step of answers that end with probability ``p0`` at each token.

        The j-th further token of a step is made if it is accepted and the answer has not ended at one before it.
        """
        _probability("p0", p0)
        left = 1.0 - p0
        return p0 * (1.0 + math.fsum(rate * left**j for j, rate in enumerate(self.acceptance, 1)))

    def steps(self, mu_o: float) -> float:
        """Mean number of steps with a token of answers of ``mu_o`` tokens on average, the first one included."""
        return mu_o if not self.acceptance else 1.0 / self.per_step(1.0 / mu_o)

    def costs(self, calibration: Calibration) -> Calibration:
        """The linear costs of steps with drafts; ``beta_d`` per sequence. The drafter runs in every step."""
        if not self.acceptance:
            return calibration
        return replace(
            calibration,
            alpha_p=calibration.alpha_p + self.alpha_s,
            alpha_d=calibration.alpha_d + self.alpha_s,
            beta_d=calibration.beta_d * self.query_tokens + self.beta_s,
            alpha_mb=_alpha_mb(calibration) + self.alpha_s,
        )


NO_DRAFTS = Drafts()


@dataclass(frozen=True)
class Threshold:
    """Result of Prop. 3.1 and Thm 3.2: shares of the batch N, and ``zeta = -ln(1 - theta0)``."""

    theta0: float
    zeta: float
    delta_theta: float
    theta_star: float


@dataclass(frozen=True)
class Crossover:
    """Both sides of Prop. 3.4 in s/token. ``beta_eb``: token-weighted exclusive cost; ``r``: decode share.

    ``beta_mb`` None: not measured; the left side is then zero.
    """

    lhs: float
    rhs: float
    r: float
    beta_mb: float | None
    beta_eb: float

    @property
    def advantage(self) -> float:
        """``lhs - rhs`` in s/token; a positive value favours exclusive batching."""
        return self.lhs - self.rhs

    def eb_wins(self, margin: float = 0.0) -> bool:
        """Eq. 8: whether exclusive batching wins by more than ``margin`` (s/token; a negative one favours EB)."""
        return self.advantage > margin


def base_threshold(p0: float, alpha_p: float, alpha_d: float, *, discrete: bool = False) -> float:
    """theta0 of Prop. 3.1, the root of ``theta/(1-theta) + ln(1-theta) = p0*alpha_p/alpha_d``.

    Hazard ``p0`` per iteration in (0, 1]; fixed costs ``alpha_p >= 0`` and ``alpha_d > 0`` in s. ``discrete`` uses the
    exact discrete-time hazard ``-ln(1-p0)`` instead of ``p0`` (appendix B.3, source 4). Relative error about 1e-15.
    Without prefill overhead waiting never pays and theta0 is 0. Raises TheoryError.
    """
    return _theta(base_zeta(p0, alpha_p, alpha_d, discrete=discrete))


def base_zeta(p0: float, alpha_p: float, alpha_d: float, *, discrete: bool = False) -> float:
    """``-ln(1-theta0)``, the number of iterations of a decode phase times ``p0``. Parameters as in base_threshold."""
    _probability("p0", p0)
    _non_negative("alpha_p", alpha_p)
    _positive("alpha_d", alpha_d)
    if discrete and p0 == 1.0:
        raise TheoryError("p0 must be below 1 in discrete time: at 1 every request ends after one token")
    hazard = -math.log1p(-p0) if discrete else p0
    return solve_zeta(hazard * alpha_p / alpha_d)


def solve_zeta(ratio: float) -> float:
    """The root ``y >= 0`` of ``exp(y) - 1 - y = ratio``, which is Prop. 3.1 with ``theta = 1 - exp(-y)``."""
    _non_negative("ratio p0*alpha_p/alpha_d", ratio)
    if ratio == 0.0:
        return 0.0
    y = _first_guess(ratio)
    for _ in range(8):
        slope = math.expm1(y)
        excess = _excess(y, slope) - ratio
        step = excess / (slope - excess * (slope + 1.0) / (2.0 * slope))  # Halley's method
        y -= step
        if abs(step) <= 1e-9 * y:  # cubic convergence: the next step would be below rounding
            break
    return y


def ifr_correction(
    theta0: float, p0: float, eta: float, beta_d: float, alpha_d: float, n: float, *, cap: float | None = DELTA_CAP
) -> float:
    """Threshold shift delta of Thm 3.2 for the hazard ``p0 + eta*t``, first order in ``eta`` (1/iteration**2).

    ``n``: batch size N in sequences; ``beta_d`` in s/sequence, ``alpha_d`` in s. The first-order term is wrong if
    large, so it is limited to ``cap*theta0`` as by the authors; ``cap=None`` gives the formula without limit. Raises
    TheoryError.
    """
    _share("theta0", theta0)
    _probability("p0", p0)
    _positive("alpha_d", alpha_d)
    for name, value in (("eta", eta), ("beta_d", beta_d), ("n", n)):
        _non_negative(name, value)
    if theta0 == 0.0:
        return 0.0
    zeta = -math.log1p(-theta0)
    fixed = zeta * (theta0 / (1.0 - theta0) - zeta / 2.0)
    linear = beta_d * n / alpha_d * _log_remainder(theta0)
    delta = eta * (1.0 - theta0) ** 2 / (p0 * p0 * theta0) * (fixed + linear)
    return delta if cap is None else min(delta, cap * theta0)


def optimal_threshold(
    p0: float,
    alpha_p: float,
    alpha_d: float,
    *,
    eta: float = 0.0,
    beta_d: float = 0.0,
    n: float = 0.0,
    cap: float | None = DELTA_CAP,
    discrete: bool = False,
    drafts: Drafts = NO_DRAFTS,
) -> Threshold:
    """theta* = theta0 + delta, limited to values below 1. Parameters as in base_threshold and ifr_correction.

    With ``drafts``, ``p0`` and ``eta`` stay per token and ``beta_d`` per token of a decode step.
    """
    if drafts.acceptance:
        a, p0 = drafts.tokens_per_step, drafts.per_step(p0)
        eta, beta_d = a * a * eta, beta_d * drafts.query_tokens + drafts.beta_s
        alpha_p, alpha_d = alpha_p + drafts.alpha_s, alpha_d + drafts.alpha_s
    zeta = base_zeta(p0, alpha_p, alpha_d, discrete=discrete)
    theta0 = _theta(zeta)
    delta = ifr_correction(theta0, p0, eta, beta_d, alpha_d, n, cap=cap)
    return Threshold(theta0, zeta, delta, min(theta0 + delta, _BELOW_ONE))


def eb_throughput(
    calibration: Calibration, *, theta: float, n: float, p0: float, mu_l: float, drafts: Drafts = NO_DRAFTS
) -> float:
    """Requests/s of exclusive batching at threshold ``theta`` (eq. 4 before inserting the optimum; appendix B.5).

    One cycle completes ``theta*n`` requests: one prefill with ``mu_l`` prompt tokens per request, then ``zeta/p0``
    decode iterations that generate ``theta*n/p0`` tokens. With ``drafts``, ``p0`` stays per token. Raises TheoryError.
    """
    _share("theta", theta)
    _positive("theta", theta)
    _probability("p0", p0)
    _positive("n", n)
    _non_negative("mu_l", mu_l)
    calibration, p0 = drafts.costs(calibration), drafts.per_step(p0)
    ended = theta * n
    decode_s = (calibration.beta_d * ended + calibration.alpha_d * -math.log1p(-theta)) / p0
    return ended / (calibration.alpha_p + calibration.beta_p * mu_l * ended + decode_s)


def mb_throughput(calibration: Calibration, *, n: float, mu_l: float, mu_o: float, drafts: Drafts = NO_DRAFTS) -> float:
    """Requests/s of mixed batching with ``n`` sequences in the batch (section 3.5). Raises TheoryError.

    Derivation: let ``x`` requests finish their prefill per iteration. In steady state as many end, and by Little's law
    ``x*mu_o`` are decoding, so the batch holds ``n = x*(1 + mu_o)`` sequences and processes ``x*(mu_l + mu_o)`` tokens.
    An iteration takes ``alpha_mb + beta_mb(r)*x*(mu_l + mu_o)`` with ``r = mu_o/(mu_l + mu_o)``; throughput is ``x``
    over that. Compared with eb_throughput at ``p0 = 1/mu_o`` this gives Prop. 3.4 exactly. With ``drafts`` an answer
    takes ``s = drafts.steps(mu_o)`` iterations of ``1 + d`` tokens each.
    """
    _positive("n", n)
    _lengths(mu_l, mu_o)
    if calibration.mixed is None:
        raise TheoryError("the mixed-batch cost beta_mb is not known for this calibration; give its a, b and c")
    steps = drafts.steps(mu_o)
    decoded = steps * drafts.query_tokens
    finished, costs = n / (1.0 + steps), drafts.costs(calibration)
    tokens_s = calibration.mixed.at(decoded / (mu_l + decoded)) * (mu_l + decoded)
    return finished / (_alpha_mb(costs) + finished * (tokens_s + drafts.beta_s * steps))


def crossover(
    calibration: Calibration, *, mu_l: float, mu_o: float, n_obs: float, theta0: float, drafts: Drafts = NO_DRAFTS
) -> Crossover:
    """Both sides of Prop. 3.4 (eq. 7) in s/token, at mean lengths ``mu_l``, ``mu_o`` (tokens) and ``n_obs`` sequences.

    The right side is what mixed batching saves in fixed costs, the left side its cost of co-location. With ``drafts``
    the tokens are computed ones, ``1 + d`` per step of an answer; drafting costs both ways the same.

    Raises TheoryError.
    """
    _lengths(mu_l, mu_o)
    _positive("n_obs", n_obs)
    _share("theta0", theta0)
    steps, costs = drafts.steps(mu_o), drafts.costs(calibration)
    decoded = steps * drafts.query_tokens
    tokens = mu_l + decoded
    r = decoded / tokens
    beta_eb = (calibration.beta_p * mu_l + calibration.beta_d * decoded) / tokens
    beta_mb = None if calibration.mixed is None else calibration.mixed.at(r)
    lhs = 0.0 if beta_mb is None else beta_mb - beta_eb
    exclusive_s = _over_theta(costs.alpha_p, theta0) + costs.alpha_d * steps * zeta_over_theta(theta0)
    rhs = (exclusive_s - _alpha_mb(costs) * (1.0 + steps)) / (n_obs * tokens)
    return Crossover(lhs=lhs, rhs=rhs, r=r, beta_mb=beta_mb, beta_eb=beta_eb)


def zeta_over_theta(theta: float) -> float:
    """``-ln(1-theta)/theta``, which tends to 1 as theta tends to 0."""
    return -math.log1p(-theta) / theta if theta else 1.0


def _theta(zeta: float) -> float:
    return min(-math.expm1(-zeta), _BELOW_ONE)


def _first_guess(ratio: float) -> float:
    if ratio < 2.0:
        s = math.sqrt(2.0 * ratio)  # ratio = y**2/2 + y**3/6 + ..., reverted
        return s * (1.0 - s * (1.0 / 6.0 - s / 36.0))
    return math.log1p(ratio + math.log1p(ratio))


def _excess(y: float, expm1_y: float) -> float:
    """``exp(y) - 1 - y`` to full relative accuracy."""
    if y >= _SERIES_LIMIT:
        return expm1_y - y
    tail = 1.0
    for k in range(_SERIES_TERMS, 2, -1):
        tail = 1.0 + tail * y / k
    return y * y / 2.0 * tail


def _log_remainder(theta: float) -> float:
    """``-ln(1-theta) - theta`` to full relative accuracy."""
    if theta >= 0.1:
        return -math.log1p(-theta) - theta
    tail = 0.0
    for k in range(18, 1, -1):
        tail = 1.0 / k + theta * tail
    return theta * theta * tail


def _over_theta(alpha_p: float, theta0: float) -> float:
    if alpha_p == 0.0:
        return 0.0  # theta0 falls as sqrt(alpha_p), so the limit is zero
    if theta0 == 0.0:
        raise TheoryError("theta0 must be above 0 while alpha_p is: at theta0 = 0 each prefill would serve no request")
    return alpha_p / theta0


def _alpha_mb(calibration: Calibration) -> float:
    return calibration.alpha_p if calibration.alpha_mb is None else calibration.alpha_mb


def _lengths(mu_l: float, mu_o: float) -> None:
    _non_negative("mu_l", mu_l)
    _positive("mu_o", mu_o)


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
    _probability("p0", p0)
    _share("theta", theta)
    return mu_l + (1.0 - theta) * zeta_over_theta(theta) / p0


def memory_bounds(capacity: float, mu_l: float, p0: float, theta: float, epsilon: float = EPSILON) -> MemoryBounds:
    """All bounds of appendix D.5 and the published code's. ``capacity``: KV cache in tokens; ``epsilon``: allowed
    probability of overflow; ``p0``: hazard per iteration.

    ``n_paper <= n_peak <= n_static`` when epsilon <= 1/e.

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
