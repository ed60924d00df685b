"""Runs jobs as tasks of a Ray cluster. Only the driver stores results.

Results fit into Ray's own messages, so losing a node loses no finished job; Ray runs the unfinished jobs of that node
again on another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ebbench.errors import RunError, UsageError
from ebbench.process.ray_connection import THIS_MACHINE, given_address, joined, ray_for
from ebbench.runs.pool import Outcome, attempt

T = TypeVar("T")
R = TypeVar("R")

RETRIES = 5
"""How often Ray may run a job again after its worker or node died."""
_PER_CPU = 3  # tasks in flight per CPU of the cluster: keeps it busy and still stops quickly


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
