"""Style of all figures: printable, colours from :mod:`ebbench.render.palette`, saved as PDF, SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbench.errors import UnknownNameError
from ebbench.extras import need
from ebbench.records import files

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


def save(chart: Any, stem: Path, formats: Sequence[str] = FORMATS, *, legend: str = "bottom") -> list[Path]:
    """Write the chart as ``stem.pdf`` and so on. Raises UnknownNameError, and RunError if it cannot be written."""
    for wanted in formats:
        if wanted not in FORMATS:
            raise UnknownNameError("figure format", wanted, FORMATS)
    final = styled(chart, legend)
    paths = []
    for wanted in formats:
        path = stem.with_name(f"{stem.name}.{wanted}")
        save_chart(final, path, scale_factor=PNG_SCALE if wanted == "png" else 1.0)
        paths.append(path)
    return paths


def save_chart(chart: Any, path: Path, **options: Any) -> None:
    """Write a chart in the format of the path's suffix, whole or not at all. Raises RunError."""
    files.write_with(path, lambda temporary: chart.save(str(temporary), format=path.suffix[1:], **options))


def values(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as chart data."""
    return altair().Data(values=list(rows))


def colour(names: Sequence[str], colours: Sequence[str], title: str | None = None, **options: Any) -> Any:
    """A colour channel for the field ``series`` with these names in this order."""
    alt = altair()
    scale = alt.Scale(domain=list(names), range=list(colours))
    return alt.Color("series:N", scale=scale, sort=list(names), title=title, **options)


def dash(names: Sequence[str], title: str | None = None) -> Any:
    """A dash pattern per name of the field ``series``, so that lines differ without colour too."""
    alt = altair()
    scale = alt.Scale(domain=list(names), range=[list(DASHES[i % len(DASHES)]) for i in range(len(names))])
    return alt.StrokeDash("series:N", scale=scale, sort=list(names), title=title)
