"""Plans and runs with a line of progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ebbench.devices.base import Device
from ebbench.errors import InterruptedRunError
from ebbench.records.plan import Plan
from ebbench.render.documents import Console
from ebbench.render.live import Work, reporter, shown
from ebbench.runs.execute import Executed, execute
from ebbench.runs.prepare import Prepared, Series
from ebbench.spec.run import RunSpec

if TYPE_CHECKING:
    from ebbench.runs.store import RunStore


def with_progress(
    label: str, cells: Sequence[RunSpec], store: RunStore, *, whole: bool, workers: int | None, quiet: bool
) -> None:
    """Execute the cells that the store lacks, with a progress line on stderr."""
    from ebbench.runs.store import run_missing

    missing = store.missing(cells, whole=whole)
    if not missing:
        return

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


def planned(series: Series, seed: int, device: Device, messages: Console, *, quiet: bool) -> Plan:
    """The plan of one seed; its reading is shown. Raises UsageError for a request that does not fit."""
    with shown(messages, Work(f"reading {series.spec.plan.workload}"), quiet=quiet):
        return series.plan(seed, device)


def measured(
    ready: Prepared, directory: Path, label: str, messages: Console, *, quiet: bool, brief: bool = False
) -> Executed:
    """Execute a run and store it in ``directory``, with a progress line named ``label``.

    ``brief``: it is one run of many, of which only long ones are shown.
    """
    known = ready.plan.release_for_s is None
    with reporter(messages, label, len(ready.plan), quiet=quiet, brief=brief, known=known) as observer:
        return execute(ready, directory, observer)
