"""Data types of ``ebbench advise``: the question, the scores and the advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ebbench.advice.theory import ExpectedLoad, Prediction
from ebbench.analysis.slo import Slo
from ebbench.analysis.statistics import PairedInterval


@dataclass(frozen=True)
class AdviceQuestion:
    """What to advise on. ``slo`` empty: throughput decides, else goodput. ``plan``: further arguments of build_plan.

    ``seeds_alike``: several seeds were asked for, but all seeds give the same plan. ``max_num_batched_tokens``: the
    token budget that gains are compared with; ``budgets``: further ones that are tried with every policy. ``server``:
    further settings of every cell, by the names of ``RunSpec.changed``.
    """

    workload: str
    device: str
    model: str
    scenario: str | None
    plan: Mapping[str, Any]
    max_num_seqs: int
    max_num_batched_tokens: int
    seeds: int
    slo: Slo
    policies: tuple[str, ...]
    seeds_alike: bool = False
    budgets: tuple[int, ...] = ()
    server: Mapping[str, Any] = field(default_factory=dict)


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
    reason: str
    concurrency: GainCurve | None
    mix: GainCurve | None
    tuning: Tuning | None = None
    notes: tuple[str, ...] = ()
    dropped: tuple[DroppedPolicy, ...] = ()
    engines: int = 1
