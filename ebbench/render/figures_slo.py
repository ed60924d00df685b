"""Attainment of a run as a heat map over TTFT and TPOT targets, one panel a phase."""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbench.analysis.slo_surface import Surface, run_surfaces
from ebbench.records.run import Run
from ebbench.render.figures import altair, values

TTFT_MS = tuple(float(v) for v in np.round(np.geomspace(100, 200_000, 18), 0))
TPOT_MS = tuple(float(v) for v in np.round(np.geomspace(10, 500, 16), 1))


def surface_chart(run: Run) -> Any:
    """Panels for the whole run and each of its phases, two in a row."""
    alt = altair()
    panels = [_panel(surface) for surface in run_surfaces(run, TTFT_MS, TPOT_MS, by_phase=True)]
    lines = [alt.hconcat(*panels[at : at + 2]) for at in range(0, len(panels), 2)]
    manifest = run.manifest
    title = f"{manifest.policy}: {manifest.scenario or manifest.workload}, {manifest.model} on {manifest.device}"
    return alt.vconcat(*lines, title=title)


def _panel(surface: Surface) -> Any:
    alt = altair()
    data = [
        {"ttft": _seconds(ttft), "tpot": f"{tpot:g}", "value": share}
        for ttft, shares in zip(surface.ttft_ms, surface.attainment, strict=True)
        for tpot, share in zip(surface.tpot_ms, shares, strict=True)
    ]
    ttft_order = [_seconds(ttft) for ttft in surface.ttft_ms]
    scale = alt.Scale(scheme="viridis", domain=[0, 1])
    cells = (
        alt.Chart(values(data))
        .mark_rect()
        .encode(
            x=alt.X("tpot:N", sort=[f"{t:g}" for t in surface.tpot_ms], title="TPOT target, ms",
                    axis=alt.Axis(labelAngle=-45)),
            y=alt.Y("ttft:N", sort=ttft_order[::-1], title="TTFT target, s"),
            color=alt.Color("value:Q", scale=scale, title="met", legend=alt.Legend(format="%", orient="right")),
        )
    )  # fmt: skip
    return cells.properties(width=260, height=240, title=surface.phase or "all requests")


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2g}"
