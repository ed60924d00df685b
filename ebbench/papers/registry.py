"""All tables by name."""

from __future__ import annotations

from collections.abc import Mapping

from ebbench.errors import UnknownNameError
from ebbench.papers.deferred.table01 import DEFERRED
from ebbench.papers.eb.adaptation import ADAPTATION
from ebbench.papers.eb.appendix_e import E3, E5
from ebbench.papers.eb.corrections import CORRECTION
from ebbench.papers.eb.long_context import LONG_CONTEXT
from ebbench.papers.eb.table02 import TABLE2
from ebbench.papers.eb.table03 import TABLE3
from ebbench.papers.eb.table04 import TABLE4
from ebbench.papers.eb.table06 import TABLE6
from ebbench.papers.eb.table09 import TABLE9
from ebbench.papers.eb.table10_11 import TABLE10, TABLE11
from ebbench.papers.eb.table13 import TABLE13
from ebbench.papers.eb.table14_16 import TABLE14, TABLE15, TABLE16
from ebbench.papers.eb.table18 import TABLE18
from ebbench.papers.eb.table19_20 import TABLE19, TABLE20
from ebbench.papers.staggered.ablation import ABLATION
from ebbench.papers.staggered.composition import COMPOSITION
from ebbench.papers.staggered.figure06_table01 import FIGURE6, TABLE1, WAITING
from ebbench.papers.staggered.figure07 import FIGURE7
from ebbench.papers.staggered.pools import POOLS
from ebbench.papers.table import PaperTable

TABLES: tuple[PaperTable, ...] = (
    TABLE2, TABLE3, TABLE4, TABLE6, TABLE9, TABLE10, TABLE11, TABLE13, TABLE14, TABLE15, TABLE16, TABLE18, TABLE19,
    TABLE20, ADAPTATION, CORRECTION, LONG_CONTEXT, DEFERRED, E3, E5, WAITING, FIGURE6, TABLE1, ABLATION, POOLS, FIGURE7,
    COMPOSITION,
)  # fmt: skip


OF_RUNS: Mapping[str, tuple[str, ...]] = {"phases": (), "slo": ("ttft", "tpot", "by_phase")}
"""Tables of the user's own runs, and the options that they read."""


def find_table(name: str) -> PaperTable:
    """A table by name: ``table3``, ``table-3`` or ``3``. Raises UnknownNameError."""
    wanted = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    for table in TABLES:
        known = {table.name, table.name.removeprefix("table"), *table.aliases}
        if wanted in {one.replace("-", "") for one in known}:
            return table
    raise UnknownNameError("table", name, [*(table.name for table in TABLES), *OF_RUNS])
