"""One client machine of several: a Ray actor that sends its part of a plan with this machine's worker processes.

Arguments and results are MessagePack or Arrow. Times and row numbers leave the machine in terms of the machine that
reports the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

import ebbench
from ebbench.client.messages import Batch, FromParent, NodeReport, NodeTask, Place, RequestRecord
from ebbench.client.senders import LocalSenders, local_senders
from ebbench.client.server_queries import ServerQueries
from ebbench.client.session_plan import PlanPart
from ebbench.errors import EbbenchError

_REPORT_WITHIN_S = 1.0
_FROM_PARENT = msgspec.msgpack.Decoder(FromParent)
_TASK = msgspec.msgpack.Decoder(NodeTask)
_encode = msgspec.msgpack.encode


class RayNode:
    """The actor. Calls in order: place, prepare, clock, begin, report until it says done, clock."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._senders: LocalSenders | None = None
        self._task: NodeTask | None = None
        self._offset_ns = 0
        self._first_worker = 0
        self._batches: list[tuple[int, Batch]] = []
        self._changed = asyncio.Event()
        self._seen = np.zeros(0, np.bool_)
        self._listening: asyncio.Task[None] | None = None

    async def place(self) -> bytes:
        """Where this actor runs."""
        return _encode(this_place())

    async def clock(self) -> int:
        """The monotonic clock of this machine (ns)."""
        return time.monotonic_ns()

    async def prepare(self, task: bytes, plan: bytes, environ: Mapping[str, str]) -> tuple[int, str | None]:
        """Check that the server can be reached, and load the plan into the worker processes.

        ``plan``: the part's requests as an Arrow stream. ``environ`` holds the API key. Returns the number of workers,
        and why this machine cannot send, if it cannot.
        """
        self._task = _TASK.decode(task)
        everything = {**os.environ, **environ}
        try:
            async with ServerQueries(self._task.url, self._task.options, everything) as server:
                await server.ready()
            part = _part(self._task, plan)
            self._seen = np.zeros(len(part.rows), np.bool_)
            self._senders = await self._stack.enter_async_context(
                local_senders(
                    part, self._task.url, self._task.model, self._task.options, self._task.id_prefix, everything
                )
            )
            await self._senders.ready()
        except EbbenchError as error:
            return 0, str(error)
        return len(self._senders.workers()), None

    async def begin(self, start_ns: int, offset_ns: int, first_worker: int) -> None:
        """Start sending at ``start_ns`` of this machine's clock, which is ``offset_ns`` ahead of the reported one.

        The numbers of this machine's workers begin with ``first_worker``.
        """
        assert self._senders is not None, "prepare comes first"
        self._offset_ns, self._first_worker = offset_ns, first_worker
        await self._senders.begin(start_ns)
        self._listening = asyncio.create_task(self._listen(self._senders))

    async def report(self) -> bytes:
        """A NodeReport of what happened since the last one; returns after a second at the latest."""
        assert self._senders is not None, "prepare comes first"
        assert self._listening is not None, "begin comes first"
        if not self._batches and not self._listening.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _REPORT_WITHIN_S)
        self._changed.clear()
        batches, self._batches = self._batches, []
        report = NodeReport(batches, self._senders.schedule.released)
        if self._listening.done():
            self._listening.result()
            report.done = list(self._senders.workers().values())
        return _encode(report)

    async def tell(self, message: bytes) -> None:
        """Pass a message on to all workers."""
        if self._senders is not None:
            self._senders.send_all(_FROM_PARENT.decode(message))

    async def end(self) -> None:
        """End the worker processes."""
        await self._stack.aclose()

    async def _listen(self, senders: LocalSenders) -> None:
        await senders.listen(self._add)
        missing = senders.missing(self._seen)
        if missing:
            self._add(-1, Batch(missing, 0, 0))
        self._changed.set()

    def _add(self, worker: int, batch: Batch) -> None:
        for record in batch.records:
            self._seen[record.row] = True
            self._translate(record)
        self._batches.append((worker + self._first_worker if worker >= 0 else worker, batch))
        self._changed.set()

    def _translate(self, record: RequestRecord) -> None:
        """Give rows, worker numbers and times as the reporting machine counts them."""
        assert self._task is not None
        record.row = self._task.rows[record.row]
        if record.worker >= 0:
            record.worker += self._first_worker
        for name in ("intended_ns", "sent_ns", "first_byte_ns", "end_ns", "first_answer_ns"):
            if time_ns := getattr(record, name):
                setattr(record, name, time_ns - self._offset_ns)
        if record.token_ns:
            record.token_ns = (np.frombuffer(record.token_ns, np.int64) - self._offset_ns).tobytes()


def this_place() -> Place:
    """The machine and network of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    return Place(
        host=platform.node(),
        process=os.getpid(),
        version=ebbench.__version__,
        machine=boot.read_text().strip() if boot.exists() else platform.node(),
        network=str(network.readlink()) if network.exists() else "",
    )


def _part(task: NodeTask, plan: bytes) -> PlanPart:
    table = pa.ipc.open_stream(plan).read_all().combine_chunks()
    spacing_ns = round(task.options.slot_spacing_s * 1e9)
    return PlanPart(np.asarray(task.rows), table, task.phases, task.max_concurrency, task.dropped, spacing_ns)
