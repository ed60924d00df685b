"""When requests of a plan are sent: at arrival times, after completions, or as the next turn of a session."""

from __future__ import annotations

from collections import deque

import numpy as np

from ebbench.records.plan import Plan

WARMUP_AT_ONCE = 64  # default of the load generator


class Releases:
    """Converts a plan to releases. Each call returns the plan rows to send now, in order.

    Closed loop: sessions are released in plan order while fewer than the current phase's ``max_concurrency`` are open.
    Open loop: sessions start at their arrival time; a cap on open sessions makes later ones wait.

    ``warmup`` requests of one turn, in rows after the plan's (:mod:`ebbench.simulation.warmup`), are sent first; the
    plan begins when the last of them has ended.
    """

    def __init__(self, plan: Plan, warmup: int = 0) -> None:
        sessions = np.asarray(plan.table["session"])
        turns = np.asarray(plan.table["turn"])
        order = np.lexsort((turns, sessions))
        same = sessions[order][1:] == sessions[order][:-1]
        self._next_turn = np.full(len(plan), -1, np.int64)
        self._next_turn[order[:-1][same]] = order[1:][same]
        self._takes_turns = bool(same.any())
        starts = np.ones(len(plan), np.bool_)
        starts[order[1:][same]] = False
        self.first_rows: list[int] = np.flatnonzero(starts).tolist()
        self._open = 0
        self._limits = [(phase.sessions, phase.max_concurrency) for phase in plan.phases]
        self._cap = plan.max_concurrency
        self._queue: deque[int] = deque(self.first_rows if plan.phases else ())
        self._released_in_phase = 0
        self._warmup = deque(range(len(plan), len(plan) + warmup))
        self._warming = warmup

    @property
    def begun(self) -> bool:
        """Whether the warm-up has ended, so that the plan's clock runs."""
        return not self._warming

    @property
    def by_completions(self) -> bool:
        """Whether the end of a request may release another one."""
        return self._takes_turns or bool(self._queue) or not self.begun

    def start(self) -> list[int]:
        """Rows sent at time zero: concurrent warm-up requests, else those of a closed loop."""
        if self.begun:
            return self._release_closed()
        at_once = self._limits[0][1] if self._limits else self._cap or WARMUP_AT_ONCE
        return [self._warmup.popleft() for _ in range(min(at_once, len(self._warmup)))]

    def arrived(self, row: int) -> list[int]:
        """Release an arrived open-loop session: its row, or nothing while the cap is reached."""
        if self._cap is not None and self._open >= self._cap:
            self._queue.append(row)
            return []
        self._open += 1
        return [row]

    def ended(self, row: int) -> list[int]:
        """Release after the end of a request: its session's next turn, or sessions for the freed slot."""
        if self._warming:
            self._warming -= 1
            if self._warmup:
                return [self._warmup.popleft()]
            return self._release_closed() if self.begun else []
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

    def failed(self, row: int) -> tuple[list[int], list[int]]:
        """A request has failed, so later turns of its session are not sent.

        Returns these turns, and the rows to send instead.
        """
        later: list[int] = []
        following = row
        while following < len(self._next_turn) and (following := int(self._next_turn[following])) >= 0:
            later.append(following)
        if later:
            self._next_turn[row] = -1
        return later, self.ended(row)

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
