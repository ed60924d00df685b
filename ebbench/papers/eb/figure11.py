"""Figure 11 of the EB paper: output lengths of the real workloads and their empirical hazard."""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbench.hazard.trend import Hazard, analyse_lengths
from ebbench.papers.published import WORKLOADS
from ebbench.papers.table import PaperFigure, PaperOptions, no_cells
from ebbench.render.figures import altair, colour, dash, values
from ebbench.render.palette import BLACK, BLUE, GREEN, VERMILION
from ebbench.runs.store import RunStore

_WIDTH, _HEIGHT = 250, 130
_FITS = ("published estimator", "censored estimator")


def hazard_panels(hazard: Hazard, title: str) -> Any:
    """Histogram of the lengths, and below it the hazard per token with both fitted lines, up to the 95th percentile."""
    alt = altair()
    return alt.vconcat(_histogram(hazard, title), _hazard(hazard), spacing=8)


def _histogram(hazard: Hazard, title: str) -> Any:
    alt = altair()
    top = int(hazard.t[-1])
    ended = hazard.h * hazard.survivors
    if hazard.limit is not None:
        ended[-1] += hazard.censored_samples
    edges = np.linspace(0, top, min(top, 40) + 1)
    counts = np.bincount(np.searchsorted(edges, hazard.t) - 1, ended, len(edges) - 1)
    data = [
        {"x": float(a), "x2": float(b), "value": float(c) / hazard.samples}
        for a, b, c in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    bars = (
        alt.Chart(values(data))
        .mark_rect(color=BLUE, opacity=0.7)
        .encode(
            x=alt.X("x:Q", title=None, scale=alt.Scale(domain=[0, top], nice=False)), x2="x2:Q",
            y=alt.Y("value:Q", title="share of answers", axis=alt.Axis(format="%")),
        )
    )  # fmt: skip
    rule = alt.Chart(values([{"x": hazard.mean}])).mark_rule(color=BLACK, strokeDash=[4, 3]).encode(x="x:Q")
    return alt.layer(bars, rule).properties(width=_WIDTH, height=_HEIGHT, title=title)


def _hazard(hazard: Hazard) -> Any:
    alt = altair()
    middles, rate = hazard.binned()
    names = ("empirical", *_FITS)
    data = [{"x": float(x), "value": 1e3 * float(y), "series": names[0]} for x, y in zip(middles, rate, strict=True)]
    for name, fit in zip(_FITS, (hazard.published, hazard.censored), strict=True):
        if fit is not None:
            ends = (float(middles[0]), float(middles[-1]))
            data += [{"x": x, "value": 1e3 * (fit.p0 + fit.eta * x), "series": name} for x in ends]
    lines = (
        alt.Chart(values(data))
        .mark_line(strokeWidth=1.8)
        .encode(
            x=alt.X("x:Q", title="output tokens t", scale=alt.Scale(domain=[0, int(hazard.t[-1])], nice=False)),
            y=alt.Y("value:Q", title="hazard h(t), 1/1000"),
            color=colour(names, (BLACK, VERMILION, GREEN)),
            strokeDash=dash(names),
        )
    )
    return lines.properties(width=_WIDTH, height=_HEIGHT)


def _chart(options: PaperOptions, store: RunStore, published: bool) -> Any:
    from ebbench.workloads import build_plan

    alt = altair()
    panels = []
    for workload in options.workloads or tuple(WORKLOADS):
        plan = build_plan(workload, source=options.source, num_prompts=options.num_prompts, with_text=False)
        hazard = analyse_lengths(plan.table["output_tokens"].to_numpy())
        panels.append(hazard_panels(hazard, WORKLOADS.get(workload, workload)))
    lines = [alt.hconcat(*panels[at : at + 2]) for at in range(0, len(panels), 2)]
    return alt.vconcat(*lines)


FIGURE11 = PaperFigure(
    "figure11",
    "output lengths and completion hazard of the real workloads",
    no_cells,
    _chart,
    "Ours, from length profiles fitted to table 9 (--source hub reads the data sets). Dashed: the mean. Hazard up to "
    "the 95th percentile, in bins. Answers cut at a limit (the last bar) are censored, not ended; the published "
    "estimator takes them for ended, which tilts its line.",
    ("workload", "num_prompts", "source"),
)
