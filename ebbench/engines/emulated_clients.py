"""Clients of the emulated engine: they send a plan's requests in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from ebbench.records.plan import Plan
from ebbench.simulation.releases import Releases
from ebbench.simulation.state import UNSET, RequestState


class VirtualClients:
    """Sends the plan's requests in virtual time: at arrival times, and after completions."""

    def __init__(self, plan: Plan, state: RequestState, warmup: int = 0, begin: Callable[[int], None] | None = None):
        """``begin`` is called with the time at which ``warmup`` requests have ended and the plan begins."""
        self._plan, self._state, self._releases = plan, state, Releases(plan, warmup)
        self._begin = begin if warmup else None
        self._arrivals: list[tuple[int, int]] = []  # (time, row)
        self._ready: list[int] = []
        self._release(self._releases.start(), 0)
        if not warmup:
            self._schedule_arrivals(0)

    def _schedule_arrivals(self, now_ns: int) -> None:
        if not self._plan.closed_loop:
            times = self._plan.table["arrival_ns"].to_pylist()
            self._arrivals = sorted((now_ns + (times[row] or 0), row) for row in self._releases.first_rows)

    def due(self, now_ns: int) -> list[int]:
        """Rows to send now, in order."""
        self._arrive(now_ns)
        rows, self._ready = self._ready, []
        return rows

    def _arrive(self, now_ns: int) -> None:
        while self._arrivals and self._arrivals[0][0] <= now_ns:
            arrival_ns, row = heapq.heappop(self._arrivals)
            self._state.intended_ns[row] = arrival_ns
            self._release(self._releases.arrived(row), arrival_ns)

    def next_arrival_ns(self) -> int | None:
        """Time (ns) of the next arrival; None if only completions release further requests."""
        return self._arrivals[0][0] if self._arrivals else None

    def ended(self, row: int, now_ns: int) -> None:
        """Process the end of a request. Sessions that arrived by then come first: they may wait for its slot."""
        self._arrive(now_ns)
        following = self._releases.ended(row)
        if self._begin is not None and self._releases.begun:
            self._begin(now_ns)
            self._begin = None
            self._schedule_arrivals(now_ns)
        self._release(following, now_ns)

    def _release(self, rows: list[int], now_ns: int) -> None:
        self._ready += rows
        for row in rows:
            if self._state.intended_ns[row] == UNSET:
                self._state.intended_ns[row] = now_ns
            self._state.sent_ns[row] = now_ns
