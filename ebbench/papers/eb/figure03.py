"""Figure 3 of the EB paper: throughput for fixed thresholds and for the online controller."""

from __future__ import annotations

from typing import Any

from ebbench.papers.protocols import FIGURE3_SEQS, figure3_protocol, fixed_threshold, protocol_cells
from ebbench.papers.published import MAIN_MODEL, SYNTHETIC, gpu_title, rows
from ebbench.papers.table import PaperFigure, PaperOptions, Published, figure
from ebbench.render.figures import altair, colour, values
from ebbench.render.palette import BLACK, BLUE, VERMILION
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

BATCH = FIGURE3_SEQS
FRACTIONS = tuple(range(1, 9))
WORKLOADS = {"decode-heavy": 8.0, "balanced": 4.0, "prefill-heavy": 1.0}  # and the relative duration of their runs
_PUBLISHED = {"decode-heavy": "decode_heavy", "balanced": "balanced", "prefill-heavy": "prefill_heavy"}
_NAMES = ("fixed k", "controller (eb)", "mixed (v1)")
_COLOURS = (BLACK, VERMILION, BLUE)
_MARKS: dict[str, tuple[list[int], str]] = {"ours": ([1, 0], "circle"), "published": ([3, 3], "cross")}
"""Line dash and point shape by source."""


def _cell3(options: PaperOptions, workload: str, policy: str) -> RunSpec:
    model, weight = options.model(), WORKLOADS[workload]
    protocol = figure3_protocol(workload, policy)
    return protocol_cells(protocol, options.device("h200"), model, options.num_prompts, weight)[0]


def _k(step: int) -> int:
    return BATCH * step // len(FRACTIONS)


def _cells3(options: PaperOptions) -> list[RunSpec]:
    policies = [*(fixed_threshold(_k(step)) for step in FRACTIONS), "eb", "v1"]
    return [_cell3(options, workload, policy) for workload in WORKLOADS for policy in policies]


def _points3(options: PaperOptions, store: RunStore, workload: str, key: str) -> list[dict[str, Any]]:
    found = []
    for step in FRACTIONS:
        value = figure(store, _cell3(options, workload, fixed_threshold(_k(step))), key)
        if value is not None:
            found.append({"k": _k(step), "value": value, "series": "fixed k", "source": "ours"})
    for policy, name in (("eb", _NAMES[1]), ("v1", _NAMES[2])):
        value = figure(store, _cell3(options, workload, policy), key)
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
    drawn = [name for name in _MARKS if any(row["source"] == name for row in data)]
    axis = alt.Axis(title="threshold k" if last else None, labels=last)
    base = alt.Chart(values(data)).encode(
        x=alt.X("k:Q", scale=alt.Scale(domain=[0, BATCH]), axis=axis),
        y=alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=False)),
        color=colour(_NAMES, _COLOURS),
    )
    dashes, shapes = ([_MARKS[name][at] for name in drawn] for at in (0, 1))
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
        for workload in WORKLOADS:
            data = _points3(options, store, workload, key) + (_published3(workload, column) if published else [])
            top = key == "total_token_throughput"
            title = SYNTHETIC[workload] if top else ""
            panels.append(_panel3(data, title, y_title if workload == "decode-heavy" else None, last=not top))
        lines.append(alt.hconcat(*panels))
    title = f"{gpu_title(options.device('h200'))}, N = {BATCH}, geometric lengths"
    return alt.vconcat(*lines, title=title)


FIGURE3 = PaperFigure(
    "figure3",
    "throughput and TPOT over fixed k, the controller and v1",
    _cells3,
    _chart3,
    "Solid: ours (engine sim, run as `ebbench fidelity` does: N = 1024, B as published, 100 warm-up requests). Dashed "
    "with crosses: published (eb-vllm); its fixed-k points were read off a figure by the authors.",
    ("device", "model", "num_prompts"),
    whole=False,
    published_on=Published(("h200",), (MAIN_MODEL,)),
)
