"""What sends a plan: the worker processes of this machine. :mod:`ebbench.client.nodes` does it on several."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.client.messages import (
    Assignment,
    Batch,
    FromParent,
    Ready,
    RequestRecord,
    Start,
    Stop,
    WorkerDone,
    from_worker,
    plan_path,
    schedule_path,
    send,
)
from ebbench.client.release_schedule import ReleaseSchedule, SharedMemory, memory_folder
from ebbench.client.session_plan import PlanPart, SessionPlan
from ebbench.client.worker import WorkerSockets, run_worker, worker_process
from ebbench.errors import UsageError
from ebbench.network.connections import CA_VARIABLES
from ebbench.network.credentials import KEY_VARIABLES
from ebbench.process.child import (
    OTHER_FILES,
    Child,
    ForkedChild,
    allow_open_files,
    child_command,
    child_environ,
    may_fork,
)
from ebbench.process.termination import on_signal
from ebbench.records.warnings import RunWarning
from ebbench.spec.client import ClientOptions

# Worker processes as seen by their parent: starting, messages, stopping, and ending in every case.

_SESSIONS_PER_WORKER = 512
_EXIT_WAIT_S = 5.0


@dataclass
class WorkerHandle:
    """One worker: number, connection, and final message. ``lost``: it died without one."""

    number: int
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    done: WorkerDone | None = None
    lost: bool = False


def workers_for(most_open: int, options: ClientOptions) -> int:
    """Number of workers: as asked, or one per 512 sessions open at a time, at most one per CPU core."""
    if options.workers is not None:
        return options.workers
    return max(1, min(-(-most_open // _SESSIONS_PER_WORKER), os.cpu_count() or 1))


@contextlib.asynccontextmanager
async def _workers(
    pool: LocalSenders, assignment: Assignment, workers: int, environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Start ``workers`` processes with ``assignment`` and a number each; on exit, end them in every case.

    0 workers: one worker runs in this process.
    """
    count = max(1, workers)
    wake_ups = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
    for end in (end for pair in wake_ups for end in pair):
        end.setblocking(False)
    try:
        for number in range(count):
            ours, theirs = socket.socketpair()
            others = tuple(sending for i, (_, sending) in enumerate(wake_ups) if i != number)
            sockets = WorkerSockets(theirs, wake_ups[number][0], others)
            reader, writer = await asyncio.open_connection(sock=ours)
            pool.handles.append(WorkerHandle(number, writer, reader))
            if workers == 0:
                pool.tasks.append(asyncio.create_task(run_worker(sockets, environ)))
            else:
                pool.processes.append(await _started(sockets, environ))
                theirs.close()
            send(writer, msgspec.structs.replace(assignment, worker=number, workers=count))
        yield
    finally:
        await _end(pool)
        for end in (end for pair in wake_ups for end in pair):
            end.close()


async def _started(sockets: WorkerSockets, environ: Mapping[str, str]) -> Child | ForkedChild:
    """Start a worker in its own process group: Ctrl-C reaches only the parent, which decides what workers do.

    A copy of this process takes 0.2 s of CPU less than one that loads its modules anew.
    """
    descriptors = [end.fileno() for end in (sockets.control, sockets.wake_up, *sockets.other_wake_ups)]
    given = (*KEY_VARIABLES, *CA_VARIABLES)
    keys = {name: environ[name] for name in given if name in environ}
    others = {name: value for name, value in os.environ.items() if name not in given}
    if not may_fork():
        command = child_command("ebbench.client", *map(str, descriptors))
        # A worker does no linear algebra: the threads that numpy would start for it cost CPU beside the measurement.
        environ = child_environ({**others, **keys, "OPENBLAS_NUM_THREADS": "1"})
        return Child(command, env=environ, pass_fds=descriptors, process_group=0)
    loop = asyncio.get_running_loop()
    started: asyncio.Future[ForkedChild] = loop.create_future()

    def fork() -> None:  # outside of every task, which asyncio would take to run in the child as well
        try:
            work = partial(worker_process, sockets, {**others, **keys})
            started.set_result(ForkedChild(work, descriptors))
        except OSError as error:
            started.set_exception(error)

    loop.call_soon(fork)
    return await started


async def _end(pool: LocalSenders) -> None:
    """Close the sockets, on which workers abort by themselves; kill those that do not."""
    for handle in pool.handles:
        handle.writer.close()
    if pool.tasks:
        await asyncio.wait(pool.tasks, timeout=_EXIT_WAIT_S)
    for process in pool.processes:
        try:
            await asyncio.to_thread(process.wait, _EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


# What a signal does to a run: before the first request it cancels the run; then the first one releases no further
# session and lets open requests finish, the second aborts them.


class Interrupts:
    """What stops the task that sends a plan, inside the context ``signals``.

    The signal handler only wakes the event loop, so that a signal is never an exception inside it. Leaving raises
    nothing: a run that has sent requests ends with what was measured, see ``interrupted``. A signal after that waits
    until the run is stored.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None  # made in the coroutine that sends the plan
        self._task = task
        self._tell: Callable[[Stop], None] | None = None
        self._stops = 0
        self.signals = on_signal(self._wake)

    @property
    def interrupted(self) -> bool:
        """Whether a signal was received."""
        return self.signals.received > 0

    def stop(self, tell: Callable[[Stop], None]) -> None:
        """From now on ``tell`` senders to stop instead of cancelling the run. Call it before they start."""
        self._tell = tell

    def close(self) -> None:
        """React to no further signal: all requests have ended."""
        self.signals.__exit__(None, None, None)

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._react)

    def _react(self) -> None:
        self._stops += 1
        if self._tell is not None:
            self._tell(Stop(abort=self._stops > 1))
        elif self._stops == 1:  # once: a second cancellation would break off the end of the workers
            self._task.cancel()


OnBatch = Callable[[int, Batch], None]
"""Receives the number of a worker and the requests that it finished."""
Seen = npt.NDArray[np.bool_]
"""Whether a request has a record, by row of the plan."""


@dataclass(frozen=True)
class Findings:
    """Facts for the manifest, warnings, and reasons that make the run INVALID."""

    facts: Mapping[str, Any]
    warnings: tuple[RunWarning, ...] = ()
    invalid: tuple[RunWarning, ...] = ()


@dataclass
class LocalSenders:
    """The workers of this machine, as child processes or as tasks of this process, and their release schedule."""

    schedule: ReleaseSchedule
    part: PlanPart
    handles: list[WorkerHandle] = field(default_factory=list)
    processes: list[Child | ForkedChild] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    lead_ns = 100_000_000
    """Time between "all workers are ready" and the start: the message must reach every worker in time."""

    async def ready(self) -> None:
        """Wait until all workers have loaded the plan."""
        for handle in self.handles:
            message = await from_worker(handle.reader)
            if not isinstance(message, Ready):
                self._gone(handle, message if isinstance(message, WorkerDone) else None)

    async def begin(self, start_ns: int) -> None:
        """Start all workers at ``start_ns`` (monotonic, of this machine)."""
        self.schedule.begin(start_ns)
        self.send_all(Start(start_ns))

    def send_all(self, message: FromParent) -> None:
        """Send a message to every worker that is still running."""
        for handle in self.handles:
            if handle.done is None and not handle.lost:
                send(handle.writer, message)

    async def listen(self, on_batch: OnBatch) -> None:
        """Pass on finished requests until each worker is done or lost."""
        await asyncio.gather(*(self._listen(handle, on_batch) for handle in self.handles))

    async def _listen(self, handle: WorkerHandle, on_batch: OnBatch) -> None:
        while handle.done is None and not handle.lost:
            message = await from_worker(handle.reader)
            if isinstance(message, Batch):
                on_batch(handle.number, message)
            else:
                self._gone(handle, message if isinstance(message, WorkerDone) else None)

    def _gone(self, handle: WorkerHandle, done: WorkerDone | None) -> None:
        """Record that a worker ended. If it failed, stop the others: in a closed loop they would wait for its slots."""
        handle.done, handle.lost = done, done is None
        if done is None or done.error is not None:
            self.send_all(Stop(abort=True))

    def missing(self, seen: Seen) -> list[RequestRecord]:
        """Records of the requests that no worker reported: never sent, or lost with their worker."""
        return missing_records(self.part, self.schedule.released, seen)

    def workers(self) -> Mapping[int, WorkerDone | None]:
        """The final message of each worker by its number; None for one that was lost."""
        return {handle.number: handle.done for handle in self.handles}

    def findings(self, limit_ms: float) -> Findings:
        """Facts, warnings and reasons for INVALID about the machines. ``limit_ms``: the limit on the client's lag."""
        return Findings({})


@contextlib.asynccontextmanager
async def local_senders(part: PlanPart, environ: Mapping[str, str]) -> AsyncIterator[LocalSenders]:
    """Start this machine's workers with ``part``; on exit, end them in every case.

    Raises UsageError if a worker may not open as many connections as its share of the load needs.
    """
    workers = workers_for(part.load.most_open, part.load.options)
    _allow_connections(part, max(1, workers))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ebbench-", dir=memory_folder()))
        memory = stack.enter_context(contextlib.closing(_shared_files(folder, part.table, part.sessions)))
        # No lock here: this process writes the schedule before the start and reads it after the end.
        senders = LocalSenders(part.sessions.schedule(memory, contextlib.nullcontext()), part)
        async with _workers(senders, Assignment(0, 0, folder, part.load), workers, environ):
            yield senders


def _allow_connections(part: PlanPart, workers: int) -> None:
    """Raise this process's limit on open files, which the workers inherit, to what one of them needs.

    Without a limit on open sessions that is as many as there are, or as the system lets.
    """
    most_open = part.load.most_open
    most = -(-most_open // workers)
    allowed = allow_open_files(2 * (most or part.sessions.sessions) + OTHER_FILES)
    if most and allowed < most + OTHER_FILES:
        enough = -(-most_open // (allowed - OTHER_FILES)) if allowed > OTHER_FILES else 0
        remedy = f", or give --workers {enough}" if enough else ""
        raise UsageError(
            f"{most_open:,} requests open at a time need {most + OTHER_FILES:,} open files in a client process, "
            f"and the hard limit is {allowed:,}: raise it (ulimit -Hn, as root){remedy}"
        )


def missing_records(
    part: PlanPart, released: int, seen: Seen, lost: str = "worker_lost", unsent: str = "not_released"
) -> list[RequestRecord]:
    """Records for the rows of ``part`` that have none.

    Those of the first ``released`` sessions are failed with the error class ``lost``, the others never sent with the
    class ``unsent``.
    """
    records = []
    for session in range(part.sessions.sessions):
        for row in part.sessions.turns(session):
            if seen[row]:
                continue
            dropped = row in part.load.dropped
            failed = session < released and not dropped
            reason = "too_long" if dropped else lost if failed else unsent
            records.append(RequestRecord(row, -1, "failed" if failed else "never_sent", error_class=reason))
    return records


def _shared_files(folder: str, table: pa.Table, session_plan: SessionPlan) -> SharedMemory:
    """Write the plan, which all workers map into memory, and create the shared memory of the release schedule."""
    with pa.OSFile(str(plan_path(folder)), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return SharedMemory.create(schedule_path(folder), ReleaseSchedule.size(session_plan.sessions))
