"""Figures 3 and 12 of the EB paper: throughput over fixed thresholds, and the online controller."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

from ebbench.papers.cells import Cell, settings
from ebbench.papers.figure import PaperFigure
from ebbench.papers.published import SYNTHETIC, gpu_title, rows
from ebbench.papers.store import CellStore
from ebbench.papers.table import Wish, figure
from ebbench.render.figures import BLACK, BLUE, VERMILION, altair, colour, values

BATCH, BUDGET = 1024, 8192
FRACTIONS = tuple(range(1, 9))
MEANS = {"decode-heavy": (128, 1024), "balanced": (512, 512), "prefill-heavy": (1024, 128)}
_PUBLISHED = {"decode-heavy": "decode_heavy", "balanced": "balanced", "prefill-heavy": "prefill_heavy"}
_NAMES = ("fixed k", "controller (eb)", "mixed (v1)")
_COLOURS = (BLACK, VERMILION, BLUE)


def _device(wish: Wish, default: str) -> str:
    return wish.devices[0] if wish.devices else default


def _cell3(wish: Wish, workload: str, policy: str) -> Cell:
    mean_in, mean_out = MEANS[workload]
    plan = settings(num_prompts=wish.num_prompts or 4000, input_len=mean_in, output_len=mean_out,
                    length_distribution="geometric")  # fmt: skip
    model = wish.models[0] if wish.models else "qwen3-8b"
    return Cell("balanced", policy, _device(wish, "h200"), model, BATCH, BUDGET, settings=plan, weight=mean_out)


def _k(step: int) -> int:
    return BATCH * step // len(FRACTIONS)


def _cells3(wish: Wish) -> list[Cell]:
    policies = [*(f"eb:k={_k(step)}" for step in FRACTIONS), "eb", "v1"]
    return [_cell3(wish, workload, policy) for workload in MEANS for policy in policies]


def _points3(wish: Wish, store: CellStore, workload: str, key: str) -> list[dict[str, Any]]:
    found = []
    for step in FRACTIONS:
        value = figure(store, _cell3(wish, workload, f"eb:k={_k(step)}"), key)
        if value is not None:
            found.append({"k": _k(step), "value": value, "series": "fixed k", "source": "ours"})
    for policy, name in (("eb", _NAMES[1]), ("v1", _NAMES[2])):
        value = figure(store, _cell3(wish, workload, policy), key)
        found += [
            {"k": k, "value": value, "series": name, "source": "ours"} for k in (_k(1), BATCH) if value is not None
        ]
    return found


def _published3(workload: str, column: str) -> list[dict[str, Any]]:
    found = []
    names = {"ours": _NAMES[1], "v1": _NAMES[2]}
    for row in rows("figure3_validation_grid", "eb_vllm"):
        if row["workload"] != _PUBLISHED[workload] or not row[column]:
            continue
        value = float(row[column])
        if row["method"] == "fixed_k":
            found.append({"k": int(row["k"]), "value": value, "series": "fixed k", "source": "published"})
        elif row["method"] in names:
            series = names[row["method"]]
            found += [{"k": k, "value": value, "series": series, "source": "published"} for k in (_k(1), BATCH)]
    return found


def _panel3(data: list[dict[str, Any]], title: str, y_title: str | None, *, last: bool) -> Any:
    alt = altair()
    axis = alt.Axis(title="threshold k" if last else None, labels=last)
    base = alt.Chart(values(data)).encode(
        x=alt.X("k:Q", scale=alt.Scale(domain=[0, BATCH]), axis=axis),
        y=alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=False)),
        color=colour(_NAMES, _COLOURS),
    )
    sources = alt.StrokeDash(
        "source:N", scale=alt.Scale(domain=["ours", "published"], range=[[1, 0], [3, 3]]), title=None
    )
    lines = base.mark_line(strokeWidth=1.8).encode(strokeDash=sources)
    fixed = alt.datum.series == "fixed k"
    shape = alt.Shape("source:N", scale=alt.Scale(domain=["ours", "published"], range=["circle", "cross"]), title=None)
    points = base.mark_point(size=36, filled=True).encode(shape=shape).transform_filter(fixed)
    return alt.layer(lines, points).properties(width=190, height=150, title=title)


def _chart3(wish: Wish, store: CellStore) -> Any:
    alt = altair()
    ours_only = _device(wish, "h200") != "h200"
    lines = []
    for key, column, y_title in (
        ("total_token_throughput", "throughput_tok_s", "tokens/s"), ("mean_tpot_ms", "tpot_mean_ms", "mean TPOT, ms"),
    ):  # fmt: skip
        panels = []
        for workload in MEANS:
            data = _points3(wish, store, workload, key) + ([] if ours_only else _published3(workload, column))
            top = key == "total_token_throughput"
            title = SYNTHETIC[workload] if top else ""
            panels.append(_panel3(data, title, y_title if workload == "decode-heavy" else None, last=not top))
        lines.append(alt.hconcat(*panels))
    title = f"{gpu_title(_device(wish, 'h200'))}, N = {BATCH}, geometric lengths"
    return alt.vconcat(*lines, title=title)


# Figure 12: the best threshold moves up when the hazard rises.

SHAPES = {1: "constant hazard (gamma, shape 1)", 4: "rising hazard (gamma, shape 4)"}
THETAS = tuple(round(0.05 * i, 2) for i in range(1, 20))
MEAN_OUTPUT, MEAN_INPUT, BATCH12 = 64, 64, 256
NEAR = 0.99
_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def _cell12(wish: Wish, shape: int, theta: float, seed: int) -> Cell:
    plan = settings(num_prompts=wish.num_prompts or 4000, input_len=MEAN_INPUT, output_len=MEAN_OUTPUT,
                    length_distribution=f"gamma:{shape}")  # fmt: skip
    device, model = _device(wish, "rtx-pro-6000"), wish.models[0] if wish.models else "qwen3-30b-a3b"
    return Cell("balanced", f"eb:theta={theta}", device, model, BATCH12, BUDGET, settings=plan, seed=seed)


def _seeds(wish: Wish) -> range:
    return range(max(wish.seeds, 3))


def figure12_cells(wish: Wish) -> list[Cell]:
    """The runs behind figure 12: every theta, shape and seed."""
    return [_cell12(wish, shape, theta, seed) for shape in SHAPES for theta in THETAS for seed in _seeds(wish)]


def sweep12(wish: Wish, store: CellStore, shape: int) -> list[dict[str, float]]:
    """Mean throughput over theta with its 95 % t interval over the seeds; thetas not run are left out."""
    found = []
    for theta in THETAS:
        rates = [figure(store, _cell12(wish, shape, theta, seed), "total_token_throughput") for seed in _seeds(wish)]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            continue
        mean = fmean(known)
        half = _T95.get(len(known), 2.0) * stdev(known) / len(known) ** 0.5
        found.append({"theta": theta, "value": mean, "low": mean - half, "high": mean + half})
    return found


def _panel12(wish: Wish, store: CellStore, shape: int) -> Any:
    alt = altair()
    data = sweep12(wish, store, shape)
    base = alt.Chart(values([dict(row) for row in data])).encode(
        x=alt.X("theta:Q", title="threshold θ = k/N", scale=alt.Scale(domain=[0, 1]))
    )
    y = alt.Y("value:Q", title="tokens/s", scale=alt.Scale(zero=False))
    layers = [
        base.mark_area(color=BLUE, opacity=0.25).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False)), y2="high:Q"),
        base.mark_line(color=BLUE, strokeWidth=1.8, point={"color": BLUE, "size": 22}).encode(y=y),
    ]
    if data:
        best = max(data, key=lambda row: row["value"])
        near = [row["theta"] for row in data if row["value"] >= NEAR * best["value"]]
        label = f"best θ = {best['theta']:.2f}; within 1 %: {min(near):.2f} to {max(near):.2f}"
        mark = values([{"theta": best["theta"], "label": label}])
        layers.append(alt.Chart(mark).mark_rule(color=VERMILION, strokeDash=[4, 3]).encode(x="theta:Q"))
        text = alt.Chart(mark).mark_text(color=VERMILION, align="left", dx=5, fontSize=11)
        layers.append(text.encode(x="theta:Q", y=alt.value(135), text="label:N"))
    return alt.layer(*layers).properties(width=270, height=150, title=SHAPES[shape])


def _chart12(wish: Wish, store: CellStore) -> Any:
    alt = altair()
    return alt.hconcat(*(_panel12(wish, store, shape) for shape in SHAPES)).resolve_scale(y="independent")


FIGURE3 = PaperFigure(
    "figure3",
    "throughput and TPOT over fixed k, the controller and v1",
    _cells3,
    _chart3,
    "Solid: ours (engine sim, N = 1024, B = 8192). Dashed with crosses: published (eb-vllm); its fixed-k points were "
    "read off a figure by the authors.",
    whole=False,
)
FIGURE12 = PaperFigure(
    "figure12",
    "best threshold under a constant and a rising hazard",
    figure12_cells,
    _chart12,
    f"Ours: Qwen3-30B-A3B on RTX PRO 6000, where waiting pays most (alpha_p > alpha_d), mean input {MEAN_INPUT}, mean "
    f"output {MEAN_OUTPUT}, N = {BATCH12}; band: 95 % t interval over the seeds. The paper's setting and optima are "
    "not legible in our copy; it reports that the optimum moves up under a rising hazard.",
    whole=False,
)
