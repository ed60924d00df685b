"""The workers as the parent sees them: started, heard, told to stop, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

from ebbench.client.book import Book, SharedInts
from ebbench.client.messages import Batch, Begin, Farewell, FromParent, Ready, Stop, from_worker, send
from ebbench.client.options import ClientOptions
from ebbench.client.worker import Assignment, run_worker, work
from ebbench.records.plan import Plan

_SESSIONS_PER_WORKER = 512
_GOODBYE_S = 5.0


@dataclass
class Member:
    """One worker."""

    number: int
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    farewell: Farewell | None = None
    lost: bool = False


@dataclass
class Crew:
    """All workers. ``memory`` and ``lock`` are what the shared book stands on."""

    memory: SharedInts
    lock: AbstractContextManager[object]
    members: list[Member] = field(default_factory=list)
    processes: list[SpawnProcess] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def tell(self, message: FromParent) -> None:
        """Tell all workers that are still there."""
        for member in self.members:
            if member.farewell is None and not member.lost:
                send(member.writer, message)

    async def ready(self) -> None:
        """Wait until all have loaded the plan."""
        for member in self.members:
            message = await from_worker(member.reader)
            if not isinstance(message, Ready):
                self._gone(member, message if isinstance(message, Farewell) else None)

    def begin(self, start_ns: int) -> None:
        """Start all at ``start_ns``."""
        self.tell(Begin(start_ns))

    async def listen(self, on_batch: Callable[[Member, Batch], None]) -> None:
        """Hear all workers out."""
        await asyncio.gather(*(self._listen(member, on_batch) for member in self.members))

    async def _listen(self, member: Member, on_batch: Callable[[Member, Batch], None]) -> None:
        while member.farewell is None and not member.lost:
            message = await from_worker(member.reader)
            if isinstance(message, Batch):
                on_batch(member, message)
            else:
                self._gone(member, message if isinstance(message, Farewell) else None)

    def _gone(self, member: Member, farewell: Farewell | None) -> None:
        """A worker is done. If it did not end well, the others must not wait for it."""
        member.farewell, member.lost = farewell, farewell is None
        if farewell is None or farewell.error is not None:
            self.tell(Stop(abort=True))


def workers_for(plan: Plan, options: ClientOptions) -> int:
    """How many workers: as asked, or one for each 512 sessions open at a time, up to the number of cores."""
    if options.workers is not None:
        return options.workers
    limit = max((phase.max_concurrency for phase in plan.phases), default=plan.max_concurrency or 0)
    return max(1, min(-(-limit // _SESSIONS_PER_WORKER), os.cpu_count() or 1))


@dataclass(frozen=True)
class Orders:
    """What all workers are given alike."""

    url: str
    model: str
    options: ClientOptions
    id_prefix: str
    plan_path: Path
    plan: Plan
    sessions: int
    dropped: frozenset[int]


@contextlib.asynccontextmanager
async def crew(orders: Orders, environ: Mapping[str, str]) -> AsyncIterator[Crew]:
    """Start the workers; end them, whatever happens. Zero workers is one in this process."""
    asked = workers_for(orders.plan, orders.options)
    workers = max(1, asked)
    context = multiprocessing.get_context("spawn")
    lock: AbstractContextManager[object] = context.Lock() if workers > 1 else contextlib.nullcontext()
    team = Crew(context.RawArray("q", Book.size(orders.sessions)), lock)
    bells = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(workers)]
    for end in (end for pair in bells for end in pair):
        end.setblocking(False)
    try:
        for number in range(workers):
            ours, theirs = socket.socketpair()
            reader, writer = await asyncio.open_connection(sock=ours)
            team.members.append(Member(number, writer, reader))
            others = tuple(handle for i, (_, handle) in enumerate(bells) if i != number)
            assignment = _assignment(orders, team, (number, workers), theirs, (bells[number][0], others))
            if asked == 0:
                team.tasks.append(asyncio.create_task(work(assignment, environ)))
            else:
                team.processes.append(_spawned(context, assignment))
                theirs.close()
        yield team
    finally:
        await _dismiss(team)
        for end in (end for pair in bells for end in pair):
            end.close()


def _assignment(
    orders: Orders,
    team: Crew,
    place: tuple[int, int],
    control: socket.socket,
    bells: tuple[socket.socket, tuple[socket.socket, ...]],
) -> Assignment:
    return Assignment(
        worker=place[0],
        workers=place[1],
        url=orders.url,
        model=orders.model,
        options=orders.options,
        id_prefix=orders.id_prefix,
        plan_path=orders.plan_path,
        phases=orders.plan.phases,
        max_concurrency=orders.plan.max_concurrency,
        memory=team.memory,
        lock=team.lock,
        control=control,
        dropped=orders.dropped,
        bell=bells[0],
        other_bells=bells[1],
    )


def _spawned(context: SpawnContext, assignment: Assignment) -> SpawnProcess:
    process = context.Process(target=run_worker, args=(assignment,), daemon=True)
    process.start()
    return process


async def _dismiss(team: Crew) -> None:
    """Close the lines; a worker without a parent aborts by itself, and is killed if it does not."""
    for member in team.members:
        member.writer.close()
    if team.tasks:
        await asyncio.wait(team.tasks, timeout=_GOODBYE_S)
    for process in team.processes:
        await asyncio.to_thread(process.join, _GOODBYE_S)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join)
