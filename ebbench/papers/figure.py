"""What a figure is: its cells and the chart drawn from their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbench.papers.table import PaperOptions
from ebbench.runs.cell import Cell
from ebbench.runs.store import RunStore


@dataclass(frozen=True)
class PaperFigure:
    """One published figure. ``chart`` returns an altair chart; ``caption`` says what is ours and what is not.

    ``reads`` and ``workloads`` are those of a PaperTable, for the options of ``ebbench figures``.
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
    """For figures that need no run."""
    return []
