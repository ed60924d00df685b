"""Documents as LaTeX with booktabs rules: ``\\input`` them into a paper that loads ``booktabs``."""

from __future__ import annotations

from collections.abc import Iterable

from ebbench.analysis.documents import Document, Section
from ebbench.render.documents import cells, grouped

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "–": "--", "±": r"$\pm$", "µ": r"$\mu$", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$", "→": r"$\to$",
    "−": "$-$", "\n": " ",
}  # fmt: skip


def as_latex(document: Document) -> str:
    """One ``table`` environment a section; the command and the notes stand as comments above the first."""
    comments = [f"% {line}" for line in (document.command, *document.notes) if line]
    tables = [_table(document, section, index) for index, section in enumerate(document.sections)]
    return "\n".join([*comments, *tables]) + "\n"


def escaped(value: str) -> str:
    """Text in which every character that LaTeX reads as a command stands for itself."""
    return "".join(_SPECIAL.get(character, character) for character in value)


def _table(document: Document, section: Section, index: int) -> str:
    caption = document.title + (f": {section.title}" if section.title else "")
    alignment = "".join("l" if column.kind == "label" else "r" for column in section.columns)
    lines = [
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{escaped(caption)}}}",
        rf"\label{{tab:{document.name}{'' if index == 0 else f'-{index + 1}'}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        *_group_header(section),
        _row(column.name for column in section.columns),
        r"\midrule",
        *(_row(shown) for shown in cells(section)),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _group_header(section: Section) -> list[str]:
    groups = grouped(section.columns)
    if not any(name for name, _ in groups):
        return []
    spans, rules, at = [], [], 1
    for name, count in groups:
        spans.append(rf"\multicolumn{{{count}}}{{c}}{{{escaped(name)}}}")
        if name and count > 1:
            rules.append(rf"\cmidrule(lr){{{at}-{at + count - 1}}}")
        at += count
    return [" & ".join(spans) + r" \\", " ".join(rules)] if rules else [" & ".join(spans) + r" \\"]


def _row(values: Iterable[str]) -> str:
    return " & ".join(escaped(value) for value in values) + r" \\"
