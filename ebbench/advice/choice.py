"""Chooses the policy to advise, with reasons that the runs support."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ebbench.analysis.cases import TIE
from ebbench.analysis.metrics import Slo
from ebbench.analysis.statistics import PairedInterval, paired_t
from ebbench.records.warnings import Fact, fact
from ebbench.spec.commands import OF_A_SERVER
from ebbench.spec.run import RunSpec, known_settings, settings_of
from ebbench.spec.server import version_defaults
from vllm_eb.calibration import Calibration
from vllm_eb.policies.eb import THETA_MAX, THETA_MIN
from vllm_eb.theory import (
    EPSILON,
    NO_DRAFTS,
    Crossover,
    Drafts,
    Threshold,
    crossover,
    eb_throughput,
    mb_throughput,
    memory_safe_batch,
    optimal_threshold,
)  # fmt: skip

# Theoretical predictions for a workload on a device: threshold, batch, throughputs, and the EB/MB crossover.
#
# Pure functions from lengths and cost coefficients to predictions (docs/theory.md). `ebbench.advice.simulate` has the
# simulation.

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


def predict(
    load: ExpectedLoad, calibration: Calibration, capacity_tokens: int, max_num_seqs: int, drafts: Drafts = NO_DRAFTS
) -> Prediction:
    """Evaluate the formulas; ``drafts``: of a server that decodes speculatively, whose cost the calibration holds.

    Raises TheoryError for invalid lengths or costs.
    """
    threshold = optimal_threshold(
        load.p0, calibration.alpha_p, calibration.alpha_d, eta=load.eta, beta_d=calibration.beta_d, n=max_num_seqs,
        drafts=drafts,
    )  # fmt: skip
    theta = min(max(threshold.theta_star, THETA_MIN), THETA_MAX)
    held_tokens = load.mu_l + drafts.kv_tokens
    n_star = min(memory_safe_batch(capacity_tokens, held_tokens, load.p0, theta, EPSILON), max_num_seqs)
    n = max(1, min(n_star, load.concurrency))
    theta0 = max(threshold.theta0, THETA_MIN)
    sides = crossover(calibration, mu_l=load.mu_l, mu_o=load.mu_o, n_obs=n, theta0=theta0, drafts=drafts)
    mean_hazard, mixes = 1 / load.mu_o, calibration.mixed is not None
    return Prediction(
        threshold=threshold,
        n_star=n_star,
        n=n,
        k_star=max(1, int(theta * n_star)),
        eb_rps=eb_throughput(calibration, theta=theta0, n=n, p0=mean_hazard, mu_l=load.mu_l, drafts=drafts),
        mb_rps=mb_throughput(calibration, n=n, mu_l=load.mu_l, mu_o=load.mu_o, drafts=drafts) if mixes else None,
        sides=sides,
        margin=calibration.margin,
        concurrency_crossover=_concurrency_crossover(sides, n),
        mix_crossovers=_mix_crossovers(load, calibration, n, drafts),
    )


def _concurrency_crossover(sides: Crossover, n: int) -> float | None:
    """Batch size at which both sides are equal, ``n*rhs/lhs``: the right side falls as 1/N, the left is constant."""
    if sides.rhs <= 0:
        return 0.0 if sides.lhs >= 0 else None
    return n * sides.rhs / sides.lhs if sides.lhs > 0 else None


def _mix_crossovers(load: ExpectedLoad, calibration: Calibration, n: int, drafts: Drafts) -> tuple[float, ...]:
    """Shares of answers at which ``lhs - rhs`` changes sign, for constant prompt plus output length."""
    total, costs = load.mu_l + load.mu_o, calibration

    def advantage(r: float) -> float:
        mu_o = max(r * total, 1.0)
        best = optimal_threshold(min(1.0, 1 / mu_o), costs.alpha_p, costs.alpha_d, drafts=drafts)
        theta0 = max(best.theta0, THETA_MIN)
        return crossover(costs, mu_l=total - mu_o, mu_o=mu_o, n_obs=n, theta0=theta0, drafts=drafts).advantage

    return sign_changes(_SHARES, [advantage(r) for r in _SHARES])


def sign_changes(x: Sequence[float], y: Sequence[float]) -> tuple[float, ...]:
    """Values of ``x`` at which ``y`` changes sign, interpolated linearly."""
    ends = pairwise(zip(x, y, strict=True))
    return tuple(before + (after - before) * a / (a - b) for (before, a), (after, b) in ends if a * b < 0)


@dataclass(frozen=True)
class AdviceQuestion:
    """What to advise on. ``spec``: the run of the baseline on the first seed, at the token budget that gains are
    compared with; ``budgets``: further ones that are tried with every policy.

    ``slo`` empty: throughput decides, else goodput. ``seeds_alike``: several seeds were asked for, but all seeds give
    the same plan.
    """

    spec: RunSpec
    seeds: int
    slo: Slo
    policies: tuple[str, ...]
    seeds_alike: bool = False
    budgets: tuple[int, ...] = ()

    @property
    def budget(self) -> int:
        """The token budget that gains are compared with."""
        return self.spec.server.max_num_batched_tokens

    @property
    def server(self) -> Mapping[str, Any]:
        """Settings of the server and its topology that differ from their defaults, by name."""
        names = ("topology", "link", *version_defaults(self.spec.server.vllm_version), *OF_A_SERVER)
        known, values = known_settings(), settings_of(self.spec)
        own = {name: values[name] for name in dict.fromkeys(names) if name != "max_model_len"}
        return {name: value for name, value in own.items() if value is not None and value != known[name].default}


class BudgetedPolicy(NamedTuple):
    """A policy at a token budget of the server."""

    policy: str
    max_num_batched_tokens: int


class DroppedPolicy(NamedTuple):
    """A policy at a budget that ran on ``seeds`` seeds only; ``behind_best``: mean there against the best, a share."""

    policy: str
    max_num_batched_tokens: int
    seeds: int
    behind_best: float


@dataclass(frozen=True)
class PolicyScore:
    """One policy at a token budget over the seeds: its objective, and its gains over v1 at the reference budget and
    over the best candidate as shares, paired by seed.

    ``attainment``: mean share of requests that met the SLO. Latencies are means of medians in ms. ``at_reference``:
    the budget is the one that gains are compared with.
    """

    policy: str
    objective: float
    values: tuple[float, ...]
    gain: PairedInterval | None
    behind_best: PairedInterval | None
    attainment: float | None
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    max_num_batched_tokens: int
    at_reference: bool = True

    @property
    def name(self) -> str:
        """The policy, with its budget if that is not the reference."""
        return self.policy if self.at_reference else f"{self.policy} with a budget of {self.max_num_batched_tokens:,}"


@dataclass(frozen=True)
class GainCurve:
    """EB against v1 over a sweep: ``gain[i]`` of EB at ``x[i]``, and where it changes sign."""

    x: tuple[float, ...]
    gain: tuple[float, ...]
    crossings: tuple[float, ...]


@dataclass(frozen=True)
class Tuning:
    """The best (B, N) for the chosen policy on one seed, and its gain over the settings of the question."""

    tried: int
    max_num_batched_tokens: int
    max_num_seqs: int
    gain: float


@dataclass(frozen=True)
class Advice:
    """The advice; ``scores`` of those that ran on all seeds, best first; ``notes`` from building the plan.

    ``load``: of all ``engines`` together; ``theory``: of one of them with its share.
    """

    question: AdviceQuestion
    load: ExpectedLoad
    theory: Prediction
    scores: tuple[PolicyScore, ...]
    chosen: PolicyScore
    reason: Fact
    concurrency: GainCurve | None
    mix: GainCurve | None
    tuning: Tuning | None = None
    notes: tuple[str, ...] = ()
    dropped: tuple[DroppedPolicy, ...] = ()
    engines: int = 1


BASELINE = "v1"
SIMPLEST_FIRST = (
    BASELINE, "cadence", "ppas", "batchwait", "slochunk", "ebplus", "marginal", "eb", "v0", "delayer", "deferred",
)  # fmt: skip
"""Kinds of policies by how much they depart from vLLM's own scheduling; all others depart more."""


def own_budget(policy: str) -> int | None:
    """The token budget of vLLM's own scheduling under another budget; None for any other policy."""
    kind, _, settings = policy.partition(":")
    value = settings.removeprefix("budget=")
    return int(value) if kind == BASELINE and value.isdigit() and value != settings else None


def tuned_budget(score: PolicyScore) -> int | None:
    """The token budget of vLLM's own scheduling at another than the reference budget; None for any other candidate."""
    if score.policy == BASELINE and not score.at_reference:
        return score.max_num_batched_tokens
    return own_budget(score.policy)


def relative_gain(ours: Sequence[float], base: Sequence[float] | None) -> PairedInterval | None:
    """Mean relative gain with its paired 95 % t interval, from the logs of the ratios; None if undefined."""
    if base is None or min(base) <= 0 or min(ours) <= 0:
        return None
    interval = paired_t([math.log(a / b) for a, b in zip(ours, base, strict=True)])
    return PairedInterval(*(math.expm1(value) for value in (interval.mean, interval.low, interval.high)))


def choose(scores: Sequence[PolicyScore]) -> tuple[PolicyScore, Fact]:
    """The simplest policy that is as good as the best: behind by at most TIE, or not significantly behind.

    If v1 is significantly behind the best, a policy that may be no better than v1 is not advised instead of one that
    is.
    """
    best = scores[0]
    if best.objective <= 0:
        return _simplest(scores), fact("none_in_targets")
    equal = [score for score in scores if score is best or _ties(score, best)]
    known = [score for score in equal if score.gain is not None and score.gain.low > 0]
    sure = known if all(score.name != BASELINE for score in equal) else []
    unsure = [score for score in equal if score not in sure]
    if sure and unsure:
        chosen = _simplest(sure)
        return chosen, fact("surely_ahead", of=BASELINE, unsure=_rivals(unsure, chosen))
    chosen = _simplest(equal)
    others = [score for score in equal if score is not chosen]
    return chosen, _among(chosen, others) if others else _winner(scores)


def budget_share(scores: Sequence[PolicyScore]) -> tuple[PolicyScore, float] | None:
    """The best tuned token budget, and which share of the best policy's gain over v1 it gives by itself.

    None if no budget was tried, or the best policy gains no more than TIE.
    """
    budgets = [score for score in scores if tuned_budget(score) is not None]
    gains = [score.gain.mean for score in scores if score.gain is not None]
    if not budgets or not gains or max(gains) <= TIE:
        return None
    best = max(budgets, key=lambda score: score.objective)
    return (best, max(best.gain.mean, 0.0) / max(gains)) if best.gain is not None else None


def _winner(scores: Sequence[PolicyScore]) -> Fact:
    best, *others = scores
    if not others:
        return fact("only_candidate")
    if all((score.behind_best is not None and score.behind_best.high < 0) for score in others):
        return fact("ahead_of_all")
    one_seed, second = len(best.values) == 1, others[0].objective
    if second <= 0:
        return fact("only_one_in_targets", one_seed=one_seed)
    return fact("ahead_by_chance", gain=best.objective / second - 1, one_seed=one_seed)


def _among(chosen: PolicyScore, others: Sequence[PolicyScore]) -> Fact:
    """The reason for the simplest of several policies that may be as good as the best.

    Those that are surely behind the chosen one are left out.
    """
    level = level_budgets(chosen, [chosen, *others])
    rivals: dict[str, list[PolicyScore]] = {"equal": [], "ahead": [], "unsure": []}
    for score in others:
        gain = _against(score, chosen)
        if score.policy == chosen.policy and score.max_num_batched_tokens in level:
            continue
        if _is_equal(gain):
            rivals["equal"].append(score)
        elif gain.high >= 0:
            rivals["ahead" if gain.low > 0 else "unsure"].append(score)
    named = {kind: _rivals(scores, chosen) for kind, scores in rivals.items()}
    return fact("simplest", **named, seeds=len(chosen.values), level=bool(level))


def _rivals(scores: Sequence[PolicyScore], over: PolicyScore) -> list[dict[str, Any]]:
    """The best candidate of each policy, with its gain over another and the ends of its interval (a share)."""
    best = list({score.policy: score for score in reversed(scores)}.values())[::-1]
    gains = [(score, _against(score, over)) for score in best]
    return [
        {"policy": score.policy, "name": score.name, "gain": gain.mean}
        | ({"low": gain.low, "high": gain.high} if math.isfinite(gain.high) else {})
        for score, gain in gains
    ]


def level_budgets(chosen: PolicyScore, scores: Sequence[PolicyScore]) -> list[int]:
    """Other token budgets, rising, at which the chosen policy is equal to it; none where no request met the targets."""
    if chosen.objective <= 0:
        return []
    same = [score for score in scores if score.policy == chosen.policy and score is not chosen]
    return sorted(score.max_num_batched_tokens for score in same if _is_equal(_against(score, chosen)))


def _against(score: PolicyScore, other: PolicyScore) -> PairedInterval:
    """The gain of one candidate over another; without an interval if in some run no request met the targets."""
    gain = relative_gain(score.values, other.values)
    return gain or PairedInterval(score.objective / other.objective - 1, -math.inf, math.inf)


def _is_equal(gain: PairedInterval) -> bool:
    """Whether the gain is at most TIE: its whole interval, or with one seed the measured gain."""
    known = math.isfinite(gain.high)
    return max(-gain.low, gain.high) <= TIE if known else abs(gain.mean) <= TIE


def _ties(score: PolicyScore, best: PolicyScore) -> bool:
    behind = score.behind_best
    if behind is None:  # a run in which no request met the targets has no ratio
        return score.objective >= (1 - TIE) * best.objective
    return behind.mean >= -TIE or (math.isfinite(behind.high) and behind.high >= 0)


def _simplest(scores: Sequence[PolicyScore]) -> PolicyScore:
    return min(scores, key=_rank)


def _rank(score: PolicyScore) -> tuple[int, bool, bool]:
    """Sort key: departure from vLLM's default behaviour, then without settings, then at the reference budget first."""
    kind = score.policy.partition(":")[0]
    place = SIMPLEST_FIRST.index(kind) if kind in SIMPLEST_FIRST else len(SIMPLEST_FIRST)
    return place, ":" in score.policy, not score.at_reference
