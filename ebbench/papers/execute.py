"""Running cells: a pool of processes, each result stored as soon as it is there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from ebbench.analysis.conclude import Setting, conclude
from ebbench.child import begin_pool_worker
from ebbench.engines.checks import check_counts
from ebbench.errors import RunError
from ebbench.papers.cells import Cell
from ebbench.papers.store import CellStore, keep, measured_from_run, settle
from ebbench.records.manifest import wall_clock_ns
from ebbench.records.run import RunWriter
from ebbench.workloads import load_scenario, load_workload
from vllm_eb.policy import parse_policy

Done = Callable[[Cell], None]
_TEMPORARY, _REMAINS_S = ".cell-", 3600.0


def run_missing(
    cells: Sequence[Cell], store: CellStore, *, workers: int | None = None, whole: bool = True, done: Done | None = None
) -> int:
    """Run the cells that the store lacks; returns how many. ``whole`` keeps the run directories, not figures alone.

    Raises UsageError for names that do not exist, before anything runs, and what the first failing cell raises; cells
    finished before it, or before an interruption, are kept.
    """
    check_counts(workers=workers)
    todo = store.missing(cells, whole=whole)
    if not todo:
        return 0
    _check_names(todo)
    store.root.mkdir(parents=True, exist_ok=True)
    _clear_remains(store.root)
    count = min(workers or os.cpu_count() or 1, len(todo))
    if count == 1:
        for cell in todo:
            _finish(run_cell(cell, store.root, whole), done)
        return len(todo)
    # Fresh interpreters: forking a process that holds Arrow's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count, mp_context=context, initializer=begin_pool_worker) as pool:
        futures = {pool.submit(run_cell, cell, store.root, whole) for cell in todo}
        try:
            _collect(futures, done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
    return len(todo)


def _check_names(cells: Sequence[Cell]) -> None:
    """A name that does not exist is refused before the first run, not after hours of them."""
    for cell in {(cell.device, cell.model): cell for cell in cells}.values():
        cell.load_device()
    for name in dict.fromkeys(cell.workload for cell in cells):
        if not name.startswith("trace:"):
            load_workload(name)
    for name in dict.fromkeys(cell.scenario for cell in cells if cell.scenario is not None):
        load_scenario(name)


def _clear_remains(root: Path) -> None:
    """Remove what workers that were killed have left: hidden directories nobody has touched for an hour."""
    for path in root.glob(f"{_TEMPORARY}*"):
        if time.time() - path.stat().st_mtime > _REMAINS_S:
            shutil.rmtree(path, ignore_errors=True)


def run_cell(cell: Cell, root: Path, whole: bool = True) -> Cell:
    """Run one cell in this process and store it under ``root``. Raises UsageError, RunError, KeyboardInterrupt."""
    plan, device, policy = cell.plan(), cell.load_device(), parse_policy(cell.policy)
    anchor = wall_clock_ns()
    engine = cell.engine()
    result = engine.run(plan, policy, device, cell.options, None)
    if result.interrupted:
        raise KeyboardInterrupt  # the engine hands back what there is; half a run is no answer to the cell
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=root))
    try:
        with RunWriter(temporary) as writer:
            run = conclude(writer, Setting(plan, policy, engine.name, device, cell.options, anchor), result)
        measured = measured_from_run(run.path)
        measured = replace(measured, figures={**measured.figures, **cell.further_figures(result)})
        keep(temporary, cell, measured, whole=whole)
        settle(temporary, root / cell.directory_name())
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return cell


def _collect(futures: set[Future[Cell]], done: Done | None) -> None:
    while futures:
        finished, futures = wait(futures, return_when=FIRST_COMPLETED)
        for future in finished:
            try:
                cell = future.result()
            except BrokenProcessPool:
                raise RunError(
                    "a worker was killed, perhaps for lack of memory; finished runs are kept: try fewer --workers"
                ) from None
            _finish(cell, done)


def _finish(cell: Cell, done: Done | None) -> None:
    if done is not None:
        done(cell)
