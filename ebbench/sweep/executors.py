"""Where cells run: processes of this machine, or a Ray cluster. Both give outcomes as they come, in any order."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from typing import Protocol

from ebbench.child import begin_pool_worker
from ebbench.errors import UsageError
from ebbench.sweep.work import Outcome, Task, work

ATTEMPTS = 3
"""How often a cell may take its worker process down before it counts as failed."""


class Executor(Protocol):
    """Runs tasks. Leaving the iteration early stops what is still running."""

    def outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Outcomes as they come; every task has exactly one."""
        ...


class Processes:
    """A pool of processes on this machine. A process that dies takes no cell with it but its own."""

    def __init__(self, workers: int | None = None, job: Callable[[Task], Outcome] = work) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"--workers must be at least 1, not {workers}")
        self.workers = workers or len(os.sched_getaffinity(0))
        self._job = job

    def outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Run the tasks. After a crash the cells that were running are tried again, one at a time."""
        waiting, suspects = list(tasks), list[Task]()
        died = dict.fromkeys((task.key for task in tasks), 0)
        while waiting or suspects:
            if suspects:
                running, _ = yield from self._until_crash([suspects.pop(0)], 1)
            else:
                running, waiting = yield from self._until_crash(waiting, self.workers)
            for task in running:
                died[task.key] += 1
                if died[task.key] < ATTEMPTS:
                    suspects.append(task)
                else:
                    why = f"the worker process died {ATTEMPTS} times running it (killed, or out of memory?)"
                    yield Outcome(task.key, None, why, 0.0, "")

    def _until_crash(self, tasks: list[Task], width: int) -> Generator[Outcome, None, tuple[list[Task], list[Task]]]:
        """Outcomes until a process dies. Returns the tasks that were running then, and those not yet started."""
        queue = list(reversed(tasks))
        running: dict[Future[Outcome], Task] = {}
        pool = ProcessPoolExecutor(width, mp_context=get_context("spawn"), initializer=begin_pool_worker)
        try:
            while queue or running:
                while queue and len(running) < width:
                    running[pool.submit(self._job, queue[-1])] = queue[-1]
                    queue.pop()
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    outcome = future.result()
                    del running[future]
                    yield outcome
        except BrokenProcessPool:
            return list(running.values()), list(reversed(queue))
        finally:
            _stop(pool)
        return [], []


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the workers now: an abandoned cell is not waited for."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        with suppress(OSError, AttributeError):
            process.terminate()
