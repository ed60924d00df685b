"""What sends a plan: the worker processes of this machine. :mod:`ebbench.client.node_senders` does it on several."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.client.messages import Assignment, Batch, FromParent, RequestRecord, WorkerDone, plan_path, schedule_path
from ebbench.client.plan_parts import PlanPart
from ebbench.client.release_schedule import ReleaseSchedule
from ebbench.client.session_plan import SessionPlan
from ebbench.client.shared import SharedMemory, memory_folder
from ebbench.client.worker_pool import WorkerPool, worker_pool, workers_for
from ebbench.config.server_url import ServerUrl
from ebbench.errors import UsageError
from ebbench.process.open_files import OTHER_FILES, allow_open_files
from ebbench.spec.client import ClientOptions

LEAD_NS = 100_000_000
"""Time between "all workers are ready" and the start: the message must reach every worker in time."""
OnBatch = Callable[[int, Batch], None]
"""Receives the number of a worker and the requests that it finished."""
Seen = npt.NDArray[np.bool_]
"""Whether a request has a record, by row of the plan."""


class Senders(Protocol):
    """Workers that send one plan, on one machine or several."""

    @property
    def lead_ns(self) -> int:
        """Time (ns) that the start must lie ahead when :meth:`begin` is called."""
        ...

    async def ready(self) -> None:
        """Wait until all workers have loaded the plan."""
        ...

    async def begin(self, start_ns: int) -> None:
        """Start all workers at ``start_ns`` (monotonic, of this machine)."""
        ...

    def send_all(self, message: FromParent) -> None:
        """Send a message to every worker that is still running."""
        ...

    async def listen(self, on_batch: OnBatch) -> None:
        """Pass on finished requests until each worker is done or lost."""
        ...

    def missing(self, seen: Seen) -> list[RequestRecord]:
        """Records of the requests that no worker reported: never sent, or lost with their worker."""
        ...

    def workers(self) -> Mapping[int, WorkerDone | None]:
        """The final message of each worker by its number; None for one that was lost."""
        ...

    def findings(self, limit_ms: float) -> Findings:
        """What is to be said about the machines, after the end. ``limit_ms``: the limit on the client's lag."""
        ...


@dataclass(frozen=True)
class Findings:
    """Facts for the manifest, warnings, and reasons that make the run INVALID."""

    facts: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()


@dataclass
class LocalSenders:
    """The workers of this machine and their release schedule."""

    pool: WorkerPool
    schedule: ReleaseSchedule
    part: PlanPart
    lead_ns: int = LEAD_NS

    async def ready(self) -> None:
        """See Senders."""
        await self.pool.ready()

    async def begin(self, start_ns: int) -> None:
        """See Senders."""
        self.schedule.begin(start_ns)
        self.pool.begin(start_ns)

    def send_all(self, message: FromParent) -> None:
        """See Senders."""
        self.pool.send_all(message)

    async def listen(self, on_batch: OnBatch) -> None:
        """See Senders."""
        await self.pool.listen(lambda handle, batch: on_batch(handle.number, batch))

    def missing(self, seen: Seen) -> list[RequestRecord]:
        """See Senders."""
        return missing_records(self.part.sessions, self.schedule.released, self.part.dropped, seen)

    def workers(self) -> Mapping[int, WorkerDone | None]:
        """See Senders."""
        return {handle.number: handle.done for handle in self.pool.handles}

    def findings(self, limit_ms: float) -> Findings:
        """See Senders."""
        return Findings({})


@contextlib.asynccontextmanager
async def local_senders(
    part: PlanPart, url: ServerUrl, model: str, options: ClientOptions, id_prefix: str, environ: Mapping[str, str]
) -> AsyncIterator[LocalSenders]:
    """Start this machine's workers with ``part``; on exit, end them in every case.

    Raises UsageError if a worker may not open as many connections as its share of the load needs.
    """
    workers = workers_for(part.most_open, options)
    _allow_connections(part, max(1, workers))
    with tempfile.TemporaryDirectory(prefix="ebbench-", dir=memory_folder()) as folder:
        schedule = _shared_files(folder, part.table, part.sessions)
        assignment = Assignment(
            worker=0, workers=0, url=url, model=model, id_prefix=id_prefix, folder=folder,
            options=replace(options, slot_spacing_s=part.spacing_ns / 1e9),
            phases=part.phases, max_concurrency=part.max_concurrency, dropped=part.dropped,
        )  # fmt: skip
        async with worker_pool(assignment, workers, environ) as pool:
            yield LocalSenders(pool, schedule, part)


def _allow_connections(part: PlanPart, workers: int) -> None:
    """Raise this process's limit on open files, which the workers inherit, to what one of them needs.

    Without a limit on open sessions that is as many as there are, or as the system lets.
    """
    each = -(-part.most_open // workers)
    allowed = allow_open_files(2 * (each or part.sessions.sessions) + OTHER_FILES)
    if each and allowed < each + OTHER_FILES:
        enough = -(-part.most_open // (allowed - OTHER_FILES)) if allowed > OTHER_FILES else 0
        remedy = f", or give --workers {enough}" if enough else ""
        raise UsageError(
            f"{part.most_open:,} requests open at a time need {each + OTHER_FILES:,} open files in a client process, "
            f"and the hard limit is {allowed:,}: raise it (ulimit -Hn, as root){remedy}"
        )


def missing_records(
    plan: SessionPlan,
    released: int,
    dropped: frozenset[int],
    seen: Seen,
    lost: str = "worker_lost",
    unsent: str = "not_released",
) -> list[RequestRecord]:
    """Records for the rows that have none.

    Those of the first ``released`` sessions are failed with the error class ``lost``, the others never sent with the
    class ``unsent``.
    """
    records = []
    for session in range(plan.sessions):
        for row in plan.turns(session):
            if seen[row]:
                continue
            failed = session < released and row not in dropped
            reason = "too_long" if row in dropped else lost if failed else unsent
            records.append(RequestRecord(row, -1, "failed" if failed else "never_sent", error_class=reason))
    return records


def _shared_files(folder: str, table: pa.Table, session_plan: SessionPlan) -> ReleaseSchedule:
    """Write the plan, which all workers map into memory, and create the release schedule in shared memory.

    The schedule has no lock here: this process writes it before the start and reads it after the end.
    """
    with pa.OSFile(str(plan_path(folder)), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    memory = SharedMemory.create(schedule_path(folder), ReleaseSchedule.size(session_plan.sessions))
    return ReleaseSchedule(
        memory, contextlib.nullcontext(), session_plan.sessions, session_plan.slots, session_plan.arrivals
    )
