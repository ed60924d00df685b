"""Executes the cells missing in a store; each result is stored as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbench.errors import EbbenchError
from ebbench.runs.execute import Made, Task, make
from ebbench.runs.key import with_absolute_paths
from ebbench.runs.pool import InProcess, Outcome, Pool, pool_of
from ebbench.runs.prepare import device_of
from ebbench.runs.store import Measured, RunStore
from ebbench.spec.run import RunSpec
from ebbench.spec.server import is_server
from ebbench.workloads import load_scenario, load_workload
from ebbench.workloads.options import is_recorded

Stored = Callable[[RunSpec, Measured | EbbenchError, Outcome[Made]], None]
"""Called after every cell with its result or its error."""
Job = Callable[[Task], Made]


def run_missing(
    cells: Sequence[RunSpec],
    store: RunStore,
    *,
    workers: int | None = None,
    whole: bool = True,
    done: Callable[[RunSpec], None] | None = None,
) -> int:
    """Run the cells missing in the store; returns their number. ``whole`` keeps run directories, not only figures.

    Raises UsageError for unknown names before the first run, and the error of the first failing cell; cells finished
    before a failure or an interruption are kept.
    """
    todo = store.missing(cells, whole=whole)
    pool = pool_of(workers, len(todo)) if not any(cell.real_time for cell in todo) else InProcess()
    if not todo:
        return 0
    check_names(todo)

    def stored(cell: RunSpec, result: Measured | EbbenchError, _outcome: Outcome[Made]) -> None:
        if isinstance(result, EbbenchError):
            raise result
        if done is not None:
            done(cell)

    run_cells(todo, store, pool, whole=whole, stored=stored)
    return len(todo)


def run_cells(
    cells: Sequence[RunSpec], store: RunStore, pool: Pool, *, whole: bool, stored: Stored, job: Job = make
) -> None:
    """Run cells and store each result at once. Stops on an exception of ``stored`` or an interruption.

    Raises RunError if a result cannot be stored.
    """
    store.open()
    tasks = {}
    for cell in cells:
        directory = store.temporary(cell).resolve() if whole else None
        tasks[Task(with_absolute_paths(cell), directory)] = cell
    under_way: dict[RunSpec, Path] = {
        cell: task.directory for task, cell in tasks.items() if task.directory is not None
    }
    try:
        outcomes: Any = pool.outcomes(job, list(tasks))
        with closing(outcomes):
            for task, outcome in outcomes:
                cell = tasks[task]
                result: Measured | EbbenchError
                if outcome.error is not None:
                    result = outcome.error
                else:
                    result = store.keep(cell, outcome, task.directory)
                    under_way.pop(cell, None)
                stored(cell, result, outcome)
    finally:
        for directory in under_way.values():
            if directory.exists():
                store.abandon(directory)


def check_names(cells: Sequence[RunSpec]) -> None:
    """Raise UsageError for unknown names before the first run."""
    for cell in {(is_server(cell.engine), cell.device, cell.model, cell.cost): cell for cell in cells}.values():
        device_of(replace(cell, host=None))
    for name in dict.fromkeys(cell.plan.workload for cell in cells):
        if not is_recorded(name):
            load_workload(name)
    for name in dict.fromkeys(cell.plan.scenario for cell in cells if cell.plan.scenario is not None):
        load_scenario(name)
