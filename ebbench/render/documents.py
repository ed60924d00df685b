"""Renders documents as rich tables, HTML, CSV, Markdown and LaTeX, and is the terminal that commands print on."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import rich.console
from rich import box
from rich.console import ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ebbench.analysis.documents import Column, Document, MeanFigure, Section, Value, text
from ebbench.foreign.documents import csv_cell, markdown, visible

if TYPE_CHECKING:
    from ebbench.records.plan import Progress


@dataclass(frozen=True)
class ProgressEvent:
    """What a command tells while it works. ``text``: the line that a terminal would show.

    ``done`` of ``total`` requests, runs or candidates; a ``total`` of 0 is not known. ``snapshot``: of a running
    measurement.
    """

    text: str
    done: int = 0
    total: int = 0
    snapshot: Progress | None = None

    def __str__(self) -> str:
        return self.text


class Console(rich.console.Console):
    """rich's console, on which the control characters of what is printed are visible.

    rich writes its own control sequences separately, so any in the text came from outside. ``follow``: called with
    every event in place of printing.

    In a notebook it prints to its file as anywhere else, where rich's would show a cell of its own for everything.
    """

    follow: Callable[[ProgressEvent], object] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"force_jupyter": False, **options})

    @classmethod
    def followed_by(cls, follow: Callable[[ProgressEvent], object]) -> Console:
        """A console that prints nothing."""
        console = cls(file=io.StringIO())
        console.follow = follow
        return console

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        """Print; ``soft_wrap`` leaves a line whole for files and pipes. A terminal would cut it within words."""
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **how)

    def say(self, text: str, *, quiet: bool = False) -> None:
        """Print a line as it is, without markup; nothing if ``quiet``."""
        if not quiet and self.follow is not None:
            self.follow(ProgressEvent(text))
        elif not quiet:
            self.print(text, markup=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, lines=True))


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
    folded = [
        column.fold and any(len(text(row[index], column)) > LABEL_WIDTH for row in section.rows)
        for index, column in enumerate(section.columns)
    ]
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
            if cell_text := text(value, column):
                yield Padding(Text(f"{column.name}: {cell_text}"), (0, 0, 0, 2))


def pieces(section: Section, width: int) -> Iterator[Section]:
    """Sections that fit ``width``; neighbouring groups of columns stay together if there is room."""
    sizes = [_natural_width(section, index) for index in range(len(section.columns))]
    labels = range(_labels(section.columns))
    taken = list(labels)
    at = len(labels)
    groups = grouped(section.columns[len(labels) :])
    # A named group of columns is not split.
    for count in (width for name, columns in groups for width in ([columns] if name else [1] * columns)):
        group = list(range(at, at + count))
        at += count
        if len(taken) > len(labels) and sum(sizes[i] for i in taken + group) > width:
            yield _with_columns(section, taken)
            taken = list(labels)
        taken += group
    yield _with_columns(section, taken)


def narrowed(section: Section, width: int, least: Sequence[str]) -> Section:
    """The section without the columns named first in ``least``, as far as it does not fit ``width`` with them."""
    for name in least:
        if sum(_natural_width(section, index) for index in range(len(section.columns))) <= width:
            break
        section = _with_columns(section, [index for index, column in enumerate(section.columns) if column.name != name])
    return section


def _with_columns(section: Section, columns: Sequence[int]) -> Section:
    rows = tuple(tuple(row[i] for i in columns) for row in section.rows)
    title = section.title if list(columns) == list(range(len(columns))) else ""  # only the first columns have it
    return replace(section, title=title, columns=tuple(section.columns[i] for i in columns), rows=rows)


def _natural_width(section: Section, index: int) -> int:
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
        keys = [column.key or f"{column.group} {column.name}" for column in section.columns]
        own_names = zip(("_".join(key.lower().split()) for key in keys), kinds, strict=True)
        names = ["section", *(name + kind for name, own in own_names for kind in own)]
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


def _csv_value(value: Value, kind: str) -> str | float:
    if isinstance(value, MeanFigure):
        if kind == "_sound":
            return "" if value.value is None else str(not value.doubtful).lower()
        value = value.spread if kind == "_std" else value.value
    elif kind:
        return ""
    return "" if value is None else value


def as_html(document: Document, heading: str = "h2") -> str:
    """An HTML fragment: a heading, one table per section, the notes. All text is escaped."""
    lines = [f"<{heading}>{html.escape(document.title)}</{heading}>"]
    for section in document.sections:
        groups = grouped(section.columns)
        heads = [f'<th colspan="{count}">{html.escape(name)}</th>' for name, count in groups]
        names = [f"<th>{html.escape(column.name)}</th>" for column in section.columns]
        rows = [map(_html_cell, row, section.columns) for row in section.rows]
        lines.append("<table>")
        lines += [f"<caption>{html.escape(section.title)}</caption>"] if section.title else []
        lines.append("<thead>")
        lines += [
            f"<tr>{''.join(row)}</tr>" for row in ([heads, names] if any(name for name, _ in groups) else [names])
        ]
        lines.append("</thead><tbody>")
        lines += [f"<tr>{''.join(row)}</tr>" for row in rows]
        lines.append("</tbody></table>")
    items = "".join(f"<li>{html.escape(note)}</li>" for note in document.notes)
    return "\n".join([*lines, *([f"<ul>{items}</ul>"] if items else [])]) + "\n"


def _html_cell(value: Value, column: Column) -> str:
    shown = html.escape(text(value, column))
    if column.kind == "label":
        return f'<th scope="row">{shown}</th>'
    return f"<td><b>{shown}</b></td>" if column.ours else f"<td>{shown}</td>"


# Renders documents as GitHub Markdown.


def as_markdown(document: Document) -> str:
    """A heading, the command that reproduces the document, one table per section, the notes."""
    written = _own_markup if document.markup else markdown
    parts = [f"# {written(document.title)}", ""]
    if document.command:
        parts += [*fenced(document.command), ""]
    for section in document.sections:
        parts += [*section_lines(section, markup=document.markup), ""]
    parts += [f"- {written(note)}" for note in document.notes]
    return "\n".join(parts).rstrip() + "\n"


def fenced(text: str) -> list[str]:
    """The text as a block of code that nothing in it ends."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [fence, visible(text, lines=True), fence]


def section_lines(section: Section, *, repeat_labels: bool = False, markup: bool = False) -> list[str]:
    """A section as a heading and a table. Labels that repeat those of the row above are left out, or repeated.

    ``markup``: as in Document.
    """
    written = _own_markup if markup else markdown
    lines = [f"## {written(section.title)}", ""] if section.title else []
    lines.append(_line(written(f"{column.group} {column.name}".strip()) for column in section.columns))
    lines.append(_line("---" if column.kind == "label" else "---:" for column in section.columns))
    for shown in cells(section, repeat_labels=repeat_labels):
        marked = zip(shown, section.columns, strict=True)
        safe = ((written(cell), column.ours and cell != "–") for cell, column in marked)
        lines.append(_line(f"**{cell}**" if ours else cell for cell, ours in safe))
    return lines


def _own_markup(text: str) -> str:
    """Text of this project, whose Markdown counts; only what would end a cell is escaped."""
    return visible(text).replace("|", "\\|")


def _line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


# Renders documents as LaTeX with booktabs rules, for papers that load `booktabs` and `graphicx`.
#
# Every table fits a page of the standard classes. A table with too many columns or rows is split into several, each
# with the row labels; a table that is slightly too wide is scaled to the text width.

WIDTH = 100
"""Characters per table row: at most about 1.3 times what fits, so that scaled text keeps 7 points."""
ROWS = 38
"""Rows that fit on a page below a caption."""

_NUMBERED = re.compile(r"(?:.*, )?([Tt]able|[Ff]igure) ([\w.]+): ")
_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "–": "--", "±": r"$\pm$", "µ": r"$\mu$", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$", "→": r"$\to$",
    "−": "$-$", "\n": " ",
}  # fmt: skip


def as_latex(document: Document) -> str:
    """One or more ``table`` environments per section; the command and the notes are comments before the first."""
    comments = [f"% {line}" for line in (NEEDS, document.command, *document.notes) if line]
    parts = [part for section in document.sections for part in _page_sections(section)]
    tables = [_table(document, part, index, continued) for index, (part, continued) in enumerate(parts)]
    return "\n".join([*comments, *tables]) + "\n"


NEEDS = "needs \\usepackage{booktabs,graphicx}"


def _page_sections(section: Section) -> Iterator[tuple[Section, bool]]:
    """Sections that fit a page, and whether each continues the one before."""
    continued = False
    for piece in pieces(section, WIDTH):
        for start in range(0, max(len(piece.rows), 1), ROWS):
            yield replace(piece, title=section.title, rows=piece.rows[start : start + ROWS]), continued
            continued = True


def escaped(value: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return "".join(_SPECIAL.get(character, character) for character in value)


def _table(document: Document, section: Section, index: int, continued: bool) -> str:
    alignment = "".join("l" if column.kind == "label" else "r" for column in section.columns)
    if continued:  # the parts of a table have one number and one caption
        caption = r"\addtocounter{table}{-1}\caption{(continued)}"
    else:  # without the number in print, beside which LaTeX would write its own
        numbered = _NUMBERED.match(document.title)
        words = document.title[numbered.end() :] if numbered else document.title
        words = words[:1].upper() + words[1:] + (f": {section.title}" if section.title else "")
        printed = f" ({numbered[1].lower()} {numbered[2]} in print)" if numbered else ""
        caption = rf"\caption{{{escaped(words + printed)}}}"
    groups = grouped(section.columns)
    spans, rules, at = [], [], 1
    for name, count in groups:
        spans.append(rf"\multicolumn{{{count}}}{{c}}{{{escaped(name)}}}")
        if name and count > 1:
            rules.append(rf"\cmidrule(lr){{{at}-{at + count - 1}}}")
        at += count
    group_header = [" & ".join(spans) + r" \\", *([" ".join(rules)] if rules else [])]
    lines = [
        r"\begin{table}",
        r"\centering\small\setlength{\tabcolsep}{4pt}",
        caption,
        rf"\label{{tab:{document.name}{'' if index == 0 else f'-{index + 1}'}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        *(group_header if any(name for name, _ in groups) else []),
        _row(column.name for column in section.columns),
        r"\midrule",
        *(_row(shown) for shown in cells(section)),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _row(values: Iterable[str]) -> str:
    return " & ".join(escaped(value) for value in values) + r" \\"


def rendered(document: Document, style: str, *, width: int | None = None) -> str:
    """The document as text: markdown, latex, html, csv, or else as on a terminal of ``width`` columns."""
    formats = {"markdown": as_markdown, "latex": as_latex, "html": as_html, "csv": as_csv}
    if style in formats:
        return formats[style](document)
    console = Console(highlight=False, width=width)
    with console.capture() as capture:
        console.print(as_rich(document, console.width), soft_wrap=False)
    return capture.get()
