"""When requests of a plan are sent: by the clock, by completions, or as the next turn of a session."""

from __future__ import annotations

from collections import deque

import numpy as np

from ebbench.records.plan import Plan


class Releases:
    """Turns a plan into releases. Each call returns plan rows to send now, in order.

    Closed loop: sessions are released in plan order while fewer than the current phase's ``max_concurrency`` are
    open. Open loop: sessions start at their arrival; a cap on open sessions makes the later ones wait.
    """

    def __init__(self, plan: Plan) -> None:
        sessions = np.asarray(plan.table["session"])
        turns = np.asarray(plan.table["turn"])
        order = np.lexsort((turns, sessions))
        same = sessions[order][1:] == sessions[order][:-1]
        self._next_turn = np.full(len(plan), -1, np.int64)
        self._next_turn[order[:-1][same]] = order[1:][same]
        starts = np.ones(len(plan), np.bool_)
        starts[order[1:][same]] = False
        self.first_rows: list[int] = np.flatnonzero(starts).tolist()
        self._open = 0
        self._limits = [(phase.sessions, phase.max_concurrency) for phase in plan.phases]
        self._cap = plan.max_concurrency
        self._queue: deque[int] = deque(self.first_rows if plan.phases else ())
        self._released_in_phase = 0

    def start(self) -> list[int]:
        """Rows sent at time zero in closed loop."""
        return self._release_closed()

    def arrived(self, row: int) -> list[int]:
        """An open-loop session arrived; the row itself, or nothing while the cap is reached."""
        if self._cap is not None and self._open >= self._cap:
            self._queue.append(row)
            return []
        self._open += 1
        return [row]

    def ended(self, row: int) -> list[int]:
        """A request ended: its session's next turn, or what its slot makes room for."""
        following = int(self._next_turn[row])
        if following >= 0:
            return [following]
        self._open -= 1
        if self._limits:
            return self._release_closed()
        if self._queue:
            self._open += 1
            return [self._queue.popleft()]
        return []

    def _release_closed(self) -> list[int]:
        rows: list[int] = []
        while self._queue and self._limits:
            sessions, max_concurrency = self._limits[0]
            if self._released_in_phase >= sessions and len(self._limits) > 1:
                self._limits.pop(0)
                self._released_in_phase = 0
                continue
            if self._open >= max_concurrency:
                break
            rows.append(self._queue.popleft())
            self._open += 1
            self._released_in_phase += 1
        return rows
