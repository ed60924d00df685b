"""Renders documents as rich tables, HTML and CSV. Markdown and LaTeX are in :mod:`ebbench.export`."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ebbench.analysis.documents import Column, Document, MeanFigure, Section, Value, text
from ebbench.untrusted import csv_cell

LABEL_WIDTH = 22
"""Longer labels are wrapped."""
NARROWEST_SENTENCES = 24
"""Characters of a column of sentences below which rows are shown as paragraphs."""


def as_rich(document: Document, width: int = 100) -> RenderableType:
    """Tables for a terminal of ``width`` characters, our own measurements in bold.

    A section that is too wide is shown in pieces below each other, each with the row labels.
    """
    parts: list[RenderableType] = [Text(document.title, style="bold")]
    for section in document.sections:
        parts += [Text(), *section_tables(section, width)]
    if document.notes:
        parts.append(Text())
    parts += [Text(f"- {note}", style="dim") for note in document.notes]
    return Group(*parts)


def section_tables(section: Section, width: int) -> list[RenderableType]:
    """The section as one rich table, or as several if ``width`` characters do not hold all columns.

    Where several columns of sentences would be a few characters wide, each row is a paragraph instead.
    """
    if _sentences_too_narrow(section, width):
        return list(_paragraphs(section))
    parts: list[RenderableType] = []
    for piece in pieces(section, width):
        parts += [Text(), _rich_table(piece)] if parts else [_rich_table(piece)]
    return parts


def _sentences_too_narrow(section: Section, width: int) -> bool:
    folded = [column.fold for column in section.columns]
    if sum(folded) < 2:
        return False
    fixed = sum(_natural_width(section, index) for index, fold in enumerate(folded) if not fold)
    return (width - fixed) / sum(folded) < NARROWEST_SENTENCES


def _paragraphs(section: Section) -> Iterator[RenderableType]:
    """Each row with its first value as a heading and the others below it, by the names of their columns."""
    if section.title:
        yield Text(section.title, style="bold")
    first, *others = section.columns
    for row in section.rows:
        yield Text(f"\n{text(row[0], first)}", style="bold")
        for value, column in zip(row[1:], others, strict=True):
            if said := text(value, column):
                yield Padding(Text(f"{column.name}: {said}"), (0, 0, 0, 2))


def pieces(section: Section, width: int) -> Iterator[Section]:
    """Sections that fit ``width``; neighbouring groups of columns stay together if there is room."""
    sizes = [_natural_width(section, index) for index in range(len(section.columns))]
    labels = range(_labels(section.columns))
    taken = list(labels)
    at = len(labels)
    for count in _unbroken(section.columns[len(labels) :]):
        group = list(range(at, at + count))
        at += count
        if len(taken) > len(labels) and sum(sizes[i] for i in taken + group) > width:
            yield _part(section, taken)
            taken = list(labels)
        taken += group
    yield _part(section, taken)


def _unbroken(columns: Sequence[Column]) -> list[int]:
    """Lengths of the runs of columns that are not split: a named group, or one column without a group."""
    return [one for name, count in grouped(columns) for one in ([count] if name else [1] * count)]


def _part(section: Section, columns: Sequence[int]) -> Section:
    rows = tuple(tuple(row[i] for i in columns) for row in section.rows)
    title = section.title if _leading(columns) else ""
    return replace(section, title=title, columns=tuple(section.columns[i] for i in columns), rows=rows)


def _leading(columns: Sequence[int]) -> bool:
    """Whether these are the first columns: only they have the section's title."""
    return list(columns) == list(range(len(columns)))


def _natural_width(section: Section, index: int) -> int:
    """Characters that the column needs, with its padding."""
    column = section.columns[index]
    shown = [text(row[index], column, "\n") for row in section.rows]
    widest = max(len(line) for word in (column.name, column.group, *shown) for line in (word.split("\n") or [""]))
    return 2 + (min(widest, LABEL_WIDTH) if column.kind == "label" and column.fold else widest)


def _rich_table(section: Section) -> Table:
    table = Table(
        title=Text(section.title) if section.title else None, title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
    )  # fmt: skip
    for column in section.columns:
        header = Text(f"{column.group}\n{column.name}" if column.group else column.name)
        style = "bold" if column.ours else None
        if column.fold:
            table.add_column(header, style=style, max_width=LABEL_WIDTH, overflow="fold")
        else:
            justify: Literal["left", "right"] = "left" if column.kind == "label" and not column.right else "right"
            table.add_column(header, justify=justify, style=style, no_wrap=True)
    for place, shown in enumerate(cells(section, "\n")):
        style = "bold" if place == section.best else "red" if place in section.faulty else None
        table.add_row(*(Text(cell) for cell in shown), style=style)
    return table


def cells(section: Section, joint: str = " ", *, repeat_labels: bool = False) -> Iterator[list[str]]:
    """Rows as texts; a label that repeats the one above is left out if all labels before it repeat too.

    ``joint`` separates a mean from its standard deviation. ``repeat_labels`` keeps repeated labels.
    """
    before: tuple[Value, ...] | None = None
    for row in section.rows:
        shown = [text(value, column, joint) for value, column in zip(row, section.columns, strict=True)]
        if before is not None and not repeat_labels:
            for index, column in enumerate(section.columns):
                if column.kind != "label" or row[index] != before[index] or index + 1 >= _labels(section.columns):
                    break
                shown[index] = ""
        before = row
        yield shown


def _labels(columns: Sequence[Column]) -> int:
    """Number of leading label columns; the last of them is always shown."""
    return next((i for i, column in enumerate(columns) if column.kind != "label"), len(columns))


def grouped(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Groups of neighbouring columns: name and number of columns."""
    return [(name, len(list(members))) for name, members in groupby(columns, key=lambda column: column.group)]


def as_csv(document: Document) -> str:
    """The document as one CSV: section in the first column, values as numbers, relative differences as fractions.

    A figure over several runs has a second column with its standard deviation (``_std``); a figure with too few samples
    anywhere has a column that says which values are sound (``_sound``). Sections with different columns follow after an
    empty line, with their own header.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header: list[str] | None = None
    for section in document.sections:
        kinds = [_csv_kinds(section, index) for index in range(len(section.columns))]
        names = ["section", *(name + kind for name, own in _csv_names(section, kinds) for kind in own)]
        if names != header:
            if header is not None:
                out.write("\n")
            writer.writerow(map(csv_cell, names))
            header = names
        for row in section.rows:
            filled = zip(row, kinds, strict=True)
            values = (_csv_value(value, kind) for value, own in filled for kind in own)
            writer.writerow(map(csv_cell, (section.title, *values)))
    return out.getvalue()


def _csv_kinds(section: Section, index: int) -> list[str]:
    """Suffixes of the CSV columns that this column becomes."""
    figures = [row[index] for row in section.rows if isinstance(row[index], MeanFigure)]
    spread = any(isinstance(figure, MeanFigure) and figure.spread is not None for figure in figures)
    doubtful = any(isinstance(figure, MeanFigure) and figure.doubtful for figure in figures)
    return ["", *(["_std"] if spread else []), *(["_sound"] if doubtful else [])]


def _csv_names(section: Section, kinds: Sequence[list[str]]) -> Iterator[tuple[str, list[str]]]:
    return zip(map(_csv_name, section.columns), kinds, strict=True)


def _csv_value(value: Value, kind: str) -> str | float:
    if isinstance(value, MeanFigure):
        if kind == "_sound":
            return "" if value.value is None else str(not value.doubtful).lower()
        value = value.spread if kind == "_std" else value.value
    elif kind:
        return ""
    return "" if value is None else value


def _csv_name(column: Column) -> str:
    name = column.key or f"{column.group} {column.name}"
    return "_".join(name.lower().split())


def as_html(document: Document) -> str:
    """An HTML fragment: a heading, one table per section, the notes. All text is escaped."""
    parts = [f"<h2>{html.escape(document.title)}</h2>"]
    for section in document.sections:
        parts.append(_html_table(section))
    if document.notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in document.notes)
        parts.append(f"<ul>{items}</ul>")
    return "\n".join(parts) + "\n"


def _html_table(section: Section) -> str:
    rows = ["<table>"]
    if section.title:
        rows.append(f"<caption>{html.escape(section.title)}</caption>")
    rows.append("<thead>")
    groups = grouped(section.columns)
    if any(name for name, _ in groups):
        spans = "".join(f'<th colspan="{count}">{html.escape(name)}</th>' for name, count in groups)
        rows.append(f"<tr>{spans}</tr>")
    rows.append("<tr>" + "".join(f"<th>{html.escape(column.name)}</th>" for column in section.columns) + "</tr>")
    rows.append("</thead><tbody>")
    for row in section.rows:
        filled = zip(row, section.columns, strict=True)
        rows.append("<tr>" + "".join(_html_cell(value, column) for value, column in filled) + "</tr>")
    rows.append("</tbody></table>")
    return "\n".join(rows)


def _html_cell(value: Value, column: Column) -> str:
    shown = html.escape(text(value, column))
    if column.kind == "label":
        return f'<th scope="row">{shown}</th>'
    return f"<td><b>{shown}</b></td>" if column.ours else f"<td>{shown}</td>"
