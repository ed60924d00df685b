"""The pages of the fidelity report: one per published source, with what it measured and what was fitted on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ebbench.errors import DataError
from ebbench.foreign.documents import load_toml
from ebbench.papers.fidelity.cases import WITHOUT
from ebbench.papers.fidelity.scores import THROUGHPUT, PublishedFigure
from ebbench.render import palette


class Page(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One source of measurements.

    ``slug``: name of its file. ``sources``: names of its cells' sources, up to a comma. ``measured``: what was
    measured, where, by which software. ``fitted``: which constants were set on which of its cells. ``constants``: the
    same in a few words, for the front table. ``seen``: whether its figures were known before the model was finished.
    ``notes``: name of the file of ``notes/`` that explains its errors.
    """

    slug: str
    title: str
    sources: tuple[str, ...]
    measured: str
    fitted: str = "Nothing."
    constants: str = ""
    seen: str = "Before the model was finished."
    notes: str = ""


class Texts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paragraphs of the report; values that are computed are in braces."""

    audit: str
    introduction: str
    errors: str
    front_end: str
    decisions: str
    constants: str


class _Pages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    texts: Texts
    pages: tuple[Page, ...]


_FILE = load_toml(Path(__file__).with_name("pages.toml"), _Pages)
PAGES, TEXTS = _FILE.pages, _FILE.texts


def is_variant(source: str) -> bool:
    """Whether the source's cases are those of another one under other settings."""
    return source.endswith(WITHOUT)


def source_page(source: str) -> Page:
    """The page on which a cell's source stands. Raises DataError for a source without one."""
    name = source.split(",")[0]
    for page in PAGES:
        if name in page.sources:
            return page
    raise DataError(f"{source}: this source has no page in ebbench/papers/fidelity/pages.toml")


# The pictures of the fidelity report: our figures over published ones.


def pictures(cells: Sequence[PublishedFigure], out: Path) -> list[Path]:
    """Write our results over published ones, one picture per metric; returns the files."""
    from ebbench.render.figures import altair, save_chart

    alt, written = altair(), []
    for name, metrics, title in PICTURES:
        rows = [
            {name: getattr(cell, name) for name in ("published", "ours", "error", "source", "device")}
            | {"kind": "fitted" if cell.fitted else "predicted"}
            for cell in cells
            if cell.metric in metrics and cell.scored and not is_variant(cell.source)
        ]
        if rows:
            path = out / f"{name}.svg"
            save_chart((_errors if name == "throughput" else _scatter)(alt, title, rows), path)
            written.append(path)
    return written


PICTURES = (
    ("throughput", THROUGHPUT, "Throughput (requests/s, tokens/s)"),
    ("ttft", ("ttft_mean_s",), "Mean TTFT, seconds"),
    ("tpot", ("tpot_mean_ms",), "Mean TPOT, milliseconds"),
)
SOURCES = ("table 3", "table 2", "figure 5", "figure 3", "RTX 4090 run")  # the same colours in every picture


def _scale(altair: Any, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Any:
    values = [row[name] for row in rows for name in names]
    return altair.Scale(type="log", domain=[min(values) * 0.8, max(values) * 1.2], nice=False)


def _marks(altair: Any, rows: list[dict[str, Any]], y: Any, x: Any) -> Any:
    shown = [name for name in SOURCES if any(row["source"] == name for row in rows)]
    others = sorted({row["source"] for row in rows} - set(SOURCES))
    colours = dict(zip(SOURCES, PALETTE, strict=True))
    return (
        altair.Chart(altair.InlineData(values=rows))
        .mark_point(filled=True, size=55, opacity=0.75)
        .encode(
            x=x,
            y=y,
            color=altair.Color(
                "source:N",
                scale=altair.Scale(domain=shown + others, range=[colours.get(n, palette.GREY) for n in shown + others]),
            ),
            shape=altair.Shape("kind:N", scale=altair.Scale(domain=["predicted", "fitted"], range=["circle", "cross"])),
        )
    )


PALETTE = (palette.BLUE, palette.VERMILION, palette.GREEN, palette.PURPLE, palette.BLACK)


def _scatter(altair: Any, title: str, rows: list[dict[str, Any]]) -> Any:
    """Our values over published ones; both are equal on the dashed line."""
    scale = _scale(altair, rows, ("published", "ours"))
    ends = [{"x": v, "y": v} for v in scale["domain"]]
    axis = altair.Axis(grid=False, format=",~g", tickCount=6)
    line = altair.Chart(altair.InlineData(values=ends)).mark_line(color="gray", strokeDash=[4, 4])
    x = altair.X("published:Q", scale=scale, axis=axis, title="published")
    y = altair.Y("ours:Q", scale=scale, axis=axis, title="ours")
    marks = _marks(altair, rows, y, x)
    return altair.layer(line.encode(x="x:Q", y="y:Q"), marks).properties(title=title, width=380, height=380)


def _errors(altair: Any, title: str, rows: list[dict[str, Any]]) -> Any:
    """Relative error over the published value; the band is the target for the median."""
    scale = _scale(altair, rows, ("published",))
    low, high = scale["domain"]
    area = altair.Chart(altair.InlineData(values=[{"from": low, "to": high, "below": -0.1, "above": 0.1}]))
    band = area.mark_rect(color="gray", opacity=0.15).encode(x="from:Q", x2="to:Q", y="below:Q", y2="above:Q")
    x = altair.X("published:Q", scale=scale, axis=altair.Axis(grid=False, format=",~g", tickCount=6), title="published")
    y = altair.Y("error:Q", axis=altair.Axis(format="+.0%"), title="ours against published")
    return altair.layer(band, _marks(altair, rows, y, x)).properties(title=title, width=520, height=320)
