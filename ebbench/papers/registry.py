"""All tables and figures by name."""

from __future__ import annotations

from collections.abc import Mapping

from ebbench.errors import UnknownNameError, UsageError
from ebbench.papers.deferred_prefill import DEFERRED, DEFERRED_COSTS, DEFERRED_LIMITS, DEFERRED_OVER_K
from ebbench.papers.eb.disaggregation import TABLE19, TABLE20
from ebbench.papers.eb.fluid import TABLE8
from ebbench.papers.eb.grid import TABLE14, TABLE15, TABLE16
from ebbench.papers.eb.lengths import FIGURE11, TABLE9, TABLE12
from ebbench.papers.eb.online_threshold import CORRECTION, E3, E5, FIGURE3
from ebbench.papers.eb.prefill_costs import FIGURE7, LONG_CONTEXT, TABLE5, TABLE6, TABLE7
from ebbench.papers.eb.shifts import ADAPTATION, TABLE3, TABLE18
from ebbench.papers.eb.step_times import FIGURE1, FIGURE2, FIGURE8, FIGURE9, FIGURE10, KAPPA, TABLE1
from ebbench.papers.eb.thresholds import FIGURE12, TABLE10, TABLE11, TABLE13
from ebbench.papers.eb.workloads import FIGURE4, FIGURE5, FIGURE6, TABLE2, TABLE4, TABLE17
from ebbench.papers.items import INDEX
from ebbench.papers.staggered.composition import COMPOSITION
from ebbench.papers.staggered.decode import SBS_FIGURE7
from ebbench.papers.staggered.prefill import ABLATION, POOLS, SBS_FIGURE6, SBS_TABLE1, WAITING
from ebbench.papers.table import PaperFigure, PaperTable

FIGURES: tuple[PaperFigure, ...] = (
    FIGURE1, FIGURE2, FIGURE3, FIGURE4, FIGURE5, FIGURE6, FIGURE7, FIGURE8, FIGURE9, FIGURE10, FIGURE11, FIGURE12,
)  # fmt: skip


FIGURES_OF_RUNS = ("timeline", "slo")
"""Figures of the user's own runs."""


def find_figure(name: str) -> PaperFigure:
    """A figure by name: ``figure3``, ``figure-3``, ``fig3`` or ``3``. Raises UnknownNameError."""
    wanted = name.lower().replace("-", "").replace("_", "").removeprefix("figure").removeprefix("fig")
    for figure in FIGURES:
        if figure.name.removeprefix("figure") == wanted:
            return figure
    raise UnknownNameError("figure", name, [*(figure.name for figure in FIGURES), *FIGURES_OF_RUNS])


TABLES: tuple[PaperTable, ...] = (
    TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8, TABLE9, TABLE10, TABLE11, TABLE12, TABLE13,
    TABLE14, TABLE15, TABLE16, TABLE17, TABLE18, TABLE19, TABLE20, KAPPA, ADAPTATION, CORRECTION, LONG_CONTEXT,
    DEFERRED, DEFERRED_COSTS, DEFERRED_LIMITS, DEFERRED_OVER_K, E3, E5, WAITING, SBS_FIGURE6, SBS_TABLE1, ABLATION,
    POOLS, SBS_FIGURE7, COMPOSITION, INDEX,
)  # fmt: skip


OF_RUNS: Mapping[str, tuple[str, ...]] = {"phases": (), "slo": ("ttft", "tpot", "by_phase")}
"""Tables of the user's own runs, and the options that they read."""


def find_table(name: str) -> PaperTable:
    """A table by name: ``table3``, ``table-3`` or ``3``. Raises UnknownNameError, and UsageError for a number that
    several papers have."""
    wanted = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    meant = [table for table in TABLES if wanted in _names(table)]
    if len(meant) > 1:
        raise UsageError(f"{name} is a table of several papers; name one: {', '.join(table.name for table in meant)}")
    if meant:
        return meant[0]
    raise UnknownNameError("table", name, [*(table.name for table in TABLES), *OF_RUNS])


def _names(table: PaperTable) -> set[str]:
    return {name.replace("-", "") for name in (table.name, table.name.removeprefix("table"), *table.aliases)}
