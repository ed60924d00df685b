"""Release schedule shared by all workers: which session starts next and when, and the ramp-up."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.errors import UsageError
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import with_columns
from ebbench.spec.client import ClientOptions

# When each session is due, without sending and without a clock.
#
# `(elapsed, sent) -> wait`: from the time since the start and the number of sessions released so far to the time
# until the next release. No function reads a clock, so tests need no waiting.

NEVER = -1


@dataclass(frozen=True)
class Arrivals:
    """Open loop: session i is due ``arrival_ns[i]`` ns after the start (ascending)."""

    arrival_ns: Sequence[int]

    def wait_ns(self, elapsed_ns: int, sent: int) -> int:
        """Ns until session number ``sent`` is due: 0 if it is due, NEVER after the last session."""
        if sent >= len(self.arrival_ns):
            return NEVER
        return max(0, self.arrival_ns[sent] - elapsed_ns)


@dataclass(frozen=True)
class Slots:
    """Closed loop: how many sessions may be open when session i is released.

    ``limits[p]`` holds from session ``first_of_phase[p]`` on; None is no limit. Where the limit rises, the new slots
    open ``spacing_ns`` apart: no client can start hundreds of requests at one instant, and each would count the
    difference as lag.
    """

    first_of_phase: tuple[int, ...]
    limits: tuple[int | None, ...]
    spacing_ns: int = 0

    @classmethod
    def of_phases(cls, phases: Sequence[ClosedPhase], spacing_ns: int = 0) -> Slots:
        """The limits of closed-loop phases; the last limit holds to the end."""
        starts = [sum(p.sessions for p in phases[:i]) for i in range(len(phases))]
        return cls(tuple(starts), tuple(p.max_concurrency for p in phases), spacing_ns)

    @classmethod
    def constant(cls, limit: int | None) -> Slots:
        """A limit on open sessions that does not change; None: no limit."""
        return cls((0,), (limit,))

    def limit(self, session: int) -> int | None:
        """The limit in force at the release of session number ``session``."""
        return self.limits[bisect_right(self.first_of_phase, session) - 1]

    def change(self, session: int) -> int:
        """Change of the limit at session number ``session``; 0 inside a phase."""
        after, before = self.limit(session), self.limit(session - 1) if session else 0
        return (after or 0) - (before or 0)


# State shared by worker processes: a file of integers and a lock, both opened by path.
#
# A lock on a file does not outlive its process: the kernel releases it when a worker dies.

_MEMORY = Path("/dev/shm")


def memory_folder() -> Path | None:
    """A directory in memory (``/dev/shm``), or None if there is none.

    The first write to a page of a file on disk can wait 5 to 20 ms for the file system, in the middle of a run.
    """
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None


class SharedMemory:
    """64-bit integers in a mapped file, shared by every process that opens the same path."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._ints = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path, length: int) -> SharedMemory:
        """Create a file of ``length`` zeros at a new path."""
        path.write_bytes(bytes(8 * length))
        return cls(path)

    def __getitem__(self, index: int) -> int:
        return self._ints[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._ints[index] = value

    def close(self) -> None:
        """Unmap the file, and close the descriptor that the mapping holds."""
        self._ints.release()
        self._map.close()


class FileLock:
    """Mutual exclusion between processes; held for microseconds."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def __enter__(self) -> FileLock:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


# Ramp-up: the load grows to its full size over some seconds.


def ramped(plan: Plan, options: ClientOptions, ramp_up_s: float) -> tuple[Plan, ClientOptions]:
    """The plan and the options with a ramp of ``ramp_up_s`` seconds.

    Open loop: the arrival rate grows linearly from zero to the planned rate. Closed loop: the slots of the first phase
    open one after the other over that time. Raises UsageError if ``ramp_up_s`` is not positive.
    """
    if not ramp_up_s > 0:
        raise UsageError(f"--ramp-up must be positive, not {ramp_up_s:g}")
    facts = {**plan.facts, "ramp_up_s": ramp_up_s}
    if plan.closed_loop:
        spacing_s = ramp_up_s / plan.phases[0].max_concurrency
        return replace(plan, facts=facts), replace(options, slot_spacing_s=spacing_s)
    arrival = plan.table.column("arrival_ns").combine_chunks()
    known = arrival.is_valid().to_numpy(zero_copy_only=False)
    slowed = slow_start_ns(arrival.fill_null(0).to_numpy(zero_copy_only=False), round(ramp_up_s * 1e9))
    column = pa.array(slowed, pa.int64(), mask=~known)
    return replace(plan, table=with_columns(plan.table, {"arrival_ns": column}), facts=facts), options


def slow_start_ns(arrival_ns: npt.NDArray[np.int64], ramp_ns: int) -> npt.NDArray[np.int64]:
    """Arrival times (ns) under a rate that grows linearly from 0 to the planned rate over ``ramp_ns``.

    The expected number of arrivals by time t becomes rate * t^2 / (2 ramp) during the ramp and rate * (t - ramp / 2)
    after it, instead of rate * t. An arrival planned at time a moves to the time at which that number is rate * a. A
    Poisson process remains one, with a rate that varies over time.
    """
    planned = arrival_ns.astype(np.float64)
    during = np.sqrt(2.0 * ramp_ns * planned)
    slowed: npt.NDArray[np.float64] = np.where(planned < ramp_ns / 2, during, planned + ramp_ns / 2)
    return np.rint(slowed).astype(np.int64)


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
    """Releases sessions in plan order, each as soon as it is due, to the workers that call it.

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
                if memory[_UNOPENED] > 0 and memory[_OPENING] == intended_ns:
                    memory[_UNOPENED] -= 1
                    memory[_OPENING] += self.slots.spacing_ns
                else:
                    memory[_USED] += 1
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
            # When the next slot opens, and when the next freed slot became free; NEVER if there is none.
            opening_ns = memory[_OPENING] if memory[_UNOPENED] > 0 else NEVER
            freed_ns = memory[_HEADER + memory[_USED]] if memory[_USED] < memory[_ENDS] else NEVER
            return freed_ns if opening_ns == NEVER or (freed_ns != NEVER and freed_ns < opening_ns) else opening_ns
        limit = self.slots.limit(number)
        if limit is not None and memory[_OPEN] >= limit:
            return NEVER
        return memory[_START] + self.arrivals.arrival_ns[number]

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
