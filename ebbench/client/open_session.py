"""One open session of a worker: sends its requests in the order of its graph, with their pauses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ebbench.client.bodies import Turn
from ebbench.client.messages import Assignment
from ebbench.client.request_sender import RequestSender
from ebbench.client.response import StreamedResponse
from ebbench.client.session_plan import SessionPlan
from ebbench.records.schema import ABANDONED, EARLIER_TURN_ABANDONED, EARLIER_TURN_FAILED

NOT_RELEASED = "not_released"
BodyOf = Callable[[Turn, Sequence[tuple[str, str]], bool], bytes]
"""The body of a request: of a turn, with the history of its session, and whether its client may hang up."""


class Reports(Protocol):
    """Takes the results of requests."""

    def ended(self, turn: Turn, intended_ns: int, answer: StreamedResponse) -> str:
        """Record a request that was sent; returns its status."""
        ...

    def never_sent(self, rows: Sequence[int], reason: str) -> None:
        """Record requests that were not sent."""
        ...


class OpenSession:
    """The state of one session: which requests have ended, and the texts that later turns repeat.

    ``stopping`` is set when no further request may be sent, which also ends pauses.
    """

    def __init__(
        self,
        plan: SessionPlan,
        rows: Sequence[int],
        assignment: Assignment,
        body: BodyOf,
        sender: RequestSender,
        reports: Reports,
        stopping: asyncio.Event,
        stopped: Callable[[], bool],
    ) -> None:
        self._plan, self._rows, self._graph = plan, rows, plan.graph
        self._assignment, self._body, self._sender, self._reports = assignment, body, sender, reports
        self._stopping, self._stopped = stopping, stopped
        self._waits = {row: int(self._graph.waits[row]) for row in rows} if self._graph.branched else {}
        self._ready_ns: dict[int, int] = {}  # latest end among the requests that a row waits for
        self._given_up: set[int] = set()
        # By content: the (question, answer) texts so far, and the last question.
        self._histories: dict[int, tuple[list[tuple[str, str]], str]] = {}

    async def run(self, intended_ns: int) -> int:
        """Send all requests; returns when the last one ended (monotonic ns)."""
        first = self._rows[0]
        return await self._branches(first, self._graph.parallel_starts.get(first, []), intended_ns)

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
        if intended_ns > ready_ns and not self._stopped():
            await self._pause_until(intended_ns)
        if self._stopped():
            self._give_up(row, NOT_RELEASED, itself=True)
            return ready_ns, []
        if row in self._assignment.dropped:  # the parent adds its record
            return ready_ns, self._after(row, ready_ns)
        turn, hang_up_ns = self._plan.turn(row), self._plan.hang_up_ns(row)
        history, asked = self._histories.get(turn.content, ([], ""))
        whole = turn.prompt is not None and turn.prompt.startswith(asked)
        body = self._body(turn, () if whole else history, hang_up_ns is not None)
        keep_text = self._assignment.options.keep_text or (turn.prompt is not None and len(self._rows) > 1)
        answer = StreamedResponse(self._assignment.options.endpoint == "chat", keep_text)
        await self._sender.send(self._assignment.id_prefix + turn.request_id, body, answer, hang_up_ns)
        status = self._reports.ended(turn, intended_ns, answer)
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
        for one in following:
            self._waits[one] -= 1
            self._ready_ns[one] = max(ended_ns, self._ready_ns.get(one, 0))
        return [one for one in following if not self._waits[one]]

    def _give_up(self, row: int, reason: str, *, itself: bool = False) -> None:
        """Record the requests that wait for ``row`` as never sent."""
        lost = [one for one in self._graph.descendants(row) if one not in self._given_up]
        self._given_up.update(lost)
        self._reports.never_sent(sorted([row, *lost] if itself else lost), reason)

    async def _pause_until(self, time_ns: int) -> None:
        # Timers of the loop may fire up to a millisecond early.
        while not self._stopping.is_set() and (left_ns := time_ns - time.monotonic_ns()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), left_ns / 1e9)
