"""All tables by name."""

from __future__ import annotations

from ebbench.errors import UnknownNameError
from ebbench.papers.deferred import DEFERRED
from ebbench.papers.estimators import E3, E5
from ebbench.papers.goodput import TABLE18
from ebbench.papers.grid import TABLE14, TABLE15, TABLE16
from ebbench.papers.lengths import TABLE9
from ebbench.papers.table import PaperTable
from ebbench.papers.table2 import TABLE2
from ebbench.papers.table3 import TABLE3
from ebbench.papers.table13 import TABLE13
from ebbench.papers.thresholds import TABLE10, TABLE11

TABLES: tuple[PaperTable, ...] = (
    TABLE2, TABLE3, TABLE9, TABLE10, TABLE11, TABLE13, TABLE14, TABLE15, TABLE16, TABLE18, DEFERRED, E3,
    E5,
)  # fmt: skip


def find_table(name: str) -> PaperTable:
    """A table by name: ``table3``, ``table-3`` or ``3``. Raises UnknownNameError."""
    wanted = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    for table in TABLES:
        known = {table.name, table.name.removeprefix("table"), *table.aliases}
        if wanted in {one.replace("-", "") for one in known}:
            return table
    raise UnknownNameError("table", name, [table.name for table in TABLES])
