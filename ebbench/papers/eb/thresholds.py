"""Fixed thresholds in the EB paper: tables 10, 11 and 13 and figure 12 (appendix E)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

from ebbench.analysis.documents import Column, Section, Value, labels, relative
from ebbench.analysis.statistics import paired_t
from ebbench.devices.linear import GIVEN
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import ASYNC_SCHEDULING, SYNTHETIC_WARMUP, VLLM
from ebbench.papers.published import MAIN_MODEL, pick
from ebbench.papers.published import rows as published_rows
from ebbench.papers.table import (
    PaperFigure,
    PaperTable,
    Published,
    Sections,
    beside,
    figure,
    mean_figure,
    of_all,
)
from ebbench.render.figures import altair, colour, dash, values
from ebbench.render.palette import BLUE, VERMILION
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated
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


def slow_refill(device: str, model: str) -> str:
    """The device's linear costs (published ones if available) with REFILL_S as ``alpha_p``, for a RunSpec."""
    return linear_costs(device, model, REFILL_S)


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
    """The device itself, and its linear costs with the implied refill cost."""
    device = options.device(default)
    return device, slow_refill(device, options.model())


def theta_k(batch: int, step: int) -> int:
    """Slots for ``theta = step/15`` of a batch."""
    return max(1, batch * step // THETA_STEPS)


# Table 10: best theta over mean output length and batch size.


def _cells10(options: PaperOptions) -> list[RunSpec]:
    settings = product(both_devices(options, "h200"), MEAN_OUTPUTS, BATCHES, range(1, THETA_STEPS))
    return [cell for setting in settings for cell in _repeats10(options, *setting)]


def _repeats10(options: PaperOptions, device: str, output: int, batch: int, step: int) -> list[RunSpec]:
    return repeats(
        options, device, f"eb:k={theta_k(batch, step)}", batch, COUNTED, warmup=SYNTHETIC_WARMUP,
        input_len=TABLE10_INPUT, output_len=output, length_distribution="geometric",
    )  # fmt: skip


def _best10(options: PaperOptions, store: RunStore, device: str, output: int, batch: int) -> tuple[float | None, str]:
    """Best theta of the sweep, and the range of thetas within 1 % of it."""
    rates: list[dict[str, float]] = []
    for step in range(1, THETA_STEPS):
        rate = mean_figure(store, _repeats10(options, device, output, batch, step), "request_throughput")
        if rate is None:
            return None, ""
        rates.append({"theta": theta_k(batch, step) / batch, "value": rate})
    best, low, high = best_and_near(rates) or (None, 0.0, 0.0)
    return best, f"{low:.2f}-{high:.2f}"


def _columns10() -> tuple[Column, ...]:
    columns = (*labels("mean output"), Column("ours", group="theta0"), Column(SLOW, group="theta0"))
    columns += beside("mean over N", SLOW)
    for batch in BATCHES:
        columns += (*beside(f"N = {batch}", SLOW), Column("within 1 %", "label", f"N = {batch}"))
    return columns


def _document10(options: PaperOptions, store: RunStore) -> Sections:
    from ebbench.devices.loader import load_device

    device, slow = both_devices(options, "h200")
    costs = load_device(device, options.model()).calibration
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
    return [Section("", _columns10(), tuple(rows))]


# Table 11: throughput over k for four input lengths.


def _cells11(options: PaperOptions) -> list[RunSpec]:
    settings = product(both_devices(options, "h200"), K_VALUES, K_INPUTS)
    return [cell for setting in settings for cell in _repeats11(options, *setting)]


def _repeats11(options: PaperOptions, device: str, k: int, input_len: int) -> list[RunSpec]:
    return repeats(
        options, device, f"eb:k={k}", K_BATCH, COUNTED, budget=K_BUDGET, warmup=SYNTHETIC_WARMUP, input_len=input_len,
        output_len=K_OUTPUT, length_distribution="uniform",
    )  # fmt: skip


def _document11(options: PaperOptions, store: RunStore) -> Sections:
    device, slow = both_devices(options, "h200")
    columns = (*labels("k"), Column("theta"))
    for mean in K_INPUTS:
        columns += (*beside(f"input {mean}", SLOW), Column("diff", "change", f"input {mean}"))
    rows: list[tuple[Value, ...]] = []
    for k in K_VALUES:
        row: list[Value] = [str(k), k / K_BATCH]
        for index, mean in enumerate(K_INPUTS):
            published = pick("table11_k_sweep_tokens_per_s", f"mu_l_{index + 1}", k=str(k))
            ours, implied = (
                mean_figure(store, _repeats11(options, d, k, mean), "output_throughput") for d in (device, slow)
            )
            row += [published, ours, implied, relative(implied, published)]
        rows.append(tuple(row))
    section = Section("output tokens/s", columns, (*rows, _best_k(rows)))
    return [section]


def _best_k(rows: list[tuple[Value, ...]]) -> tuple[Value, ...]:
    """A last row with the k at which each column is highest."""
    last: list[Value] = ["best k", None]
    for column in range(2, len(rows[0])):
        values = [value for row in rows if isinstance(value := row[column], int | float)]
        is_rate = (column - 2) % 4 != 3
        last.append(K_VALUES[values.index(max(values))] if is_rate and len(values) == len(rows) else None)
    return tuple(last)


PUBLISHED_E2 = Published(("h200",), (MAIN_MODEL,))
_READS = ("device", "model", "num_prompts", "seeds")
TABLE10 = PaperTable("table10", _cells10, _READS, _document10, whole=False, published_on=PUBLISHED_E2, facts=globals())
TABLE11 = PaperTable("table11", _cells11, _READS, _document11, whole=False, published_on=PUBLISHED_E2, facts=globals())


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


def _repeats12(options: PaperOptions, device: str, shape: str, theta: float) -> list[RunSpec]:
    return repeats(
        options, device, f"eb:k={round(theta * FIGURE12_BATCH)}", FIGURE12_BATCH, FIGURE12_COUNT, 3,
        budget=E3_BUDGET, warmup=SYNTHETIC_WARMUP, workload=f"reference:workloads/hazard-gamma-{shape}.toml",
    )  # fmt: skip


def figure12_cells(options: PaperOptions) -> list[RunSpec]:
    """The cells of figure 12: both costs, every shape, theta and seed."""
    settings = product(both_devices(options, "h200"), FIGURE12_SHAPES, FIGURE12_THETAS)
    return [cell for setting in settings for cell in _repeats12(options, *setting)]


def sweep12(options: PaperOptions, store: RunStore, shape: str, *, slow: bool) -> list[dict[str, float]]:
    """Mean tokens/s per theta with a 95 % t interval over the seeds; thetas that were not run are left out."""
    device = both_devices(options, "h200")[slow]
    points = []
    for theta in FIGURE12_THETAS:
        rates = [figure(store, cell, "total_token_throughput") for cell in _repeats12(options, device, shape, theta)]
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
    "figure12", figure12_cells, ("device", "model", "num_prompts", "seeds"), _chart12, whole=False,
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


def _cells13(options: PaperOptions) -> list[RunSpec]:
    policies = [policy for _, policy in _policies13(options)]
    settings = product(both_devices(options, "rtx-pro-6000"), _LENGTHS13, policies)
    return [cell for setting in settings for cell in _repeats13(options, *setting)]


def _repeats13(options: PaperOptions, device: str, name: str, policy: str) -> list[RunSpec]:
    return repeats(options, device, policy, TABLE13_BATCH, 3000, **_LENGTHS13[name])


def _section13(options: PaperOptions, store: RunStore, name: str) -> Section:
    rates: list[Mapping[str, float | None]] = [
        {
            row["theta"]: float(row["throughput_tokens_per_s"])
            for row in published_rows("table13_theta_sweep_tokens_per_s")
            if row["workload"] == name
        }
    ]
    for device in both_devices(options, "rtx-pro-6000"):
        cells = {label: _repeats13(options, device, name, policy) for label, policy in _policies13(options)}
        rates.append({label: mean_figure(store, seeds, "total_token_throughput") for label, seeds in cells.items()})
    peaks = [of_all(max, (column.get(str(theta)) for theta in TABLE13_THETAS)) for column in rates]
    rows = []
    for label, _ in _policies13(options):
        values = [column.get(label) for column in rates]
        shares = [100 * v / peak if v is not None and peak else None for v, peak in zip(values, peaks, strict=True)]
        rows.append((label, *values, *shares))
    return Section(name, labels("theta") + beside("tokens/s", SLOW) + beside("% of peak", SLOW), tuple(rows))


def _document13(options: PaperOptions, store: RunStore) -> Sections:
    return tuple(_section13(options, store, name) for name in _LENGTHS13)


TABLE13 = PaperTable(
    "table13", _cells13, ("device", "model", "policy", "num_prompts", "seeds"), _document13, whole=False,
    published_on=Published(("rtx-pro-6000",), (MAIN_MODEL,)), facts=globals(),
)  # fmt: skip
