"""The workers as the parent sees them: started, heard, told to stop, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from ebbench.child import Child, child_command, child_environ
from ebbench.client.messages import Assignment, Batch, Begin, Farewell, FromParent, Ready, Stop, from_worker, send
from ebbench.client.options import KEY_VARIABLES, ClientOptions
from ebbench.client.process import work
from ebbench.client.worker import Lines
from ebbench.connections import CA_VARIABLES
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
    """All workers."""

    members: list[Member] = field(default_factory=list)
    processes: list[Child] = field(default_factory=list)
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


@contextlib.asynccontextmanager
async def crew(assignment: Assignment, workers: int, environ: Mapping[str, str]) -> AsyncIterator[Crew]:
    """Start ``workers`` worker processes with ``assignment``, each told its number; end them, whatever happens.

    Zero workers is one in this process.
    """
    count = max(1, workers)
    team = Crew()
    bells = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
    for end in (end for pair in bells for end in pair):
        end.setblocking(False)
    try:
        for number in range(count):
            ours, theirs = socket.socketpair()
            others = tuple(handle for i, (_, handle) in enumerate(bells) if i != number)
            lines = Lines(theirs, bells[number][0], others)
            reader, writer = await asyncio.open_connection(sock=ours)
            team.members.append(Member(number, writer, reader))
            if workers == 0:
                team.tasks.append(asyncio.create_task(work(lines, environ)))
            else:
                team.processes.append(_started(lines, environ))
                theirs.close()
            send(writer, msgspec.structs.replace(assignment, worker=number, workers=count))
        yield team
    finally:
        await _dismiss(team)
        for end in (end for pair in bells for end in pair):
            end.close()


def _started(lines: Lines, environ: Mapping[str, str]) -> Child:
    """A worker process, in a process group of its own: what Ctrl-C means is the parent's to decide."""
    descriptors = [end.fileno() for end in (lines.control, lines.bell, *lines.other_bells)]
    command = child_command("ebbench.client", *map(str, descriptors))
    given = (*KEY_VARIABLES, *CA_VARIABLES)
    keys = {name: environ[name] for name in given if name in environ}
    others = {name: value for name, value in os.environ.items() if name not in given}
    return Child(command, env=child_environ(others | keys), pass_fds=descriptors, process_group=0)


async def _dismiss(team: Crew) -> None:
    """Close the lines; a worker without a parent aborts by itself, and is killed if it does not."""
    for member in team.members:
        member.writer.close()
    if team.tasks:
        await asyncio.wait(team.tasks, timeout=_GOODBYE_S)
    for process in team.processes:
        try:
            await asyncio.to_thread(process.wait, _GOODBYE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
