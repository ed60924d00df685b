"""The timeline of a run: mode, estimates, throughput, queue and KV memory on one time axis.

A server says nothing of its steps: of a run over HTTP it shows open requests, their rate and the time to first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import MISSING, RequestColumns
from ebbench.analysis.phases import served_spans, token_times
from ebbench.analysis.summary import metric_columns
from ebbench.errors import DataError
from ebbench.records.run import Run
from ebbench.render import palette
from ebbench.render.figures import altair, colour, lines, values
from ebbench.render.live import MODES

BINS, _RATES = 240, 60
WIDTH = 640
_STEP_COLUMNS = (
    "start_ns", "end_ns", "phase", "mode", "kv_blocks_used", "kv_blocks_total", "waiting", "running", "k", "n_limit",
)  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True)
class Timeline:
    """Rows ``{"t": s, "series": name, "value": y}`` per panel; ``modes`` are spans, ``phases`` start times with
    names."""

    title: str
    phases: list[Row]
    throughput: list[Row]
    modes: list[Row] = field(default_factory=list)
    sizes: list[Row] = field(default_factory=list)
    sides: list[Row] = field(default_factory=list)
    queue: list[Row] = field(default_factory=list)
    kv: list[Row] = field(default_factory=list)
    open: list[Row] = field(default_factory=list)
    rate: list[Row] = field(default_factory=list)
    ttft: list[Row] = field(default_factory=list)


def make_timeline(run: Run) -> Timeline:
    """The timeline of a run. Raises DataError if nothing was sent."""
    columns = RequestColumns.of(metric_columns(run))
    spans, manifest = served_spans(columns), run.manifest
    title = f"{manifest.policy}: {manifest.scenario or manifest.workload}, {manifest.model} on {manifest.device}"
    phases = [{"t": start, "label": name} for name, start, _ in spans] if len(spans) > 1 else []
    steps = run.table("steps", _STEP_COLUMNS)
    if not steps.num_rows:
        sent = columns.sent != MISSING
        if not sent.any():
            raise DataError(f"{run.path}: no request was sent, so there is no timeline")
        ended = np.where(columns.end != MISSING, columns.end, columns.sent)
        begun = np.where(columns.first_token != MISSING, columns.first_token, ended)
        sent_s, begun_s, ended_s = (np.sort(times[sent] / 1e9) for times in (columns.sent, begun, ended))
        edges = np.linspace(0.0, max(float(ended_s[-1]), 1e-3), BINS + 1)
        waiting = _until(sent_s, edges) - _until(begun_s, edges)
        answered = _until(begun_s, edges) - _until(ended_s, edges)
        wide = edges[:: BINS // _RATES]
        failed = np.sort(ended[sent & (columns.status != "ok")] / 1e9)
        rates = {"sent": sent_s, "completed": np.sort(ended[columns.ok] / 1e9), "failed": failed}
        return Timeline(
            title,
            phases,
            throughput=_throughput(columns),
            open=[*_points("waiting for a first token", edges, waiting), *_points("being answered", edges, answered)],
            rate=[
                row
                for name, times in rates.items()
                if len(times)
                for row in _points(name, _middles(wide), np.diff(_until(times, wide)) / np.diff(wide))
            ],
            ttft=_ttft(columns, wide),
        )
    step_columns = {name: steps[name].to_numpy(zero_copy_only=False) for name in _STEP_COLUMNS}
    times = step_columns["start_ns"] / 1e9
    return Timeline(
        title,
        phases,
        modes=_mode_spans(times, step_columns["end_ns"] / 1e9, step_columns["mode"]),
        throughput=_throughput(columns),
        sizes=_sizes(run, times, step_columns),
        sides=_sides(run),
        queue=_binned("waiting", times, step_columns["waiting"]) + _binned("running", times, step_columns["running"]),
        kv=_binned("KV", times, 100 * step_columns["kv_blocks_used"] / np.maximum(step_columns["kv_blocks_total"], 1)),
    )


def _until(times: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """How many of the sorted ``times`` lie at or before each edge."""
    return np.searchsorted(times, edges, "right")


def _middles(edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return (edges[:-1] + edges[1:]) / 2


def _points(series: str, times: npt.NDArray[np.float64], values: npt.NDArray[Any]) -> list[Row]:
    return [{"t": float(t), "series": series, "value": float(y)} for t, y in zip(times, values, strict=True)]


def _ttft(columns: RequestColumns, edges: npt.NDArray[np.float64]) -> list[Row]:
    """TTFT in ms of the requests intended in each part of the time; of several classes, the median of each."""
    ok = columns.generated
    place = np.searchsorted(edges, columns.intended[ok] / 1e9, "right") - 1
    ttft_ms = (columns.first_token - columns.intended)[ok] / 1e6
    classes, middles = columns.request_class[ok], _middles(edges)
    rows_by_series: dict[str, list[Row]] = {
        name: [] for name in (*palette.TTFT, *(f"median of {c}" for c in columns.classes))
    }
    for part in np.unique(place[place < len(middles)]):
        in_part, t = place == part, float(middles[part])
        for name, share in zip(palette.TTFT, (0.5, 0.9), strict=True):
            rows_by_series[name].append({"t": t, "series": name, "value": float(np.quantile(ttft_ms[in_part], share))})
        for name in columns.classes:
            if (in_class := in_part & (classes == name)).any():
                series = f"median of {name}"
                rows_by_series[series].append({"t": t, "series": series, "value": float(np.median(ttft_ms[in_class]))})
    return [row for rows in rows_by_series.values() for row in rows]


def _mode_spans(start: npt.NDArray[np.float64], end: npt.NDArray[np.float64], mode: npt.NDArray[Any]) -> list[Row]:
    edges = np.concatenate([[0], np.flatnonzero(mode[1:] != mode[:-1]) + 1])
    ends = [*edges[1:], len(mode)]
    return [
        {"t": float(start[a]), "t2": float(end[b - 1]), "series": MODES.get(str(mode[a]), str(mode[a]))}
        for a, b in zip(edges, ends, strict=True)
    ]


def _throughput(columns: RequestColumns) -> list[Row]:
    times, tokens = token_times(columns)
    if not len(times):
        return []
    edges = np.linspace(0.0, float(times[-1]), 81)
    cumulative = np.concatenate([[0.0], np.cumsum(tokens)])
    rate = np.diff(cumulative[_until(times, edges)]) / np.diff(edges)
    return [{"t": float(t), "value": float(y)} for t, y in zip(_middles(edges), rate, strict=True)]


def _sizes(run: Run, times: npt.NDArray[np.float64], columns: dict[str, npt.NDArray[Any]]) -> list[Row]:
    rows = []
    for name, label in (("k", "k*"), ("n_limit", "N*")):
        column = np.asarray(columns[name], np.float64)
        known = np.isfinite(column)
        rows += _binned(label, times[known], column[known])
    decisions = run.table("decisions", ["time_ns", "n_obs"]).drop_null()
    return rows + _binned("N_obs", decisions["time_ns"].to_numpy() / 1e9, decisions["n_obs"].to_numpy())


def _sides(run: Run) -> list[Row]:
    """Both sides of eq. 8 in microseconds per token, per evaluation."""
    table = run.table("decisions", ["time_ns", "lhs", "rhs", "margin"]).drop_null()
    times = table["time_ns"].to_numpy() / 1e9
    lhs, rhs, margin = (1e6 * table[name].to_numpy() for name in ("lhs", "rhs", "margin"))
    return [
        row for name, side in zip(palette.SIDES, (lhs, rhs + margin), strict=True) for row in _binned(name, times, side)
    ]


def _binned(series: str, times: npt.NDArray[np.float64], column: npt.NDArray[Any]) -> list[Row]:
    """At most BINS points, each the mean over its part of the time."""
    if len(times) <= BINS:
        return _points(series, times, column)
    edges = np.linspace(times[0], times[-1], BINS + 1)
    place = np.clip(np.searchsorted(edges, times, "right") - 1, 0, BINS - 1)
    counts = np.bincount(place, minlength=BINS)
    sums, full = np.bincount(place, np.asarray(column, np.float64), BINS), counts > 0
    return _points(series, _middles(edges)[full], sums[full] / counts[full])


def timeline_chart(line: Timeline) -> Any:
    """The chart with its panels below each other."""
    alt = altair()
    panels = [_mode_panel(line)] if line.modes else []
    panels.append(_plain_panel(line, line.throughput, "tokens/s", palette.THROUGHPUT))
    for rows, what, colours in (
        (line.sizes, "sequences", palette.SIZES),
        (line.sides, "µs/token", palette.SIDES),
        (line.queue, "requests", palette.QUEUE),
        (line.open, "open requests", palette.OPEN),
        (line.rate, "requests/s", palette.RATE),
    ):
        panels += [_series_panel(line, rows, what, colours)] if rows else []
    if line.kv:
        panels.append(_plain_panel(line, line.kv, "KV used, %", palette.KV, last=True, domain=(0, 100)))
    if line.ttft:
        panels.append(_series_panel(line, line.ttft, "TTFT, ms", palette.ttft_colours(line.ttft), last=True))
    return alt.vconcat(*panels, spacing=6, title=line.title).resolve_scale(
        color="independent", strokeDash="independent"
    )


def _x(line: Timeline, last: bool = False) -> Any:
    alt = altair()
    end = max((row.get("t2", row["t"]) for row in (*line.modes, *line.open)), default=1.0)
    axis = alt.Axis(labels=last, title="time, s" if last else None, ticks=last)
    return alt.X("t:Q", scale=alt.Scale(domain=[0, end], nice=False), axis=axis)


def _boundaries(line: Timeline) -> list[Any]:
    rules = altair().Chart(values(line.phases)).mark_rule(color=palette.BOUNDARY, strokeDash=[3, 3])
    return [rules.encode(x="t:Q")] if line.phases else []


def _mode_panel(line: Timeline) -> Any:
    alt = altair()
    hues = colour(list(palette.MODES), list(palette.MODES.values()), "mode")
    bars = alt.Chart(values(line.modes)).mark_rect(opacity=0.85).encode(x=_x(line), x2="t2:Q", color=hues)
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


def _series_panel(
    line: Timeline, rows: list[Row], title: str, colours: Mapping[str, str], *, last: bool = False
) -> Any:
    alt = altair()
    present = {name: hue for name, hue in colours.items() if any(row["series"] == name for row in rows)}
    y, mark = (
        alt.Y("value:Q", title=title, scale=alt.Scale(zero=False)),
        {"strokeWidth": 1.6, "interpolate": "step-after"},
    )
    steps = lines(rows, _x(line, last), y, list(present), list(present.values()), mark=mark)
    return alt.layer(steps, *_boundaries(line)).properties(width=WIDTH, height=100)
