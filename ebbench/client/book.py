"""The one schedule all workers share: who releases which session next, and when it was meant to start."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ebbench.client.pacing import Arrivals, Slots, freed_by

_NEXT, _OPEN, _ENDS, _STOPPED, _START, _FLOOR, _HEADER = 0, 1, 2, 3, 4, 5, 6


class SharedInts(Protocol):
    """Integers all workers see, e.g. ``multiprocessing.RawArray('q', n)``."""

    def __getitem__(self, index: int) -> int: ...

    def __setitem__(self, index: int, value: int) -> None: ...


class Release(NamedTuple):
    """A session to start, and when it was meant to (monotonic ns)."""

    session: int
    intended_ns: int


@dataclass(frozen=True)
class Book:
    """Releases sessions in plan order, whichever worker asks, while a slot is free and the session is due.

    ``memory`` is shared between the workers and holds the state; ``lock`` guards it. The intended start is the
    arrival time (open loop) or the moment the slot became free (closed loop: ``arrivals`` None), never the
    moment somebody got round to asking.
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
        self.memory[_START] = self.memory[_FLOOR] = start_ns

    def stop(self) -> None:
        """Release nothing more."""
        self.memory[_STOPPED] = 1

    @property
    def start_ns(self) -> int:
        """The common start time."""
        return self.memory[_START]

    @property
    def stopped(self) -> bool:
        """Whether somebody said stop."""
        return bool(self.memory[_STOPPED])

    @property
    def released(self) -> int:
        """How many sessions have been released."""
        return self.memory[_NEXT]

    @property
    def finished(self) -> bool:
        """Whether nothing is left to release."""
        return bool(self.memory[_STOPPED]) or self.memory[_NEXT] >= self.sessions

    def take(self) -> Release | None:
        """The next session, if it may start now."""
        with self.lock:
            memory, number = self.memory, self.memory[_NEXT]
            intended_ns = self._intended_ns()
            if intended_ns is None or intended_ns > time.monotonic_ns():
                return None
            memory[_NEXT], memory[_OPEN] = number + 1, memory[_OPEN] + 1
            if self.slots.opens_phase(number + 1):
                memory[_FLOOR] = intended_ns
            return Release(number, intended_ns)

    def due_ns(self) -> int | None:
        """When the next session may start, as far as that is known: None if a slot must become free first."""
        with self.lock:
            return self._intended_ns()

    def end(self, end_ns: int) -> None:
        """A session ended at ``end_ns``: its slot is free."""
        with self.lock:
            memory = self.memory
            memory[_HEADER + memory[_ENDS]] = end_ns
            memory[_ENDS] += 1
            memory[_OPEN] -= 1

    def share(self, workers: int) -> int | None:
        """How many sessions one of ``workers`` should hold open now; None is no limit."""
        limit = self.slots.limit(min(self.memory[_NEXT], self.sessions - 1))
        return None if limit is None else -(-limit // workers)

    def _intended_ns(self) -> int | None:
        """The intended start of the next session; None if there is none, or no slot for it."""
        memory, number = self.memory, self.memory[_NEXT]
        if memory[_STOPPED] or number >= self.sessions:
            return None
        limit = self.slots.limit(number)
        if limit is not None and memory[_OPEN] >= limit:
            return None
        if self.arrivals is not None:
            return memory[_START] + self.arrivals.arrival_ns[number]
        opened_ns = memory[_FLOOR] + self.slots.opening_ns(number)
        index = -1 if limit is None else freed_by(number, limit)
        return opened_ns if index < 0 else max(opened_ns, memory[_HEADER + index])
