"""Attainment over a grid of TTFT and TPOT targets: which targets a run would have met.

The share of *planned* requests that completed and met both targets, as in :mod:`ebbench.analysis.metrics`: a failed
request meets nothing, nor does one whose TPOT is undefined (fewer than two tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import NEEDED, Mask, RequestColumns
from ebbench.analysis.distribution import NS_PER_MS
from ebbench.errors import UsageError
from ebbench.records.run import Run


@dataclass(frozen=True)
class Surface:
    """``attainment[i][j]`` is the share in [0, 1] that met ``ttft_ms[i]`` and ``tpot_ms[j]``; ``phase`` "": all."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    attainment: tuple[tuple[float, ...], ...]
    planned: int
    phase: str = ""

    def at(self, ttft_ms: float, tpot_ms: float) -> float:
        """Attainment at targets of the grid. Raises ValueError when they are not on it."""
        return self.attainment[self.ttft_ms.index(ttft_ms)][self.tpot_ms.index(tpot_ms)]


def run_surfaces(
    run: Run, ttft_ms: Sequence[float], tpot_ms: Sequence[float], *, by_phase: bool = False
) -> tuple[Surface, ...]:
    """The surface of a run and, ``by_phase``, one for each of its phases where it has several.

    Raises UsageError for targets that are not positive, DataError on damaged files.
    """
    columns = RequestColumns.of(run.table("requests", NEEDED))
    found = [surface(columns, ttft_ms, tpot_ms)]
    names = list(dict.fromkeys(columns.phase.tolist()))
    if by_phase and len(names) > 1:
        found += [surface(columns, ttft_ms, tpot_ms, phase=name) for name in names]
    return tuple(found)


def surface(columns: RequestColumns, ttft_ms: Sequence[float], tpot_ms: Sequence[float], *, phase: str = "") -> Surface:
    """Attainment of all requests, or of one phase's. Raises UsageError for targets that are not positive."""
    for name, targets in (("ttft", ttft_ms), ("tpot", tpot_ms)):
        if not targets or not all(0 < target < float("inf") for target in targets):
            raise UsageError(f"{name} targets must be positive numbers, at least one of them")
    rows = np.ones(len(columns.status), np.bool_) if not phase else columns.phase == phase
    ttft, tpot = latencies_ms(columns, rows & columns.ok)
    planned = int(rows.sum())
    # Requests counted at the first target they meet in each direction, then summed up: every request once.
    first = np.searchsorted(np.sort(np.asarray(ttft_ms, float)), ttft)
    second = np.searchsorted(np.sort(np.asarray(tpot_ms, float)), tpot)
    counts = np.zeros((len(ttft_ms) + 1, len(tpot_ms) + 1))
    np.add.at(counts, (first, second), 1)
    met = counts.cumsum(0).cumsum(1)[:-1, :-1] / max(planned, 1)
    return Surface(
        tuple(sorted(ttft_ms)), tuple(sorted(tpot_ms)), tuple(tuple(map(float, row)) for row in met), planned, phase
    )


def latencies_ms(columns: RequestColumns, rows: Mask) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """TTFT and TPOT in ms; an undefined TPOT is infinite, so that it meets no target."""
    gaps = columns.output_tokens[rows] - 1
    span = (columns.last_token - columns.first_token)[rows] / NS_PER_MS
    tpot = np.where(gaps >= 1, span / np.maximum(gaps, 1), np.inf)
    return (columns.first_token - columns.intended)[rows] / NS_PER_MS, tpot
