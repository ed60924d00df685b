"""Data types of ``ebbench advise``: the question, the scores and the advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbench.advice.theory import ExpectedLoad, Prediction
from ebbench.analysis.slo import Slo
from ebbench.analysis.statistics import PairedInterval


@dataclass(frozen=True)
class AdviceQuestion:
    """What to advise on. ``slo`` empty: throughput decides, else goodput. ``plan``: further arguments of build_plan.

    ``seeds_alike``: several seeds were asked for, but all seeds give the same plan.
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


@dataclass(frozen=True)
class PolicyScore:
    """One policy over the seeds: its objective, and its gains over v1 and over the best policy as shares, paired by
    seed.

    ``attainment``: mean share of requests that met the SLO. Latencies are means of medians in ms.
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
    """The advice; ``scores`` best first, ``notes`` from building the plan."""

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
