"""Effect of each part of staggered dispatch, near 80 % of the peak of figure 6. No figures are published."""

from __future__ import annotations

from ebbench.analysis.documents import Column, Document, Section, Value, labels, relative
from ebbench.papers.staggered.curves import (
    AS_PUBLISHED,
    IMMEDIATE,
    LONG_16K,
    SHORT_3K,
    WITH_LOOKAHEAD,
    Setup,
    prefill_cell,
)
from ebbench.papers.table import PaperOptions, PaperTable, figure, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

SHARE = 0.76
"""Share of the pool's throughput with full chunks; the peak of figure 6 is at 0.95."""
_SETUPS = (SHORT_3K, LONG_16K)
_PARTS = (
    "sbs", "sbs:sizing=off", "sbs:bypass=off", "sbs:interval=off", "sbs:adaptive=off", "sbs:lookahead=0.75",
    "sbs:lookahead=0", "sbs:patience=off", "sbs:overdraw=off", "sbs:packing=off", WITH_LOOKAHEAD, AS_PUBLISHED,
)  # fmt: skip
_FIGURES = (("mean_ttft_ms", "mean"), ("median_ttft_ms", "median"), ("p99_ttft_ms", "p99"))


def _cell(options: PaperOptions, setup: Setup, dispatch: str) -> RunSpec:
    return prefill_cell(options, setup, dispatch, SHARE)


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [_cell(options, setup, dispatch) for setup in _SETUPS for dispatch in (*IMMEDIATE, *_PARTS)]


def _section(options: PaperOptions, store: RunStore, setup: Setup) -> Section:
    columns = (
        *labels("dispatch"),
        *(Column(title, group="TTFT s", ours=True) for _, title in _FIGURES),
        Column("mean TTFT", "change", "vs better immediate", True),
        Column("chunk utilisation, %", ours=True),
    )
    means = [figure(store, _cell(options, setup, name), "mean_ttft_ms") for name in IMMEDIATE]
    known = [value for value in means if value is not None]
    base = min(known) if len(known) == len(means) else None
    rows = []
    for dispatch in (*IMMEDIATE, *_PARTS):
        cell = _cell(options, setup, dispatch)
        row: list[Value] = [dispatch, *(figure(store, cell, key, 1e-3) for key, _ in _FIGURES)]
        row += [relative(figure(store, cell, "mean_ttft_ms"), base)]
        row += [figure(store, cell, "front_chunk_utilisation", 100)]
        rows.append(tuple(row))
    return Section(setup.title, columns, tuple(rows))


def _document(options: PaperOptions, store: RunStore) -> Document:
    notes = (
        f"Setup of `sbs-figure6`, one load: {SHARE:g} of what the pool computes with full chunks, about 80 % of the "
        "peak of figure 6. Each line switches one part of 'sbs' off; the last is Algorithms 1 and 2 to the letter, the "
        "one before it adds our lookahead to them.",
        *pending(store, _cells(options)),
    )
    sections = tuple(_section(options, store, setup) for setup in _SETUPS)
    return Document("sbs-ablation", "Parts of staggered dispatch, one at a time", sections, notes)


ABLATION = PaperTable(
    "sbs-ablation", "parts of staggered dispatch, one at a time", _cells, _document, ("num_prompts",), whole=False
)
