"""Runs of varying traffic by phase: throughput, latency, attainment, and recovery after each shift."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ebbench.analysis.documents import Column, Document, Section, Value, labels
from ebbench.analysis.recovery import Recovery, recoveries
from ebbench.analysis.slo import Slo
from ebbench.analysis.slo_surface import run_surfaces
from ebbench.analysis.summary import Summary, summarise_phases
from ebbench.records.run import Run

_NOTES = (
    "served: from the first token of the phase to that of the next; settled: tokens/s (prompts and answers) over the "
    "second half of it.",
    "recovery: the time after which the mean rate to the middle of the phase is 95 % of the settled rate or more, –: "
    "never; TTFT rec.: until blocks of requests stay under 1.5 times the later median TTFT; lost: work missed in the "
    "first half, as seconds at the settled rate; controller: until its last change of mode in the phase.",
    "requests, output tokens/s, TTFT and TPOT are those of the phase's own requests, whenever they end.",
)


def phases_document(runs: Sequence[Run], slo: Slo | None = None) -> Document:
    """One section per run, one row per phase. ``slo`` None uses the limits of each run. Raises DataError."""
    sections = tuple(_section(run, slo) for run in runs)
    return Document("phases", "By phase", sections, _NOTES)


def _section(run: Run, slo: Slo | None) -> Section:
    summaries = summarise_phases(run, slo)
    found = {recovery.phase: recovery for recovery in recoveries(run)}
    with_slo = any(summary.slo for summary in summaries)
    columns = (
        *labels("phase"),
        Column("requests"), Column("served s"), Column("settled tok/s", ours=True), Column("output tok/s"),
        Column("TTFT p50 s"), Column("TPOT p50 ms"),
        *((Column("SLO met %"),) if with_slo else ()),
        Column("recovery s", ours=True), Column("TTFT rec. s", ours=True), Column("lost s"),
        Column("controller s"), Column("switches"),
    )  # fmt: skip
    rows = [_row(summary, found.get(summary.phase), with_slo) for summary in summaries]
    manifest = run.manifest
    title = f"{manifest.policy}: {manifest.scenario}, {manifest.model} on {manifest.device}, {manifest.engine}"
    return Section(title, columns, tuple(rows))


def _row(summary: Summary, recovery: Recovery | None, with_slo: bool) -> tuple[Value, ...]:
    metrics = summary.metrics
    row: list[Value] = [
        summary.phase,
        metrics.completed,
        recovery.span_s if recovery else None,
        recovery.settled_tokens_per_s if recovery else None,
        metrics.output_throughput,
        None if metrics.ttft.median is None else metrics.ttft.median / 1e3,
        metrics.tpot.median,
    ]
    if with_slo:
        row.append(None if metrics.slo_attainment is None else 100 * metrics.slo_attainment)
    if recovery is None:
        return (*row, None, None, None, None, None)
    return (
        *row, recovery.recovery_s, recovery.ttft_recovery_s, recovery.lost_s, recovery.controller_s, recovery.switches,
    )  # fmt: skip


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
    from ebbench.records.run import find_runs

    return [Run.load(path) for path in find_runs(paths)]
