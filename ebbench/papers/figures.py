"""All figures by name."""

from __future__ import annotations

from ebbench.errors import UnknownNameError
from ebbench.papers.figure import PaperFigure
from ebbench.papers.figure1 import FIGURE1
from ebbench.papers.figure3 import FIGURE3
from ebbench.papers.figure4 import FIGURE4, FIGURE5, FIGURE6
from ebbench.papers.figure11 import FIGURE11
from ebbench.papers.figure12 import FIGURE12

FIGURES: tuple[PaperFigure, ...] = (FIGURE1, FIGURE3, FIGURE4, FIGURE5, FIGURE6, FIGURE11, FIGURE12)


OF_RUNS = ("timeline", "slo")
"""Figures of runs of the user's own."""


def find_figure(name: str) -> PaperFigure:
    """A figure by name: ``figure3``, ``figure-3``, ``fig3`` or ``3``. Raises UnknownNameError."""
    wanted = name.lower().replace("-", "").replace("_", "").removeprefix("figure").removeprefix("fig")
    for figure in FIGURES:
        if figure.name.removeprefix("figure") == wanted:
            return figure
    raise UnknownNameError("figure", name, [*(figure.name for figure in FIGURES), *OF_RUNS])
