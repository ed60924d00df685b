"""SLO attainment over a grid of TTFT and TPOT targets.

Attainment is the share of *planned* requests that completed and met both targets, as in
:mod:`ebbench.analysis.metrics`, also where TPOT is undefined: a failed request meets no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import NEEDED, Mask, RequestColumns
from ebbench.analysis.distribution import NS_PER_MS
from ebbench.analysis.metrics import limited_ns
from ebbench.errors import UsageError
from ebbench.records.run import Run


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
    found = [surface(columns, ttft_ms, tpot_ms)]
    names = list(dict.fromkeys(columns.phase.tolist()))
    if by_phase and len(names) > 1:
        found += [surface(columns, ttft_ms, tpot_ms, phase=name) for name in names]
    return tuple(found)


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
