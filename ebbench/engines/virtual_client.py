"""Who asks when, in virtual time: releases a plan's requests by the clock and by completions.

Order is part of the meaning, since two engines are compared step by step: the queue's key is (release time,
sequence). First turns of an open plan carry their row number as sequence; everything a completion releases is
numbered after them, in the order in which completions are reported.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
import numpy.typing as npt

from ebbench.records.plan import Plan


class VirtualClient:
    """Releases rows of a plan. A session runs its turns one after the other and holds one slot meanwhile.

    Times in ns of virtual time. ``intended_ns`` per row is when the scenario wanted it sent (metrics.md): the
    arrival, or the moment its slot became free; -1 while unknown.
    """

    def __init__(self, plan: Plan) -> None:
        table = plan.table
        self._rows = len(plan)
        self._arrival_ns = table["arrival_ns"].to_pylist()
        self._next_turn = _next_turns(table["session"].to_pylist())
        self._heads = deque(_first_rows(self._next_turn))
        self._phases = deque((phase.sessions, phase.max_concurrency) for phase in plan.phases)
        self._cap = plan.max_concurrency
        self._held: deque[int] = deque()  # arrived sessions over the cap
        self._heap: list[tuple[int, int, int]] = []
        self._sequence = self._rows
        self._open = 0
        self.intended_ns: npt.NDArray[np.int64] = np.full(self._rows, -1, dtype=np.int64)
        self._start(plan.closed_loop)

    def _start(self, closed_loop: bool) -> None:
        if closed_loop:
            self._refill(0)
            return
        for row in self._heads:
            arrival = self._arrival_ns[row] or 0
            self.intended_ns[row] = arrival
            heapq.heappush(self._heap, (arrival, row, row))
        self._heads.clear()

    def next_release_ns(self) -> int | None:
        """Time of the next release already known; None when only a completion can cause one."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ns: int) -> list[int]:
        """Rows released at or before ``now_ns`` and not taken yet, in order."""
        rows = []
        while self._heap and self._heap[0][0] <= now_ns:
            _, sequence, row = heapq.heappop(self._heap)
            if sequence < self._rows:  # a session arrives by the clock; everything else already has its slot
                if self._cap is not None and self._open >= self._cap:
                    self._held.append(row)
                    continue
                self._open += 1
            rows.append(row)
        return rows

    def ended(self, row: int, now_ns: int) -> None:
        """The request of ``row`` ended at ``now_ns``: its session goes on, or its slot goes to another."""
        follower = self._next_turn[row]
        if follower is not None:
            self._release(follower, now_ns)
            return
        self._open -= 1
        if self._held:
            self._open += 1
            self._push(self._held.popleft(), now_ns)
        elif self._phases:
            self._refill(now_ns)

    def _refill(self, now_ns: int) -> None:
        while self._heads and self._phases:
            sessions, limit = self._phases[0]
            if sessions == 0:
                self._phases.popleft()
                continue
            if self._open >= limit:
                return
            self._phases[0] = (sessions - 1, limit)
            self._open += 1
            self._release(self._heads.popleft(), now_ns)

    def _release(self, row: int, now_ns: int) -> None:
        self.intended_ns[row] = now_ns
        self._push(row, now_ns)

    def _push(self, row: int, now_ns: int) -> None:
        heapq.heappush(self._heap, (now_ns, self._sequence, row))
        self._sequence += 1


def _next_turns(sessions: list[int]) -> list[int | None]:
    """Row of the following turn of the same session, per row."""
    following: list[int | None] = [None] * len(sessions)
    last: dict[int, int] = {}
    for row, session in enumerate(sessions):
        if session in last:
            following[last[session]] = row
        last[session] = row
    return following


def _first_rows(following: list[int | None]) -> list[int]:
    later = set(following)
    return [row for row in range(len(following)) if row not in later]
