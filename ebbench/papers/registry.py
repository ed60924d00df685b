"""All tables by name."""

from __future__ import annotations

from collections.abc import Mapping

from ebbench.errors import UnknownNameError, UsageError
from ebbench.papers.deferred.figures import DEFERRED_COSTS, DEFERRED_LIMITS, DEFERRED_OVER_K
from ebbench.papers.deferred.table01 import DEFERRED
from ebbench.papers.eb.adaptation import ADAPTATION
from ebbench.papers.eb.appendix_e import E3, E5
from ebbench.papers.eb.convexity import KAPPA
from ebbench.papers.eb.corrections import CORRECTION
from ebbench.papers.eb.linear_fit import TABLE5, TABLE7
from ebbench.papers.eb.long_context import LONG_CONTEXT
from ebbench.papers.eb.table01 import TABLE1 as EB_TABLE1
from ebbench.papers.eb.table02 import TABLE2
from ebbench.papers.eb.table03 import TABLE3
from ebbench.papers.eb.table04 import TABLE4
from ebbench.papers.eb.table06 import TABLE6
from ebbench.papers.eb.table08 import TABLE8
from ebbench.papers.eb.table09 import TABLE9
from ebbench.papers.eb.table10_11 import TABLE10, TABLE11
from ebbench.papers.eb.table12 import TABLE12
from ebbench.papers.eb.table13 import TABLE13
from ebbench.papers.eb.table14_16 import TABLE14, TABLE15, TABLE16
from ebbench.papers.eb.table17 import TABLE17
from ebbench.papers.eb.table18 import TABLE18
from ebbench.papers.eb.table19_20 import TABLE19, TABLE20
from ebbench.papers.items import INDEX
from ebbench.papers.staggered.ablation import ABLATION
from ebbench.papers.staggered.composition import COMPOSITION
from ebbench.papers.staggered.figure06_table01 import FIGURE6, TABLE1, WAITING
from ebbench.papers.staggered.figure07 import FIGURE7
from ebbench.papers.staggered.pools import POOLS
from ebbench.papers.table import PaperTable

TABLES: tuple[PaperTable, ...] = (
    EB_TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8, TABLE9, TABLE10, TABLE11, TABLE12, TABLE13,
    TABLE14, TABLE15, TABLE16, TABLE17, TABLE18, TABLE19, TABLE20, KAPPA, ADAPTATION, CORRECTION, LONG_CONTEXT,
    DEFERRED, DEFERRED_COSTS, DEFERRED_LIMITS, DEFERRED_OVER_K, E3, E5, WAITING, FIGURE6, TABLE1, ABLATION, POOLS,
    FIGURE7, COMPOSITION, INDEX,
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
    return {each.replace("-", "") for each in (table.name, table.name.removeprefix("table"), *table.aliases)}
