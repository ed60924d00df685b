"""Renders documents as GitHub Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from ebbench.analysis.documents import Column, Document, Section
from ebbench.render.documents import cells


def as_markdown(document: Document) -> str:
    """A heading, the command that reproduces the document, one table per section, the notes."""
    parts = [f"# {_plain(document.title)}", ""]
    if document.command:
        parts += ["```", document.command, "```", ""]
    for section in document.sections:
        parts += [*section_lines(section), ""]
    parts += [f"- {_plain(note)}" for note in document.notes]
    return "\n".join(parts).rstrip() + "\n"


def section_lines(section: Section, *, repeat_labels: bool = False) -> list[str]:
    """A section as a heading and a table. Labels that repeat those of the row above are left out, or repeated."""
    lines = [f"## {_plain(section.title)}", ""] if section.title else []
    lines.append(_line(_header(column) for column in section.columns))
    lines.append(_line("---" if column.kind == "label" else "---:" for column in section.columns))
    for shown in cells(section, repeat_labels=repeat_labels):
        marked = zip(shown, section.columns, strict=True)
        lines.append(_line(f"**{cell}**" if column.ours and cell != "–" else cell for cell, column in marked))
    return lines


def _header(column: Column) -> str:
    return f"{column.group} {column.name}".strip()


def _line(values: Iterable[str]) -> str:
    return "| " + " | ".join(value if value.startswith("---") else _plain(value) for value in values) + " |"


def _plain(value: str) -> str:
    """The text with pipes and angle brackets escaped, which would end a cell or start an HTML element."""
    return value.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
