"""Renders documents as GitHub Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ebbench.analysis.documents import Column, Document, Section
from ebbench.render.documents import cells
from ebbench.untrusted import markdown, visible


def as_markdown(document: Document) -> str:
    """A heading, the command that reproduces the document, one table per section, the notes."""
    parts = [f"# {markdown(document.title)}", ""]
    if document.command:
        parts += [*fenced(document.command), ""]
    for section in document.sections:
        parts += [*section_lines(section), ""]
    parts += [f"- {markdown(note)}" for note in document.notes]
    return "\n".join(parts).rstrip() + "\n"


def fenced(text: str) -> list[str]:
    """The text as a block of code that nothing in it ends."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [fence, visible(text, lines=True), fence]


def section_lines(section: Section, *, repeat_labels: bool = False) -> list[str]:
    """A section as a heading and a table. Labels that repeat those of the row above are left out, or repeated."""
    lines = [f"## {markdown(section.title)}", ""] if section.title else []
    lines.append(_line(markdown(_header(column)) for column in section.columns))
    lines.append(_line("---" if column.kind == "label" else "---:" for column in section.columns))
    for shown in cells(section, repeat_labels=repeat_labels):
        marked = zip(shown, section.columns, strict=True)
        safe = ((markdown(cell), column.ours and cell != "–") for cell, column in marked)
        lines.append(_line(f"**{cell}**" if ours else cell for cell, ours in safe))
    return lines


def _header(column: Column) -> str:
    return f"{column.group} {column.name}".strip()


def _line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"
