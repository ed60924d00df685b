"""First table of the fidelity report: one row per source and device, compared with the last committed table; and the
audit of caveats: whether runs of measured servers say how far off they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from ebbench.devices.profiles import find_model, list_models
from ebbench.grouping import by_key
from ebbench.papers.fidelity.cases_servers import TTFT_NOTE
from ebbench.papers.fidelity.scores import GAP, SCHEDULERS, THROUGHPUT, PublishedFigure, comparisons
from ebbench.records import files
from ebbench.records.warnings import seen_errors

WORSE_POINTS = 0.01  # increase of a median error that counts as a loss of accuracy
FIGURES = {
    "TPOT": ("tpot_mean_ms",), "TTFT": ("ttft_mean_s",), "throughput": THROUGHPUT, "step time": ("step_ms",),
    "KV cache": ("kv_gib", "kv_tokens"),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Errors of one source on one device: median and 90th percentile of their absolute value, as shares, per figure.

    ``direction``: share of the pairs of schedulers with distinct published results for which the winner is the same;
    for other settings, share of cases in which our fastest one is, in print, within GAP of the fastest; settings that
    were fitted on count there too. None without a comparison. ``fitted``: number of cells on which constants were
    fitted; they are not part of the errors.
    """

    source: str
    device: str
    count: int
    fitted: int
    errors: Mapping[str, tuple[float, float]]
    direction: float | None

    @property
    def key(self) -> str:
        """Key of the row in the committed file."""
        return f"{self.source} | {self.device}"


def scoreboard(cells: Sequence[PublishedFigure]) -> list[Row]:
    """One row per source and device, in the order of the cells."""
    return [
        _row(source, device, [cell for cell in cells if (cell.source, cell.device) == (source, device)])
        for source, device in dict.fromkeys((cell.source, cell.device) for cell in cells)
    ]


def _row(source: str, device: str, cells: list[PublishedFigure]) -> Row:
    predicted = [cell for cell in cells if not cell.fitted]
    errors = {}
    for name, metrics in FIGURES.items():
        # Values with a different definition (TTFT of silicon) are shown with a note; doubtful ones are not.
        chosen = [cell for cell in predicted if cell.metric in metrics and (cell.scored or cell.note == TTFT_NOTE)]
        if sizes := [abs(cell.error) for cell in chosen]:
            errors[name] = (float(median(sizes)), float(np.percentile(sizes, 90)))
    right = [pair.same_winner for pair in comparisons(predicted) if pair.decided] or _winners(cells)
    direction = sum(right) / len(right) if right else None
    return Row(source, device, len(predicted), len(cells) - len(predicted), errors, direction)


def _winners(cells: Iterable[PublishedFigure]) -> list[float]:
    """For settings other than the papers' schedulers (tables 19 and 20): whether our fastest one of a case is right.

    1 if the published figure is within GAP of the fastest, else 0: below that, single published runs define no winner.
    A setting that ran out of memory is the slowest. Of several that are equally fast with us (a policy that decides as
    another does), the share that is right.
    """
    cases = by_key(
        (cell.row, cell)
        for cell in cells
        if cell.metric in THROUGHPUT and cell.scheduler not in SCHEDULERS and (cell.scored or cell.failed)
    )
    right = []
    for case in (case for case in cases.values() if len(case) > 1):
        # A run that ended without a rate counts as 0.
        published, ours = (np.nan_to_num([getattr(cell, which) for cell in case]) for which in ("published", "ours"))
        right.append(float((published[ours == ours.max()] >= (1.0 - GAP) * published.max()).mean()))
    return right


def losses(rows: Iterable[Row], before: Mapping[str, Row]) -> list[str]:
    """One sentence per figure that got worse by more than WORSE_POINTS."""
    remarks = []
    for row in rows:
        old = before.get(row.key)
        for name, (now, _) in row.errors.items() if old else ():
            was = old.errors.get(name) if old else None
            if was is not None and now > was[0] + WORSE_POINTS:
                remarks.append(f"{row.source} on {row.device}: median error of {name} {now:.1%}, was {was[0]:.1%}")
    return remarks


PROMISED = {"TPOT": 0.15, "TTFT": 0.30, "throughput": 0.15}
"""Largest size of an error in a run without a caveat about that figure, in nine of ten rows (docs/accuracy.md)."""
OF_MIXTURES = {"TPOT": 0.25}
"""The same where it is larger for mixtures of experts."""
AUDITED = ("InferenceX", "inference-perf", "LLMServingSim", "GPUStack")
"""Sources of servers with the arguments of their runs: beginnings of their names."""


@dataclass(frozen=True)
class Audited:
    """One figure of a measured server, and what our run says about its own error.

    ``caveats``: codes of those about this figure. ``verdict``: empty (within what is promised), ``said``, ``missing``
    (beyond it, and no caveat covers it) or ``against`` (a caveat says the other direction, by a third of what is
    promised or more).
    """

    cell: PublishedFigure
    figure: str
    caveats: tuple[str, ...]
    verdict: str


def audited(cells: Iterable[PublishedFigure]) -> list[Audited]:
    """Every scored figure of the sources of servers that no constant was fitted on, with its verdict."""
    names = {metric: name for name in PROMISED for metric in FIGURES[name]}
    chosen = [
        cell
        for cell in cells
        if cell.source.startswith(AUDITED) and ", no API" not in cell.source
        if cell.scored and not cell.fitted and cell.metric in names
    ]
    return [_audit(cell, names[cell.metric]) for cell in chosen]


def _audit(cell: PublishedFigure, figure: str) -> Audited:
    ranges = {code: seen_errors().get(code, {}).get(figure) for code in cell.caveats}
    said = {code: ends for code, ends in ranges.items() if ends is not None}
    mixture = cell.model in list_models() and find_model(cell.model).experts > 0
    promised, error = OF_MIXTURES.get(figure, PROMISED[figure]) if mixture else PROMISED[figure], cell.error
    low, high = min([0.0, *(low for low, _ in said.values())]), max([0.0, *(high for _, high in said.values())])
    if not low - promised <= error <= high + promised:
        verdict = "missing"
    elif abs(error) > promised:
        verdict = "said"
    else:
        other_side = low < 0 == high < error or error < low == 0 < high
        verdict = "against" if other_side and abs(error) > promised / 3 else ""
    return Audited(cell, figure, tuple(said), verdict)


def save(rows: Iterable[Row], path: Path) -> None:
    """Write the rows for later comparison."""
    files.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", path)


def load(path: Path) -> dict[str, Row]:
    """The rows of a committed file by key; empty without a file."""
    rows = msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.is_file() else []
    return {row.key: row for row in rows}
