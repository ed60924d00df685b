"""Runs of varying traffic by phase: throughput, latency, attainment, and recovery after each shift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import NEEDED, Mask, RequestColumns
from ebbench.analysis.documents import Column, Document, Section, Value, labels
from ebbench.analysis.metrics import NS_PER_MS, limited_ns
from ebbench.analysis.summary import Summary, summarise_phases
from ebbench.errors import UsageError
from ebbench.records.run import Run, find_runs

# How long a system takes to recover from a shift of its traffic.
#
# Definitions. A phase is *served* from the first output token of any of its requests to the first output token of the
# next phase's (the last phase: to the last first token of all, without the drain). Tokens processed are prompts,
# counted at their first output token, and output tokens. The *settled rate* is tokens processed per second over the
# second half of the served span.
#
# - recovery time: the smallest r such that the mean rate from r after the start to the middle of the span is at least
#   95 % of the settled rate; 0 if the shift cost nothing, None if no r up to one window before the middle qualifies.
#   The mean has a fixed end instead of a moving window: with exclusive batches the rate oscillates within every cycle.
# - TTFT recovery: requests of the phase in order of their intended start, in blocks of a twentieth of them (at least
#   20); from the phase's first intended start to the end of the last block of the first half whose median TTFT exceeds
#   1.5 times the median over the second half; 0 if no block does
# - lost time: tokens short of the settled rate over the first half of the span, as seconds of work at that rate
# - controller time: from the start of the served span to the last change of mode inside it; 0 without a change; the
#   requests that ended meanwhile are those whose last token lies in it
#
# A window is the larger of 5 s and a tenth of the span; phases served for less than four windows have no settled
# rate.

WINDOW_S, WINDOW_SHARE = 5.0, 0.1

BAND = 0.95
TTFT_FACTOR, _BLOCK = 1.5, 20
_STEPS = 400  # points in time at which the rate is evaluated


@dataclass(frozen=True)
class Recovery:
    """One phase: its served span, its mean and settled rate in tokens/s, the times defined above (s), and how many
    requests ended in the controller's."""

    phase: str
    start_s: float
    end_s: float
    mean_tokens_per_s: float | None
    settled_tokens_per_s: float | None = None
    recovery_s: float | None = None
    ttft_recovery_s: float | None = None
    lost_s: float | None = None
    controller_s: float = 0.0
    controller_requests: int = 0
    switches: int = 0

    @property
    def span_s(self) -> float:
        """Duration of the served span (s)."""
        return self.end_s - self.start_s


def recoveries(run: Run) -> tuple[Recovery, ...]:
    """One entry per phase, in the order served. Raises DataError for damaged files."""
    columns = RequestColumns.of(run.table("requests", NEEDED))
    spans = served_spans(columns)
    if not spans:
        return ()
    times_s, tokens = token_times(columns)
    cumulative = np.concatenate([[0.0], np.cumsum(tokens)])
    changes = mode_changes(run)
    last_tokens_s = np.sort(columns.last_token[columns.ok]) / 1e9
    phases = []
    for name, start, end in spans:
        inside = changes[(changes > start) & (changes < end)]
        controller_s = float(inside[-1]) - start if len(inside) else 0.0
        ended = np.searchsorted(last_tokens_s, [start, start + controller_s], "right")
        phase = _recovery(name, start, end, times_s, cumulative)
        phases.append(replace(
            phase, ttft_recovery_s=ttft_recovery(columns, name), controller_s=controller_s,
            controller_requests=int(ended[1] - ended[0]), switches=len(inside),
        ))  # fmt: skip
    return tuple(phases)


def ttft_recovery(columns: RequestColumns, phase: str) -> float | None:
    """TTFT recovery of a phase as defined above (s); None with fewer than 80 requests."""
    rows = columns.generated & (columns.phase == phase)
    order = np.argsort(columns.intended[rows], kind="stable")
    intended = columns.intended[rows][order] / 1e9
    ttft = (columns.first_token - columns.intended)[rows][order]
    block = max(_BLOCK, len(ttft) // 20)
    half = len(ttft) // 2
    if half < 2 * block:
        return None
    limit = TTFT_FACTOR * float(np.median(ttft[half:]))
    slow = [at for at in range(0, half - block + 1, block) if np.median(ttft[at : at + block]) > limit]
    return float(intended[slow[-1] + block - 1] - intended[0]) if slow else 0.0


def served_spans(columns: RequestColumns) -> list[tuple[str, float, float]]:
    """(phase, start, end) in s, in order; phases that were never served are left out."""
    ok = columns.ok
    firsts, served = columns.first_token[ok] / 1e9, columns.phase[ok]
    starts = sorted((float(firsts[served == name].min()), name) for name in set(served.tolist()))
    ends = [start for start, _ in starts[1:]] + ([float(firsts.max())] if starts else [])
    return [(name, start, end) for (start, name), end in zip(starts, ends, strict=True)]


def token_times(columns: RequestColumns) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Times (s, ascending) of tokens, and tokens per time: a prompt counts at its first output token."""
    ok = columns.ok
    gaps, counts = columns.gaps_of(ok), columns.gap_counts[ok]
    firsts = columns.first_token[ok]
    running = np.concatenate([[0], np.cumsum(gaps, dtype=np.int64)])
    later = running[1:] + np.repeat(firsts - running[np.cumsum(counts) - counts], counts)
    weight = np.where(counts > 0, (columns.output_tokens[ok] - 1) / np.maximum(counts, 1), 0.0)
    times = np.concatenate([firsts, later])
    with_first = columns.input_tokens[ok] + np.minimum(columns.output_tokens[ok], 1.0)
    tokens = np.concatenate([with_first, np.repeat(weight, counts)])
    order = np.argsort(times, kind="stable")
    return times[order] / 1e9, tokens[order]


def mode_changes(run: Run) -> npt.NDArray[np.float64]:
    """Times (s) at which any instance changed its scheduling mode, from the steps table; empty without steps."""
    steps = run.table("steps", ["start_ns", "mode", "instance"])
    if steps.num_rows < 2:
        return np.zeros(0)
    instance = steps["instance"].to_numpy()
    order = np.argsort(instance, kind="stable")  # each instance's steps in their order
    mode, owner = steps["mode"].to_numpy(zero_copy_only=False)[order], instance[order]
    changed = np.flatnonzero((mode[1:] != mode[:-1]) & (owner[1:] == owner[:-1])) + 1
    return np.sort(steps["start_ns"].to_numpy()[order][changed] / 1e9)


def _recovery(
    name: str, start: float, end: float, times_s: npt.NDArray[np.float64], cumulative: npt.NDArray[np.float64]
) -> Recovery:
    span = end - start

    def done(at: npt.NDArray[np.float64] | float) -> npt.NDArray[np.float64]:
        return np.asarray(cumulative[np.searchsorted(times_s, at, "right")])

    phase = Recovery(name, start, end, float(done(end) - done(start)) / span if span else None)
    window = max(WINDOW_S, WINDOW_SHARE * span)
    if span < 4 * window:
        return phase
    middle = start + span / 2
    settled = float(done(end) - done(middle)) / (end - middle)
    moments = np.linspace(start, middle - window, _STEPS)
    enough = np.flatnonzero((done(middle) - done(moments)) / (middle - moments) >= BAND * settled)
    lost = max(settled * (middle - start) - float(done(middle) - done(start)), 0.0) / settled if settled else None
    return replace(
        phase,
        settled_tokens_per_s=settled,
        recovery_s=float(moments[enough[0]]) - start if len(enough) else None,
        lost_s=lost,
    )


# SLO attainment over a grid of TTFT and TPOT targets.
#
# Attainment is the share of *planned* requests that completed and met both targets, as in `ebbench.analysis.metrics`,
# also where TPOT is undefined: a failed request meets no target.


@dataclass(frozen=True)
class Surface:
    """``attainment[i][j]``: share in [0, 1] that met ``ttft_ms[i]`` and ``tpot_ms[j]``; ``phase`` "" is all phases."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    attainment: tuple[tuple[float, ...], ...]
    planned: int
    phase: str = ""

    def at(self, ttft_ms: float, tpot_ms: float) -> float:
        """Attainment at targets of the grid. Raises ValueError if they are not on it."""
        return self.attainment[self.ttft_ms.index(ttft_ms)][self.tpot_ms.index(tpot_ms)]


def run_surfaces(
    run: Run, ttft_ms: Sequence[float], tpot_ms: Sequence[float], *, by_phase: bool = False
) -> tuple[Surface, ...]:
    """The surface of a run and, with ``by_phase``, one per phase if it has several.

    Raises UsageError for targets that are not positive, DataError for damaged files.
    """
    columns = RequestColumns.of(run.table("requests", NEEDED))
    surfaces = [surface(columns, ttft_ms, tpot_ms)]
    names = list(dict.fromkeys(columns.phase.tolist()))
    if by_phase and len(names) > 1:
        surfaces += [surface(columns, ttft_ms, tpot_ms, phase=name) for name in names]
    return tuple(surfaces)


def surface(columns: RequestColumns, ttft_ms: Sequence[float], tpot_ms: Sequence[float], *, phase: str = "") -> Surface:
    """Attainment of all requests or of one phase's. Raises UsageError for targets that are not positive."""
    for name, targets in (("ttft", ttft_ms), ("tpot", tpot_ms)):
        if not targets or not all(0 < target < float("inf") for target in targets):
            raise UsageError(f"{name} targets must be positive numbers, at least one of them")
    rows = np.ones(len(columns.status), np.bool_) if not phase else columns.phase == phase
    ttft, tpot = latencies_ms(columns, rows & columns.ok)
    planned = int(rows.sum())
    # Count each request at the smallest targets that it meets, then take cumulative sums.
    first = np.searchsorted(np.sort(np.asarray(ttft_ms, float)), ttft)
    second = np.searchsorted(np.sort(np.asarray(tpot_ms, float)), tpot)
    counts = np.zeros((len(ttft_ms) + 1, len(tpot_ms) + 1))
    np.add.at(counts, (first, second), 1)
    met = counts.cumsum(0).cumsum(1)[:-1, :-1] / max(planned, 1)
    return Surface(
        tuple(sorted(ttft_ms)), tuple(sorted(tpot_ms)), tuple(tuple(map(float, row)) for row in met), planned, phase
    )


def latencies_ms(columns: RequestColumns, rows: Mask) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """TTFT and TPOT in ms as limits are compared with them (:func:`~ebbench.analysis.metrics.limited_ns`), one entry
    per request in ``rows``."""
    return limited_ns(columns, "ttft")[rows] / NS_PER_MS, limited_ns(columns, "tpot")[rows] / NS_PER_MS


_NOTES = (
    "served: from the first token of the phase to that of the next; settled: tokens/s (prompts and answers) over the "
    "second half of it.",
    "recovery: the time after which the mean rate to the middle of the phase is 95 % of the settled rate or more, –: "
    "never; TTFT rec.: until blocks of requests stay under 1.5 times the later median TTFT; lost: work missed in the "
    "first half, as seconds at the settled rate; controller: until its last change of mode in the phase.",
    "requests, output tokens/s, TTFT and TPOT are those of the phase's own requests, whenever they end.",
)


def phases_document(runs: Sequence[Run]) -> Document:
    """One section per run, one row per phase, by the limits of each run. Raises DataError."""
    return Document("phases", "By phase", tuple(map(_section, runs)), _NOTES)


def _section(run: Run) -> Section:
    summaries = summarise_phases(run)
    recovery_by_phase = {recovery.phase: recovery for recovery in recoveries(run)}
    with_slo = any(summary.slo for summary in summaries)
    columns = (
        *labels("phase"),
        Column("requests"), Column("served s"), Column("settled tok/s", ours=True), Column("output tok/s"),
        Column("TTFT p50 s"), Column("TPOT p50 ms"),
        *((Column("SLO met %"),) if with_slo else ()),
        Column("recovery s", ours=True), Column("TTFT rec. s", ours=True), Column("lost s"),
        Column("controller s"), Column("switches"),
    )  # fmt: skip
    rows = [_row(summary, recovery_by_phase.get(summary.phase), with_slo) for summary in summaries]
    manifest = run.manifest
    title = f"{manifest.policy}: {manifest.scenario}, {manifest.model} on {manifest.device}, {manifest.engine}"
    return Section(title, columns, tuple(rows))


def _row(summary: Summary, recovery: Recovery | None, with_slo: bool) -> tuple[Value, ...]:
    metrics = summary.metrics
    names = (
        "span_s", "settled_tokens_per_s", "recovery_s", "ttft_recovery_s", "lost_s", "controller_s", "switches",
    )  # fmt: skip
    span_s, settled, *after = (None if recovery is None else getattr(recovery, name) for name in names)
    ttft_ms, met = metrics.ttft.median, metrics.slo_attainment
    row: list[Value] = [summary.phase, metrics.completed, span_s, settled, metrics.output_throughput]
    row += [None if ttft_ms is None else ttft_ms / 1e3, metrics.tpot.median]
    row += [None if met is None else 100 * met] if with_slo else []
    return (*row, *after)


def attainment_document(
    runs: Sequence[Run], ttft_ms: Sequence[float], tpot_ms: Sequence[float], *, by_phase: bool = False
) -> Document:
    """Attainment surfaces of stored runs in per cent, one section per run and phase. Raises UsageError, DataError."""
    sections = []
    for run in runs:
        for surface in run_surfaces(run, ttft_ms, tpot_ms, by_phase=by_phase):
            columns = (*labels("TTFT ≤"), *(Column(f"TPOT ≤ {t:g} ms", ours=True) for t in surface.tpot_ms))
            rows: list[tuple[Value, ...]] = [
                (f"{ttft / 1e3:g} s", *(100 * share for share in shares))
                for ttft, shares in zip(surface.ttft_ms, surface.attainment, strict=True)
            ]
            title = f"{run.manifest.policy}, {run.path.name}" + (f", phase {surface.phase}" if surface.phase else "")
            sections.append(Section(title, columns, tuple(rows)))
    notes = ("per cent of planned requests that completed and met both targets",)
    return Document("slo", "SLO attainment", tuple(sections), notes)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs among ``paths``; a directory stands for all runs in it. Raises DataError."""
    return [Run.load(path) for path in find_runs(paths)]
