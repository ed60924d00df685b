"""The question that ``ebbench advise`` answers, and the answer, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbench.advice.theory import Load, Prediction
from ebbench.analysis.slo import Slo
from ebbench.analysis.statistics import Interval


@dataclass(frozen=True)
class Question:
    """The question. ``slo`` empty: throughput decides; else goodput. ``plan``: what plans are built from besides.

    ``seeds_alike``: more seeds were asked for, but every seed gives the same plan.
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
class Score:
    """One policy over the seeds: its objective, and its gain over v1 and over the best as shares, paired by seed.

    ``attainment`` is the mean share that met the SLO; latencies are means of medians, ms.
    """

    policy: str
    objective: float
    values: tuple[float, ...]
    gain: Interval | None
    behind_best: Interval | None
    attainment: float | None
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Probe:
    """EB against v1 over a sweep: ``gain[i]`` of EB at ``x[i]``, and where it changes sign."""

    x: tuple[float, ...]
    gain: tuple[float, ...]
    crossings: tuple[float, ...]


@dataclass(frozen=True)
class Tuning:
    """The best of some (B, N) for the chosen policy, one seed, and its gain over the settings of the question."""

    tried: int
    max_num_batched_tokens: int
    max_num_seqs: int
    gain: float


@dataclass(frozen=True)
class Advice:
    """The answer; ``scores`` best first, ``notes`` what the plan's builder has to say."""

    question: Question
    load: Load
    theory: Prediction
    scores: tuple[Score, ...]
    chosen: Score
    reason: str
    concurrency: Probe | None
    mix: Probe | None
    tuning: Tuning | None = None
    notes: tuple[str, ...] = ()
