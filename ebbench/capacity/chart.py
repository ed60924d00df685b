"""Latency over load with the capacity marked, one colour per policy: what ``ebbench capacity --plot`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbench.capacity.choose import Choice
from ebbench.capacity.drive import Outcome
from ebbench.capacity.limits import Limits
from ebbench.errors import UsageError
from ebbench.render import figures, palette

_PANELS = (("attainment", "requests within the limits (%)"), ("ttft", "median TTFT (ms)"), ("tpot", "median TPOT (ms)"))


def save_curves(found: Mapping[str, Outcome], limits: Limits, by_concurrency: bool, path: Path) -> None:
    """Write the chart; the suffix of ``path`` says the format. Raises UsageError for another suffix."""
    check_suffix(path)
    figures.save(curves(found, limits, by_concurrency), path.with_suffix(""), [path.suffix[1:]])


def check_suffix(path: Path) -> None:
    """Raise UsageError unless the path ends like a picture that can be written."""
    if path.suffix[1:] not in figures.FORMATS:
        raise UsageError(f"--plot {path}: the name must end in {', '.join('.' + name for name in figures.FORMATS)}")


def curves(found: Mapping[str, Outcome], limits: Limits, by_concurrency: bool) -> Any:
    """One panel per figure, one line per policy; a vertical rule at each capacity, dashed rules at the limits."""
    alt = figures.altair()
    names = list(found)
    colours = palette.policy_colours(names)
    unit = "open sessions" if by_concurrency else "sessions per second"
    bounds = {"attainment": 100 * limits.attainment, "ttft": limits.slo.ttft, "tpot": limits.slo.tpot}
    capacities = [
        {"series": name, "load": outcome.estimate.capacity}
        for name, outcome in found.items()
        if outcome.estimate.capacity is not None
    ]
    panels = []
    for key, title in _PANELS:
        x = alt.X("load:Q", title=f"load ({unit})", scale=alt.Scale(zero=False))
        y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=key == "attainment"))
        colour = figures.colour(names, colours)
        lines = alt.Chart(figures.values(_rows(found, key))).mark_line(point=True).encode(x=x, y=y, color=colour)
        rule = alt.Chart(figures.values(capacities)).mark_rule(strokeWidth=1.5).encode(x="load:Q", color=colour)
        layers = [lines, rule]
        if (bound := bounds[key]) is not None:
            limit = figures.values([{"value": bound}])
            layers.append(alt.Chart(limit).mark_rule(strokeDash=[4, 3], color=palette.GREY).encode(y="value:Q"))
        panels.append(alt.layer(*layers).properties(width=260, height=200))
    return alt.hconcat(*panels)


def _rows(found: Mapping[str, Outcome], key: str) -> list[dict[str, Any]]:
    """One row per policy and load: the mean over the probes at that load, of those whose queue stayed bounded."""
    rows = []
    for name, outcome in found.items():
        by_load: dict[float, list[float]] = {}
        for reading in outcome.readings:
            figure = {"attainment": 100 * reading.attainment, "ttft": reading.ttft_ms, "tpot": reading.tpot_ms}[key]
            if reading.decides and not reading.probe.runaway and figure is not None:
                by_load.setdefault(reading.probe.load, []).append(figure)
        rows += [
            {"series": name, "load": load, "value": sum(values) / len(values)}
            for load, values in sorted(by_load.items())
        ]
    return rows


def save_frontier(found: Choice, priced: bool, path: Path) -> None:
    """Write cost (or GPUs) over median TPOT, one point per deployment, those on the frontier filled."""
    check_suffix(path)
    alt = figures.altair()
    rows = [
        {
            "series": each.deployment.candidate.device,
            "tpot": each.deployment.reading.tpot_ms,
            "cost": each.cost,
            "frontier": each.frontier,
        }
        for each in found.found
        if each.deployment.reading is not None and each.deployment.reading.tpot_ms is not None
    ]
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    colours = [palette.SERIES[index % len(palette.SERIES)] for index in range(len(names))]
    base = alt.Chart(figures.values(rows)).encode(
        x=alt.X("tpot:Q", title="median TPOT (ms)", scale=alt.Scale(zero=False)),
        y=alt.Y("cost:Q", title="cost per hour" if priced else "GPUs", scale=alt.Scale(zero=False)),
        color=figures.colour(names, colours),
    )
    points = base.mark_point(size=70).encode(fillOpacity=alt.condition("datum.frontier", alt.value(1), alt.value(0)))
    line = base.transform_filter("datum.frontier").mark_line(strokeDash=[4, 3]).encode(color=alt.value(palette.GREY))
    figures.save(alt.layer(line, points).properties(width=420, height=280), path.with_suffix(""), [path.suffix[1:]])
