"""Runs jobs as tasks of a Ray cluster. Only the driver stores results.

Results fit into Ray's own messages, so losing a node loses no finished job; Ray runs the unfinished jobs of that node
again on another one.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from ebbench.child import descendants_guarded
from ebbench.errors import RunError, UsageError
from ebbench.extras import need
from ebbench.runs.pool import Outcome, attempt
from ebbench.termination import signals_kept

T = TypeVar("T")
R = TypeVar("R")

RETRIES = 5
"""How often Ray may run a job again after its worker or node died."""
_PER_CPU = 3  # tasks in flight per CPU of the cluster: keeps it busy and still stops quickly
CONNECT_S = 5.0
"""How long an address may take to accept a connection."""


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
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._ray = need("ray", "--executor ray", "sweep")
        # By default Ray joins the cluster last started on this machine, even another user's.
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.gpus, self.workers = gpus, workers

    def outcomes(self, job: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, Outcome[R]]]:
        """Run the jobs. Raises RunError if the cluster cannot be reached or cannot run the jobs."""
        with self._guarded():
            ours = self._connect()
            try:
                yield from self._run(job, tasks)
            finally:
                if ours:
                    self._ray.shutdown()

    def _guarded(self) -> AbstractContextManager[None]:
        """A cluster of its own ends with this process: by itself, Ray's agents notice a minute late that it was
        killed."""
        own = self._address == "local" and not self._ray.is_initialized()
        return descendants_guarded() if own else nullcontext()

    def _connect(self) -> bool:
        """Join the cluster; returns False if this process was connected already, which it then stays."""
        if self._ray.is_initialized():
            return False
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address == "local":
            options |= {"include_dashboard": False, "num_cpus": self.workers}
        else:
            _check_listening(self._address)
        try:
            with signals_kept():  # Ray handles SIGTERM with sys.exit, which would lose measurements
                self._ray.init(address=self._address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "this machine" if self._address == "local" else self._address
            raise RunError(f"no Ray cluster at {where}: {str(error).splitlines()[0]}") from None
        return True

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


def _check_listening(address: str) -> None:
    """Raise RunError if nothing accepts a connection: Ray would retry for minutes without a message."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():  # neither auto nor a URL of Ray
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise RunError(f"no Ray cluster at {address}: {error}") from None
