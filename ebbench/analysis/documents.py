"""Tables as data, from which every output format is rendered.

A document has a title, sections and notes. A section is a GPU in tables of papers, and one load in one environment in
tables of runs. Grouped columns stand together: the group is what is measured (for example a policy), its columns are
published, ours and difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ebbench.foreign.documents import visible


@dataclass(frozen=True)
class MeanFigure:
    """A figure over one or several runs. ``spread``: sample standard deviation over runs, None for a single run.

    ``doubtful``: a percentile with too few samples.
    """

    value: float | None
    spread: float | None = None
    doubtful: bool = False


Value = str | float | int | None | MeanFigure
Kind = Literal["label", "number", "change", "points"]

DOUBTFUL = "?"
"""Printed after a value that is not reliable."""


@dataclass(frozen=True)
class Column:
    """One column. ``change`` is a relative difference (0.05 is 5 %), ``points`` a difference in percentage points.

    ``ours`` marks figures measured by ebbench, in contrast to published ones. ``show`` formats a number of this column;
    by default ``kind`` decides. ``key``: column name in CSV, by default the heading. ``fold``: long labels may take
    several lines. ``right``: align labels right like numbers.
    """

    name: str
    kind: Kind = "number"
    group: str = ""
    ours: bool = False
    show: Callable[[float], str] | None = None
    key: str = ""
    fold: bool = False
    right: bool = False


@dataclass(frozen=True)
class Section:
    """Rows under one heading; a row has one value per column, None for unknown.

    ``best``: index of the row to emphasise. ``faulty``: indices of rows with unreliable figures.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    best: int | None = None
    faulty: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: a row of {len(row)} values under {len(self.columns)} columns")


@dataclass(frozen=True)
class Document:
    """A table to render. ``command`` reproduces it.

    ``markup``: its texts are this project's own and may hold Markdown; otherwise Markdown in them is shown as it is.
    """

    name: str
    title: str
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = field(default=())
    command: str = ""
    markup: bool = False


def labels(*names: str) -> tuple[Column, ...]:
    """Label columns with these headings."""
    return tuple(Column(name, "label") for name in names)


def compared(group: str, *, points: bool = False) -> tuple[Column, ...]:
    """Columns for published, ours and their difference: relative, or in points if the values are percentages."""
    difference: Kind = "points" if points else "change"
    return (
        Column("published", group=group),
        Column("ours", group=group, ours=True),
        Column("diff", difference, group),
    )


def comparison(published: Value, ours: Value, *, points: bool = False) -> tuple[Value, Value, Value]:
    """The values of the columns of :func:`compared`; without a difference where one of both is no number."""
    if not points:
        return published, ours, relative(ours, published)
    if isinstance(published, int | float) and isinstance(ours, int | float):
        return published, ours, ours - published
    return published, ours, None


def relative(value: Value, base: Value) -> float | None:
    """``value / base - 1``; None if either is no number or the base is zero."""
    if isinstance(value, int | float) and isinstance(base, int | float) and base:
        return value / base - 1
    return None


def text(value: Value, column: Column, joint: str = " ") -> str:
    """A value as text, an en dash for unknown. ``joint`` precedes the standard deviation."""
    if isinstance(value, MeanFigure):
        shown = text(value.value, column) + (f" {DOUBTFUL}" if value.doubtful else "")
        return shown if value.spread is None else f"{shown}{joint}±{text(value.spread, column).removeprefix('+')}"
    if value is None:
        return "–"
    if isinstance(value, str):
        return visible(value)
    if column.show is not None:
        return column.show(value)
    if column.kind == "change":
        return f"{100 * value:+.1f} %"
    if column.kind == "points":
        return f"{value:+.1f} pp"
    return number(value)


def number(value: float) -> str:
    """About four significant digits with thousands separators: ``13,179``, ``164.2``, ``19.68``, ``0.061``."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 0.995 else 3
    return f"{value:.{digits}f}"


def average_row(section_rows: Sequence[tuple[Value, ...]], columns: Sequence[Column], label: str) -> tuple[Value, ...]:
    """A last row with the means of relative columns; means of unlike rates are not meaningful and left out."""
    cells: list[Value] = []
    for index, column in enumerate(columns):
        if column.kind == "label":
            cells.append(label if index == 0 else "")
        else:
            averaged = section_rows if column.kind in ("change", "points") else ()
            known = [float(value) for row in averaged if isinstance(value := row[index], int | float)]
            cells.append(sum(known) / len(known) if known else None)
    return tuple(cells)
