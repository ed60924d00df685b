"""Staggered against immediate dispatch for prefill pools of other sizes, down to one unit. No figures are published."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ebbench.analysis.documents import Column, Document, Section, Value, labels, relative
from ebbench.papers.staggered.curves import IMMEDIATE, LONG_16K, SHORT_3K, Setup, capacity_rps, prefill_cell
from ebbench.papers.table import PaperOptions, PaperTable, figure, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

LOADS = (0.05, 0.1, 0.15, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Shares of the pool's throughput with full chunks; its peak in the sense of figure 6 is near 0.95."""
REQUESTS = 6000
_SETUPS = (SHORT_3K, LONG_16K)


class _PrefillPool(NamedTuple):
    title: str
    topology: str


_POOLS = tuple(
    _PrefillPool(
        f"{instances} x {units} unit{'s' if units > 1 else ''}", f"instances={instances},tp=4,dp={units},ep={4 * units}"
    )
    for instances in (1, 2, 6)
    for units in (1, 8)
)


def _cell(options: PaperOptions, setup: Setup, pool: _PrefillPool, dispatch: str, load: float) -> RunSpec:
    smaller = options if options.num_prompts else replace(options, num_prompts=REQUESTS)
    return prefill_cell(smaller, setup, dispatch, load, pool.topology)


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [
        _cell(options, setup, pool, dispatch, load)
        for setup in _SETUPS for pool in _POOLS for load in LOADS for dispatch in (*IMMEDIATE, "sbs")
    ]  # fmt: skip


def _section(options: PaperOptions, store: RunStore, setup: Setup) -> Section:
    columns = (
        *labels("instances of units", "load"), Column("req/s"),
        Column("better immediate", group="TTFT mean, s", ours=True), Column("sbs", group="TTFT mean, s", ours=True),
        Column("diff", "change", "TTFT mean, s", True),
        Column("better immediate", group="TTFT p99, s", ours=True), Column("sbs", group="TTFT p99, s", ours=True),
        Column("diff", "change", "TTFT p99, s", True),
    )  # fmt: skip
    rows = []
    for pool in _POOLS:
        for load in LOADS:
            title = pool.title if load == LOADS[0] else ""
            row: list[Value] = [title, f"{100 * load:.0f} %", load * capacity_rps(setup, pool.topology)]
            for key in ("mean_ttft_ms", "p99_ttft_ms"):
                immediate = [figure(store, _cell(options, setup, pool, name, load), key, 1e-3) for name in IMMEDIATE]
                known = [value for value in immediate if value is not None]
                base = min(known) if len(known) == len(immediate) else None
                ours = figure(store, _cell(options, setup, pool, "sbs", load), key, 1e-3)
                row += [base, ours, relative(ours, base)]
            rows.append(tuple(row))
    return Section(setup.title, columns, tuple(rows))


def _findings(sections: tuple[Section, ...]) -> list[str]:
    found = []
    for section in sections:
        changes = [(row[5], f"{_title(section, i)}, {row[1]}") for i, row in enumerate(section.rows)]
        known = [(float(change), where) for change, where in changes if isinstance(change, (int, float))]
        if len(known) < len(changes):
            continue
        worst, best = max(known), min(known)
        span = " to ".join(f"{100 * change:+.1f} % ({where})" for change, where in (best, worst))
        found.append(f"{section.title}: mean TTFT {span}.")
    return found


def _title(section: Section, index: int) -> str:
    return next(str(row[0]) for row in reversed(section.rows[: index + 1]) if row[0])


def _document(options: PaperOptions, store: RunStore) -> Document:
    sections = tuple(_section(options, store, setup) for setup in _SETUPS)
    notes = (
        "Setup of `sbs-figure6` with pools of other sizes; loads are shares of what the pool computes with full "
        "chunks. The better immediate policy is chosen for each figure and load. One instance alone and few requests: "
        "`sbs` dispatches at once, which makes it least-outstanding.",
        *_findings(sections),
        *pending(store, _cells(options)),
    )
    return Document("sbs-pools", "Staggered dispatch in pools of all sizes", sections, notes)


POOLS = PaperTable(
    "sbs-pools", "staggered against immediate dispatch, pools of all sizes", _cells, _document, ("num_prompts",),
    whole=False,
)  # fmt: skip
