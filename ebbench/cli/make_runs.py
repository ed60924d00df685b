"""Executes the runs that a table, a figure or an advice lacks, with a progress line on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbench.papers.figure import PaperFigure
    from ebbench.papers.table import PaperOptions, PaperTable
    from ebbench.runs.store import RunStore
    from ebbench.spec.run import RunSpec


def make_runs(
    table: PaperTable | PaperFigure, options: PaperOptions, store: RunStore, *, workers: int | None, quiet: bool
) -> None:
    """Execute the missing runs of a table or figure, with a progress line on stderr."""
    with_progress(table.name, table.cells(options), store, whole=table.whole, workers=workers, quiet=quiet)


def with_progress(
    label: str, cells: Sequence[RunSpec], store: RunStore, *, whole: bool, workers: int | None, quiet: bool
) -> None:
    """Execute the cells that the store lacks, with a progress line on stderr."""
    missing = store.missing(cells, whole=whole)
    if not missing:
        return
    from ebbench.errors import InterruptedRunError
    from ebbench.render.console import Console
    from ebbench.render.live import Work, shown
    from ebbench.runs.drive import run_missing

    with shown(Console(stderr=True), Work(label, len(missing)), quiet=quiet) as work:

        def done(_cell: RunSpec) -> None:
            work.done += 1

        try:
            run_missing(missing, store, workers=workers, whole=whole, done=done)
        except KeyboardInterrupt:
            left = len(store.missing(missing, whole=whole))
            raise InterruptedRunError(
                f"interrupted; {len(missing) - left} runs are kept in {store.root}; the same command continues "
                f"with the other {left}"
            ) from None
