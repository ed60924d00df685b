"""The event loop: one virtual clock for any number of instances.

Events at the same nanosecond are taken in the order of their priority, then in the order they were made:

    0  ARRIVAL  a session's first request reaches the front door
    1  WAKE     an instance's oldest step has ended, or an arrival wakes it
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from ebbench.records.plan import Plan
from ebbench.simulation.instance import Instance
from ebbench.simulation.releases import Releases
from ebbench.simulation.state import RequestState

ARRIVAL, WAKE = 0, 1
NEVER_NS = 1 << 62

Dispatch = Callable[[int], int]
Tick = Callable[[int], None]


def to_first(_row: int) -> int:
    """Dispatch everything to the only instance."""
    return 0


class EventLoop:
    """Runs a plan on instances until every request has ended."""

    def __init__(
        self,
        plan: Plan,
        state: RequestState,
        instances: Sequence[Instance],
        *,
        dispatch: Dispatch = to_first,
        tick: Tick | None = None,
        warmup: int = 0,
        begin: Tick | None = None,
    ) -> None:
        """``warmup``: requests before the plan; ``begin`` is called when they have ended, before the plan's first."""
        self._state, self._instances, self._dispatch, self._tick = state, instances, dispatch, tick
        self._plan, self._begin, self._warming = plan, begin, warmup > 0
        self._releases = Releases(plan, warmup)
        self._heap: list[tuple[int, int, int, int]] = []
        self._sequence = 0
        self._woken = [False] * len(instances)
        self.now_ns = 0
        self.ended = 0  # warm-up requests included

    def run(self) -> None:
        """Run to the end. A KeyboardInterrupt leaves a consistent state behind."""
        if not self._warming:
            self._schedule_arrivals()
        for row in self._releases.start():
            self._send(row, 0, 0)
        while self._heap:
            self.now_ns, kind, _, subject = heapq.heappop(self._heap)
            if kind == ARRIVAL:
                self._state.intended_ns[subject] = self.now_ns
                for row in self._releases.arrived(subject):
                    self._send(row, self.now_ns, self.now_ns)
            else:
                self._wake(subject)
            if self._tick is not None:
                self._tick(self.now_ns)

    def _schedule_arrivals(self) -> None:
        if self._plan.closed_loop:
            return
        arrivals = np.asarray(self._plan.table["arrival_ns"].fill_null(0))
        for row in self._releases.first_rows:
            self._push(self.now_ns + int(arrivals[row]), ARRIVAL, row)

    def _end_warmup(self) -> None:
        self._warming = False
        if self._begin is not None:
            self._begin(self.now_ns)
        self._schedule_arrivals()

    def _wake(self, index: int) -> None:
        instance = self._instances[index]  # stays marked as woken, so that what it is sent meanwhile wakes it no more
        while True:
            again_ns, ended = instance.wake(self.now_ns, self._heap[0][0] if self._heap else NEVER_NS)
            for row in ended:
                self.ended += 1
                following = self._releases.ended(row)
                if self._warming and self._releases.begun:
                    self._end_warmup()
                for released in following:
                    self._send(released, self.now_ns, self.now_ns)
            if not ended:
                break
        self._woken[index] = False
        if again_ns is not None:
            self._push_wake(again_ns, index)

    def _send(self, row: int, intended_ns: int, now_ns: int) -> None:
        state = self._state
        if state.intended_ns[row] < 0:
            state.intended_ns[row] = intended_ns
        state.sent_ns[row] = now_ns
        index = self._dispatch(row)
        instance = self._instances[index]
        instance.add(row)
        if instance.idle and not self._woken[index]:
            self._push_wake(now_ns, index)

    def _push_wake(self, time_ns: int, index: int) -> None:
        self._woken[index] = True
        self._push(time_ns, WAKE, index)

    def _push(self, time_ns: int, kind: int, subject: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_ns, kind, self._sequence, subject))
