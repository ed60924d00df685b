"""Clients of the emulated engine: they send a plan's requests in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from ebbench.records.plan import Plan
from ebbench.simulation.api_server import ApiServers
from ebbench.simulation.events import TURNAROUND_NS
from ebbench.simulation.queue_limits import QueueLimits
from ebbench.simulation.releases import Releases
from ebbench.simulation.scheduler import HangUps
from ebbench.simulation.state import UNSET, RequestState

# In this order at the same nanosecond, as in the simulator's event loop; the engine's steps end before HANG_UP.
ARRIVAL, RESUME, FOLLOW, ENTRY, DEPARTURE, HANG_UP = range(6)


class VirtualClients:
    """Sends the plan's requests in virtual time: at arrival times, and after completions.

    ``api_servers``: requests go through them to the engine, and end for their clients when the last token has left
    them; None: clients and engine meet directly. ``queue_limits``: requests that the API server refuses; None: none.
    """

    def __init__(
        self,
        plan: Plan,
        state: RequestState,
        warmup: int = 0,
        begin: Callable[[int], None] | None = None,
        api_servers: ApiServers | None = None,
        queue_limits: QueueLimits | None = None,
    ):
        """``begin`` is called with the time at which ``warmup`` requests have ended and the plan begins."""
        self._plan, self._state, self._releases = plan, state, Releases(plan, warmup)
        self.hang_ups = HangUps(plan)
        self.lost = 0  # requests of the plan that the engine does not complete: refused, abandoned or given up
        self._left: list[int] = []  # rows in the engine whose clients have hung up since the last call of left()
        self._begin = begin if warmup else None
        self._api_servers, self._queue_limits = api_servers, queue_limits
        self._events: list[tuple[int, int, int, int]] = []  # (time, kind, count of events before, row)
        self._pushed = 0
        self._ready: list[int] = []
        self._release(self._releases.start(), 0)
        if not warmup:
            self._schedule_arrivals(0)

    def _push(self, time_ns: int, kind: int, row: int) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (time_ns, kind, self._pushed, row))

    def _schedule_arrivals(self, now_ns: int) -> None:
        if not self._plan.closed_loop:
            times = self._plan.table["arrival_ns"].to_pylist()
            for row in self._releases.first_rows:
                self._push(now_ns + (times[row] or 0), ARRIVAL, row)

    def due(self, now_ns: int) -> list[int]:
        """Rows that enter the engine now, in order."""
        self.catch_up(now_ns)
        rows, self._ready = self._ready, []
        return rows

    def left(self) -> list[int]:
        """Rows in the engine whose clients have hung up since the last call."""
        rows, self._left = self._left, []
        return rows

    def catch_up(self, now_ns: int, *, idle: bool = False) -> None:
        """Let everything happen that happens outside the engine up to now.

        A client that hangs up at this very moment still gets the tokens of a step that ends now, so its hang-up comes
        later, unless the engine is ``idle``.
        """
        limit = (now_ns, HANG_UP + idle)
        while self._events and self._events[0][:2] < limit:
            time_ns, kind, _, row = heapq.heappop(self._events)
            if kind == ENTRY:
                self._ready += self.hang_ups.still_wanted([row])
            elif kind == DEPARTURE:
                self._end([row], time_ns)
            elif kind == HANG_UP:
                self._hang_up(row, time_ns)
            elif kind == RESUME:
                self._send([row], time_ns)
            elif kind == FOLLOW:
                self._state.intend([row], time_ns - TURNAROUND_NS)
                self._send([row], time_ns)
            else:
                self._state.intended_ns[row] = time_ns
                self._release(self._releases.arrived(row), time_ns)

    def _hang_up(self, row: int, now_ns: int) -> None:
        if not self.hang_ups.hangs_up(row):
            return
        self.lost += self._state.end_ns[row] == UNSET
        self._state.end_ns[row] = now_ns
        if row in self._ready:
            self._ready.remove(row)
        else:
            self._left.append(row)
        if self._queue_limits is not None:
            self._queue_limits.ended(row)
        lost, released = self._releases.failed(row)
        self.hang_ups.given_up += lost
        self.lost += len(lost)
        self._release(released, now_ns)

    def next_event_ns(self) -> int | None:
        """Time (ns) of the next event outside the engine; None if only the engine's completions cause further ones."""
        return self._events[0][0] if self._events else None

    def ended(self, rows: Sequence[int], now_ns: int) -> None:
        """Process the ends of requests in one step of the engine. Sessions that arrived by then come first."""
        self.catch_up(now_ns)
        at_once: list[int] = []
        for row in rows:
            departed_ns = now_ns if self._api_servers is None else self._api_servers.departed_ns(row)
            if departed_ns <= now_ns:
                at_once.append(row)
            else:
                self._push(departed_ns, DEPARTURE, row)
        self._end(at_once, now_ns)

    def _end(self, rows: Sequence[int], now_ns: int) -> None:
        """Process the ends of requests for their clients, then send those that they release."""
        following: list[int] = []
        if self.hang_ups.any:
            rows = self.hang_ups.still_wanted(rows)
            self.hang_ups.ended(rows)
        for row in rows:
            if self._queue_limits is not None:
                self._queue_limits.ended(row)
            following += self._releases.ended(row)
        if self._end_warmup(now_ns):  # the plan's first requests, at its time zero
            self._release(following, now_ns)
            return
        for row in self._pause(following, now_ns):
            self._push(now_ns + TURNAROUND_NS, FOLLOW, row)

    def _end_warmup(self, now_ns: int) -> bool:
        """Begin the plan if the warm-up has ended just now; returns whether."""
        if self._begin is None or not self._releases.begun:
            return False
        self._begin(now_ns)
        self._begin = None
        self._schedule_arrivals(now_ns)
        return True

    def _release(self, rows: list[int], now_ns: int) -> None:
        """Send requests when they have paused."""
        self._send(self._pause(rows, now_ns), now_ns)

    def _pause(self, rows: list[int], now_ns: int) -> list[int]:
        """Let requests pause; returns those that do not."""
        at_once = []
        for row in rows:
            if pause_ns := self._releases.pause_ns(row):
                self._push(now_ns + pause_ns, RESUME, row)
            else:
                at_once.append(row)
        return at_once

    def _stamp(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that requests are sent now."""
        self._state.intend(rows, now_ns)
        for row in rows:
            self._state.sent_ns[row] = now_ns

    def _send(self, rows: list[int], now_ns: int) -> None:
        if self._queue_limits is None:
            self._stamp(rows, now_ns)
        else:
            rows, ended = self._queue_limits.accept(rows, now_ns, self._releases, self._stamp)
            self.lost += ended
            self._end_warmup(now_ns)
        for row in rows:
            if (patience_ns := self.hang_ups.sent(row)) is not None:
                self._push(now_ns + patience_ns, HANG_UP, row)
            entry_ns = now_ns if self._api_servers is None else self._api_servers.enter(row, now_ns)
            if entry_ns <= now_ns:
                self._ready.append(row)
            else:
                self._push(entry_ns, ENTRY, row)
