"""Explains a run: how its time divides among phases and modes, and the controller's inputs and decisions.

Reads the step and decision tables. Without recorded steps there is no explanation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.records.run import Run

TIMELINE_BINS = 20
_STEP_COLUMNS = (
    "start_ns", "end_ns", "phase", "mode", "prefill_tokens", "decode_seqs", "kv_blocks_used", "kv_blocks_total",
    "preemptions",
)  # fmt: skip


@dataclass(frozen=True)
class StepKind:
    """Steps of one phase: number, share of all step time, mean prompt tokens and mean sequences per step."""

    steps: int
    share: float
    mean_s: float
    mean_prefill_tokens: float
    mean_decode_seqs: float


@dataclass(frozen=True)
class StepFacts:
    """Time by phase and mode. ``eb_timeline``: share of exclusive mode in equal parts of the run."""

    steps: int
    kinds: dict[str, StepKind]
    eb_share: float
    eb_timeline: tuple[float, ...]
    preemptions: int


@dataclass(frozen=True)
class Spread:
    """Median and range of a value over the run."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class CrossoverFacts:
    """Inputs of Eq. 8 over the run: medians of both sides and of the margin in s/token."""

    evaluations: int
    eb_ahead: int
    lhs: float
    rhs: float
    margin: float
    r: float
    n_obs: float


@dataclass(frozen=True)
class Switch:
    """A change of mode."""

    time_s: float
    mode: str
    reason: str


@dataclass(frozen=True)
class DecisionFacts:
    """Values that the controller used; a Spread is None if the policy does not have the value."""

    updates: int
    k: Spread | None
    n_limit: Spread | None
    theta: Spread | None
    theta0: Spread | None
    p0: Spread | None
    eta: Spread | None
    crossover: CrossoverFacts | None
    evaluations: int
    last_reason: str
    switches: tuple[Switch, ...]


@dataclass(frozen=True)
class Explanation:
    """Explanation of one run; parts without recorded data are None."""

    policy: str
    steps: StepFacts | None
    decisions: DecisionFacts | None


def explain(run: Run) -> Explanation:
    """Compute the explanation of a run. Raises DataError for a damaged table."""
    steps = run.table("steps", _STEP_COLUMNS)
    return Explanation(
        policy=run.manifest.policy,
        steps=_step_facts(steps) if steps.num_rows else None,
        decisions=_decision_facts(run.decisions) if run.table("decisions", ["kind"]).num_rows else None,
    )


def _step_facts(steps: pa.Table) -> StepFacts:
    # Texts are compared in Arrow: as numpy arrays they would be one Python object per step.
    values = {name: steps.column(name).to_numpy() for name in _STEP_COLUMNS if name not in ("phase", "mode")}
    phases = steps.column("phase")
    start, end = values["start_ns"], values["end_ns"]
    spent = (end - start).astype(np.float64)
    total = float(spent.sum()) or 1.0
    eb = pc.equal(steps.column("mode"), "eb").to_numpy()
    return StepFacts(
        steps=len(spent),
        kinds={
            kind: _step_kind(values, pc.equal(phases, kind).to_numpy(), spent, total)
            for kind in phases.unique().to_pylist()
        },
        eb_share=float(spent[eb].sum()) / total,
        eb_timeline=_timeline(start, spent, eb),
        preemptions=int(values["preemptions"].sum()),
    )


def _step_kind(
    values: dict[str, Any], rows: npt.NDArray[np.bool_], spent: npt.NDArray[np.float64], total: float
) -> StepKind:
    return StepKind(
        steps=int(rows.sum()),
        share=float(spent[rows].sum()) / total,
        mean_s=float(spent[rows].mean()) / 1e9,
        mean_prefill_tokens=float(values["prefill_tokens"][rows].mean()),
        mean_decode_seqs=float(values["decode_seqs"][rows].mean()),
    )


def _timeline(
    start: npt.NDArray[np.int64], spent: npt.NDArray[np.float64], eb: npt.NDArray[np.bool_]
) -> tuple[float, ...]:
    """Share of exclusive mode per bin; a bin without steps repeats the bin before."""
    origin, length = int(start.min()), max(int(start.max() - start.min()), 1)
    place = np.minimum((start - origin) * TIMELINE_BINS // length, TIMELINE_BINS - 1).astype(np.int64)
    busy = np.bincount(place, spent, TIMELINE_BINS)
    exclusive = np.bincount(place, spent * eb, TIMELINE_BINS)
    shares: list[float] = []
    for time_eb, time_all in zip(exclusive, busy, strict=True):
        shares.append(float(time_eb / time_all) if time_all else (shares[-1] if shares else 0.0))
    return tuple(shares)


def _decision_facts(decisions: pa.Table) -> DecisionFacts:
    updates = decisions.filter(pc.equal(decisions.column("kind"), "update"))
    modes = decisions.filter(pc.equal(decisions.column("kind"), "mode"))
    settings = updates if updates.num_rows else decisions
    return DecisionFacts(
        updates=updates.num_rows,
        **{name: _spread(settings, name) for name in ("k", "n_limit", "theta", "theta0", "p0", "eta")},
        crossover=_crossover(modes),
        evaluations=modes.num_rows,
        last_reason=modes.column("reason")[-1].as_py() if modes.num_rows else "",
        switches=_switches(modes),
    )


def _spread(table: pa.Table, name: str) -> Spread | None:
    values = table.column(name).drop_null().to_numpy()
    if not len(values):
        return None
    return Spread(float(np.median(values)), float(values.min()), float(values.max()))


def _crossover(modes: pa.Table) -> CrossoverFacts | None:
    known = modes.filter(pc.is_valid(modes.column("lhs")))
    if not known.num_rows:
        return None
    values = {name: known.column(name).to_numpy() for name in ("lhs", "rhs", "margin", "r", "n_obs")}
    ahead = values["lhs"] > values["rhs"] + values["margin"]
    medians = {name: float(np.median(column)) for name, column in values.items()}
    return CrossoverFacts(known.num_rows, int(ahead.sum()), **medians)


def _switches(modes: pa.Table) -> tuple[Switch, ...]:
    """Changes of mode of all instances in order of time; EB+ starts in mixed mode."""
    found, before = [], dict[int, str]()
    for row in modes.select(["time_ns", "instance", "mode", "reason"]).to_pylist():
        if row["mode"] != before.get(row["instance"], "mb"):
            found.append(Switch(row["time_ns"] / 1e9, row["mode"], row["reason"]))
        before[row["instance"]] = row["mode"]
    return tuple(sorted(found, key=lambda switch: switch.time_s))
