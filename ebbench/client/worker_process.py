"""Main function of a worker process: reads its assignment, prepares, sends its share of the requests, reports."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from ebbench.client.bodies import RequestBodies
from ebbench.client.lag import LagMonitor
from ebbench.client.messages import (
    Assignment,
    Ready,
    Start,
    WorkerDone,
    from_parent,
    lock_path,
    plan_path,
    schedule_path,
    send,
)
from ebbench.client.release_schedule import ReleaseSchedule
from ebbench.client.request_sender import RequestSender
from ebbench.client.session_plan import plan_sessions
from ebbench.client.shared import FileLock, SharedMemory
from ebbench.client.worker import Worker, WorkerSockets
from ebbench.process.collector import no_full_collections
from ebbench.spec.client import spacing_ns


async def run_worker(sockets: WorkerSockets, environ: Mapping[str, str]) -> None:
    """Send one worker's share of a plan, then report :class:`WorkerDone`."""
    reader, writer = await asyncio.open_connection(sock=sockets.control)
    assignment = await from_parent(reader)
    if not isinstance(assignment, Assignment):
        writer.close()
        return
    try:
        done = await _send_part(assignment, sockets, environ, reader, writer)
    except Exception as problem:
        done = WorkerDone(b"", 0.0, f"{type(problem).__name__}: {problem}")
    send(writer, done)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    writer.close()


async def _send_part(
    assignment: Assignment,
    sockets: WorkerSockets,
    environ: Mapping[str, str],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> WorkerDone:
    """Send the requests."""
    session_plan = plan_sessions(
        _mapped(plan_path(assignment.folder)),
        assignment.phases,
        assignment.max_concurrency,
        spacing_ns(assignment.options),
    )
    bodies = RequestBodies(assignment.model, assignment.options)
    lock = FileLock(lock_path(assignment.folder))
    try:
        schedule = ReleaseSchedule(
            SharedMemory(schedule_path(assignment.folder)),
            lock,
            session_plan.sessions,
            session_plan.slots,
            session_plan.arrivals,
        )
        async with RequestSender(assignment.url, bodies.path, assignment.options, environ) as sender:
            worker = Worker(assignment, session_plan, schedule, bodies, sender, sockets, writer, environ)
            await sender.prepare(worker.initial_connections(), reserve=worker.open_loop)
            worker.ahead.start(worker.first_sessions())
            no_full_collections()
            send(writer, Ready())
            if not isinstance(await from_parent(reader), Start):
                return WorkerDone(b"", 0.0)
            started_s = time.process_time()
            monitor = LagMonitor(asyncio.get_running_loop())
            try:
                await worker.run(reader)
            finally:
                worker.ahead.close()
                monitor.close()
            cpu_s = time.process_time() - started_s
            return WorkerDone(monitor.late_ns.tobytes(), cpu_s, connections=sender.connections)
    finally:
        lock.close()


def _mapped(path: Path) -> pa.Table:
    """The plan, mapped into memory that all workers share."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()
