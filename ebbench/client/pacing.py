"""Pacing, pure and apart from sending.

``(elapsed, sent) -> wait``: given the time since the start and how many sessions have been released, how long
until the next one. Nothing here reads a clock, so the schedule can be tested without one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ebbench.records.plan import ClosedPhase

NEVER = -1


@dataclass(frozen=True)
class Arrivals:
    """Open loop: session i is due ``arrival_ns[i]`` after the start (ascending)."""

    arrival_ns: Sequence[int]

    def wait_ns(self, elapsed_ns: int, sent: int) -> int:
        """Nanoseconds until session number ``sent`` is due: 0 when it is, NEVER after the last."""
        if sent >= len(self.arrival_ns):
            return NEVER
        return max(0, self.arrival_ns[sent] - elapsed_ns)


@dataclass(frozen=True)
class Slots:
    """How many sessions may be open when session i is about to be released."""

    first_of_phase: tuple[int, ...]
    limits: tuple[int | None, ...]

    @classmethod
    def of_phases(cls, phases: Sequence[ClosedPhase]) -> Slots:
        """The limits of closed-loop phases; the last one holds on."""
        starts = [sum(p.sessions for p in phases[:i]) for i in range(len(phases))]
        return cls(tuple(starts), tuple(p.max_concurrency for p in phases))

    @classmethod
    def constant(cls, limit: int | None) -> Slots:
        """One limit throughout; None is no limit."""
        return cls((0,), (limit,))

    def limit(self, session: int) -> int | None:
        """The limit in force at the release of session number ``session``."""
        return self.limits[bisect_right(self.first_of_phase, session) - 1]

    def opens_phase(self, session: int) -> bool:
        """Whether ``session`` is the first of a later phase."""
        return session > 0 and session in self.first_of_phase


def freed_index(ends: int, open_sessions: int, limit: int) -> int:
    """Which end freed the slot the next release takes; negative: it was free from the start.

    ``limit - open_sessions`` slots are free and the one free for longest is taken. The ends that freed them are
    the last so many.
    """
    return ends - (limit - open_sessions)
