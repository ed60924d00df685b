"""The EB paper's online threshold: beside fixed ones (figure 3), by its correction (ours), E.3 and E.5."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ebbench.analysis.documents import Column, Section, Value, labels
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.papers.eb.thresholds import (
    FIGURE12,
    FIGURE12_COSTS,
    FIGURE12_SHAPES,
    FIGURE12_THETAS,
    PUBLISHED_E2,
    SLOW,
    best_and_near,
    figure12_cells,
    linear_costs,
    repeats,
    slow_refill,
    sweep12,
    sweep_cell,
)
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import FIGURE3_SEQS, figure3_protocol, fixed_threshold, protocol_cells
from ebbench.papers.published import MAIN_MODEL, SYNTHETIC, gpu_title, model_title, rows
from ebbench.papers.table import PaperFigure, PaperTable, Published, Sections, figure, mean_figure, of_all, ours
from ebbench.render.figures import altair, colour, values
from ebbench.render.palette import BLACK, BLUE, VERMILION
from ebbench.runs.store import Measured, RunStore
from ebbench.spec.run import RunSpec
from vllm_eb.hazard import CensoredHazard, HazardEstimate, SlidingHazard
from vllm_eb.theory import base_threshold

# Figure 3 of the EB paper: throughput for fixed thresholds and for the online controller.

FRACTIONS = tuple(range(1, 9))
FIGURE3_WORKLOADS = {
    "decode-heavy": 8.0,
    "balanced": 4.0,
    "prefill-heavy": 1.0,
}  # and the relative duration of their runs
_SERIES3 = ("fixed k", "controller (eb)", "mixed (v1)")
_COLOURS3 = (BLACK, VERMILION, BLUE)
_MARKS3: dict[str, tuple[list[int], str]] = {"ours": ([1, 0], "circle"), "published": ([3, 3], "cross")}
"""Line dash and point shape by source."""


def _cell3(options: PaperOptions, workload: str, policy: str) -> RunSpec:
    model, weight = options.model(), FIGURE3_WORKLOADS[workload]
    protocol = figure3_protocol(workload, policy)
    return protocol_cells(protocol, options.device("h200"), model, options.num_prompts, weight)[0]


def _k(step: int) -> int:
    return FIGURE3_SEQS * step // len(FRACTIONS)


def _cells3(options: PaperOptions) -> list[RunSpec]:
    policies = [*(fixed_threshold(_k(step)) for step in FRACTIONS), "eb", "v1"]
    return [_cell3(options, workload, policy) for workload in FIGURE3_WORKLOADS for policy in policies]


def _points3(options: PaperOptions, store: RunStore, workload: str, key: str) -> list[dict[str, Any]]:
    points = []
    for step in FRACTIONS:
        value = figure(store, _cell3(options, workload, fixed_threshold(_k(step))), key)
        points += [] if value is None else [{"k": _k(step), "value": value, "series": _SERIES3[0], "source": "ours"}]
    for policy, name in zip(("eb", "v1"), _SERIES3[1:], strict=True):
        value = figure(store, _cell3(options, workload, policy), key)
        points += [] if value is None else _level(value, name, "ours")
    return points


def _level(value: float, series: str, source: str) -> list[dict[str, Any]]:
    """A line over all k, for what has no k of its own."""
    return [{"k": k, "value": value, "series": series, "source": source} for k in (_k(1), FIGURE3_SEQS)]


def _published3(workload: str, column: str) -> list[dict[str, Any]]:
    points, levels = [], {"ours": _SERIES3[1], "v1": _SERIES3[2]}
    for row in rows("figure3_validation_grid", "eb_vllm"):
        if row["workload"] != workload.replace("-", "_") or not row[column]:
            continue
        value = float(row[column])
        if row["method"] == "fixed_k":
            points.append({"k": int(row["k"]), "value": value, "series": _SERIES3[0], "source": "published"})
        elif row["method"] in levels:
            points += _level(value, levels[row["method"]], "published")
    return points


def _panel3(data: list[dict[str, Any]], title: str, y_title: str | None, *, last: bool) -> Any:
    alt = altair()
    drawn = [name for name in _MARKS3 if any(row["source"] == name for row in data)]
    axis = alt.Axis(title="threshold k" if last else None, labels=last)
    base = alt.Chart(values(data)).encode(
        x=alt.X("k:Q", scale=alt.Scale(domain=[0, FIGURE3_SEQS]), axis=axis),
        y=alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=False)),
        color=colour(_SERIES3, _COLOURS3),
    )
    dashes, shapes = ([_MARKS3[name][at] for name in drawn] for at in (0, 1))
    sources = alt.StrokeDash("source:N", scale=alt.Scale(domain=drawn, range=dashes), title=None)
    lines = base.mark_line(strokeWidth=1.8).encode(strokeDash=sources)
    fixed = alt.datum.series == "fixed k"
    shape = alt.Shape("source:N", scale=alt.Scale(domain=drawn, range=shapes), title=None)
    points = base.mark_point(size=36, filled=True).encode(shape=shape).transform_filter(fixed)
    return alt.layer(lines, points).properties(width=190, height=150, title=title)


def _chart3(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    lines = []
    for key, column, y_title in (
        ("total_token_throughput", "throughput_tok_s", "tokens/s"), ("mean_tpot_ms", "tpot_mean_ms", "mean TPOT, ms"),
    ):  # fmt: skip
        panels = []
        for workload in FIGURE3_WORKLOADS:
            data = _points3(options, store, workload, key) + (_published3(workload, column) if published else [])
            top = key == "total_token_throughput"
            title = SYNTHETIC[workload] if top else ""
            panels.append(_panel3(data, title, y_title if workload == "decode-heavy" else None, last=not top))
        lines.append(alt.hconcat(*panels))
    title = f"{gpu_title(options.device('h200'))}, N = {FIGURE3_SEQS}, geometric lengths"
    return alt.vconcat(*lines, title=title)


FIGURE3 = PaperFigure(
    "figure3", _cells3, ("device", "model", "num_prompts"), _chart3, whole=False,
    published_on=Published(("h200",), (MAIN_MODEL,)),
)  # fmt: skip


# How close the online threshold comes to the best fixed one, by the form of its correction and the shape of answers.
#
# The EB paper has no such table; its theorem 3.2 is the first column.

SHAPES = ("gamma:0.5", "gamma:1", "gamma:2", "gamma:4", "gamma:8", "uniform")
THETAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CORRECTIONS = {
    "theorem 3.2": "eb",
    "off": "eb:correction=off",
    "renewal": "eb:correction=renewal",
    "renewal, censored estimator": "eb:correction=renewal,estimator=censored",
}
CORRECTION_BATCH, BUDGET, WARMUP = 256, 65536, 100  # a refill of the whole batch is one step, as in the paper's model
MEAN_INPUT, MEAN_OUTPUT, COUNT = 128, 512, 3000


def _correction_costs(options: PaperOptions) -> dict[str, str]:
    device, model = options.device(), options.model()
    return {"the device's linear costs": linear_costs(device, model), SLOW: slow_refill(device, model)}


def _correction_repeats(options: PaperOptions, device: str, shape: str, policy: str) -> list[RunSpec]:
    return repeats(
        options, device, policy, CORRECTION_BATCH, COUNT, budget=BUDGET, warmup=WARMUP, input_len=MEAN_INPUT,
        output_len=MEAN_OUTPUT, length_distribution=shape,
    )  # fmt: skip


def _correction_policies() -> tuple[str, ...]:
    return (*(f"eb:theta={theta}" for theta in THETAS), *CORRECTIONS.values())


def _correction_cells(options: PaperOptions) -> list[RunSpec]:
    settings = product(_correction_costs(options).values(), SHAPES, _correction_policies())
    return [cell for setting in settings for cell in _correction_repeats(options, *setting)]


def _correction_section(options: PaperOptions, store: RunStore, title: str, device: str) -> Section:
    columns = (*labels("answers"), Column("best theta"), Column("tokens/s", group="best theta"))
    columns += ours(*CORRECTIONS, group="% of the best fixed threshold")
    rows: list[tuple[Value, ...]] = []
    for shape in SHAPES:
        rates = {
            policy: mean_figure(store, _correction_repeats(options, device, shape, policy), "output_throughput")
            for policy in _correction_policies()
        }
        fixed = {rate: theta for theta in reversed(THETAS) if (rate := rates[f"eb:theta={theta}"]) is not None}
        peak = of_all(max, (rates[f"eb:theta={theta}"] for theta in THETAS))
        shares = [
            None if peak is None or (rate := rates[policy]) is None else 100 * rate / peak
            for policy in CORRECTIONS.values()
        ]
        rows.append((shape, None if peak is None else fixed[peak], peak, *shares))
    return Section(title, columns, tuple(rows))


def _correction_sections(options: PaperOptions, store: RunStore) -> Sections:
    return [_correction_section(options, store, title, costs) for title, costs in _correction_costs(options).items()]


def _correction_runs(options: PaperOptions, _store: RunStore, _sections: Sections) -> Iterator[str]:
    count = options.num_prompts or COUNT
    yield f"{count:,} requests on {gpu_title(options.device())}, {model_title(options.model())}."


CORRECTION = PaperTable(
    "corrections", _correction_cells, ("device", "model", "num_prompts", "seeds"), _correction_sections,
    findings=_correction_runs, whole=False, published_on=Published((DEFAULT_DEVICE,), (DEFAULT_MODEL,)),
    facts=globals(),
)  # fmt: skip


# Appendix E.3 and E.5 of the EB paper as experiments: rising hazards, and the error of the online estimate.

WINDOWS = (100, 250, 500, 1000, 2000)
DRAWS = 200  # number of windows evaluated
ESTIMATORS = ("published", "censored")
MEAN_OUTPUTS = (256, 1024)
_BATCH, _MEAN_INPUT = 512, 128


# E.3: constant and rising hazard.


def _document_ifr(options: PaperOptions, store: RunStore) -> Sections:
    return (
        _best_thetas(options, store),
        *(_section_ifr(options, store, name, slow=bool(index)) for index, name in enumerate(FIGURE12_COSTS)),
    )


def _best_thetas(options: PaperOptions, store: RunStore) -> Section:
    """The best threshold of every case, and those whose throughput is within 1 % of the best."""
    columns, rows = labels("costs"), []
    for name in FIGURE12_SHAPES.values():
        columns += (Column("best theta", group=name, ours=True), Column("within 1 %", "label", name))
    for index, name in enumerate(FIGURE12_COSTS):
        row: list[Value] = [name]
        for shape in FIGURE12_SHAPES:
            best = best_and_near(sweep12(options, store, shape, slow=bool(index)))
            row += [None, ""] if best is None else [best[0], f"{best[1]:.2f}-{best[2]:.2f}"]
        rows.append(tuple(row))
    return Section("best thresholds", columns, tuple(rows))


def _section_ifr(options: PaperOptions, store: RunStore, title: str, *, slow: bool) -> Section:
    columns = labels("theta")
    for name in FIGURE12_SHAPES.values():
        columns += (Column("tokens/s", group=name, ours=True), Column("% of best", group=name))
    curves = {
        shape: {row["theta"]: row["value"] for row in sweep12(options, store, shape, slow=slow)}
        for shape in FIGURE12_SHAPES
    }
    best = {shape: max(curve.values(), default=None) for shape, curve in curves.items()}
    rows = []
    for theta in FIGURE12_THETAS:
        row: list[Value] = [f"{theta:.2f}"]
        for shape in FIGURE12_SHAPES:
            value, top = curves[shape].get(theta), best[shape]
            row += [value, None if value is None or not top else 100 * value / top]
        rows.append(tuple(row))
    return Section(title, columns, tuple(rows))


# E.5: the estimators compared with a known hazard.


def _service_cell(options: PaperOptions, estimator: str, mean: int) -> RunSpec:
    policy = "eb" if estimator == "published" else f"eb:estimator={estimator}"
    return sweep_cell(
        options.device(), options.model(), policy, _BATCH, 0, num_prompts=options.num_prompts or 4000,
        input_len=_MEAN_INPUT, output_len=mean, length_distribution="geometric",
    )  # fmt: skip


def _cells_sensitivity(options: PaperOptions) -> list[RunSpec]:
    return [_service_cell(options, estimator, mean) for estimator in ESTIMATORS for mean in MEAN_OUTPUTS]


def _document_sensitivity(options: PaperOptions, store: RunStore) -> Sections:
    from ebbench.runs.prepare import device_of

    costs = device_of(_service_cell(options, "published", 256)).calibration
    ratio = (costs.alpha_p, costs.alpha_d)
    return (_windows_section(ratio), _service_section(options, store, ratio))


def _error_columns(*first: str) -> tuple[Column, ...]:
    return (
        *labels(*first), Column("true p0 x 1000"), Column("median", group="p0 x 1000", ours=True),
        Column("5 %", group="p0 x 1000"), Column("95 %", group="p0 x 1000"), Column("bias", "change", "p0"),
        Column("true", group="theta0"), Column("at median p0", group="theta0", ours=True),
    )  # fmt: skip


def _error_row(
    names: tuple[str, ...], true_p0: float, estimates: list[float], costs: tuple[float, float]
) -> tuple[Value, ...]:
    truth = base_threshold(true_p0, *costs)
    if not estimates:
        return (*names, 1e3 * true_p0, None, None, None, None, truth, None)
    low, median, high = (float(value) for value in np.percentile(estimates, (5, 50, 95)))
    return (
        *names, 1e3 * true_p0, 1e3 * median, 1e3 * low, 1e3 * high, median / true_p0 - 1, truth,
        base_threshold(median, *costs),
    )  # fmt: skip


def _windows_section(costs: tuple[float, float]) -> Section:
    rows = []
    for mean, estimator, window in product(MEAN_OUTPUTS, ESTIMATORS, WINDOWS):
        rng = np.random.default_rng([mean, window])
        estimates = [_estimate(estimator, rng.geometric(1 / mean, window)) for _ in range(DRAWS)]
        names = (f"geometric, mean {mean}", estimator, f"W = {window}")
        rows.append(_error_row(names, 1 / mean, [estimate.p0 for estimate in estimates if estimate is not None], costs))
    return Section("complete windows", _error_columns("lengths", "estimator", "window"), tuple(rows))


def _estimate(estimator: str, lengths: np.ndarray) -> HazardEstimate | None:
    hazard = (SlidingHazard if estimator == "published" else CensoredHazard)(window=len(lengths))
    for length in lengths.tolist():
        hazard.observe(length)
    return hazard.estimate()


def _service_section(options: PaperOptions, store: RunStore, costs: tuple[float, float]) -> Section:
    rows = [
        _error_row(
            (f"geometric, mean {mean}", estimator), 1 / mean,
            _updates(store.get(_service_cell(options, estimator, mean))), costs,
        )
        for mean, estimator in product(MEAN_OUTPUTS, ESTIMATORS)
    ]  # fmt: skip
    return Section("in service", _error_columns("lengths", "estimator"), tuple(rows))


def _updates(measured: Measured | None) -> list[float]:
    """p0 at every update of a run."""
    if measured is None:
        return []
    table = measured.run.table("decisions", ["kind", "p0"])
    updates = table.filter(pc.equal(table["kind"], "update"))["p0"].drop_null()
    return [float(value) for value in updates.to_pylist()]


E3 = PaperTable("e3", figure12_cells, FIGURE12.reads, _document_ifr, whole=False, published_on=PUBLISHED_E2)
E5 = PaperTable(
    "e5", _cells_sensitivity, ("device", "model", "num_prompts"), _document_sensitivity,
    published_on=Published((DEFAULT_DEVICE,), (DEFAULT_MODEL,)), facts=globals(),
)  # fmt: skip
