"""One worker's life: assignment, preparation, work, farewell."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from ebbench.client.agenda import make_agenda
from ebbench.client.bodies import Bodies
from ebbench.client.book import Book
from ebbench.client.caller import Caller
from ebbench.client.lag import LagMonitor
from ebbench.client.messages import (
    Assignment,
    Begin,
    Farewell,
    Ready,
    book_path,
    from_parent,
    lock_path,
    plan_path,
    send,
)
from ebbench.client.options import spacing_ns
from ebbench.client.shared import FileLock, SharedMemory
from ebbench.client.worker import Lines, Worker
from ebbench.collector import no_full_collections


async def work(lines: Lines, environ: Mapping[str, str]) -> None:
    """Carry out one worker's part of a plan, then say farewell."""
    reader, writer = await asyncio.open_connection(sock=lines.control)
    assignment = await from_parent(reader)
    if not isinstance(assignment, Assignment):
        writer.close()
        return
    error, late_ns, cpu_s = None, b"", 0.0
    try:
        late_ns, cpu_s = await _carry_out(assignment, lines, environ, reader, writer)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    send(writer, Farewell(late_ns, cpu_s, error))
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    writer.close()


async def _carry_out(
    assignment: Assignment,
    lines: Lines,
    environ: Mapping[str, str],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> tuple[bytes, float]:
    """The work itself. Returns the lateness of the loop's ticks and the CPU seconds since the start."""
    agenda = make_agenda(
        _mapped(plan_path(assignment.folder)),
        assignment.phases,
        assignment.max_concurrency,
        spacing_ns(assignment.options),
    )
    bodies = Bodies(assignment.model, assignment.options)
    lock = FileLock(lock_path(assignment.folder))
    try:
        book = Book(SharedMemory(book_path(assignment.folder)), lock, agenda.sessions, agenda.slots, agenda.arrivals)
        async with Caller(assignment.url, bodies.path, assignment.options, environ) as caller:
            worker = Worker(assignment, agenda, book, bodies, caller, lines, writer, environ)
            await caller.prepare(worker.first_sends(), reserve=worker.open_loop)
            no_full_collections()
            send(writer, Ready())
            if not isinstance(await from_parent(reader), Begin):
                return b"", 0.0
            started_s = time.process_time()
            monitor = LagMonitor(asyncio.get_running_loop())
            try:
                await worker.run(reader)
            finally:
                monitor.close()
            return monitor.late_ns.tobytes(), time.process_time() - started_s
    finally:
        lock.close()


def _mapped(path: Path) -> pa.Table:
    """The plan, mapped: all workers share its pages."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()
