"""Running cells: a pool of processes, each result stored as soon as it is there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from ebbench.analysis.conclude import Setting, conclude
from ebbench.engines.sim import SimEngine
from ebbench.papers.cells import Cell
from ebbench.papers.store import CellStore, keep, measured_from_run, settle
from ebbench.records.manifest import wall_clock_ns
from ebbench.records.run import RunWriter
from vllm_eb.policy import parse_policy

Done = Callable[[Cell], None]


def run_missing(
    cells: Sequence[Cell], store: CellStore, *, workers: int | None = None, whole: bool = True, done: Done | None = None
) -> int:
    """Run the cells that the store lacks; returns how many. ``whole`` keeps the run directories, not figures alone.

    Raises what the first failing cell raises; cells finished before it, or before an interruption, are kept.
    """
    todo = store.missing(cells, whole=whole)
    if not todo:
        return 0
    store.root.mkdir(parents=True, exist_ok=True)
    count = min(workers or os.cpu_count() or 1, len(todo))
    if count == 1:
        for cell in todo:
            _finish(run_cell(cell, store.root, whole), done)
        return len(todo)
    # Fresh interpreters: forking a process that holds Arrow's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        futures = {pool.submit(run_cell, cell, store.root, whole) for cell in todo}
        try:
            _collect(futures, done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(todo)


def run_cell(cell: Cell, root: Path, whole: bool = True) -> Cell:
    """Run one cell in this process and store it under ``root``. Raises UsageError or RunError."""
    plan, device, policy = cell.plan(), cell.load_device(), parse_policy(cell.policy)
    anchor = wall_clock_ns()
    result = SimEngine().run(plan, policy, device, cell.options)
    temporary = Path(tempfile.mkdtemp(prefix=".cell-", dir=root))
    try:
        with RunWriter(temporary) as writer:
            run = conclude(writer, Setting(plan, policy, SimEngine.name, device, cell.options, anchor), result)
        keep(temporary, cell, measured_from_run(run.path), whole=whole)
        settle(temporary, root / cell.directory_name())
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return cell


def _collect(futures: set[Future[Cell]], done: Done | None) -> None:
    while futures:
        finished, futures = wait(futures, return_when=FIRST_COMPLETED)
        for future in finished:
            _finish(future.result(), done)


def _finish(cell: Cell, done: Done | None) -> None:
    if done is not None:
        done(cell)
