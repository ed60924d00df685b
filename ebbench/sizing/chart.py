"""Pictures of capacity and deployments: ``--plot`` of ``ebbench capacity`` and ``ebbench plan``.

The HTML report shows the same curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ebbench.grouping import by_key
from ebbench.render import figures, numbers, palette
from ebbench.sizing.choose import DeploymentPlan, dominated

PANELS = (
    ("attainment", "requests within the limits (%)"),
    ("ttft_at_attainment_ms", "TTFT, {} (ms)"),
    ("tpot_at_attainment_ms", "TPOT, {} (ms)"),
)


def curves(rows: Sequence[Mapping[str, Any]], width: int = 260, height: int = 200) -> Any:
    """Share within the limits over the load, and TTFT and TPOT over throughput, from the objects of ``--json``.

    Latencies are the percentiles at the required attainment, which reach their limits at capacity. One line per policy.
    A vertical rule marks each capacity, a band its interval, a diamond the nearest probe, which is the knee of the
    latency curves; dashed rules are the limits.
    """
    alt = figures.altair()
    names = [str(row["policy"]) for row in rows]
    colour = figures.colour(names, palette.policy_colours(names))
    by_concurrency = any("capacity_concurrency" in row for row in rows)
    limits = {**_limits(rows), "attainment": 100 * float(rows[0]["required_attainment"]) if rows else None}
    percentile = numbers.percentile(float(rows[0]["required_attainment"])) if rows else ""
    panels = []
    for key, title in PANELS:
        over_load = key == "attainment"
        load = "open sessions" if by_concurrency else "requests/s offered"
        x = alt.X("x:Q", title=load if over_load else "output tokens/s", scale=alt.Scale(zero=False))
        y = alt.Y("y:Q", title=title.format(percentile), scale=alt.Scale(zero=over_load))
        points = alt.Chart(figures.values(_points(rows, key, over_load)))
        layers = [points.mark_line(point=True).encode(x=x, y=y, color=colour)]
        layers += _intervals(alt, rows, colour) if over_load else []
        knees = alt.Chart(figures.values(_knees(rows, key, over_load)))
        layers.append(knees.mark_point(shape="diamond", size=160, filled=True).encode(x="x:Q", y="y:Q", color=colour))
        if (bound := limits.get(key)) is not None:
            limit = alt.Chart(figures.values([{"y": bound}]))
            layers.append(limit.mark_rule(strokeDash=[4, 3], color=palette.GREY).encode(y="y:Q"))
        panels.append(alt.layer(*layers).properties(width=width, height=height))
    return alt.hconcat(*panels)


def _limits(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    limits_ms = rows[0]["limits_ms"] if rows else {}
    return {f"{name}_at_attainment_ms": value for name, value in limits_ms.items()}


def _intervals(alt: Any, rows: Sequence[Mapping[str, Any]], colour: Any) -> list[Any]:
    """A rule at each capacity, and a band over its interval if both ends are known."""
    intervals = [
        {"series": row["policy"], "x": stored_capacity(row), "low": row["low"], "high": row["high"]}
        for row in rows
        if stored_capacity(row) is not None
    ]
    rules = alt.Chart(figures.values(intervals)).mark_rule(strokeWidth=1.5).encode(x="x:Q", color=colour)
    closed = alt.Chart(figures.values([row for row in intervals if row["high"] is not None]))
    return [closed.mark_rect(opacity=0.15).encode(x="low:Q", x2="high:Q", color=colour), rules]


def stored_capacity(row: Mapping[str, Any]) -> float | None:
    """The capacity in one object of ``--json``, whichever unit it is in."""
    value = row.get("capacity_concurrency", row.get("capacity_requests_per_s"))
    return None if value is None else float(value)


def _points(rows: Sequence[Mapping[str, Any]], key: str, over_load: bool) -> list[dict[str, Any]]:
    """One point per policy and load: the mean over probes at that load whose queue stayed bounded."""
    points = []
    for row in rows:
        by_load = by_key(
            (probe["load"], _point(probe, key, over_load))
            for probe in row["curve"]
            if probe["decides"] and not probe["runaway"] and probe[key] is not None
        )
        for pairs in by_load.values():
            x, y = (sum(values) / len(values) for values in zip(*pairs, strict=True))
            points.append({"series": row["policy"], "x": x, "y": y})
    return points


def _knees(rows: Sequence[Mapping[str, Any]], key: str, over_load: bool) -> list[dict[str, Any]]:
    knees = []
    for row in rows:
        near = [probe for probe in row["curve"] if probe["run_dir"] == row["nearest_run_dir"]]
        if stored_capacity(row) is not None and near and near[0][key] is not None:
            x, y = _point(near[0], key, over_load)
            knees.append({"series": row["policy"], "x": x, "y": y})
    return knees


def _point(probe: Mapping[str, Any], key: str, over_load: bool) -> tuple[float, float]:
    y = float(probe[key]) * (100 if key == "attainment" else 1)
    return probe["load" if over_load else "output_tokens_per_s"], y


def frontiers(plan: DeploymentPlan) -> Any:
    """Cost (or GPUs) over TTFT and over TPOT, and output tokens/s per GPU over those per user, in three panels.

    One point per deployment; those that no other one beats in both are filled and joined.
    """
    alt = figures.altair()
    rows = [
        {
            "series": costed.deployment.candidate.device,
            "ttft": costed.ttft_ms,
            "tpot": costed.tpot_ms,
            "cost": costed.cost,
            "user": costed.tokens_per_s_per_user,
            "gpu": costed.tokens_per_s_per_gpu,
        }
        for costed in plan.deployments.carrying
        if math.isfinite(costed.ttft_ms) and math.isfinite(costed.tpot_ms)
    ]
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    colour = figures.colour(names, [palette.SERIES[index % len(palette.SERIES)] for index in range(len(names))])
    cost = "cost per hour" if plan.prices else "GPUs"
    panels = [
        _frontier(alt, rows, ("ttft", "median TTFT (ms)", 1), ("cost", cost, 1), colour),
        _frontier(alt, rows, ("tpot", "median TPOT (ms)", 1), ("cost", cost, 1), colour),
        _frontier(alt, rows, ("user", "output tokens/s per user", -1), ("gpu", "output tokens/s per GPU", -1), colour),
    ]
    return alt.hconcat(*panels)


_Axis = tuple[str, str, int]
"""Field, title, and whether less (1) or more (-1) is better."""


def _frontier(alt: Any, rows: Sequence[Mapping[str, Any]], x: _Axis, y: _Axis, colour: Any) -> Any:
    """Deployments over two figures, with the line of those that none beats in both."""
    costs = [(x[2] * row[x[0]], y[2] * row[y[0]]) for row in rows]
    shown = [{**row, "frontier": not dominated(own, costs)} for row, own in zip(rows, costs, strict=True)]
    base = alt.Chart(figures.values(shown)).encode(
        x=alt.X(f"{x[0]}:Q", title=x[1], scale=alt.Scale(zero=False)),
        y=alt.Y(f"{y[0]}:Q", title=y[1], scale=alt.Scale(zero=False)),
    )
    opacity = alt.condition("datum.frontier", alt.value(1), alt.value(0))
    points = base.mark_point(size=70).encode(color=colour, fill=colour, fillOpacity=opacity)
    line = base.transform_filter("datum.frontier").mark_line(strokeDash=[4, 3], color=palette.GREY)
    return alt.layer(line, points).properties(width=260, height=220)
