"""Pools that run jobs in this process or in worker processes. Results arrive in order of completion.

A pool runs any picklable function of one argument; :class:`RayCluster` does the same on a Ray cluster.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from ebbench.engines.base import check_counts
from ebbench.errors import EbbenchError, RunError, UsageError
from ebbench.process.child import begin_pool_worker
from ebbench.process.ray_connection import THIS_MACHINE, given_address, joined, ray_for
from ebbench.process.termination import held, raise_if_stopped

T = TypeVar("T")
R = TypeVar("R")
_LOOK_S = 0.2
"""How often a thread that another one may stop looks whether it has, while jobs run."""
ATTEMPTS = 3
"""How often a job may crash its worker process before it counts as failed."""


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The value or the error of one job. ``seconds``: wall time; ``worker``: host and process id."""

    value: R | None
    error: EbbenchError | None = None
    seconds: float = 0.0
    worker: str = ""


class Pool(Protocol):
    """Runs jobs. Leaving the iteration early stops running jobs."""

    def outcomes(self, job: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, Outcome[R]]]:
        """Yield each task with its outcome, in order of completion; an exception becomes the outcome's error."""
        ...


def attempt(job: Callable[[T], R], task: T) -> Outcome[R]:
    """Run one job in this process. An exception from ebbench or an engine becomes a RunError with its source line."""
    started = time.monotonic()
    value: R | None = None
    error: EbbenchError | None = None
    try:
        value = job(task)
    except EbbenchError as problem:
        error = problem
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        error = RunError(f"{type(problem).__name__}: {problem} ({Path(last.filename).name}:{last.lineno})")
    return Outcome(value, error, time.monotonic() - started, f"{platform.node()}:{os.getpid()}")


class InProcess:
    """Runs jobs one after another in this process: for a single job, and for jobs that use servers."""

    workers = 1

    def outcomes(self, job: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, Outcome[R]]]:
        """Run the jobs in the order given."""
        for task in tasks:
            with held():  # until the caller has stored the outcome
                yield task, attempt(job, task)


class Processes:
    """A pool of newly started processes on this machine; forking a process with Arrow's threads can deadlock.

    If a process dies, only its own job fails: jobs that were running then are tried again, one at a time.
    """

    def __init__(self, workers: int | None = None) -> None:
        check_counts(workers=workers)
        self.workers = workers or usable_processors()

    def outcomes(self, job: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, Outcome[R]]]:
        """Run the jobs."""
        waiting, suspects = list(range(len(tasks))), list[int]()
        died = [0] * len(tasks)
        while waiting or suspects:
            if suspects:
                running, _ = yield from self._until_crash(job, tasks, [suspects.pop(0)], 1)
            else:
                running, waiting = yield from self._until_crash(job, tasks, waiting, self.workers)
            for index in running:
                died[index] += 1
                if died[index] < ATTEMPTS:
                    suspects.append(index)
                else:
                    why = f"the worker process died {ATTEMPTS} times running it (killed, or out of memory?)"
                    yield tasks[index], Outcome(None, RunError(f"{why}; finished runs are kept: try fewer --workers"))

    def _until_crash(
        self, job: Callable[[T], R], tasks: Sequence[T], chosen: list[int], width: int
    ) -> Generator[tuple[T, Outcome[R]], None, tuple[list[int], list[int]]]:
        """Yield outcomes until a process dies. Returns the jobs running then, and those not yet started."""
        queue = list(reversed(chosen))
        running: dict[Future[Outcome[R]], int] = {}
        pool = ProcessPoolExecutor(width, mp_context=get_context("spawn"), initializer=begin_pool_worker)
        try:
            while queue or running:
                while queue and len(running) < width:
                    with _interrupts_held(), _without_main():
                        future = pool.submit(attempt, job, tasks[queue[-1]])
                    running[future] = queue.pop()
                done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                raise_if_stopped()
                for future in done:
                    outcome = future.result()
                    yield tasks[running.pop(future)], outcome
        except BrokenProcessPool:
            return list(running.values()), list(reversed(queue))
        finally:
            _stop(pool)
        return [], []


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block; processes started in it ignore Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes started in it do not run the caller's script, which would start them again; they need nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _stop(pool: ProcessPoolExecutor) -> None:
    """Kill the workers: unfinished jobs are abandoned.

    Waits for the pool's thread: it closes the pipe by which Python wakes it at the end of the program, and where both
    fall together that is an error (``OSError: Bad file descriptor``, at the end of a command that did its work).
    """
    processes: list[Any] = list((getattr(pool, "_processes", None) or {}).values())
    manager: threading.Thread | None = getattr(pool, "_executor_manager_thread", None)
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        with suppress(OSError, AttributeError):
            process.terminate()
    if manager is not None:
        manager.join()


def usable_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def make_pool(workers: int | None, jobs: int) -> Pool:
    """A pool for so many jobs that need one core each; with one worker or one job, this process."""
    check_counts(workers=workers)
    count = min(workers or usable_processors(), jobs)
    return InProcess() if count <= 1 else Processes(count)


def values(pool: Pool, job: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
    """The values of the jobs as they finish. Raises the first error."""
    outcomes: Any = pool.outcomes(job, tasks)
    with closing(outcomes):
        for _, outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
            yield outcome.value


RETRIES = 5
"""How often Ray may run a job again after its worker or node died."""
_PER_CPU = 3  # tasks in flight per CPU of the cluster: keeps it busy and still stops quickly


# Runs jobs as tasks of a Ray cluster. Only the driver stores results.
#
# Results fit into Ray's own messages, so losing a node loses no finished job; Ray runs the unfinished jobs of that
# node again on another one.


class RayCluster:
    """Runs jobs on the cluster at ``address``: ``auto``, ``HOST:PORT``, or None for RAY_ADDRESS or a new local cluster.

    ``gpus``: GPUs per job: 1 for the vllm engine, so that every cell has its own. ``workers``: concurrent jobs; None:
    as many as fit on the cluster.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        gpus: float = 0.0,
        workers: int | None = None,
    ) -> None:
        if gpus < 0:
            raise UsageError(f"--gpus-per-cell must not be negative, not {gpus:g}")
        self._ray = ray_for("--executor ray")
        self._address = given_address(address) or THIS_MACHINE
        self.gpus, self.workers = gpus, workers

    def outcomes(self, job: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, Outcome[R]]]:
        """Run the jobs. Raises RunError if the cluster cannot be reached or cannot run the jobs."""
        with joined(self._ray, self._address, own_cpus=self.workers):
            yield from self._run(job, tasks)

    def _run(self, job: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, Outcome[R]]]:
        if self.gpus and self._ray.cluster_resources().get("GPU", 0) < self.gpus:
            raise RunError(f"the cluster has no node with {self.gpus:g} GPU(s); start one with ray start --num-gpus")
        remote = self._ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=RETRIES)(attempt)
        queue = list(reversed(tasks))
        running: dict[Any, T] = {}
        try:
            while queue or running:
                while queue and len(running) < self._room():
                    task = queue.pop()
                    running[remote.remote(job, task)] = task
                done, _ = self._ray.wait(list(running), num_returns=1)
                for reference in done:
                    yield running.pop(reference), self._outcome(reference)
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def _room(self) -> int:
        if self.workers is not None:
            return self.workers
        return max(1, _PER_CPU * int(self._ray.cluster_resources().get("CPU", 1)))

    def _outcome(self, reference: Any) -> Outcome[Any]:
        try:
            outcome: Outcome[Any] = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            line = (str(error).strip().splitlines() or [""])[0]
            why = f"lost on the cluster after {RETRIES} retries ({type(error).__name__}: {line})"
            return Outcome(None, RunError(why))
        return outcome
