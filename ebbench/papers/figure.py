"""A figure: its cells, and the chart of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbench.papers.table import PaperOptions, Published, said_of, setting_of
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec


@dataclass(frozen=True)
class PaperFigure:
    """One published figure. ``chart`` returns an altair chart, with published values if its last argument is true;
    ``caption`` says which parts are ours.

    ``reads``, ``workloads`` and ``published_on`` are as in PaperTable, for the options of ``ebbench figures``.
    """

    name: str
    title: str
    cells: Callable[[PaperOptions], list[RunSpec]]
    chart: Callable[[PaperOptions, RunStore, bool], Any]
    caption: str
    reads: tuple[str, ...]
    whole: bool = True
    workloads: tuple[str, ...] = ()
    published_on: Published | None = None

    def drawn(self, options: PaperOptions, store: RunStore) -> tuple[Any, str]:
        """The chart and its caption, which says what was run where that is not the published setting; published values
        of another setting are left out."""
        setting = setting_of(options, self.reads, self.published_on)
        said = f"{said_of(setting, 'figure')} " if setting.deviations else ""
        return self.chart(options, store, setting.beside_print), said + self.caption


def no_cells(_wish: PaperOptions) -> list[RunSpec]:
    """No cells, for figures that need no run."""
    return []
