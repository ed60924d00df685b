"""A figure: its cells, and the chart of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbench.papers.table import PaperOptions
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec


@dataclass(frozen=True)
class PaperFigure:
    """One published figure. ``chart`` returns an altair chart; ``caption`` says which parts are ours.

    ``reads`` and ``workloads`` are as in PaperTable, for the options of ``ebbench figures``.
    """

    name: str
    title: str
    cells: Callable[[PaperOptions], list[RunSpec]]
    chart: Callable[[PaperOptions, RunStore], Any]
    caption: str
    reads: tuple[str, ...]
    whole: bool = True
    workloads: tuple[str, ...] = ()


def no_cells(_wish: PaperOptions) -> list[RunSpec]:
    """No cells, for figures that need no run."""
    return []
