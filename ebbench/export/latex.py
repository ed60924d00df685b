"""Renders documents as LaTeX with booktabs rules, for papers that load ``booktabs`` and ``graphicx``.

Every table fits a page of the standard classes. A table with too many columns or rows is split into several, each with
the row labels; a table that is slightly too wide is scaled to the text width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ebbench.analysis.documents import Document, Section
from ebbench.render.documents import cells, grouped, pieces

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
    parts = [part for section in document.sections for part in _parts(section)]
    tables = [_table(document, part, index, continued) for index, (part, continued) in enumerate(parts)]
    return "\n".join([*comments, *tables]) + "\n"


NEEDS = "needs \\usepackage{booktabs,graphicx}"


def _parts(section: Section) -> Iterator[tuple[Section, bool]]:
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
    lines = [
        r"\begin{table}",
        r"\centering\small\setlength{\tabcolsep}{4pt}",
        _caption(document, section, continued),
        rf"\label{{tab:{document.name}{'' if index == 0 else f'-{index + 1}'}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        *_group_header(section),
        _row(column.name for column in section.columns),
        r"\midrule",
        *(_row(shown) for shown in cells(section)),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _caption(document: Document, section: Section, continued: bool) -> str:
    """The caption, without the number in print, beside which LaTeX would write its own.

    The parts of a table have one number and one caption.
    """
    if continued:
        return r"\addtocounter{table}{-1}\caption{(continued)}"
    numbered = _NUMBERED.match(document.title)
    words = document.title[numbered.end() :] if numbered else document.title
    words = words[:1].upper() + words[1:] + (f": {section.title}" if section.title else "")
    printed = f" ({numbered[1].lower()} {numbered[2]} in print)" if numbered else ""
    return rf"\caption{{{escaped(words + printed)}}}"


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
