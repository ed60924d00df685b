"""Release schedule shared by all workers: which session starts next, and its intended start."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ebbench.client.pacing import NEVER, Arrivals, Slots

# Positions in the shared memory; the end times of sessions follow.
_NEXT, _OPEN, _ENDS, _STOPPED, _START, _UNOPENED, _OPENING, _USED, _HEADER = range(9)
_NO_SESSION, _NO_TURN = 1, 2  # values of _STOPPED; 0 while sessions and turns are released


class SharedInts(Protocol):
    """Integers in memory shared by all workers, for example ``multiprocessing.RawArray('q', n)``."""

    def __getitem__(self, index: int) -> int: ...

    def __setitem__(self, index: int, value: int) -> None: ...


class Release(NamedTuple):
    """A session to start, and its intended start (monotonic ns)."""

    session: int
    intended_ns: int


@dataclass(frozen=True)
class ReleaseSchedule:
    """Releases sessions in plan order to the workers that ask, each as soon as it is due.

    ``memory`` is shared between the workers and holds the state; ``lock`` guards it. The intended start is the arrival
    time (open loop) or the time at which the slot became free (closed loop: ``arrivals`` None), not the time at which a
    worker asked. A closed loop has two queues of slots: slots opened by a higher limit and slots freed by finished
    sessions. Each session takes the slot that was available first. A lower limit removes slots from these queues.
    """

    memory: SharedInts
    lock: AbstractContextManager[object]
    sessions: int
    slots: Slots
    arrivals: Arrivals | None

    @staticmethod
    def size(sessions: int) -> int:
        """How many integers ``memory`` needs."""
        return _HEADER + sessions

    def begin(self, start_ns: int) -> None:
        """Set the common start time."""
        self.memory[_START] = start_ns
        if self.arrivals is None:
            self._change_limit(0, start_ns)

    def stop(self) -> None:
        """Release no further session and no further turn of open sessions."""
        self.memory[_STOPPED] = _NO_TURN

    def close(self) -> None:
        """Release no further session; open sessions continue to their last turn."""
        self.memory[_STOPPED] = max(self.memory[_STOPPED], _NO_SESSION)

    @property
    def start_ns(self) -> int:
        """The common start time."""
        return self.memory[_START]

    @property
    def stopped(self) -> bool:
        """Whether no further turn may be sent."""
        return self.memory[_STOPPED] == _NO_TURN

    @property
    def released(self) -> int:
        """How many sessions have been released."""
        return self.memory[_NEXT]

    @property
    def finished(self) -> bool:
        """Whether no session is left to release."""
        return bool(self.memory[_STOPPED]) or self.memory[_NEXT] >= self.sessions

    def take(self) -> Release | None:
        """The next session if it may start now, else None."""
        with self.lock:
            memory, number = self.memory, self.memory[_NEXT]
            intended_ns = self._due_ns()
            if intended_ns == NEVER or intended_ns > time.monotonic_ns():
                return None
            memory[_NEXT], memory[_OPEN] = number + 1, memory[_OPEN] + 1
            if self.arrivals is None:
                self._use_slot(intended_ns)
                self._change_limit(number + 1, intended_ns)
            return Release(number, intended_ns)

    def end(self, end_ns: int) -> None:
        """Record that a session ended at ``end_ns``, which frees its slot."""
        with self.lock:
            memory = self.memory
            memory[_HEADER + memory[_ENDS]] = end_ns
            memory[_ENDS] += 1
            memory[_OPEN] -= 1

    def due_ns(self) -> int | None:
        """Earliest known start of the next session (monotonic ns); None if a session must end first."""
        with self.lock:
            due_ns = self._due_ns()
        return None if due_ns == NEVER else due_ns

    def share(self, workers: int) -> int | None:
        """Number of sessions that one of ``workers`` should have open now; None is no limit."""
        limit = self.slots.limit(min(self.memory[_NEXT], self.sessions - 1))
        return None if limit is None else -(-limit // workers)

    def _due_ns(self) -> int:
        memory, number = self.memory, self.memory[_NEXT]
        if memory[_STOPPED] or number >= self.sessions:
            return NEVER
        if self.arrivals is None:
            opening_ns, freed_ns = self._slot_times()
            return freed_ns if opening_ns == NEVER or (freed_ns != NEVER and freed_ns < opening_ns) else opening_ns
        limit = self.slots.limit(number)
        if limit is not None and memory[_OPEN] >= limit:
            return NEVER
        return memory[_START] + self.arrivals.arrival_ns[number]

    def _slot_times(self) -> tuple[int, int]:
        """When the next slot opens, and when the next freed slot became free; NEVER if there is none."""
        memory = self.memory
        opening_ns = memory[_OPENING] if memory[_UNOPENED] > 0 else NEVER
        freed_ns = memory[_HEADER + memory[_USED]] if memory[_USED] < memory[_ENDS] else NEVER
        return opening_ns, freed_ns

    def _use_slot(self, time_ns: int) -> None:
        memory = self.memory
        if memory[_UNOPENED] > 0 and memory[_OPENING] == time_ns:
            memory[_UNOPENED] -= 1
            memory[_OPENING] += self.slots.spacing_ns
        else:
            memory[_USED] += 1

    def _change_limit(self, number: int, now_ns: int) -> None:
        """If session ``number`` begins a phase, open more slots or remove the next ones that become free."""
        if number >= self.sessions:
            return
        memory, change = self.memory, self.slots.change(number)
        if change > 0 and memory[_UNOPENED] == 0:
            memory[_OPENING] = now_ns
        lapsed = min(memory[_UNOPENED], max(0, -change))
        memory[_UNOPENED] += max(0, change) - lapsed
        memory[_USED] += max(0, -change) - lapsed
