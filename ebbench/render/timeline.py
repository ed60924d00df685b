"""The timeline of a run: mode, estimates, throughput, queue and KV memory on one time axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import NEEDED, RequestColumns
from ebbench.analysis.phases import served_spans, token_times
from ebbench.errors import DataError
from ebbench.records.run import Run
from ebbench.render import palette
from ebbench.render.figures import altair, colour, dash, values

BINS = 240
WIDTH = 640
_STEP_COLUMNS = (
    "start_ns", "end_ns", "phase", "mode", "kv_blocks_used", "kv_blocks_total", "waiting", "running", "k", "n_limit",
)  # fmt: skip
_MODES = {"eb": "exclusive", "mb": "mixed"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Timeline:
    """Rows ``{"t": s, "series": name, "value": y}`` per panel; ``modes`` are spans, ``phases`` start times with
    names."""

    title: str
    modes: list[Row]
    phases: list[Row]
    throughput: list[Row]
    sizes: list[Row]
    sides: list[Row]
    queue: list[Row]
    kv: list[Row]


def timeline_of(run: Run) -> Timeline:
    """The timeline of a run. Raises DataError if it recorded no steps, as runs against a server do not."""
    steps = run.table("steps", _STEP_COLUMNS)
    if not steps.num_rows:
        raise DataError(f"{run.path}: recorded no engine steps, so there is no timeline; use engine sim or emulated")
    held = {name: steps[name].to_numpy(zero_copy_only=False) for name in _STEP_COLUMNS}
    columns = RequestColumns.of(run.table("requests", NEEDED))
    times = held["start_ns"] / 1e9
    spans = served_spans(columns)
    manifest = run.manifest
    return Timeline(
        title=f"{manifest.policy}: {manifest.scenario or manifest.workload}, {manifest.model} on {manifest.device}",
        modes=_mode_spans(times, held["end_ns"] / 1e9, held["mode"]),
        phases=[{"t": start, "label": name} for name, start, _ in spans] if len(spans) > 1 else [],
        throughput=_throughput(columns),
        sizes=_sizes(run, times, held),
        sides=_sides(run),
        queue=_binned("waiting", times, held["waiting"]) + _binned("running", times, held["running"]),
        kv=_binned("KV", times, 100 * held["kv_blocks_used"] / np.maximum(held["kv_blocks_total"], 1)),
    )


def _mode_spans(start: npt.NDArray[np.float64], end: npt.NDArray[np.float64], mode: npt.NDArray[Any]) -> list[Row]:
    edges = np.concatenate([[0], np.flatnonzero(mode[1:] != mode[:-1]) + 1])
    ends = [*edges[1:], len(mode)]
    return [
        {"t": float(start[a]), "t2": float(end[b - 1]), "series": _MODES.get(str(mode[a]), str(mode[a]))}
        for a, b in zip(edges, ends, strict=True)
    ]


def _throughput(columns: RequestColumns) -> list[Row]:
    times, tokens = token_times(columns)
    if not len(times):
        return []
    edges = np.linspace(0.0, float(times[-1]), 81)
    cumulative = np.concatenate([[0.0], np.cumsum(tokens)])
    done = np.diff(cumulative[np.searchsorted(times, edges, "right")])
    rate = done / np.diff(edges)
    middles = (edges[:-1] + edges[1:]) / 2
    return [{"t": float(t), "value": float(y)} for t, y in zip(middles, rate, strict=True)]


def _sizes(run: Run, times: npt.NDArray[np.float64], held: dict[str, npt.NDArray[Any]]) -> list[Row]:
    found = []
    for name, label in (("k", "k*"), ("n_limit", "N*")):
        column = np.asarray(held[name], np.float64)
        known = np.isfinite(column)
        if known.any():
            found += _binned(label, times[known], column[known])
    decisions = run.table("decisions", ["time_ns", "n_obs"]).drop_null()
    if decisions.num_rows:
        found += _binned("N_obs", decisions["time_ns"].to_numpy() / 1e9, decisions["n_obs"].to_numpy())
    return found


def _sides(run: Run) -> list[Row]:
    """Both sides of eq. 8 in microseconds per token, per evaluation."""
    table = run.table("decisions", ["time_ns", "lhs", "rhs", "margin"]).drop_null()
    if not table.num_rows:
        return []
    times = table["time_ns"].to_numpy() / 1e9
    lhs, rhs = (1e6 * table[name].to_numpy() for name in ("lhs", "rhs"))
    margin = 1e6 * table["margin"].to_numpy()
    return [
        *_binned("cost of mixing (left side)", times, lhs),
        *_binned("saving of mixing + margin (right side)", times, rhs + margin),
    ]


def _binned(series: str, times: npt.NDArray[np.float64], column: npt.NDArray[Any]) -> list[Row]:
    """At most BINS points, each the mean over its part of the time."""
    if len(times) <= BINS:
        return [{"t": float(t), "series": series, "value": float(y)} for t, y in zip(times, column, strict=True)]
    edges = np.linspace(times[0], times[-1], BINS + 1)
    place = np.clip(np.searchsorted(edges, times, "right") - 1, 0, BINS - 1)
    counts = np.bincount(place, minlength=BINS)
    sums = np.bincount(place, np.asarray(column, np.float64), BINS)
    middles = (edges[:-1] + edges[1:]) / 2
    return [
        {"t": float(middles[i]), "series": series, "value": float(sums[i] / counts[i])} for i in np.flatnonzero(counts)
    ]


def timeline_chart(line: Timeline) -> Any:
    """The chart with its panels below each other."""
    alt = altair()
    panels = [_mode_panel(line), _plain_panel(line, line.throughput, "tokens/s", palette.THROUGHPUT)]
    if line.sizes:
        panels.append(_series_panel(line, line.sizes, "sequences", palette.SIZES))
    if line.sides:
        panels.append(_series_panel(line, line.sides, "µs/token", palette.SIDES))
    panels.append(_series_panel(line, line.queue, "requests", palette.QUEUE))
    panels.append(_plain_panel(line, line.kv, "KV used, %", palette.KV, last=True, domain=(0, 100)))
    return alt.vconcat(*panels, spacing=6, title=line.title).resolve_scale(
        color="independent", strokeDash="independent"
    )


def _x(line: Timeline, last: bool = False) -> Any:
    alt = altair()
    end = max((row["t2"] for row in line.modes), default=1.0)
    axis = alt.Axis(labels=last, title="time, s" if last else None, ticks=last)
    return alt.X("t:Q", scale=alt.Scale(domain=[0, end], nice=False), axis=axis)


def _boundaries(line: Timeline) -> list[Any]:
    if not line.phases:
        return []
    alt = altair()
    data = values(line.phases)
    return [alt.Chart(data).mark_rule(color=palette.BOUNDARY, strokeDash=[3, 3]).encode(x="t:Q")]


def _mode_panel(line: Timeline) -> Any:
    alt = altair()
    names, colours = list(palette.MODES), list(palette.MODES.values())
    bars = (
        alt.Chart(values(line.modes))
        .mark_rect(opacity=0.85)
        .encode(x=_x(line), x2="t2:Q", color=colour(names, colours, "mode"))
    )
    layers = [bars, *_boundaries(line)]
    if line.phases:
        text = alt.Chart(values(line.phases)).mark_text(align="left", dx=4, dy=-1, fontSize=11, fontWeight="bold")
        layers.append(text.encode(x="t:Q", y=alt.value(9), text="label:N"))
    return alt.layer(*layers).properties(width=WIDTH, height=18)


def _plain_panel(
    line: Timeline, rows: list[Row], title: str, tint: str, *, last: bool = False, domain: tuple[int, int] | None = None
) -> Any:
    alt = altair()
    scale = alt.Undefined if domain is None else alt.Scale(domain=list(domain))
    area = (
        alt.Chart(values(rows))
        .mark_area(color=tint, opacity=0.25, line={"color": tint, "strokeWidth": 1.2})
        .encode(x=_x(line, last), y=alt.Y("value:Q", title=title, scale=scale))
    )
    return alt.layer(area, *_boundaries(line)).properties(width=WIDTH, height=85)


def _series_panel(line: Timeline, rows: list[Row], title: str, colours: Mapping[str, str]) -> Any:
    alt = altair()
    present = [name for name in colours if any(row["series"] == name for row in rows)]
    shown = [colours[name] for name in present]
    lines = (
        alt.Chart(values(rows))
        .mark_line(strokeWidth=1.6, interpolate="step-after")
        .encode(
            x=_x(line),
            y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False)),
            color=colour(present, shown),
            strokeDash=dash(present),
        )
    )
    return alt.layer(lines, *_boundaries(line)).properties(width=WIDTH, height=100)
