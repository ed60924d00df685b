"""Runs a sweep: stored cells are kept, missing ones are run and stored as soon as they finish."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbench.errors import EbbenchError
from ebbench.records.lock import sole_use
from ebbench.runs.api_server import as_answered
from ebbench.runs.drive import Job, run_cells
from ebbench.runs.execute import Made, make
from ebbench.runs.pool import InProcess, Outcome, Pool
from ebbench.runs.store import Measured
from ebbench.spec.run import RunSpec
from ebbench.spec.server import OFF, is_server
from ebbench.sweep.spec import Sweep
from ebbench.sweep.store import Finished, SweepStore, header_values


@dataclass(frozen=True)
class SweepProgress:
    """Progress of a sweep.

    ``kept``: cells stored before; ``done`` and ``failed``: cells of this call, in ``elapsed_s``.
    """

    cells: int
    kept: int
    done: int
    failed: int
    elapsed_s: float

    @property
    def open(self) -> int:
        """Number of cells still to run."""
        return self.cells - self.kept - self.done - self.failed

    @property
    def cells_per_s(self) -> float:
        """Cells per second of this call."""
        return (self.done + self.failed) / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True)
class Failed:
    """A cell that could not be run, with the error."""

    cell: RunSpec
    error: EbbenchError


@dataclass(frozen=True)
class Result:
    """State of a sweep: finished cells in grid order, failed ones, and the progress of this call.

    ``kept_since_unix_s``: when the oldest cell from before was stored; None without such cells.
    """

    sweep: Sweep
    finished: tuple[Finished, ...]
    failed: tuple[Failed, ...]
    progress: SweepProgress
    interrupted: bool
    results: Path
    kept_since_unix_s: float | None = None

    @property
    def invalid(self) -> tuple[Finished, ...]:
        """Finished cells whose runs are INVALID."""
        return tuple(entry for entry in self.finished if not entry.measured.valid)


class _CellCounts:
    """Counts the cells of this call by outcome."""

    def __init__(self, sweep: Sweep, todo: int) -> None:
        self._cells, self._todo, self._started = len(sweep.cells), todo, time.monotonic()
        self.done = 0
        self.failed: list[Failed] = []

    def repeated(self, cells: int) -> None:
        """So many cells run once more."""
        self._cells += cells
        self._todo += cells

    def progress(self) -> SweepProgress:
        """How far the sweep is now."""
        kept = self._cells - self._todo
        return SweepProgress(self._cells, kept, self.done, len(self.failed), time.monotonic() - self._started)


def run_sweep(
    sweep: Sweep,
    store: SweepStore,
    pool: Pool,
    *,
    spec: bytes,
    report: Callable[[SweepProgress], None],
    job: Job = make,
) -> Result:
    """Run the missing cells. Ctrl-C ends it early with ``interrupted``; finished cells are kept.

    Cells on external servers run one at a time, after the others, and simulated ones that would keep vLLM's API server
    busy once more with it (``api_server_if_busy``): those replace the others in the result. Raises RunError if results
    cannot be stored, DataError if stored ones are damaged, UsageError if another sweep uses the directory.
    """
    with sole_use(store.directory):
        return _run_sweep(sweep, store, pool, spec, report, job)


def _run_sweep(
    sweep: Sweep, store: SweepStore, pool: Pool, spec: bytes, report: Callable[[SweepProgress], None], job: Job
) -> Result:
    store.open(spec, header_values(sweep.cells))
    todo = missing(sweep, store)
    kept_since = store.runs.stored_since(set(sweep.cells).difference(todo))
    counts, interrupted = _CellCounts(sweep, len(todo)), False

    def stored(cell: RunSpec, result: Measured | EbbenchError, outcome: Outcome[Made]) -> None:
        if isinstance(result, EbbenchError):
            store.failed(cell, result, outcome.seconds)
            counts.failed.append(Failed(cell, result))
        else:
            store.succeeded(cell)
            counts.done += 1
        report(counts.progress())

    def run(cells: Sequence[RunSpec], chosen: Pool) -> None:
        if cells:
            run_cells(cells, store.runs, chosen, whole=sweep.keep_runs, stored=stored, job=job)

    report(counts.progress())
    try:
        run([cell for cell in todo if not is_server(cell.engine)], pool)
        run([cell for cell in todo if is_server(cell.engine)], InProcess())
        if sweep.api_server_if_busy:
            sweep = behind_api_servers(sweep, store)
            more = missing(sweep, store)
            again = [cell for cell in more if cell.server.api_server != OFF]
            counts.repeated(len(again))
            run(again, pool)
    except KeyboardInterrupt:
        interrupted = True
    finished = tuple(store.load(sweep.cells))
    results = store.write_results(finished)
    return Result(sweep, finished, tuple(counts.failed), counts.progress(), interrupted, results, kept_since)


def behind_api_servers(sweep: Sweep, store: SweepStore) -> Sweep:
    """The sweep with vLLM's API server in cells that would keep it busy, and in those they are compared with.

    Cells that are not finished stay as they are, unless one that they are compared with is.
    """

    def figures(cell: RunSpec) -> Mapping[str, Any] | None:
        found = store.runs.get(cell)
        return None if found is None else found.figures

    answered = as_answered(sweep.cells, figures)
    return replace(sweep, cells=tuple(answered[cell] for cell in sweep.cells))


def missing(sweep: Sweep, store: SweepStore) -> list[RunSpec]:
    """Cells without a stored result, in the order of the grid."""
    absent = set(store.runs.missing(sweep.cells, whole=sweep.keep_runs))
    return [cell for cell in sweep.cells if cell in absent]


def summary_lines(errors: Iterable[str], limit: int = 5) -> list[str]:
    """Errors of failed cells with their numbers, the most frequent first."""
    lines = [f"{count} cell(s): {error}" for error, count in Counter(errors).most_common()]
    return lines[:limit] + ([f"and {len(lines) - limit} other errors"] if len(lines) > limit else [])


def named(cells: Sequence[Finished], axes: Sequence[str]) -> list[tuple[str, str]]:
    """Names of finished cells, each with the reasons why it is INVALID."""
    from ebbench.runs.settings import plain
    from ebbench.spec.run import settings_of

    found = []
    for entry in cells:
        settings = settings_of(entry.cell)
        where = ", ".join(f"{name}={plain(settings[name])}" for name in axes) or "the only cell"
        found.append((where, "; ".join(entry.measured.figures.get("reasons") or ())))
    return found
