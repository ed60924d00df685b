"""Attainment of a run as heat maps over TTFT and TPOT targets, one panel per phase."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import NEEDED, RequestColumns
from ebbench.analysis.slo_surface import Surface, latencies_ms, run_surfaces
from ebbench.errors import DataError
from ebbench.records.run import Run
from ebbench.render.figures import altair, values

_ROWS, _COLUMNS = 16, 14
_EDGES = (0.02, 0.995)  # quantiles between which targets are placed


def surface_chart(run: Run) -> Any:
    """Panels for the whole run and for each phase, two per row; targets span the run's latencies.

    Raises DataError if no request completed.
    """
    alt = altair()
    columns = RequestColumns.of(run.table("requests", NEEDED))
    if not columns.ok.any():
        raise DataError(f"{run.path}: no request completed, so there is no attainment to draw")
    ttft, _ = latencies_ms(columns, columns.ok)
    _, tpot = latencies_ms(columns, columns.ok & (columns.tokens_after_first > 0))
    surfaces = run_surfaces(run, _targets(ttft, _ROWS), _targets(tpot, _COLUMNS), by_phase=True)
    panels = [_panel(surface) for surface in surfaces]
    lines = [alt.hconcat(*panels[at : at + 2]) for at in range(0, len(panels), 2)]
    manifest = run.manifest
    title = f"{manifest.policy}: {manifest.scenario or manifest.workload}, {manifest.model} on {manifest.device}"
    return alt.vconcat(*lines, title=title)


def _targets(found_ms: npt.NDArray[np.float64], count: int) -> tuple[float, ...]:
    """At least two targets with two significant digits, evenly spaced in ratio over the measured values."""
    low, high = np.quantile(found_ms, _EDGES) if len(found_ms) else (10.0, 100.0)
    low = max(float(low), 1e-3)
    steps = np.geomspace(low, max(1.1 * float(high), 1.5 * low), count)
    return tuple(sorted({float(f"{step:.2g}") for step in steps}))


def _panel(surface: Surface) -> Any:
    alt = altair()
    data = [
        {"ttft": _seconds(ttft), "tpot": f"{tpot:.3g}", "value": share}
        for ttft, shares in zip(surface.ttft_ms, surface.attainment, strict=True)
        for tpot, share in zip(surface.tpot_ms, shares, strict=True)
    ]
    ttft_order = [_seconds(ttft) for ttft in surface.ttft_ms]
    scale = alt.Scale(scheme="viridis", domain=[0, 1])
    cells = (
        alt.Chart(values(data))
        .mark_rect()
        .encode(
            x=alt.X(
                "tpot:N",
                sort=[f"{t:.3g}" for t in surface.tpot_ms],
                title="TPOT target, ms",
                axis=alt.Axis(labelAngle=-45),
            ),
            y=alt.Y("ttft:N", sort=ttft_order[::-1], title="TTFT target, s"),
            color=alt.Color("value:Q", scale=scale, title="met", legend=alt.Legend(format="%", orient="right")),
        )
    )
    return cells.properties(width=260, height=240, title=surface.phase or "all requests")


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.3g}"
