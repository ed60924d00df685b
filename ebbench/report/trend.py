"""Trends as tables, sentences, a picture and a page."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ebbench.analysis.documents import Column, Document, Section, Value
from ebbench.analysis.environment import UNKNOWN_DEVICE, differences, listed
from ebbench.analysis.statistics import PairedInterval
from ebbench.analysis.trend import Change, Point, Trend
from ebbench.analysis.units import label_of
from ebbench.records import files
from ebbench.records.warnings import counted
from ebbench.render import figures, numbers, palette
from ebbench.render.documents import rendered
from ebbench.report import page
from ebbench.report.page_data import Page, SearchSection, of_section

EXIT_CODES = {"": 0, "worse": 1, "doubt": 5}
"""Of ``--alert``: as those of the gate."""
_HASH = re.compile(r"[0-9a-f]{10,}")
Series = Sequence[Trend]
"""The trends of one series, one per figure."""


def document(all_series: Sequence[Series], last: int | None = None) -> Document:
    """One section per series with a row per point (the ``last`` ones), and a sentence per change and alert."""
    sections = tuple(_section(series, _title(series, all_series), last) for series in all_series)
    notes = [line for series in all_series for line in sentences(series, _title(series, all_series))]
    points = [point for series in all_series for point in series[0].points]
    first, newest = (chosen(points, key=lambda point: point.begun_ns).begun for chosen in (min, max))
    runs = sum(len(point.members) for point in points)
    heading = f"Trend of {counted(len(points), 'point')} ({counted(runs, 'run')}), {first} to {newest} UTC"
    return Document("trend", heading, sections, (*notes, *_why_apart(all_series)))


def _title(series: Series, all_series: Sequence[Series]) -> str:
    """Policy, workload and device, and the load where several series differ in it; the same for no two series."""
    where = series[0].points[0].units[0].environment
    device, host = where.get("device", ""), where.get("host", "")
    device = host if device == UNKNOWN_DEVICE and host else device
    words = [series[0].kind.policy, where.get("workload", ""), f"on {device}"]
    others = [kind[0].kind for kind in all_series if kind is not series]
    alike = [kind for kind in others if kind.policy == series[0].kind.policy]
    words += [series[0].kind.load] if any(kind.load != series[0].kind.load for kind in alike) else []
    words += [host] if host and host != device and alike else []
    words += [series[0].kind.environment] if any(kind.load == series[0].kind.load for kind in alike) else []
    return ", ".join(filter(None, words)).replace(", on ", " on ")


def _why_apart(all_series: Sequence[Series]) -> list[str]:
    """Why runs of one policy and load are in several series: their environments differ."""
    reasons = []
    known: dict[tuple[str, str, str], Point] = {}
    for series in all_series:
        kind, point = series[0].kind, series[0].points[0]
        first = known.setdefault((kind.policy, kind.load, kind.limits), point)
        unlike = differences(first.units[0].environment, point.units[0].environment)
        if unlike:
            renamed = {difference.key for difference in unlike} == {"host"}
            label = " A host that has another name every night gets one with --host-label." if renamed else ""
            reasons.append(f"Apart, since they differ in {listed(unlike)}: runs of {kind.policy}.{label}")
    return reasons


def _section(series: Series, title: str, last: int | None) -> Section:
    points = series[0].points
    shown = range(max(0, len(points) - last) if last else 0, len(points))
    days = [points[place].begun[:10] for place in shown]  # or the minutes, where several points are of one day
    begun: list[Value] = [*days] if len(set(days)) == len(days) else [points[place].begun for place in shown]
    # Points of a server, where nobody stated a commit, are told apart by its version.
    commits = any(member.stated for point in points for member in point.members)
    kind = "commit" if commits or any(_HASH.fullmatch(point.commit) for point in points) else "version"
    cells: list[tuple[Column, list[Value]]] = [
        (Column("point", "label", right=True), [str(place + 1) for place in shown]),
        (Column("begun (UTC)", "label"), begun),
        (Column(kind, "label"), [_short(points[place]) for place in shown]),
        (Column("label", "label"), [points[place].label for place in shown]),
        (Column("runs"), [len(points[place].members) for place in shown]),
    ]
    for trend in series:
        cells += _figure_columns(trend, shown)
    cells = [(column, values) for column, values in cells if any(value not in ("", None) for value in values)]
    rows = tuple(zip(*(values for _, values in cells), strict=True))
    # What stands out: changes for the worse, and a last point that is worse.
    worse = {change.place for trend in series for change in trend.changes if change.direction == "worse"}
    worse |= {trend.judged[-1] for trend in series if trend.newest is not None and trend.newest.outcome == "fail"}
    faulty = frozenset(place - shown.start for place in worse if place in shown)
    return Section(title, tuple(column for column, _ in cells), rows, faulty=faulty)


def _figure_columns(trend: Trend, shown: range) -> list[tuple[Column, list[Value]]]:
    name, show = label_of(trend.figure), partial(numbers.figure, trend.figure)
    values = [trend.values[place] for place in shown]
    changes = {change.place: numbers.change(change.bounds[0]) for change in trend.changes}
    return [
        (Column("", group=name, show=show, key=trend.figure), [None if v is None else v.mean for v in values]),
        (Column("95 %", "label", name, right=True, key=f"{trend.figure}_interval"),
         [_interval(trend.figure, v) for v in values]),
        (Column("change", "label", name, right=True, key=f"{trend.figure}_change"),
         [changes.get(place, "") for place in shown]),
    ]  # fmt: skip


def _interval(figure: str, value: PairedInterval | None) -> str:
    if value is None or not math.isfinite(value.high):
        return ""
    return f"{numbers.figure(figure, value.low)} to {numbers.figure(figure, value.high)}"


def sentences(series: Series, title: str) -> list[str]:
    """What changed in a series, and whether its newest point is worse."""
    lines = []
    for trend in series:
        name, points = label_of(trend.figure), trend.points
        lines += [_change_told(name, change, points[change.place]) for change in trend.changes]
        newest = _point_name(points[trend.judged[-1]]) if trend.judged else ""
        if trend.newest is not None and trend.newest.outcome == "fail":
            lines.append(
                f"{name}: the newest point ({newest}) is {numbers.percent(trend.newest.loss)} worse than those "
                f"before it (p = {trend.newest.p_adjusted:.3f})."
            )
        elif trend.alert == "doubt" and trend.newest is not None:
            lines.append(
                f"{name}: the newest point ({newest}) is {numbers.percent(trend.newest.loss)} worse, and worse "
                f"than every point before it, but {counted(len(trend.newest.losses), 'pair')} of runs cannot show "
                "it; six can (--repeats 6)."
            )
    nothing = "no change is shown" if len(series[0].points) > 1 else "one point; a trend needs two or more"
    lacking = [
        f"{label_of(trend.figure)}: not judged in {len(trend.points) - len(trend.judged)} of "
        f"{counted(len(trend.points), 'point')}, where it is undefined or has too few samples in some run"
        for trend in series
        if len(trend.judged) < len(trend.points)
    ]
    return [f"{title}: {line}" for line in [*(lines or [nothing]), *lacking]]


def _change_told(name: str, change: Change, point: Point) -> str:
    grown, low, high = change.bounds
    ends = f"95 % interval {numbers.change(low)} to {numbers.change(high)}"
    interval = ends if math.isfinite(high) else "no interval"
    return (
        f"{name} {numbers.change(grown)} ({change.direction}) from {_point_name(point)} on: {interval}, "
        f"p = {change.judged.p_adjusted:.4f} over {counted(len(change.judged.losses), 'pair')}."
    )


def _short(point: Point) -> str:
    """The first ten digits of a commit's hash; a version whole."""
    return point.commit[:10] if _HASH.fullmatch(point.commit) else point.commit


def _point_name(point: Point) -> str:
    return ", ".join(filter(None, (_short(point), point.label, point.begun[:10])))


def worst_alert(all_series: Sequence[Series]) -> str:
    """The worst alert: ``worse``, ``doubt`` or none."""
    alerts = {trend.alert for series in all_series for trend in series}
    return "worse" if "worse" in alerts else "doubt" if "doubt" in alerts else ""


def as_json(all_series: Sequence[Series]) -> dict[str, Any]:
    """Series with their points, changes and alerts; an infinite bound is null."""
    return {
        "alert": worst_alert(all_series) or None,
        "series": [
            {
                "name": series[0].kind.name, "title": _title(series, all_series), "policy": series[0].kind.policy,
                "load": series[0].kind.load, "environment": dict(series[0].points[0].units[0].environment),
                "points": [_point(series, place) for place in range(len(series[0].points))],
                "changes": [_change(trend, change) for trend in series for change in trend.changes],
                "alerts": {trend.figure: trend.alert for trend in series if trend.alert},
            }
            for series in all_series
        ],
    }  # fmt: skip


def _point(series: Series, place: int) -> dict[str, Any]:
    point = series[0].points[place]
    values = {}
    for trend in series:
        value = trend.values[place]
        low, high = (None, None) if value is None or not math.isfinite(value.high) else (value.low, value.high)
        values[trend.figure] = {"value": None if value is None else value.mean, "low": low, "high": high}
    return {"begun": point.begun, "commit": point.commit, "label": point.label,
            "runs": [unit.run for unit in point.units], **values}  # fmt: skip


def _change(trend: Trend, change: Change) -> dict[str, Any]:
    grown, low, high = numbers.finite(change.bounds)
    return {
        "figure": trend.figure, "commit": trend.points[change.place].commit, "point": change.place,
        "direction": change.direction, "change": grown, "low": low, "high": high, "p": change.judged.p_adjusted,
    }  # fmt: skip


# Pictures: per figure the points with their intervals over the commits, the mean between changes, and the changes.


def chart(series: Series, width: int = 300, height: int = 200) -> Any:
    """Panels of a series beside each other."""
    return figures.altair().hconcat(*(_panel(trend, width, height) for trend in series))


def _panel(trend: Trend, width: int, height: int) -> Any:
    alt = figures.altair()
    rows = [
        {"place": place + 1, "commit": _point_name(point), "value": value.mean,
         **({"low": value.low, "high": value.high} if math.isfinite(value.high) else {})}
        for place, (point, value) in enumerate(zip(trend.points, trend.values, strict=True)) if value is not None
    ]  # fmt: skip
    title = label_of(trend.figure) + (", ms" if trend.figure.endswith("_ms") else "")
    x = alt.X(
        "place:Q", title="point", scale=alt.Scale(nice=False, padding=8), axis=alt.Axis(tickMinStep=1, format="d")
    )
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False))
    low = alt.Y("low:Q", title=title, scale=alt.Scale(zero=False))
    base = alt.Chart(figures.values(rows))
    tooltip = ["commit:N", alt.Tooltip("value:Q", format=",.4~r")]
    layers = [
        base.mark_rule(color=palette.GREY).encode(x=x, y=low, y2="high:Q"),
        alt.Chart(figures.values(_levels(trend))).mark_line(strokeWidth=2, color=palette.KV).encode(
            x="place:Q", y="value:Q", detail="part:N"),
        base.mark_point(filled=True, size=36, color=palette.THROUGHPUT, opacity=1).encode(x=x, y=y, tooltip=tooltip),
    ]  # fmt: skip
    changes = [
        {
            "place": change.place + 0.5,
            "text": f"{numbers.change(change.bounds[0])} {_short(trend.points[change.place])}",
        }
        for change in trend.changes
    ]
    if changes:
        marks = alt.Chart(figures.values(changes))
        layers.append(marks.mark_rule(strokeDash=[4, 3], color=palette.BOUNDARY).encode(x="place:Q", tooltip="text:N"))
        layers.append(marks.mark_text(align="right", dx=-4, baseline="top", fontSize=10).encode(
            x="place:Q", y=alt.value(4), text="text:N"))  # fmt: skip
    return alt.layer(*layers).properties(width=width, height=height)


def _levels(trend: Trend) -> list[dict[str, Any]]:
    edges = [0, *(change.place for change in trend.changes), len(trend.points)]
    rows = []
    for part, (begin, end) in enumerate(itertools.pairwise(edges)):
        known = [value.mean for value in trend.values[begin:end] if value is not None]
        if known:
            mean = geometric_mean(known)
            rows += [{"part": part, "place": place, "value": mean} for place in (begin + 0.6, end + 0.4)]
    return rows


def save_chart(all_series: Sequence[Series], path: Path) -> None:
    """Write the panels of all series, below each other, in the format of the suffix. Raises UnknownNameError."""
    alt = figures.altair()
    rows = [chart(series).properties(title=_title(series, all_series)) for series in all_series]
    figures.save_plot(alt.vconcat(*rows), path)


def trend_page(all_series: Sequence[Series]) -> Page:
    """The HTML page: the same tables, sentences and panels."""
    shown = document(all_series)
    sections = []
    for series, section in zip(all_series, shown.sections, strict=True):
        lines = tuple(line.removeprefix(f"{section.title}: ") for line in sentences(series, section.title))
        picture = chart(series).to_dict(validate=False) | {"background": None}
        sections.append(SearchSection(of_section(section), lines, picture))
    alert = {"worse": "Worse.", "doubt": "Perhaps worse.", "": "No alert."}[worst_alert(all_series)]
    return Page(
        title="Trend", subtitle=(shown.title,), verdicts=(("", (alert,), False),),
        warnings=tuple(_why_apart(all_series)), searches=tuple(sections),
    )  # fmt: skip


def write(
    series: Sequence[Series], style: str, *, plot: Path | None, html: Path | None, summary: Path | None,
    last: int | None,
) -> None:  # fmt: skip
    """Draw and write the trend where that is asked for, then print it; ``style``: of the table, or json."""
    if plot is not None:
        save_chart(series, plot)
    if html is not None:
        page.write(trend_page(series), html)
    table = document(series, last)
    files.append_to_summary(rendered(table, "markdown"), summary)
    shown = json.dumps(as_json(series), indent=2, allow_nan=False) + "\n" if style == "json" else rendered(table, style)
    print(shown, end="")
