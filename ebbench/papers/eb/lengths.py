"""Lengths of the EB paper's real workloads and their hazard: tables 9 and 12, figure 11."""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbench.analysis.documents import Column, Section, Value, compared, comparison, labels
from ebbench.hazard import Hazard, analyse_lengths, trend_tests
from ebbench.papers.options import PaperOptions
from ebbench.papers.published import WORKLOADS, pick
from ebbench.papers.table import PaperFigure, PaperTable, Sections, no_runs
from ebbench.records.plan import Plan
from ebbench.render.figures import altair, lines, values
from ebbench.render.palette import BLACK, BLUE, GREEN, VERMILION
from ebbench.runs.store import RunStore

# Table 9 of the EB paper: lengths of the four real workloads. It needs no runs.

_FIELDS = (("samples", "samples"), ("input_mean", "input mean"), ("output_mean", "output mean"),
           ("output_std", "output std"))  # fmt: skip


def _plan(options: PaperOptions, workload: str) -> Plan:
    from ebbench.workloads import build_plan

    return build_plan(workload, source=options.source, num_prompts=options.num_prompts, with_text=False)


def _lengths(options: PaperOptions, workload: str) -> tuple[dict[str, float], str, str]:
    """Statistics of the workload as ebbench runs it, whether its hazard rises, and its source."""
    plan = _plan(options, workload)
    inputs, outputs = (plan.table[name].to_numpy() for name in ("input_tokens", "output_tokens"))
    tests = trend_tests(outputs)
    figures = {
        "samples": float(len(np.unique(plan.table["session"].to_numpy()))),
        "input_mean": float(inputs.mean()),
        "output_mean": float(outputs.mean()),
        "output_std": float(outputs.std()),
    }
    return figures, "yes" if tests is not None and tests.rising else "no", str(plan.facts.get("source", ""))


def _document9(options: PaperOptions, store: RunStore) -> Sections:
    columns = labels("workload", "source")
    for _, title in _FIELDS:
        columns += compared(title)
    columns += (Column("ours", "label", "IFR"),)
    rows = []
    for workload in options.workloads or tuple(WORKLOADS):
        figures, rising, source = _lengths(options, workload)
        row: list[Value] = [WORKLOADS.get(workload, workload), source]
        for name, _ in _FIELDS:
            published = pick("table9_workload_lengths", name, workload=WORKLOADS.get(workload, workload))
            row += comparison(published, figures[name])
        rows.append((*row, rising))
    return [Section("", columns, tuple(rows))]


TABLE9 = PaperTable("table9", ("workload", "num_prompts", "source"), _document9, runs=no_runs)


# Table 12 of the EB paper (appendix E.4): tests of the hazard's trend on real workloads. It needs no runs.

SAMPLES = {"sharegpt": 4000, "numinamath": 4000, "wildchat": 3000}
"""Printed n by workload; WildChat's counts conversations."""


def _probability(value: float) -> str:
    return f"{value:.1e}" if value < 1e-3 else f"{value:.3f}"


def _row12(options: PaperOptions, workload: str) -> tuple[Value, ...]:
    plan = _plan(options, workload)
    hazard = analyse_lengths(plan.table["output_tokens"].to_numpy())
    head = (WORKLOADS.get(workload, workload), str(plan.facts.get("source", "")), SAMPLES.get(workload), hazard.samples)
    tests = hazard.tests
    if tests is None:
        return (*head, None, None, None, None, None, hazard.untested)
    word = "rising" if tests.rising else tests.trend
    figures = (tests.t_max, tests.tau, tests.mann_kendall_p, 1e6 * tests.slope, tests.regression_p)
    return (*head, *figures, word)


def _document12(options: PaperOptions, store: RunStore) -> Sections:
    columns: tuple[Column, ...] = (
        *labels("workload", "source"), Column("n printed"), Column("answers", ours=True), Column("up to t", ours=True),
        Column("tau", group="Mann-Kendall", ours=True, show=lambda tau: f"{tau:+.2f}"),
        Column("p", group="Mann-Kendall", ours=True, show=_probability),
        Column("slope, 1e-6", group="regression", ours=True, show=lambda slope: f"{slope:+.2f}"),
        Column("p", group="regression", ours=True, show=_probability), Column("hazard", "label", ours=True),
    )  # fmt: skip
    rows = tuple(_row12(options, workload) for workload in options.workloads or tuple(SAMPLES))
    return [Section("", columns, rows)]


TABLE12 = PaperTable("table12", ("workload", "num_prompts", "source"), _document12, runs=no_runs)


# Figure 11 of the EB paper: output lengths of the real workloads and their empirical hazard.

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
    x = alt.X("x:Q", title=None, scale=alt.Scale(domain=[0, top], nice=False))
    y = alt.Y("value:Q", title="share of answers", axis=alt.Axis(format="%"))
    bars = alt.Chart(values(data)).mark_rect(color=BLUE, opacity=0.7).encode(x=x, x2="x2:Q", y=y)
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
    x = alt.X("x:Q", title="output tokens t", scale=alt.Scale(domain=[0, int(hazard.t[-1])], nice=False))
    chart = lines(data, x, alt.Y("value:Q", title="hazard h(t), 1/1000"), names, (BLACK, VERMILION, GREEN))
    return chart.properties(width=_WIDTH, height=_HEIGHT)


def _chart11(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    panels = []
    for workload in options.workloads or tuple(WORKLOADS):
        hazard = analyse_lengths(_plan(options, workload).table["output_tokens"].to_numpy())
        panels.append(hazard_panels(hazard, WORKLOADS.get(workload, workload)))
    return alt.vconcat(*(alt.hconcat(*panels[at : at + 2]) for at in range(0, len(panels), 2)))


FIGURE11 = PaperFigure("figure11", ("workload", "num_prompts", "source"), _chart11, runs=no_runs)
