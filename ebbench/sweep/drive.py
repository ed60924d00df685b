"""Carrying out a sweep: what is there already stays, the rest is run, every finished cell is stored at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ebbench.errors import UsageError
from ebbench.sweep.executors import Executor
from ebbench.sweep.settings import with_absolute_paths
from ebbench.sweep.spec import Cell, Sweep
from ebbench.sweep.store import Finished, Store
from ebbench.sweep.work import Task


@dataclass(frozen=True)
class Progress:
    """How far a sweep is. ``kept`` cells were there before; ``elapsed_s`` of this call."""

    cells: int
    kept: int
    done: int
    failed: int
    elapsed_s: float

    @property
    def open(self) -> int:
        """Cells still to run."""
        return self.cells - self.kept - self.done - self.failed

    @property
    def cells_per_s(self) -> float:
        """Rate of this call."""
        return (self.done + self.failed) / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True)
class Result:
    """Where a sweep stands: finished cells in the order of the grid, failed ones, and how this call went."""

    sweep: Sweep
    finished: tuple[Finished, ...]
    failed: tuple[Finished, ...]
    progress: Progress
    interrupted: bool
    results: Path


def run_sweep(
    sweep: Sweep, store: Store, executor: Executor, *, spec: bytes, report: Callable[[Progress], None]
) -> Result:
    """Run what is missing. Ctrl-C ends it early with ``interrupted``; nothing finished is lost.

    Raises RunError when results cannot be stored, DataError when stored ones are damaged.
    """
    store.open(spec)
    todo = missing(sweep, store)
    started = time.monotonic()
    kept, done, interrupted = len(sweep.cells) - len(todo), 0, False
    failed: list[Finished] = []
    cells = {cell.key: cell for cell in todo}

    def progress() -> Progress:
        return Progress(len(sweep.cells), kept, done, len(failed), time.monotonic() - started)

    report(progress())
    try:
        with closing(executor.outcomes([_task(cell, sweep, store) for cell in todo])) as outcomes:  # type: ignore[type-var]
            for outcome in outcomes:
                entry = store.record(cells[outcome.key], outcome)
                if entry.summary is None:
                    failed.append(entry)
                else:
                    done += 1
                report(progress())
    except KeyboardInterrupt:
        interrupted = True
    finished = store.load(sweep.cells)
    ordered = tuple(finished[cell.key] for cell in sweep.cells if cell.key in finished)
    return Result(sweep, ordered, tuple(failed), progress(), interrupted, store.write_results(ordered))


def missing(sweep: Sweep, store: Store) -> list[Cell]:
    """Cells that are not there yet, in the order of the grid."""
    there = store.finished_keys()
    return [cell for cell in sweep.cells if cell.key not in there]


def _task(cell: Cell, sweep: Sweep, store: Store) -> Task:
    run_dir = None
    if sweep.keep_runs:
        run_dir = _fresh(store.run_dir(cell.key).resolve())
    return Task(cell.key, with_absolute_paths(cell.settings), run_dir)


def _fresh(run_dir: Path) -> Path:
    """The directory of a cell that did not finish is a leftover; it is set aside, not deleted."""
    if not run_dir.exists():
        return run_dir
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.unfinished-{number}")).exists():
        number += 1
    try:
        run_dir.rename(aside)
    except OSError as error:
        raise UsageError(f"{run_dir} is in the way and cannot be moved: {error.strerror or error}") from None
    return run_dir


def summary_lines(errors: Iterable[str], limit: int = 5) -> list[str]:
    """Why cells fail, equal errors together, the most frequent first."""
    lines = [f"{count} cell(s): {error}" for error, count in Counter(errors).most_common()]
    return lines[:limit] + ([f"and {len(lines) - limit} other errors"] if len(lines) > limit else [])
