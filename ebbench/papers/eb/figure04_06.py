"""Figures 4, 5 and 6 of the EB paper: v0, v1 and EB(k*) on synthetic and real workloads, and on four more models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ebbench.papers.eb.table02 import table2_cell
from ebbench.papers.eb.table14_16 import real_cell
from ebbench.papers.published import (
    GPUS,
    MAIN_MODEL,
    MODELS,
    SYNTHETIC,
    WORKLOADS,
    best_config,
    gpu_title,
    model_title,
    pick,
)
from ebbench.papers.table import PaperFigure, PaperOptions, Published, figure
from ebbench.render.figures import altair, values
from ebbench.render.palette import BLACK
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec
from vllm_eb.policy import policy_class

POLICIES = ("v0", "v1", "eb")
_TITLES = {"v0": "v0", "v1": "v1", "eb": "EB(k*)"}
_PUBLISHED_NAMES = {"v0": "v0", "v1": "v1", "eb": "Ours"}
_TABLE6 = "figure6_models"
MODELS6 = ("llama-3.1-8b", "mathstral-7b", "qwen2.5-coder-7b", "deepseek-r1-distill-qwen-7b")
Row = dict[str, Any]
Metric = tuple[str, str, str, float]
"""Our figure, the column of the published one, the axis title, the factor for ours."""


def _bars(
    data: Sequence[Row], x_order: Sequence[str], title: str, y_title: str | None, *, log: bool, width: int
) -> Any:
    """Bars of our results by policy, with a black tick for each published value."""
    alt = altair()
    names = [_TITLES[policy] for policy in POLICIES]
    colours = [policy_class(policy).colour for policy in POLICIES]
    ours = [row for row in data if row["source"] == "ours" and row["value"] is not None]
    published = [row for row in data if row["source"] == "published" and row["value"] is not None]
    marks = ["published"] if published else []
    scheme = alt.Scale(domain=[*names, *marks], range=[*colours, BLACK][: len(names) + len(marks)])
    known = [row["value"] for row in (*ours, *published)]
    floor = min(known, default=1.0) / 2
    scale = alt.Scale(type="log", domainMin=floor, nice=False) if log else alt.Scale()
    x = alt.X("x:N", sort=list(x_order), title=None, axis=alt.Axis(labelAngle=-20))
    offset = alt.XOffset("series:N", sort=names)
    bars = (
        alt.Chart(values([{**row, "floor": floor if log else 0} for row in ours]))
        .mark_bar()
        .encode(
            x=x, xOffset=offset, y=alt.Y("value:Q", title=y_title, scale=scale), y2="floor:Q",
            color=alt.Color("series:N", scale=scheme, sort=None, title=None),
        )
    )  # fmt: skip
    ticks = (
        alt.Chart(values([{**row, "mark": "published"} for row in published]))
        .mark_tick(thickness=2.5, size=13, opacity=1)
        .encode(
            x=x, xOffset=offset, y=alt.Y("value:Q", scale=scale),
            color=alt.Color("mark:N", scale=scheme, sort=None, title=None),
        )
    )  # fmt: skip
    layers = [bars, ticks] if published else [bars]
    return alt.layer(*layers).properties(width=width, height=140, title=title)


# Figure 4: synthetic workloads.

_METRICS4: tuple[Metric, ...] = (
    ("request_throughput", "rps", "requests/s", 1.0),
    ("mean_itl_ms", "itl_s", "ITL, s", 1e-3),
    ("mean_ttft_ms", "ttft_s", "TTFT, s", 1e-3),
)


def _cell4(options: PaperOptions, device: str, workload: str, policy: str) -> RunSpec:
    tokens, seqs = best_config(device, policy, workload, "qwen3-8b")
    model = options.model()
    return real_cell(options, device, model, workload, policy, (seqs, tokens))


def _cells4(options: PaperOptions) -> list[RunSpec]:
    return [_cell4(options, d, w, p) for d in options.devices or tuple(GPUS) for w in SYNTHETIC for p in POLICIES]


def _rows4(options: PaperOptions, store: RunStore, device: str, metric: Metric, *, published: bool) -> list[Row]:
    key, column, _, scale = metric
    found: list[Row] = []
    for workload, title in SYNTHETIC.items():
        for policy in POLICIES:
            where = {"gpu": gpu_title(device), "workload": title, "method": _PUBLISHED_NAMES[policy]}
            base = {"x": title, "series": _TITLES[policy]}
            ours = figure(store, _cell4(options, device, workload, policy), key, scale)
            found.append({**base, "source": "ours", "value": ours})
            if published:
                printed = pick("figure4_synthetic_e2e", column, "eb_vllm", **where)
                found.append({**base, "source": "published", "value": printed})
    return found


def _chart4(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    lines = []
    for device in options.devices or tuple(GPUS):
        panels = [
            _bars(_rows4(options, store, device, metric, published=published), list(SYNTHETIC.values()),
                  "" if at else gpu_title(device), metric[2], log=False, width=190)
            for at, metric in enumerate(_METRICS4)
        ]  # fmt: skip
        lines.append(alt.hconcat(*panels).resolve_scale(y="independent"))
    return alt.vconcat(*lines)


# Figure 5: latency on real workloads.

_METRICS5 = (("mean_ttft_ms", "ttft_s", "TTFT, s", 1e-3), ("mean_tpot_ms", "tpot_ms", "TPOT, ms", 1.0))
_MODELS5 = ("qwen3-8b", "qwen3-30b-a3b")


def _cells5(options: PaperOptions) -> list[RunSpec]:
    return [
        table2_cell(options, device, model, workload, policy)
        for device in options.devices or tuple(GPUS)
        for model in options.models or _MODELS5
        for workload in options.workloads or tuple(WORKLOADS)
        for policy in POLICIES
    ]


def _rows5(
    options: PaperOptions, store: RunStore, device: str, model: str, metric: Metric, *, published: bool
) -> list[Row]:
    key, column, _, scale = metric
    found: list[Row] = []
    for workload in options.workloads or tuple(WORKLOADS):
        title = WORKLOADS.get(workload, workload)
        for policy in POLICIES:
            where = {"gpu": gpu_title(device), "model": model_title(model), "workload": title,
                     "method": _PUBLISHED_NAMES[policy]}  # fmt: skip
            base = {"x": title, "series": _TITLES[policy]}
            ours = figure(store, table2_cell(options, device, model, workload, policy), key, scale)
            found.append({**base, "source": "ours", "value": ours})
            if published:
                printed = pick("figure5_latency", column, "eb_vllm", **where)
                found.append({**base, "source": "published", "value": printed})
    return found


def _chart5(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    order = [WORKLOADS.get(workload, workload) for workload in options.workloads or tuple(WORKLOADS)]
    lines = []
    for metric in _METRICS5:
        for device in options.devices or tuple(GPUS):
            panels = [
                _bars(_rows5(options, store, device, model, metric, published=published), order,
                      f"{gpu_title(device)}, {model_title(model)}", metric[2], log=True, width=290)
                for model in options.models or _MODELS5
            ]  # fmt: skip
            lines.append(alt.hconcat(*panels))
    return alt.vconcat(*lines)


# Figure 6: four more models.


def _cell6(options: PaperOptions, model: str, policy: str) -> RunSpec:
    device = options.device()
    tokens, seqs = best_config(device, policy, "wildchat", "qwen3-8b")
    return real_cell(options, device, model, "wildchat", policy, (seqs, tokens), weight=20)


def _cells6(options: PaperOptions) -> list[RunSpec]:
    return [_cell6(options, model, policy) for model in options.models or MODELS6 for policy in POLICIES]


_METRICS6: tuple[Metric, ...] = (
    ("request_throughput", "rps", "requests/s", 1.0),
    ("mean_ttft_ms", "ttft_s", "TTFT, s", 1e-3),
    ("mean_tpot_ms", "tpot_ms", "TPOT, ms", 1.0),
)


def _rows6(options: PaperOptions, store: RunStore, metric: Metric, *, published: bool) -> list[Row]:
    key, column, _, scale = metric
    gpu, found = gpu_title(options.device()), []
    for model in options.models or MODELS6:
        for policy in POLICIES:
            base = {"x": model, "series": _TITLES[policy]}
            ours = figure(store, _cell6(options, model, policy), key, scale)
            found.append({**base, "source": "ours", "value": ours})
            if published:
                where = {"gpu": gpu, "model": model, "method": _PUBLISHED_NAMES[policy]}
                found.append({**base, "source": "published", "value": pick(_TABLE6, column, "eb_vllm", **where)})
    return found


def _chart6(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    models = options.models or MODELS6
    panels = [
        _bars(_rows6(options, store, metric, published=published), models, "", metric[2], log=False, width=230)
        for metric in _METRICS6
    ]
    return alt.hconcat(*panels).resolve_scale(y="independent")


FIGURE4 = PaperFigure(
    "figure4",
    "v0, v1 and EB(k*) on three synthetic workloads",
    _cells4,
    _chart4,
    "Bars: ours, each scheduler at its published best B and N (table 16; v0 takes EB's, another GPU the RTX PRO "
    "6000's). Black: published (eb-vllm).",
    ("device", "model", "num_prompts"),
    published_on=Published(tuple(GPUS), (MAIN_MODEL,)),
)
FIGURE5 = PaperFigure(
    "figure5",
    "TTFT and TPOT on four real workloads",
    _cells5,
    _chart5,
    "Bars: ours, the runs of table 2. Black: published (eb-vllm), read off log-scale bars by the authors: approximate.",
    ("device", "model", "workload", "num_prompts", "outputs"),
    published_on=Published(tuple(GPUS), tuple(MODELS)),
)
FIGURE6 = PaperFigure(
    "figure6",
    "four more models on WildChat",
    _cells6,
    _chart6,
    "Bars: ours, at the best B and N published for Qwen3-8B, which the authors' script takes for these models, too. "
    "Black: published (the numbers in the authors' plotting script, eb-vllm): EB(k*) has 8 to 17 % more requests/s and "
    "17 to 47 % less TPOT than v1.",
    ("device", "model", "num_prompts", "outputs"),
    published_on=Published(("rtx-pro-6000",), MODELS6),
)
