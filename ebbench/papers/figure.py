"""A figure: its cells, and the chart of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbench.papers.table import PaperOptions
from ebbench.runs.cell import Cell
from ebbench.runs.store import RunStore


@dataclass(frozen=True)
class PaperFigure:
    """One published figure. ``chart`` returns an altair chart; ``caption`` says which parts are ours.

    ``reads`` and ``workloads`` are as in PaperTable, for the options of ``ebbench figures``.
    """

    name: str
    title: str
    cells: Callable[[PaperOptions], list[Cell]]
    chart: Callable[[PaperOptions, RunStore], Any]
    caption: str
    reads: tuple[str, ...]
    whole: bool = True
    workloads: tuple[str, ...] = ()


def no_cells(_wish: PaperOptions) -> list[Cell]:
    """No cells, for figures that need no run."""
    return []
