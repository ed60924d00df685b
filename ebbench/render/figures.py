"""Style of all figures: printable, colours from :mod:`ebbench.render.palette`, saved as PDF, SVG and PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import NEEDED, RequestColumns
from ebbench.analysis.phases import Surface, latencies_ms, run_surfaces
from ebbench.errors import DataError, UsageError, check_known
from ebbench.installation import need
from ebbench.records import files
from ebbench.records.run import Run
from ebbench.render.palette import policy_colours

# Attainment of a run as heat maps over TTFT and TPOT targets, one panel per phase.

_ROWS, _COLUMNS = 16, 14

_EDGES = (0.02, 0.995)  # quantiles between which targets are placed


def surface_chart(run: Run) -> Any:
    """Panels for the whole run and for each phase, two per row; targets span the run's latencies.

    Raises DataError if no request completed, or none with tokens.
    """
    alt = altair()
    columns = RequestColumns.of(run.table("requests", NEEDED))
    if not columns.generated.any():
        nothing = "answers have no tokens" if columns.ok.any() else "no request completed"
        raise DataError(f"{run.path}: {nothing}, so there is no attainment to draw")
    ttft, _ = latencies_ms(columns, columns.generated)
    _, tpot = latencies_ms(columns, columns.ok & (columns.tokens_after_first > 0))
    surfaces = run_surfaces(run, _targets(ttft, _ROWS), _targets(tpot, _COLUMNS), by_phase=True)
    panels = [_panel(surface) for surface in surfaces]
    lines = [alt.hconcat(*panels[at : at + 2]) for at in range(0, len(panels), 2)]
    manifest = run.manifest
    title = f"{manifest.policy}: {manifest.scenario or manifest.workload}, {manifest.model} on {manifest.device}"
    return alt.vconcat(*lines, title=title)


def _targets(found_ms: npt.NDArray[np.float64], count: int) -> tuple[float, ...]:
    """At least two targets with two significant digits, evenly spaced in ratio over the measured values."""
    low, high = np.quantile(found_ms, _EDGES) if len(found_ms) else (10.0, 100.0)
    low = max(float(low), 1e-3)
    steps = np.geomspace(low, max(1.1 * float(high), 1.5 * low), count)
    return tuple(sorted({float(f"{step:.2g}") for step in steps}))


def _panel(surface: Surface) -> Any:
    alt = altair()
    data = [
        {"ttft": _seconds(ttft), "tpot": f"{tpot:.3g}", "value": share}
        for ttft, shares in zip(surface.ttft_ms, surface.attainment, strict=True)
        for tpot, share in zip(surface.tpot_ms, shares, strict=True)
    ]
    ttft_order, tpot_order = map(_seconds, surface.ttft_ms), [f"{t:.3g}" for t in surface.tpot_ms]
    scale, legend = alt.Scale(scheme="viridis", domain=[0, 1]), alt.Legend(format="%", orient="right")
    cells = alt.Chart(values(data)).mark_rect().encode(
        x=alt.X("tpot:N", sort=tpot_order, title="TPOT target, ms", axis=alt.Axis(labelAngle=-45)),
        y=alt.Y("ttft:N", sort=list(ttft_order)[::-1], title="TTFT target, s"),
        color=alt.Color("value:Q", scale=scale, title="met", legend=legend),
    )  # fmt: skip
    return cells.properties(width=260, height=240, title=surface.phase or "all requests")


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.3g}"


FORMATS = ("pdf", "svg", "png")
PNG_SCALE = 2.5

DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2], [1, 3])


def altair() -> Any:
    """The plotting library. Raises EbbenchError with the pip command if it is not installed."""
    need("vl_convert", "drawing figures")
    alt = need("altair", "drawing figures")
    alt.data_transformers.disable_max_rows()
    return alt


def styled(chart: Any, legend: str = "bottom") -> Any:
    """The chart with the common style; ``legend`` is the position of legends."""
    return (
        chart.configure(font="Arial, Liberation Sans, DejaVu Sans, sans-serif", background="white")
        .configure_axis(
            labelFontSize=11, titleFontSize=12, titleFontWeight="normal", gridColor="#E3E3E3", domainColor="#444",
            tickColor="#444", labelColor="#222", titleColor="#111",
        )
        .configure_legend(
            labelFontSize=11, titleFontSize=11, titleFontWeight="normal", symbolStrokeWidth=2, symbolSize=80,
            orient=legend, labelLimit=320, titleOrient="left", offset=2, padding=0, rowPadding=0,
        )
        .configure_header(labelFontSize=12, titleFontSize=12, labelFontWeight="bold", titleFontWeight="normal")
        .configure_title(fontSize=13, anchor="start", subtitleFontSize=11, subtitleColor="#444")
        .configure_view(stroke="#BBB")
    )  # fmt: skip


def formats_of(text: str) -> list[str]:
    """The formats of ``pdf,svg``. Raises UsageError, UnknownNameError."""
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    if not chosen:
        raise UsageError(f"--format is empty; write any of {','.join(FORMATS)}")
    for wanted in chosen:
        check_known("figure format", wanted, FORMATS)
    return chosen


def save(chart: Any, stem: Path, formats: Sequence[str] = FORMATS, *, legend: str = "bottom") -> list[Path]:
    """Write the chart as ``stem.pdf`` and so on. Raises UnknownNameError, and RunError if it cannot be written."""
    for wanted in formats:
        check_known("figure format", wanted, FORMATS)
    final = styled(chart, legend)
    paths = []
    for wanted in formats:
        path = stem.with_name(f"{stem.name}.{wanted}")
        save_chart(final, path, scale_factor=PNG_SCALE if wanted == "png" else 1.0)
        paths.append(path)
    return paths


def check_plot(path: Path) -> None:
    """Raise UsageError unless the name of a picture that was asked for ends in a format."""
    if path.suffix[1:] not in FORMATS:
        raise UsageError(f"--plot {path}: the name must end in {', '.join('.' + name for name in FORMATS)}")


def save_plot(chart: Any, path: Path) -> None:
    """Write the chart in the format of the name's suffix. Raises RunError."""
    save(chart, path.with_suffix(""), [path.suffix[1:]])


def save_chart(chart: Any, path: Path, **options: Any) -> None:
    """Write a chart in the format of the path's suffix, whole or not at all. Raises RunError."""
    files.write_with(path, lambda temporary: chart.save(str(temporary), format=path.suffix[1:], **options))


def latency_chart(points: Mapping[str, Sequence[dict[str, Any]]], policies: Sequence[str]) -> Any:
    """Distributions of TTFT and TPOT, one curve per run: ``points`` as the HTML report has them."""
    alt = altair()
    shown = colour(list(policies), policy_colours(policies), field="policy")
    panels = []
    for name, title in (("ttft", "time to first token"), ("tpot", "time per output token")):
        x = alt.X("ms:Q", title=title, scale=alt.Scale(type="log", nice=False), axis=ms_axis())
        y = alt.Y("share:Q", title="share of requests", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]))
        curves = alt.Chart(values(list(points[f"cdf_{name}"]))).mark_line(clip=True)
        panels.append(curves.encode(x=x, y=y, color=shown, detail="run:N").properties(width=320, height=200))
    return alt.hconcat(*panels)


_MS = "datum.value < 1000 ? format(datum.value, ',~r') + ' ms' : format(datum.value / 1000, ',~r') + ' s'"


def ms_axis(**options: Any) -> Any:
    """An axis of times in ms, labelled 20 ms, 1.5 s."""
    return altair().Axis(labelExpr=_MS, labelSeparation=6, labelOverlap="greedy", **options)


def svg(chart: Any) -> str:
    """The chart as an SVG document."""
    import vl_convert

    text: str = vl_convert.vegalite_to_svg(styled(chart).to_dict())
    return text


def values(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as chart data."""
    return altair().Data(values=list(rows))


def colour(
    names: Sequence[str], colours: Sequence[str], title: str | None = None, *, field: str = "series", **options: Any
) -> Any:
    """A colour channel for a field with these names in this order."""
    alt = altair()
    scale = alt.Scale(domain=list(names), range=list(colours))
    return alt.Color(f"{field}:N", scale=scale, sort=list(names), title=title, **options)


def lines(
    rows: Sequence[dict[str, Any]], x: Any, y: Any, names: Sequence[str], colours: Sequence[str],
    title: str | None = None, *, mark: Mapping[str, Any] = {"strokeWidth": 1.8}, **options: Any,
) -> Any:  # fmt: skip
    """A line for each of the series with these names, told apart by colour and dash."""
    drawn = altair().Chart(values(rows)).mark_line(**mark)
    return drawn.encode(x=x, y=y, color=colour(names, colours, title, **options), strokeDash=dash(names, title))


def dash(names: Sequence[str], title: str | None = None) -> Any:
    """A dash pattern per name of the field ``series``, so that lines differ without colour too."""
    alt = altair()
    scale = alt.Scale(domain=list(names), range=[list(DASHES[i % len(DASHES)]) for i in range(len(names))])
    return alt.StrokeDash("series:N", scale=scale, sort=list(names), title=title)
