"""The client machines of a Ray cluster: choice, calls that always end, clock offsets, and sending one plan from all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

import ebbench
from ebbench.client.messages import Batch, FromParent, NodeReport, Place, RequestRecord, Stop, WorkerDone
from ebbench.client.senders import Findings, LocalSenders, OnBatch, Seen, local_senders, missing_records
from ebbench.client.server_queries import ServerQueries
from ebbench.client.session_plan import MachineLoad, PlanPart, split
from ebbench.config.server_url import is_loopback
from ebbench.errors import EbbenchError, RunError, UsageError
from ebbench.network.credentials import KEY_VARIABLES
from ebbench.process.ray_connection import given_address, joined, ray_for
from ebbench.records.warnings import RunWarning, counted, warning
from ebbench.spec.client import ClientOptions

START_S = 60.0
"""How long a node may take to start its client."""
_OPTION = "--workers ray:N"
_PLACE = msgspec.msgpack.Decoder(Place)


class CallFailedError(Exception):
    """A call to a node that brought no result: the node is gone, or silent."""


@dataclass(frozen=True)
class ClientNode:
    """A node of the cluster and the actor on it."""

    ray: Any
    address: str
    actor: Any
    place: Place

    def end(self) -> None:
        """End the actor and with it its worker processes."""
        self.ray.kill(self.actor, no_restart=True)


@contextlib.asynccontextmanager
async def client_nodes(
    url: str, options: ClientOptions, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[Sequence[ClientNode]]:
    """Start one client on each of ``options.client_nodes`` nodes (None: all); on exit, end them in every case.

    Raises EbbenchError without Ray, UsageError for too few nodes or a server that they cannot reach, RunError for a
    cluster that does not answer.
    """
    address = given_address(options.ray_address, environ)
    if address is None:
        raise UsageError(f"{_OPTION} needs the address of a Ray cluster: give --ray-address auto or HOST:PORT")
    ray = ray_for(_OPTION)
    with joined(ray, address):
        actors = [
            (node["NodeManagerAddress"], _actor(ray, node["NodeID"]))
            for node in _nodes_that_send(ray, options.client_nodes)
        ]
        try:
            nodes = await asyncio.gather(*(_started(ray, *node) for node in actors))
            check_reachable(url, nodes)
            yield nodes
        finally:
            for _, actor in actors:
                ray.kill(actor, no_restart=True)


async def await_result(call: Any, timeout_s: float) -> Any:
    """The result of a remote call. Raises CallFailedError if its node is lost or does not answer in time."""
    future = asyncio.wrap_future(call.future())
    done, _ = await asyncio.wait([future], timeout=timeout_s)
    if not done:
        future.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise CallFailedError(f"no answer for {timeout_s:g} s")
    try:
        return future.result()
    except ray_for(_OPTION).exceptions.RayError as error:
        raise CallFailedError(_line_of(error)) from None


def _line_of(error: Exception) -> str:
    """One line of a Ray error: the last line of a remote traceback, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    remote = [line for line in lines if "Error: " in line]
    return (remote[-1] if remote else lines[0])[:200]


def _nodes_that_send(ray: Any, asked: int | None) -> list[dict[str, Any]]:
    """The nodes that send: those with a CPU for a client, by address. Raises UsageError for too few."""
    able = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    able.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    count = len(able) if asked is None else asked
    if count > len(able) or not able:
        raise UsageError(
            f"--workers ray:{count or 1}: the Ray cluster has {counted(len(able), 'node')} with a CPU; start more with "
            "`ray start --address=HOST:PORT` on other machines, or ask for fewer"
        )
    return able[:count]


def _actor(ray: Any, node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    placement = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return ray.remote(RayNode).options(num_cpus=1, max_restarts=0, scheduling_strategy=placement).remote()


async def _started(ray: Any, address: str, actor: Any) -> ClientNode:
    try:
        place = _PLACE.decode(await await_result(actor.place.remote(), START_S))
    except CallFailedError as error:
        raise RunError(
            f"client node {address} did not start ({error}); it needs a free CPU and the same ebbench as this machine"
        ) from None
    if place.version != ebbench.__version__:
        raise RunError(f"client node {address} has ebbench {place.version}, this machine {ebbench.__version__}")
    return ClientNode(ray, address, actor, place)


def check_reachable(url: str, nodes: Sequence[ClientNode]) -> None:
    """Raise UsageError for a server on this machine's loopback address that another machine is to load."""
    if not is_loopback(url):
        return
    own_place = this_place()
    away = [
        node.address
        for node in nodes
        if (node.place.machine, node.place.network) != (own_place.machine, own_place.network)
    ]
    if away:
        raise UsageError(
            f"{url} is an address of this machine only, which client node {away[0]} cannot reach; let the server "
            "listen on an address of the network and give that"
        )


# How the monotonic clock of another machine relates to this one's, and how exactly that is known.
#
# One exchange reads this clock, the other one, and this clock again. The other clock was read at some time between,
# so its offset lies within half the round trip of the value that assumes the middle (Cristian, Distributed Computing
# 3, 1989). Of several exchanges the one with the shortest round trip is used.

EXCHANGES = 40


@dataclass(frozen=True)
class ClockOffset:
    """``offset_ns``: the other clock minus this one, at an error of at most half of ``round_trip_ns``."""

    offset_ns: int
    round_trip_ns: int

    @property
    def error_ns(self) -> int:
        """The largest error of the offset."""
        return -(-self.round_trip_ns // 2)


def clock_offset(sent_ns: int, other_ns: int, received_ns: int) -> ClockOffset:
    """The offset by one exchange: read here at ``sent_ns`` and ``received_ns``, there at ``other_ns``."""
    return ClockOffset(other_ns - (sent_ns + received_ns) // 2, received_ns - sent_ns)


async def measured_offset(read_other: Callable[[], Awaitable[int]], exchanges: int = EXCHANGES) -> ClockOffset:
    """The offset of the clock that ``read_other`` reads (ns), by the exchange with the shortest round trip."""
    offsets = []
    for _ in range(exchanges):
        sent_ns = time.monotonic_ns()
        other_ns = await read_other()
        offsets.append(clock_offset(sent_ns, other_ns, time.monotonic_ns()))
    return min(offsets, key=lambda offset: offset.round_trip_ns)


def alignment_error_ns(before: ClockOffset, after: ClockOffset) -> int:
    """The largest error of times converted with the offset ``before`` the run, at its start and at its end."""
    drift_ns = abs(after.offset_ns - before.offset_ns)
    return max(before.error_ns, drift_ns + after.error_ns)


# Client machines through Ray: each node of a cluster sends a part of one plan (`ebbench.client.nodes`).
#
# This process splits the plan, starts all nodes at one time of its own clock, collects their records, and says what
# the alignment of the clocks was worth and which nodes were lost.

NODE_LOST = "node_lost"
"""Error class of requests whose client node was lost before it reported them."""
SILENT_S = 10.0
"""A node that reports nothing for so long is lost; it reports every second."""
PREPARE_S = 600.0
"""How long a node may take to load its part of the plan."""
_REPORT = msgspec.msgpack.Decoder(NodeReport)


@dataclass
class Sending:
    """One node with its part of the plan, and what is known of it so far."""

    node: ClientNode
    part: PlanPart
    workers: int = 0
    first_worker: int = 0
    before: ClockOffset | None = None
    after: ClockOffset | None = None
    released: int = 0
    done: list[WorkerDone | None] | None = None
    lost_ns: int = 0
    lost_why: str = ""

    @property
    def running(self) -> bool:
        """Whether the node still sends requests or reports."""
        return self.done is None and not self.lost_ns

    def alignment_error_ns(self) -> int | None:
        """See :func:`alignment_error_ns`; None before the first measurement."""
        if self.before is None:
            return None
        return self.before.error_ns if self.after is None else alignment_error_ns(self.before, self.after)

    def fact(self) -> dict[str, Any]:
        """This node's entry in the manifest. Times in ms."""
        error_ns = self.alignment_error_ns()
        drift = self.after.offset_ns - self.before.offset_ns if self.before and self.after else None
        return {
            "address": self.node.address,
            "host": self.node.place.host,
            "workers": self.workers,
            "requests": len(self.part.rows),
            "clock_offset_ms": self.before.offset_ns / 1e6 if self.before else None,
            "clock_drift_ms": None if drift is None else drift / 1e6,
            "round_trip_ms": self.before.round_trip_ns / 1e6 if self.before else None,
            "alignment_error_ms": None if error_ns is None else error_ns / 1e6,
            "lost": bool(self.lost_ns),
        }


@dataclass
class NodeSenders:
    """The workers of several machines; see :class:`~ebbench.client.senders.LocalSenders`."""

    sending: list[Sending]
    keys: Mapping[str, str]
    start_ns: int = 0
    lead_ns = 1_000_000_000

    async def ready(self) -> None:
        """See LocalSenders. Raises RunError for a node that cannot send."""
        await asyncio.gather(*(self._prepare(sender) for sender in self.sending))
        first = 0
        for sender in self.sending:
            sender.first_worker, first = first, first + sender.workers
            try:
                sender.before = await self._clock(sender)
            except CallFailedError as error:
                raise RunError(f"client node {sender.node.address} was lost before the start ({error})") from None

    async def begin(self, start_ns: int) -> None:
        """See LocalSenders."""
        self.start_ns = start_ns
        calls = []
        for sender in self.sending:
            assert sender.before is not None, "ready comes first"
            offset_ns = sender.before.offset_ns
            begun = sender.node.actor.begin.remote(start_ns + offset_ns, offset_ns, sender.first_worker)
            calls.append(self._unless_lost(sender, await_result(begun, SILENT_S)))
        await asyncio.gather(*calls)

    def send_all(self, message: FromParent) -> None:
        """See LocalSenders."""
        encoded = msgspec.msgpack.encode(message)
        for sender in self.sending:
            if sender.running:
                sender.node.actor.tell.remote(encoded)

    async def listen(self, on_batch: OnBatch) -> None:
        """See LocalSenders. Then measure the clocks again and end the workers."""
        await asyncio.gather(*(self._listen(sender, on_batch) for sender in self.sending))
        for sender in self.sending:
            if not sender.lost_ns:
                with contextlib.suppress(CallFailedError):
                    sender.after = await self._clock(sender)
                    await await_result(sender.node.actor.end.remote(), SILENT_S)

    def missing(self, seen: Seen) -> list[RequestRecord]:
        """See LocalSenders. Requests of a lost node have the error class NODE_LOST.

        They failed if their session had been released, as far as the node reported it or, in an open loop, by the plan.
        """
        records = []
        for sender in self.sending:
            part = sender.part
            lacking = missing_records(part, self._released(sender), seen[part.rows], NODE_LOST, NODE_LOST)
            for record in lacking:
                record.row = int(part.rows[record.row])
            records += lacking
        return records

    def workers(self) -> Mapping[int, WorkerDone | None]:
        """See LocalSenders. Without the workers of lost nodes."""
        return {sender.first_worker + i: done for sender in self.sending for i, done in enumerate(sender.done or ())}

    def findings(self, limit_ms: float) -> Findings:
        """See LocalSenders."""
        errors_ms = [error / 1e6 for sender in self.sending if (error := sender.alignment_error_ns()) is not None]
        worst_ms = max(errors_ms, default=0.0)
        invalid = [
            warning("node-lost", address=sender.node.address, why=sender.lost_why)
            for sender in self.sending
            if sender.lost_ns
        ]
        if worst_ms > limit_ms:
            invalid.append(warning("clocks-apart", error_ms=worst_ms, limit_ms=limit_ms))
        facts = {"client_nodes": [sender.fact() for sender in self.sending], "clock_alignment_error_ms": worst_ms}
        return Findings(facts, tuple(self._warnings()), tuple(invalid))

    def _warnings(self) -> list[RunWarning]:
        machines = {sender.node.place.machine for sender in self.sending}
        warnings = []
        if len(machines) < len(self.sending):
            warnings.append(warning("nodes-share-machine", nodes=len(self.sending), machines=len(machines)))
        if len(self.sending[0].part.load.phases) > 1 and len(self.sending) > 1:
            warnings.append(warning("phases-by-node"))
        return warnings

    def _released(self, sender: Sending) -> int:
        """How many of a node's sessions have been released, or may have been before it was lost."""
        arrivals = sender.part.sessions.arrivals
        if not sender.lost_ns or arrivals is None or sender.part.load.max_concurrency is not None:
            return sender.released
        return max(sender.released, bisect_right(arrivals.arrival_ns, sender.lost_ns - self.start_ns))

    async def _prepare(self, sender: Sending) -> None:
        part = sender.part
        plan = part.table.append_column(_ROW, pa.array(part.rows))
        prepared = sender.node.actor.prepare.remote(_encode(part.load), _stream(plan), self.keys)
        try:
            sender.workers, problem = await await_result(prepared, PREPARE_S)
        except CallFailedError as error:
            raise RunError(f"client node {sender.node.address} was lost before the start ({error})") from None
        if problem is not None:
            raise RunError(f"client node {sender.node.address}: {problem}")

    async def _clock(self, sender: Sending) -> ClockOffset:
        return await measured_offset(lambda: await_result(sender.node.actor.clock.remote(), SILENT_S))

    async def _listen(self, sender: Sending, on_batch: OnBatch) -> None:
        while sender.running:
            await self._unless_lost(sender, self._next_report(sender, on_batch))

    async def _next_report(self, sender: Sending, on_batch: OnBatch) -> None:
        report = _REPORT.decode(await await_result(sender.node.actor.report.remote(), SILENT_S))
        sender.released = report.released
        for worker, batch in report.batches:
            on_batch(worker, batch)
        if report.done is not None:
            sender.done = report.done
            if any(done is None or done.error is not None for done in report.done):
                self.send_all(Stop(abort=True))

    async def _unless_lost(self, sender: Sending, call: Awaitable[None]) -> None:
        """Wait for a call. If the node is lost, stop the others: the run has not the load that was planned."""
        try:
            await call
        except CallFailedError as error:
            sender.lost_ns, sender.lost_why = time.monotonic_ns(), str(error)
            sender.node.end()
            self.send_all(Stop(abort=True))


Senders = LocalSenders | NodeSenders
"""Workers that send one plan, on one machine or several."""


def node_senders(nodes: Sequence[ClientNode], plan: PlanPart, environ: Mapping[str, str]) -> NodeSenders:
    """Split ``plan`` over the nodes, which end with their actors. Raises UsageError if there is too little to split."""
    parts = split(plan, len(nodes))
    sending = [Sending(node, part) for node, part in zip(nodes, parts, strict=True)]
    keys = {name: environ[name] for name in KEY_VARIABLES if name in environ}
    return NodeSenders(sending, keys)


def _stream(table: pa.Table) -> bytes:
    """The table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


# One client machine of several: a Ray actor that sends its part of a plan with this machine's worker processes.
#
# Arguments and results are MessagePack or Arrow. Times and row numbers leave the machine in terms of the machine that
# reports the run.

_REPORT_WITHIN_S = 1.0
_FROM_PARENT = msgspec.msgpack.Decoder(FromParent)
_LOAD = msgspec.msgpack.Decoder(MachineLoad)
_ROW = "row"
"""The column of a part's requests that has their rows in the whole plan."""
_encode = msgspec.msgpack.encode


class RayNode:
    """The actor. Calls in order: place, prepare, clock, begin, report until it says done, clock."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._senders: LocalSenders | None = None
        self._rows: list[int] = []
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

    async def prepare(self, load: bytes, plan: bytes, environ: Mapping[str, str]) -> tuple[int, str | None]:
        """Check that the server can be reached, and load the plan into the worker processes.

        ``plan``: the part's requests and their rows as an Arrow stream. ``environ`` holds the API key. Returns the
        number of workers, and why this machine cannot send, if it cannot.
        """
        table, own_load = pa.ipc.open_stream(plan).read_all().combine_chunks(), _LOAD.decode(load)
        part = PlanPart(table[_ROW].to_numpy(), table.drop_columns(_ROW), own_load)
        self._rows, self._seen = part.rows.tolist(), np.zeros(len(part.rows), np.bool_)
        everything = {**os.environ, **environ}
        try:
            async with ServerQueries(own_load.url, own_load.options, everything) as server:
                await server.ready()
            self._senders = await self._stack.enter_async_context(local_senders(part, everything))
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
        record.row = self._rows[record.row]
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
