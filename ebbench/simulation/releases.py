"""When requests of a plan are sent: at arrival times, after completions, or after other requests of their session."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ebbench.records.plan import Plan
from ebbench.records.turn_graph import turn_graph

WARMUP_AT_ONCE = 64  # default of the load generator


class Releases:
    """Converts a plan to releases. Each call returns the plan rows that may be sent now, in order; the caller adds the
    pause of each (:meth:`pause_ns`).

    Closed loop: sessions are released in plan order while fewer than the current phase's ``max_concurrency`` are open.
    Open loop: sessions start at their arrival time; a cap on open sessions makes later ones wait. A session is open
    until its last request has ended, also while it pauses.

    ``warmup`` requests of one turn, in rows after the plan's (:mod:`ebbench.simulation.warmup`), are sent first; the
    plan begins when the last of them has ended.
    """

    def __init__(self, plan: Plan, warmup: int = 0) -> None:
        self._graph = turn_graph(plan.table)
        self._takes_turns = bool(len(self._graph.follower_rows))
        self.first_rows: list[int] = self._graph.first_rows
        self._given_up: set[int] = set()
        if self._graph.branched:
            self._waits = self._graph.waits.tolist()
            _, codes, sizes = np.unique(np.asarray(plan.table["session"]), return_inverse=True, return_counts=True)
            self._session_of, self._left = codes.tolist(), sizes.tolist()
        self._rows = len(plan)
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

    def pause_ns(self, row: int) -> int:
        """How long (ns) a released request waits before it is sent."""
        return self._graph.pause_of(row)

    def start(self) -> list[int]:
        """Rows sent at time zero: concurrent warm-up requests, else those of a closed loop."""
        if self.begun:
            return self._release_closed()
        at_once = self._limits[0][1] if self._limits else self._cap or WARMUP_AT_ONCE
        return [self._warmup.popleft() for _ in range(min(at_once, len(self._warmup)))]

    def arrived(self, row: int) -> list[int]:
        """Release an arrived open-loop session: its first rows, or nothing while the cap is reached."""
        if self._cap is not None and self._open >= self._cap:
            self._queue.append(row)
            return []
        return self._begin(row)

    def ended(self, row: int) -> list[int]:
        """Release after the end of a request: requests that waited for it, or sessions for the freed slot."""
        if self._warming:
            self._warming -= 1
            if self._warmup:
                return [self._warmup.popleft()]
            return self._release_closed() if self.begun else []
        if self._takes_turns or self._graph.branched:
            following = self._graph.followers(row)
            if self._graph.branched:
                for one in following:
                    self._waits[one] -= 1
                following = [one for one in following if not self._waits[one]]
                if self._still_open(row, 1):
                    return following
            elif following:
                return following
        return self._close_session()

    def all_ended(self, rows: Sequence[int]) -> list[int]:
        """Release after the ends of several requests: what :meth:`ended` returns for one after the other.

        Sessions of one request in a closed loop end together: which are released depends only on the number of free
        slots.
        """
        if self._warming or self._takes_turns or self._graph.branched or not self._limits:
            return [later for row in rows for later in self.ended(row)]
        self._open -= len(rows)
        return self._release_closed()

    def failed(self, row: int) -> tuple[list[int], list[int]]:
        """A request has failed or its client hung up, so what waits for it is not sent.

        Returns the requests that wait for it, directly or through others, and the rows to send instead.
        """
        if row >= self._rows:  # a warm-up request
            return [], self.ended(row)
        later = [one for one in self._graph.descendants(row) if one not in self._given_up]
        self._given_up.update(later)
        if self._graph.branched and self._still_open(row, 1 + len(later)):
            return later, []
        return later, self._close_session()

    def _still_open(self, row: int, done: int) -> bool:
        """Whether requests of the row's session are left after ``done`` more."""
        session = self._session_of[row]
        self._left[session] -= done
        return bool(self._left[session])

    def _close_session(self) -> list[int]:
        self._open -= 1
        if self._limits:
            return self._release_closed()
        return self._begin(self._queue.popleft()) if self._queue else []

    def _begin(self, row: int) -> list[int]:
        self._open += 1
        return [row, *self._graph.parallel_starts.get(row, ())] if self._graph.parallel_starts else [row]

    def _release_closed(self) -> list[int]:
        rows: list[int] = []
        queue, limits = self._queue, self._limits
        while queue and limits:
            sessions, max_concurrency = limits[0]
            if len(limits) > 1 and self._released_in_phase >= sessions:
                limits.pop(0)
                self._released_in_phase = 0
            elif self._open < max_concurrency:
                rows += self._begin(queue.popleft())
                self._released_in_phase += 1
            else:
                break
        return rows
