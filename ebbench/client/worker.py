"""A worker: releases sessions by the shared schedule, sends their requests and reports the results."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.bodies_ahead import BodiesAhead
from ebbench.client.classify import BODY_LIMIT, classify
from ebbench.client.messages import (
    Assignment,
    Batch,
    RequestRecord,
    Stop,
    from_parent,
    send,
)
from ebbench.client.open_session import OpenSession
from ebbench.client.pacing import NEVER, Arrivals
from ebbench.client.release_schedule import ReleaseSchedule
from ebbench.client.request_sender import RequestSender
from ebbench.client.response import LONGEST_MODEL, StreamedResponse
from ebbench.client.session_plan import SessionPlan
from ebbench.network.credentials import redacted
from ebbench.process.alarm import Alarm
from ebbench.spec.client import secrets

_ODD_CHARACTERS = 40  # of a value that is no number, as a warning repeats it
_REPORT_EVERY_S, _REPORT_AT = 0.2, 64
"""A worker reports finished requests after so many seconds, or as soon as it holds so many."""
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
    """One worker and its open sessions."""

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
        self._assignment, self._session_plan, self._schedule, self._bodies = assignment, session_plan, schedule, bodies
        self._sender, self._sockets, self._writer = sender, sockets, writer
        self._secrets = secrets(assignment.options, environ)
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._on_alarm)
        self._own_next = assignment.worker
        self._open: set[asyncio.Task[None]] = set()
        self._records: list[RequestRecord] = []
        self._tokens = 0
        self.ahead = BodiesAhead(bodies, session_plan, assignment.worker, assignment.workers)
        self._idle = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Run to the end of the plan, or until the parent sends Stop."""
        self._loop.add_reader(self._sockets.wake_up.fileno(), self._on_wake_up)
        listener = asyncio.create_task(self._listen(reader))
        reporter = asyncio.create_task(self._report_regularly())
        try:
            self._alarm.set(self._schedule.start_ns)
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
        if self._session_plan.arrivals is not None:
            soon = bisect_right(self._session_plan.arrivals.arrival_ns, round(_SOON_S * 1e9))
            return min(-(-soon // self._assignment.workers), _MAX_PRECONNECTIONS)
        share = self._schedule.share(self._assignment.workers)
        return self._session_plan.sessions if share is None else min(share, self._session_plan.sessions)

    def initial_connections(self) -> int:
        """Number of connections that are surely in use together soon after the start.

        Of an open loop only those that arrive at once: how many requests will be open at a time is not known, and each
        idle connection occupies a thread of a server that has few.
        """
        first = self.first_sessions()
        if self._session_plan.arrivals is not None:
            at_once = bisect_right(self._session_plan.arrivals.arrival_ns, round(_AT_ONCE_S * 1e9))
            return min(-(-at_once // self._assignment.workers), first)
        spacing_s = self._assignment.options.slot_spacing_s
        return first if not spacing_s else min(first, 1 + round(_SLOTS_OPEN_S / spacing_s / self._assignment.workers))

    @property
    def open_loop(self) -> bool:
        """Whether sessions start at fixed times, independent of how many are open."""
        return self._session_plan.arrivals is not None

    def _on_alarm(self) -> None:
        """Timer callback: at the start, at a session's arrival, or when a slot opens."""
        if self._session_plan.arrivals is None:
            self._fill()
        else:
            self._arrive(self._session_plan.arrivals)

    def _arrive(self, arrivals: Arrivals) -> None:
        """Open loop: for each own session that is due, release one session; then set the timer for the next."""
        elapsed_ns = time.monotonic_ns() - self._schedule.start_ns
        wait_ns = arrivals.wait_ns(elapsed_ns, self._own_next)
        while wait_ns == 0:
            self._own_next += self._assignment.workers
            self._take()
            wait_ns = arrivals.wait_ns(elapsed_ns, self._own_next)
        if wait_ns != NEVER and not self._schedule.finished:
            self._alarm.set(self._schedule.start_ns + elapsed_ns + wait_ns)
        self._check_idle()

    def _on_wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._sockets.wake_up.recv(64):
                pass
        self._fill()

    def _fill(self, changed: bool = False) -> None:
        """Release sessions up to this worker's share of the slots; wake the other workers if their share changed."""
        if self._session_plan.arrivals is None:
            share = self._schedule.share(self._assignment.workers)
            while share is None or len(self._open) < share:
                if not self._take():
                    due_ns = self._schedule.due_ns()
                    if due_ns is not None:
                        self._alarm.set(due_ns)
                    break
                changed, share = True, self._schedule.share(self._assignment.workers)
        closed = self._session_plan.arrivals is None
        if changed and (self._schedule.finished or (closed and self._schedule.due_ns() is not None)):
            self._wake_others()
        self._check_idle()

    def _wake_others(self) -> None:
        for wake_up in self._sockets.other_wake_ups:
            with contextlib.suppress(OSError):  # buffer full: the worker will wake anyway; closed: it has ended
                wake_up.send(b"!")

    def _take(self) -> bool:
        release = self._schedule.take()
        if release is None:
            return False
        task = self._loop.create_task(self._session(*release))
        self._open.add(task)
        return True

    def _check_idle(self) -> None:
        own_done = self._session_plan.arrivals is None or self._own_next >= self._session_plan.sessions
        if not self._open and (self._schedule.stopped or (self._schedule.finished and own_done)):
            self._idle.set()

    async def _session(self, session: int, intended_ns: int) -> None:
        """Send the requests of one session."""
        task = asyncio.current_task()
        assert task is not None
        ended_ns = intended_ns
        try:
            ended_ns = await self._opened(session).run(intended_ns)
        except Exception as error:  # a bug in the client: the run ends with this error
            self._failure = self._failure or error
            self._stop()
        self._open.discard(task)
        self._schedule.end(ended_ns)
        # This worker takes the slot just freed; it shares further slots, if the limit rose, with the others.
        if self._session_plan.arrivals is None or self._assignment.max_concurrency is not None:
            self._take()
        self._fill(changed=True)

    def _opened(self, session: int) -> OpenSession:
        return OpenSession(
            self._session_plan,
            self._session_plan.turns(session),
            self._assignment,
            self._body,
            self._sender,
            self,
            self._stopping,
            lambda: self._schedule.stopped,
        )

    def _body(self, turn: Turn, history: Sequence[tuple[str, str]], may_hang_up: bool) -> bytes:
        """The request body, built ahead if it could be."""
        if turn.turn == 0 and (body := self.ahead.take(turn.row)) is not None:
            return body
        if self._assignment.workers > 1:
            self.ahead.passed(self._schedule.released)
        return self._bodies.build(turn, history, may_hang_up=may_hang_up)

    def _stop(self) -> None:
        """Send no further request; pauses end."""
        self._schedule.stop()
        self._stopping.set()

    def ended(self, turn: Turn, intended_ns: int, streamed: StreamedResponse) -> str:
        """See Reports."""
        record = self._record_of(turn, intended_ns, streamed)
        self._records.append(record)
        self._tokens += record.output_tokens or 0
        if len(self._records) >= _REPORT_AT:
            self._report()
        return record.status

    def never_sent(self, rows: Sequence[int], reason: str) -> None:
        """See Reports."""
        for row in rows:
            self._records.append(RequestRecord(row, self._assignment.worker, "never_sent", error_class=reason))

    def _record_of(self, turn: Turn, intended_ns: int, streamed: StreamedResponse) -> RequestRecord:
        verdict = classify(streamed, turn.output_tokens, self._assignment.options.ignore_eos)
        counts, body, tokens = streamed.counts(), verdict.error_body, verdict.tokens
        odd = {name: redacted(value, self._secrets)[:_ODD_CHARACTERS] for name, value in counts.odd.items()}
        return RequestRecord(
            row=turn.row,
            worker=self._assignment.worker,
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
            text=self._redacted(streamed.text) if self._assignment.options.keep_text else None,
            thinking_tokens=verdict.hidden_tokens or streamed.thinking_tokens,
            first_answer_ns=tokens.times_ns[0] if verdict.hidden_tokens else streamed.first_answer_ns,
            odd_numbers=odd or None,
            first_on_connection=streamed.first_on_connection,
            other_model=self._redacted(_other_model(streamed, turn.lora or self._assignment.model)),
        )

    def _redacted(self, text: str | None) -> str | None:
        return text and redacted(text, self._secrets)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Process the parent's messages. If the parent is gone (None), abort everything."""
        while True:
            message = await from_parent(reader)
            if isinstance(message, Stop) and message.finish_sessions:
                self._schedule.close()
                self._check_idle()
                continue
            self._stop()
            if not isinstance(message, Stop) or message.abort:
                self._sender.abort()
            self._check_idle()
            if message is None:
                return

    async def _report_regularly(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            self._report()

    def _report(self) -> None:
        records, self._records = self._records, []
        send(self._writer, Batch(records, self._sender.in_flight, self._tokens))


def _other_model(streamed: StreamedResponse, asked: str) -> str | None:
    """The models that the server named if any is not the one asked for."""
    others = [name for name in streamed.models if name != asked[:LONGEST_MODEL]]
    return " and ".join(dict.fromkeys(streamed.models)) if others else None
