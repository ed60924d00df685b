"""Thresholds in the EB paper: fixed (tables 10, 11, 13, figures 3, 12), and estimated online (corrections, e3, e5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ebbench.analysis.documents import Column, Section, Value, labels, relative
from ebbench.analysis.statistics import paired_t
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.devices.costs import GIVEN
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import (
    ASYNC_SCHEDULING,
    FIGURE3_SEQS,
    SYNTHETIC_WARMUP,
    VLLM,
    figure3_protocol,
    fixed_threshold,
    protocol_cells,
)
from ebbench.papers.published import MAIN_MODEL, SYNTHETIC, gpu_title, model_title, pick
from ebbench.papers.published import rows as published_rows
from ebbench.papers.table import (
    PaperFigure,
    PaperTable,
    Published,
    Sections,
    beside,
    each,
    figure,
    mean_figure,
    of_all,
    ours,
)
from ebbench.render.figures import altair, colour, dash, values
from ebbench.render.palette import BLACK, BLUE, VERMILION
from ebbench.runs.store import Measured, RunStore
from ebbench.spec.run import RunSpec, simulated
from vllm_eb.hazard import CensoredHazard, HazardEstimate, SlidingHazard
from vllm_eb.theory import base_threshold

# Tables 10 and 11 of the EB paper: the best threshold, and throughput over the threshold.
#
# They are made twice: with the device's costs, and with the refill cost that the published thresholds imply.
#
# Table 11 of the EB paper (tokens/s over k at N = 128) shows the cost of a refill in the runs behind its appendix E: at
# k = 8 the server spends most of its time on something that happens once per refill. Fitted with the paper's own linear
# coefficients, that is 0.14 s (root mean square error of 7 to 10 % over the 16 points of each column), a hundred times
# the published alpha_p of 1.3 ms on H200. With it Prop. 3.1 gives thresholds of 0.2 to 0.5, as table 10 finds; with the
# published alpha_p it gives 0.03 to 0.07. We do not know the cause. The tables of appendix E are therefore shown for
# both costs.

REFILL_S = 0.14
BATCHES = (64, 128, 256, 512)
MEAN_OUTPUTS = (64, 128, 192, 256, 320, 384)
THETA_STEPS = 15  # the published optima are multiples of 1/15
BUDGET = 65536
"""Tokens per step at most: a refill of 512 prompts of 128 tokens is one batch, as in the paper's model of a cycle. With
8,192 a refill of more than 64 prompts pays its fixed cost several times."""
TABLE10_INPUT = 128

K_BATCH, K_OUTPUT = 128, 128
K_INPUTS = (48, 96, 128, 256)
K_VALUES = tuple(range(8, 129, 8))
K_BUDGET = 32768  # k * mu_l never exceeds it, so that every refill is one step, as in the paper
NEAR = 0.99
COUNTED = 4000 - SYNTHETIC_WARMUP  # "4,000 requests per configuration (including a 100-request warmup)"
SLOW = f"refill {REFILL_S:g} s"


@cache
def linear_costs(device: str, model: str, alpha_p: float | None = None) -> str:
    """A device whose steps take the linear costs that its controller is told, for a RunSpec; ``alpha_p`` (s) replaces
    its own."""
    from ebbench.devices.loader import load_device

    loaded = load_device(device, model)
    costs = loaded.calibration
    values = (costs.alpha_p if alpha_p is None else alpha_p, costs.beta_p, costs.alpha_d, costs.beta_d)
    return GIVEN + ",".join(f"{value:.6g}" for value in values) + f",{loaded.kv_capacity_tokens}"


def sweep_cell(
    device: str, model: str, policy: str, batch: int, seed: int, *, budget: int = BUDGET, warmup: int = 0,
    workload: str = "balanced", **plan: Any,
) -> RunSpec:  # fmt: skip
    """A saturated run for threshold sweeps; no asynchronous scheduling, as in the authors' vLLM."""
    return simulated(
        workload, policy, device, model, batch, budget, seed=seed, warmup=warmup, vllm_version=VLLM,
        async_scheduling=ASYNC_SCHEDULING, **plan,
    )  # fmt: skip


def repeats(
    options: PaperOptions, device: str, policy: str, batch: int, count: int, least: int = 1, **settings: Any
) -> list[RunSpec]:
    """The cell of :func:`sweep_cell` once for each seed, of which there are ``least`` by default."""
    count, model = options.num_prompts or count, options.model()
    return [
        sweep_cell(device, model, policy, batch, seed, num_prompts=count, **settings)
        for seed in options.seed_range(least)
    ]


def both_devices(options: PaperOptions, default: str) -> tuple[str, str]:
    """The device itself, and its linear costs (published ones if available) with the implied refill cost."""
    device = options.device(default)
    return device, linear_costs(device, options.model(), REFILL_S)


# Table 10: best theta over mean output length and batch size.


def _best10(options: PaperOptions, store: RunStore, device: str, output: int, batch: int) -> tuple[float | None, str]:
    data = []
    for k in (max(1, batch * step // THETA_STEPS) for step in range(1, THETA_STEPS)):
        cells = repeats(
            options, device, f"eb:k={k}", batch, COUNTED, warmup=SYNTHETIC_WARMUP, input_len=TABLE10_INPUT,
            output_len=output, length_distribution="geometric",
        )  # fmt: skip
        rate = mean_figure(store, cells, "request_throughput")
        data += [] if rate is None else [{"theta": k / batch, "value": rate}]
    return _best_theta(data if len(data) == THETA_STEPS - 1 else [])


def _best_theta(data: list[dict[str, float]]) -> tuple[float | None, str]:
    """The best theta of a sweep, and the range of thetas within 1 % of it."""
    best = best_and_near(data)
    return (None, "") if best is None else (best[0], f"{best[1]:.2f}-{best[2]:.2f}")


def _document10(options: PaperOptions, store: RunStore) -> Sections:
    from ebbench.devices.loader import load_device

    device, slow = both_devices(options, "h200")
    costs = load_device(device, options.model()).calibration
    columns = (*labels("mean output"), Column("ours", group="theta0"), Column(SLOW, group="theta0"))
    columns += beside("mean over N", SLOW)
    for batch in BATCHES:
        columns += (*beside(f"N = {batch}", SLOW), Column("within 1 %", "label", f"N = {batch}"))
    rows: list[tuple[Value, ...]] = []
    for output in MEAN_OUTPUTS:
        theory = [base_threshold(1 / output, alpha_p, costs.alpha_d) for alpha_p in (costs.alpha_p, REFILL_S)]
        cells: list[tuple[float | None, float | None, float | None, str]] = []
        for batch in BATCHES:
            best, _ = _best10(options, store, device, output, batch)
            slow_best, near = _best10(options, store, slow, output, batch)
            cells.append((pick("table10_best_theta", f"batch_{batch}", mu_o=str(output)), best, slow_best, near))
        means = [of_all(fmean, column) for column in list(zip(*cells, strict=True))[:3]]
        rows.append((str(output), *theory, *means, *(value for cell in cells for value in cell)))
    return [Section("", columns, tuple(rows))]


# Table 11: throughput over k for four input lengths.


def _document11(options: PaperOptions, store: RunStore) -> Sections:
    columns = (*labels("k"), Column("theta"))
    for mean in K_INPUTS:
        columns += (*beside(f"input {mean}", SLOW), Column("diff", "change", f"input {mean}"))
    rows: list[tuple[Value, ...]] = []
    for k in K_VALUES:
        row: list[Value] = [str(k), k / K_BATCH]
        for index, mean in enumerate(K_INPUTS):
            published = pick("table11_k_sweep_tokens_per_s", f"mu_l_{index + 1}", k=str(k))
            cells = (
                repeats(
                    options, device, f"eb:k={k}", K_BATCH, COUNTED, budget=K_BUDGET, warmup=SYNTHETIC_WARMUP,
                    input_len=mean, output_len=K_OUTPUT, length_distribution="uniform",
                )
                for device in both_devices(options, "h200")
            )  # fmt: skip
            ours, implied = (mean_figure(store, seeds, "output_throughput") for seeds in cells)
            row += [published, ours, implied, relative(implied, published)]
        rows.append(tuple(row))
    return [Section("output tokens/s", columns, (*rows, _best_k(rows)))]


def _best_k(rows: list[tuple[Value, ...]]) -> tuple[Value, ...]:
    last: list[Value] = ["best k", None]
    for column in range(2, len(rows[0])):
        values = [value for row in rows if isinstance(value := row[column], int | float)]
        is_rate = (column - 2) % 4 != 3
        last.append(K_VALUES[values.index(max(values))] if is_rate and len(values) == len(rows) else None)
    return tuple(last)


PUBLISHED_E2 = Published(("h200",), (MAIN_MODEL,))
_READS = ("device", "model", "num_prompts", "seeds")
TABLE10 = PaperTable("table10", _READS, _document10, whole=False, published_on=PUBLISHED_E2, facts=globals())
TABLE11 = PaperTable("table11", _READS, _document11, whole=False, published_on=PUBLISHED_E2, facts=globals())


# Figure 12 of the EB paper (appendix E.3): throughput over theta under a constant and a rising hazard.

FIGURE12_SHAPES = {
    "0.5": "falling hazard (gamma, shape 0.5)",
    "1": "constant hazard (gamma, shape 1)",
    "2": "rising hazard (gamma, shape 2)",
}
FIGURE12_INPUT, FIGURE12_OUTPUT, FIGURE12_BATCH, E3_BUDGET, FIGURE12_COUNT = 1, 128, 256, 16384, 3000
FIGURE12_STEPS = 30
FIGURE12_K = tuple(FIGURE12_BATCH * i // FIGURE12_STEPS for i in range(1, FIGURE12_STEPS + 1))
FIGURE12_THETAS = tuple(k / FIGURE12_BATCH for k in FIGURE12_K)
FIGURE12_COSTS = ("device's cost model", SLOW)


def sweep12(options: PaperOptions, store: RunStore, shape: str, *, slow: bool) -> list[dict[str, float]]:
    """Mean tokens/s per theta with a 95 % t interval over the seeds; thetas that were not run are left out."""
    device = both_devices(options, "h200")[slow]
    points = []
    for k, theta in zip(FIGURE12_K, FIGURE12_THETAS, strict=True):
        cells = repeats(
            options, device, f"eb:k={k}", FIGURE12_BATCH, FIGURE12_COUNT, 3, budget=E3_BUDGET, warmup=SYNTHETIC_WARMUP,
            workload=f"reference:workloads/hazard-gamma-{shape}.toml",
        )  # fmt: skip
        rates = [figure(store, cell, "total_token_throughput") for cell in cells]
        known = [rate for rate in rates if rate is not None]
        if len(known) == len(rates):
            interval = paired_t(known)
            points.append({"theta": theta, "value": fmean(known), "low": interval.low, "high": interval.high})
    return points


def best_and_near(data: list[dict[str, float]]) -> tuple[float, float, float] | None:
    """The best theta, and the lowest and highest theta within 1 % of it."""
    if not data:
        return None
    top = max(row["value"] for row in data)
    near = [row["theta"] for row in data if row["value"] >= NEAR * top]
    return next(row["theta"] for row in data if row["value"] == top), min(near), max(near)


def _figure12_panel(options: PaperOptions, store: RunStore, shape: str) -> Any:
    alt = altair()
    curves = {name: sweep12(options, store, shape, slow=name == SLOW) for name in FIGURE12_COSTS}
    rows = [{**row, "series": name} for name, data in curves.items() for row in data]
    base = alt.Chart(values(rows)).encode(
        x=alt.X("theta:Q", title="threshold θ = k/N", scale=alt.Scale(domain=[0, 1])),
        color=colour(FIGURE12_COSTS, (BLUE, VERMILION)),
    )
    y = alt.Y("value:Q", title="tokens/s", scale=alt.Scale(zero=False))
    layers = [
        base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False)), y2="high:Q"),
        base.mark_line(strokeWidth=1.8).encode(y=y, strokeDash=dash(FIGURE12_COSTS)),
    ]
    marks = [
        {"theta": peak[0], "value": next(r["value"] for r in curves[name] if r["theta"] == peak[0]), "series": name,
         "label": f"best {peak[0]:.2f} ({peak[1]:.2f} to {peak[2]:.2f} within 1 %)"}
        for name in FIGURE12_COSTS if (peak := best_and_near(curves[name])) is not None
    ]  # fmt: skip
    best = alt.Chart(values(marks)).encode(x="theta:Q", y="value:Q", color=colour(FIGURE12_COSTS, (BLUE, VERMILION)))
    layers.append(best.mark_point(size=70, filled=True))
    layers.append(best.mark_text(align="left", dx=6, dy=-9, fontSize=11).encode(text="label:N"))
    return alt.layer(*layers).properties(width=290, height=190, title=FIGURE12_SHAPES[shape])


def _chart12(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    return alt.hconcat(*(_figure12_panel(options, store, shape) for shape in FIGURE12_SHAPES)).resolve_scale(y="shared")


FIGURE12 = PaperFigure(
    "figure12", ("device", "model", "num_prompts", "seeds"), _chart12, whole=False,
    published_on=PUBLISHED_E2, facts=globals(),
)  # fmt: skip


# Table 13 of the EB paper (appendix E.5): throughput over fixed theta, and the online controller.

TABLE13_THETAS = tuple(round(0.1 * i, 1) for i in range(1, 10))
GAMMA: Mapping[str, Any] = {"input_len": 128, "output_len": 512, "length_distribution": "gamma:4"}
TABLE13_BATCH = 256
_LENGTHS13: Mapping[str, Mapping[str, Any]] = {"Gamma": GAMMA, "ShareGPT": {"workload": "sharegpt"}}


def _policies13(options: PaperOptions) -> list[tuple[str, str]]:
    named = [(str(theta), f"eb:theta={theta}") for theta in TABLE13_THETAS]
    named += [("adaptive", "eb"), ("adaptive, censored estimator", "eb:estimator=censored")]
    named += [(f"adaptive, correction={form}", f"eb:correction={form}") for form in ("off", "renewal")]
    return named + [(policy, policy) for policy in options.policies]


def _section13(options: PaperOptions, store: RunStore, name: str) -> Section:
    rates: list[Mapping[str, float | None]] = [
        {
            row["theta"]: float(row["throughput_tokens_per_s"])
            for row in published_rows("table13_theta_sweep_tokens_per_s")
            if row["workload"] == name
        }
    ]
    for device in both_devices(options, "rtx-pro-6000"):
        run = partial(repeats, options, device, batch=TABLE13_BATCH, count=3000, **_LENGTHS13[name])
        cells = {label: run(policy=policy) for label, policy in _policies13(options)}
        rates.append({label: mean_figure(store, seeds, "total_token_throughput") for label, seeds in cells.items()})
    peaks = [of_all(max, (column.get(str(theta)) for theta in TABLE13_THETAS)) for column in rates]
    rows = []
    for label, _ in _policies13(options):
        values = [column.get(label) for column in rates]
        shares = [100 * v / peak if v is not None and peak else None for v, peak in zip(values, peaks, strict=True)]
        rows.append((label, *values, *shares))
    return Section(name, labels("theta") + beside("tokens/s", SLOW) + beside("% of peak", SLOW), tuple(rows))


TABLE13 = PaperTable(
    "table13", ("device", "model", "policy", "num_prompts", "seeds"),
    each(_section13, lambda _options: product(_LENGTHS13)), whole=False,
    published_on=Published(("rtx-pro-6000",), (MAIN_MODEL,)), facts=globals(),
)  # fmt: skip


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
    for row in published_rows("eb_vllm/figure3_validation_grid"):
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
    "figure3", ("device", "model", "num_prompts"), _chart3, whole=False,
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
CORRECTION_BATCH, WARMUP = 256, 100  # with BUDGET a refill of the whole batch is one step, as in the paper's model
MEAN_INPUT, MEAN_OUTPUT, COUNT = 128, 512, 3000


def _correction_costs(options: PaperOptions) -> list[tuple[str, str]]:
    costs = {"the device's linear costs": None, SLOW: REFILL_S}
    return [(title, linear_costs(options.device(), options.model(), alpha_p)) for title, alpha_p in costs.items()]


def _correction_section(options: PaperOptions, store: RunStore, title: str, device: str) -> Section:
    columns = (*labels("answers"), Column("best theta"), Column("tokens/s", group="best theta"))
    columns += ours(*CORRECTIONS, group="% of the best fixed threshold")
    rows: list[tuple[Value, ...]] = []
    for shape in SHAPES:
        policies = (*(f"eb:theta={theta}" for theta in THETAS), *CORRECTIONS.values())
        cells = (
            repeats(
                options, device, policy, CORRECTION_BATCH, COUNT, budget=BUDGET, warmup=WARMUP, input_len=MEAN_INPUT,
                output_len=MEAN_OUTPUT, length_distribution=shape,
            )
            for policy in policies
        )  # fmt: skip
        rates = [mean_figure(store, seeds, "output_throughput") for seeds in cells]
        fixed, corrected = rates[: len(THETAS)], rates[len(THETAS) :]
        peak = of_all(max, fixed)
        best = None if peak is None else THETAS[fixed.index(peak)]
        rows.append((shape, best, peak, *(rate and peak and 100 * rate / peak for rate in corrected)))
    return Section(title, columns, tuple(rows))


def _correction_runs(options: PaperOptions, _store: RunStore, _sections: Sections) -> Iterator[str]:
    count = options.num_prompts or COUNT
    yield f"{count:,} requests on {gpu_title(options.device())}, {model_title(options.model())}."


CORRECTION = PaperTable(
    "corrections", ("device", "model", "num_prompts", "seeds"),
    each(_correction_section, _correction_costs), findings=_correction_runs,
    whole=False, published_on=Published((DEFAULT_DEVICE,), (DEFAULT_MODEL,)), facts=globals(),
)  # fmt: skip


# Appendix E.3 and E.5 of the EB paper as experiments: rising hazards, and the error of the online estimate.

WINDOWS = (100, 250, 500, 1000, 2000)
DRAWS = 200  # number of windows evaluated
ESTIMATORS = ("published", "censored")
E5_MEAN_OUTPUTS = (256, 1024)
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
            row += _best_theta(sweep12(options, store, shape, slow=bool(index)))
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
    for mean, estimator, window in product(E5_MEAN_OUTPUTS, ESTIMATORS, WINDOWS):
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
        for mean, estimator in product(E5_MEAN_OUTPUTS, ESTIMATORS)
    ]  # fmt: skip
    return Section("in service", _error_columns("lengths", "estimator"), tuple(rows))


def _updates(measured: Measured | None) -> list[float]:
    if measured is None:
        return []
    updates = measured.run.table("decisions", ["kind", "p0"]).filter(pc.field("kind") == "update")
    return [float(value) for value in updates["p0"].drop_null().to_pylist()]


E3 = PaperTable("e3", FIGURE12.reads, _document_ifr, whole=False, published_on=PUBLISHED_E2)
E5 = PaperTable(
    "e5", ("device", "model", "num_prompts"), _document_sensitivity,
    published_on=Published((DEFAULT_DEVICE,), (DEFAULT_MODEL,)), facts=globals(),
)  # fmt: skip
