"""Worker processes as seen by their parent: starting, messages, stopping, and ending in every case."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from ebbench.client.messages import Assignment, Batch, FromParent, Ready, Start, Stop, WorkerDone, from_worker, send
from ebbench.client.worker import WorkerSockets
from ebbench.client.worker_process import run_worker
from ebbench.network.connections import CA_VARIABLES
from ebbench.network.credentials import KEY_VARIABLES
from ebbench.process.child import Child, child_command, child_environ
from ebbench.spec.client import ClientOptions

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


@dataclass
class WorkerPool:
    """All workers, as child processes or as tasks of this process."""

    handles: list[WorkerHandle] = field(default_factory=list)
    processes: list[Child] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def send_all(self, message: FromParent) -> None:
        """Send a message to every worker that is still running."""
        for handle in self.handles:
            if handle.done is None and not handle.lost:
                send(handle.writer, message)

    async def ready(self) -> None:
        """Wait until all workers have loaded the plan."""
        for handle in self.handles:
            message = await from_worker(handle.reader)
            if not isinstance(message, Ready):
                self._gone(handle, message if isinstance(message, WorkerDone) else None)

    def begin(self, start_ns: int) -> None:
        """Start all workers at ``start_ns``."""
        self.send_all(Start(start_ns))

    async def listen(self, on_batch: Callable[[WorkerHandle, Batch], None]) -> None:
        """Receive the messages of all workers until each is done or lost."""
        await asyncio.gather(*(self._listen(handle, on_batch) for handle in self.handles))

    async def _listen(self, handle: WorkerHandle, on_batch: Callable[[WorkerHandle, Batch], None]) -> None:
        while handle.done is None and not handle.lost:
            message = await from_worker(handle.reader)
            if isinstance(message, Batch):
                on_batch(handle, message)
            else:
                self._gone(handle, message if isinstance(message, WorkerDone) else None)

    def _gone(self, handle: WorkerHandle, done: WorkerDone | None) -> None:
        """Record that a worker ended. If it failed, stop the others: in a closed loop they would wait for its slots."""
        handle.done, handle.lost = done, done is None
        if done is None or done.error is not None:
            self.send_all(Stop(abort=True))


def workers_for(most_open: int, options: ClientOptions) -> int:
    """Number of workers: as asked, or one per 512 sessions open at a time, at most one per CPU core."""
    if options.workers is not None:
        return options.workers
    return max(1, min(-(-most_open // _SESSIONS_PER_WORKER), os.cpu_count() or 1))


@contextlib.asynccontextmanager
async def worker_pool(assignment: Assignment, workers: int, environ: Mapping[str, str]) -> AsyncIterator[WorkerPool]:
    """Start ``workers`` processes with ``assignment`` and a number each; on exit, end them in every case.

    0 workers: one worker runs in this process.
    """
    count = max(1, workers)
    pool = WorkerPool()
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
                pool.processes.append(_started(sockets, environ))
                theirs.close()
            send(writer, msgspec.structs.replace(assignment, worker=number, workers=count))
        yield pool
    finally:
        await _end(pool)
        for end in (end for pair in wake_ups for end in pair):
            end.close()


def _started(sockets: WorkerSockets, environ: Mapping[str, str]) -> Child:
    """Start a worker in its own process group: Ctrl-C reaches only the parent, which decides what workers do."""
    descriptors = [end.fileno() for end in (sockets.control, sockets.wake_up, *sockets.other_wake_ups)]
    command = child_command("ebbench.client", *map(str, descriptors))
    given = (*KEY_VARIABLES, *CA_VARIABLES)
    keys = {name: environ[name] for name in given if name in environ}
    others = {name: value for name, value in os.environ.items() if name not in given}
    return Child(command, env=child_environ(others | keys), pass_fds=descriptors, process_group=0)


async def _end(pool: WorkerPool) -> None:
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
