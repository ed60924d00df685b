"""A worker: releases sessions by the shared schedule, sends their requests and reports the results."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import uvloop

from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.dialects import DIALECTS
from ebbench.client.lag import LagMonitor
from ebbench.client.messages import (
    Assignment,
    Batch,
    Ready,
    RequestRecord,
    Start,
    Stop,
    WorkerDone,
    from_parent,
    lock_path,
    plan_path,
    schedule_path,
    send,
)
from ebbench.client.release_schedule import NEVER, Arrivals, FileLock, ReleaseSchedule, SharedMemory
from ebbench.client.request_sender import RequestSender
from ebbench.client.response import BODY_LIMIT, LONGEST_MODEL, StreamedResponse, classify, response_to
from ebbench.client.session_plan import BodiesAhead, SessionPlan
from ebbench.network.credentials import redacted
from ebbench.process.alarm import Alarm, take_short_slices
from ebbench.process.child import make_room_for_files
from ebbench.process.interpreter import no_full_collections
from ebbench.records.schema import ABANDONED, EARLIER_TURN_ABANDONED, EARLIER_TURN_FAILED
from ebbench.spec.client import secrets

if TYPE_CHECKING:
    from ebbench.workloads.tokens import TokenizerCount

# One open session of a worker: sends its requests in the order of its graph, with their pauses.

NOT_RELEASED = "not_released"


class OpenSession:
    """The state of one session of a worker: which requests have ended, and the texts that later turns repeat."""

    def __init__(self, worker: Worker, rows: Sequence[int]) -> None:
        self._worker, self._rows, self._plan, self._graph = worker, rows, worker.session_plan, worker.session_plan.graph
        self._waits = {row: int(self._graph.waits[row]) for row in rows} if self._graph.branched else {}
        self._ready_ns: dict[int, int] = {}  # latest end among the requests that a row waits for
        self._given_up: set[int] = set()
        # By content: the (question, answer) texts so far, and the last question.
        self._histories: dict[int, tuple[list[tuple[str, str]], str]] = {}

    async def run(self, intended_ns: int) -> int:
        """Send all requests; returns when the last one ended (monotonic ns)."""
        first = self._rows[0]
        others = self._graph.parallel_starts.get(first)
        return await (self._branches(first, others, intended_ns) if others else self._branch(first, intended_ns))

    async def _branches(self, first: int, others: Sequence[int], ready_ns: int) -> int:
        """Send ``others`` and what follows them in tasks of their own, ``first`` in this one."""
        tasks = [asyncio.create_task(self._branch(row, self._ready_ns.get(row, ready_ns))) for row in others]
        ended_ns = await self._branch(first, self._ready_ns.get(first, ready_ns))
        for task in tasks:
            ended_ns = max(ended_ns, await task)
        return ended_ns

    async def _branch(self, row: int, ready_ns: int) -> int:
        """Send a request and those that follow it, one after the other; parallel ones run in tasks of their own."""
        while True:
            ended_ns, following = await self._send(row, ready_ns)
            if not following:
                return ended_ns
            if len(following) > 1:
                return await self._branches(following[0], following[1:], ended_ns)
            row, ready_ns = following[0], self._ready_ns.get(following[0], ended_ns)

    async def _send(self, row: int, ready_ns: int) -> tuple[int, list[int]]:
        """Send one request after its pause. Returns its end and the rows that may be sent then."""
        intended_ns = ready_ns + self._graph.pause_of(row)
        worker, schedule = self._worker, self._worker.schedule
        if intended_ns > ready_ns and not schedule.stopped:
            await self._pause_until(intended_ns)
        if schedule.stopped:
            self._give_up(row, NOT_RELEASED, itself=True)
            return ready_ns, []
        if row in worker.load.dropped:  # the parent adds its record
            return ready_ns, self._after(row, ready_ns)
        turn, hang_up_ns = self._plan.turn(row), self._plan.hang_up_ns(row)
        history, asked = self._histories.get(turn.content, ([], ""))
        whole = turn.prompt is not None and turn.prompt.startswith(asked)
        body = worker.body(turn, () if whole else history, may_hang_up=hang_up_ns is not None)
        options = worker.load.options
        keep_text = options.keep_text or bool(options.tokenizer) or (turn.prompt is not None and len(self._rows) > 1)
        answer = response_to(DIALECTS[options.endpoint], keep_text)
        await worker.sender.send(worker.load.id_prefix + turn.request_id, body, answer, hang_up_ns)
        following = self._graph.followers(row)
        if not following:
            worker.ended(turn, intended_ns, answer)
            return answer.end_ns, []
        status = worker.status(turn, intended_ns, answer)
        if status != "ok":
            self._give_up(row, EARLIER_TURN_ABANDONED if status == ABANDONED else EARLIER_TURN_FAILED)
            return answer.end_ns, []
        if turn.prompt is not None and answer.text is not None:
            self._histories[turn.content] = ([*history, (turn.prompt, answer.text)], turn.prompt)
        return answer.end_ns, self._after(row, answer.end_ns)

    def _after(self, row: int, ended_ns: int) -> list[int]:
        following = self._graph.followers(row)
        if not self._waits:
            return following
        for follower in following:
            self._waits[follower] -= 1
            self._ready_ns[follower] = max(ended_ns, self._ready_ns.get(follower, 0))
        return [follower for follower in following if not self._waits[follower]]

    def _give_up(self, row: int, reason: str, *, itself: bool = False) -> None:
        """Record the requests that wait for ``row`` as never sent."""
        lost = [descendant for descendant in self._graph.descendants(row) if descendant not in self._given_up]
        self._given_up.update(lost)
        self._worker.never_sent(sorted([row, *lost] if itself else lost), reason)

    async def _pause_until(self, time_ns: int) -> None:
        stopping = self._worker.stopping
        # Timers of the loop may fire up to a millisecond early.
        while not stopping.is_set() and (left_ns := time_ns - time.monotonic_ns()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), left_ns / 1e9)


# Main function of a worker process: reads its assignment, prepares, sends its share of the requests, reports.


def worker_process(sockets: WorkerSockets, environ: Mapping[str, str]) -> None:
    """Everything that a process of its own does for a plan."""
    take_short_slices()
    make_room_for_files()
    uvloop.run(run_worker(sockets, environ))


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
    if not writer.is_closing():  # as it is where the run was interrupted before it began
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
    load, session_plan = assignment.load, assignment.load.sessions(_mapped(plan_path(assignment.folder)))
    bodies = RequestBodies(load.model, load.options)
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(contextlib.closing(SharedMemory(schedule_path(assignment.folder))))
        lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if assignment.workers > 1:  # otherwise no other process uses the schedule between the start and the end
            lock = stack.enter_context(contextlib.closing(FileLock(lock_path(assignment.folder))))
        schedule = session_plan.schedule(memory, lock)
        async with RequestSender(load.target, load.options, environ) as sender:
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


def _mapped(path: Path) -> pa.Table:
    """The plan, mapped into memory that all workers share."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


_ODD_CHARACTERS = 40  # of a value that is no number, as a warning repeats it
_REPORT_EVERY_S, _REPORT_AT = 0.5, 256
"""A worker reports finished requests after so many seconds, or as soon as it holds so many.

Each report costs the parent 3 ms of CPU, most of it for one more piece of the table."""
_RECORD_AT = 8
"""A worker makes the records of so many finished requests in a row, in half the time that single ones take."""
_MAX_PRECONNECTIONS = 512  # connections that a worker opens before an open loop starts
_SOON_S, _AT_ONCE_S = 2.0, 0.01
_SLOTS_OPEN_S = 0.5  # of a closed loop; a connection that waits longer for its slot may be too old by then


@dataclass(frozen=True)
class WorkerSockets:
    """A worker's sockets: to its parent, one on which other workers wake it, and those on which it wakes the others."""

    control: socket.socket
    wake_up: socket.socket
    other_wake_ups: tuple[socket.socket, ...]


class Worker:
    """One worker and its open sessions.

    ``stopping`` is set when no further request may be sent, which also ends pauses.
    """

    def __init__(
        self,
        assignment: Assignment,
        session_plan: SessionPlan,
        schedule: ReleaseSchedule,
        bodies: RequestBodies,
        sender: RequestSender,
        sockets: WorkerSockets,
        writer: asyncio.StreamWriter,
        environ: Mapping[str, str],
    ) -> None:
        self.assignment, self.session_plan, self.schedule, self._bodies = assignment, session_plan, schedule, bodies
        self.load = assignment.load
        self.sender, self._sockets, self._writer = sender, sockets, writer
        self._secrets = secrets(self.load.options, environ)
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._on_alarm)
        self._own_next = assignment.worker
        self._open: set[asyncio.Task[None]] = set()
        self._ended: list[tuple[Turn, int, StreamedResponse]] = []
        self._records: list[RequestRecord] = []
        self._tokens = 0
        self.ahead = BodiesAhead(bodies, session_plan, assignment.worker, assignment.workers)
        self._idle = asyncio.Event()
        self.stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._counter = _counter(self.load.options.tokenizer)

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Run to the end of the plan, or until the parent sends Stop."""
        self._loop.add_reader(self._sockets.wake_up.fileno(), self._on_wake_up)
        listener = asyncio.create_task(self._listen(reader))
        reporter = asyncio.create_task(self._report_regularly())
        try:
            self._alarm.set(self.schedule.start_ns)
            await self._idle.wait()
        finally:
            self._loop.remove_reader(self._sockets.wake_up.fileno())
            listener.cancel()
            reporter.cancel()
            self._alarm.close()
            self._report()
        if self._failure is not None:
            raise self._failure

    def first_sessions(self) -> int:
        """Number of sessions that this worker releases soon after the start: those of its slots, or that arrive."""
        if self.session_plan.arrivals is not None:
            soon = bisect_right(self.session_plan.arrivals.arrival_ns, round(_SOON_S * 1e9))
            return min(-(-soon // self.assignment.workers), _MAX_PRECONNECTIONS)
        share = self.schedule.share(self.assignment.workers)
        return self.session_plan.sessions if share is None else min(share, self.session_plan.sessions)

    def initial_connections(self) -> int:
        """Number of connections that are surely in use together soon after the start.

        Of an open loop only those that arrive at once: how many requests will be open at a time is not known, and each
        idle connection occupies a thread of a server that has few.
        """
        first = self.first_sessions()
        if self.session_plan.arrivals is not None:
            at_once = bisect_right(self.session_plan.arrivals.arrival_ns, round(_AT_ONCE_S * 1e9))
            return min(-(-at_once // self.assignment.workers), first)
        spacing_s = self.load.spacing_ns / 1e9
        return first if not spacing_s else min(first, 1 + round(_SLOTS_OPEN_S / spacing_s / self.assignment.workers))

    @property
    def open_loop(self) -> bool:
        """Whether sessions start at fixed times, independent of how many are open."""
        return self.session_plan.arrivals is not None

    def _on_alarm(self) -> None:
        """Timer callback: at the start, at a session's arrival, or when a slot opens."""
        if self.session_plan.arrivals is None:
            self._fill()
        else:
            self._arrive(self.session_plan.arrivals)

    def _arrive(self, arrivals: Arrivals) -> None:
        """Open loop: for each own session that is due, release one session; then set the timer for the next."""
        elapsed_ns = time.monotonic_ns() - self.schedule.start_ns
        wait_ns = arrivals.wait_ns(elapsed_ns, self._own_next)
        while wait_ns == 0:
            self._own_next += self.assignment.workers
            self._take()
            wait_ns = arrivals.wait_ns(elapsed_ns, self._own_next)
        if wait_ns != NEVER and not self.schedule.finished:
            self._alarm.set(self.schedule.start_ns + elapsed_ns + wait_ns)
        self._check_idle()

    def _on_wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._sockets.wake_up.recv(64):
                pass
        self._fill()

    def _fill(self, changed: bool = False) -> None:
        """Release sessions up to this worker's share of the slots; wake the other workers if their share changed."""
        if self.session_plan.arrivals is None:
            share = self.schedule.share(self.assignment.workers)
            while share is None or len(self._open) < share:
                if not self._take():
                    due_ns = self.schedule.due_ns()
                    if due_ns is not None:
                        self._alarm.set(due_ns)
                    break
                changed, share = True, self.schedule.share(self.assignment.workers)
        closed = self.session_plan.arrivals is None
        if changed and (self.schedule.finished or (closed and self.schedule.due_ns() is not None)):
            self._wake_others()
        self._check_idle()

    def _wake_others(self) -> None:
        for wake_up in self._sockets.other_wake_ups:
            with contextlib.suppress(OSError):  # buffer full: the worker will wake anyway; closed: it has ended
                wake_up.send(b"!")

    def _take(self) -> bool:
        release = self.schedule.take()
        if release is None:
            return False
        task = self._loop.create_task(self._session(*release))
        self._open.add(task)
        return True

    def _check_idle(self) -> None:
        own_done = self.session_plan.arrivals is None or self._own_next >= self.session_plan.sessions
        if not self._open and (self.schedule.stopped or (self.schedule.finished and own_done)):
            self._idle.set()

    async def _session(self, session: int, intended_ns: int) -> None:
        """Send the requests of one session."""
        task = asyncio.current_task()
        assert task is not None
        ended_ns = intended_ns
        try:
            ended_ns = await OpenSession(self, self.session_plan.turns(session)).run(intended_ns)
        except Exception as error:  # a bug in the client: the run ends with this error
            self._fail(error)
        self._open.discard(task)
        self.schedule.end(ended_ns)
        # This worker takes the slot just freed; it shares further slots, if the limit rose, with the others.
        if self.session_plan.arrivals is None or self.load.max_concurrency is not None:
            self._take()
        self._fill(changed=True)

    def body(self, turn: Turn, history: Sequence[tuple[str, str]], *, may_hang_up: bool) -> bytes:
        """The request body, built ahead if it could be."""
        if turn.turn == 0 and (body := self.ahead.take(turn.row)) is not None:
            return body
        if self.assignment.workers > 1:
            self.ahead.passed(self.schedule.released)
        return self._bodies.build(turn, history, may_hang_up=may_hang_up)

    def _stop(self) -> None:
        """Send no further request; pauses end."""
        self.schedule.stop()
        self.stopping.set()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._stop()

    def ended(self, turn: Turn, intended_ns: int, streamed: StreamedResponse) -> None:
        """Record a request that was sent, a little later."""
        self._ended.append((turn, intended_ns, streamed))
        if len(self._ended) >= _RECORD_AT or self._counter is not None:
            self._record()

    def status(self, turn: Turn, intended_ns: int, streamed: StreamedResponse) -> str:
        """Record a request that was sent, now; returns its status."""
        self._ended.append((turn, intended_ns, streamed))
        return self._record()[-1].status

    def _record(self) -> list[RequestRecord]:
        """Record the requests that have ended; report them if there are many."""
        ended, self._ended = self._ended, []
        records = [self._record_of(*request) for request in ended]
        self._records += records
        self._tokens += sum(record.output_tokens or 0 for record in records)
        if len(self._records) >= _REPORT_AT:
            self._send_records()
        return records

    def never_sent(self, rows: Sequence[int], reason: str) -> None:
        """Record requests that were not sent."""
        for row in rows:
            self._records.append(RequestRecord(row, self.assignment.worker, "never_sent", error_class=reason))

    def _record_of(self, turn: Turn, intended_ns: int, streamed: StreamedResponse) -> RequestRecord:
        if self._counter is not None:
            streamed.estimate(self._counter.count)
        verdict = classify(streamed, turn.output_tokens, self.load.options.ignore_eos)
        counts, body, tokens = streamed.counts(), verdict.error_body, verdict.tokens
        odd = {name: redacted(value, self._secrets)[:_ODD_CHARACTERS] for name, value in counts.odd.items()}
        return RequestRecord(
            row=turn.row,
            worker=self.assignment.worker,
            status=verdict.status,
            intended_ns=intended_ns,
            sent_ns=streamed.sent_ns,
            first_byte_ns=streamed.first_byte_ns,
            end_ns=streamed.end_ns,
            token_ns=tokens.times_ns.tobytes(),
            bundled=tokens.bundled,
            first_tokens=tokens.first,
            output_tokens=verdict.output_tokens,
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            finish_reason=self._redacted(streamed.finish_reason),
            error_class=verdict.error_class,
            error_body=redacted(body, self._secrets)[:BODY_LIMIT] if body is not None else None,
            http_status=streamed.status,
            text=self._redacted(streamed.text) if self.load.options.keep_text else None,
            thinking_tokens=verdict.hidden_tokens or streamed.thinking_tokens,
            first_answer_ns=tokens.times_ns[0] if verdict.hidden_tokens else streamed.first_answer_ns,
            odd_numbers=odd or None,
            first_on_connection=streamed.first_on_connection,
            other_model=self._redacted(_other_model(streamed, turn.lora or self.load.model)),
            estimated=streamed.estimated,
            drafts=counts.drafts,
        )

    def _redacted(self, text: str | None) -> str | None:
        return text and redacted(text, self._secrets)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Process the parent's messages. If the parent is gone (None), abort everything."""
        while True:
            message = await from_parent(reader)
            if isinstance(message, Stop) and message.finish_sessions:
                self.schedule.close()
                self._check_idle()
                continue
            self._stop()
            if not isinstance(message, Stop) or message.abort:
                self.sender.abort()
            self._check_idle()
            if message is None:
                return

    async def _report_regularly(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            try:
                self._report()
            except Exception as error:
                self._fail(error)

    def _report(self) -> None:
        self._record()
        self._send_records()

    def _send_records(self) -> None:
        records, self._records = self._records, []
        send(self._writer, Batch(records, self.sender.in_flight, self._tokens))


def _counter(tokenizer: str | None) -> TokenizerCount | None:
    """What counts the tokens of answers without usage; imported only where it is asked for."""
    if tokenizer is None:
        return None
    from ebbench.workloads.tokens import load_tokenizer

    return load_tokenizer(tokenizer)


def _other_model(streamed: StreamedResponse, asked: str) -> str | None:
    """The models that the server named if any is not the one asked for."""
    others = [name for name in streamed.models if name != asked[:LONGEST_MODEL]]
    return " and ".join(dict.fromkeys(streamed.models)) if others else None
