"""All figures by name."""

from __future__ import annotations

from ebbench.errors import UnknownNameError
from ebbench.papers.eb.figure01 import FIGURE1
from ebbench.papers.eb.figure03 import FIGURE3
from ebbench.papers.eb.figure04_06 import FIGURE4, FIGURE5, FIGURE6
from ebbench.papers.eb.figure11 import FIGURE11
from ebbench.papers.eb.figure12 import FIGURE12
from ebbench.papers.eb.kernel_parts import FIGURE2, FIGURE8, FIGURE9, FIGURE10
from ebbench.papers.eb.linear_fit import FIGURE7
from ebbench.papers.table import PaperFigure

FIGURES: tuple[PaperFigure, ...] = (
    FIGURE1, FIGURE2, FIGURE3, FIGURE4, FIGURE5, FIGURE6, FIGURE7, FIGURE8, FIGURE9, FIGURE10, FIGURE11, FIGURE12,
)  # fmt: skip


OF_RUNS = ("timeline", "slo")
"""Figures of the user's own runs."""


def find_figure(name: str) -> PaperFigure:
    """A figure by name: ``figure3``, ``figure-3``, ``fig3`` or ``3``. Raises UnknownNameError."""
    wanted = name.lower().replace("-", "").replace("_", "").removeprefix("figure").removeprefix("fig")
    for figure in FIGURES:
        if figure.name.removeprefix("figure") == wanted:
            return figure
    raise UnknownNameError("figure", name, [*(figure.name for figure in FIGURES), *OF_RUNS])
