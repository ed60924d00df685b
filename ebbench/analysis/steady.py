"""The steady window: the part of a run in which the system carries its intended load.

Closed loop: per phase, from the first to the last time at which at least 95 % of the phase's concurrency is open. A
phase with too few sessions to reach that has no window. A session is open from its first intended start to the end of
its last request.

Open loop: there is no target concurrency, so the mean number of open sessions during the arrivals replaces it; the
window runs from the first time at 95 % of that mean to the last arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbench.analysis.columns import MISSING, Ints, RequestColumns
from ebbench.records.manifest import PhaseFact

LEVEL = 0.95


@dataclass(frozen=True)
class Window:
    """A steady window ``(start_ns, end_ns]`` of one phase; ``target``: the intended number of open sessions."""

    phase: str
    start_ns: int
    end_ns: int
    target: float

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class _OpenSessions:
    """Open sessions as a step function: ``count[i]`` holds from ``time[i]`` to ``time[i+1]``."""

    time: Ints
    count: Ints

    def mean(self, start: int, end: int) -> float:
        """Time-weighted mean over [start, end]."""
        edges = np.clip(np.append(self.time, end), start, end)
        return float(np.dot(np.diff(edges), self.count) / (end - start))

    def first_and_last_at(self, level: float, start: int, end: int) -> tuple[int, int] | None:
        """First and last time in [start, end] with at least ``level`` open sessions."""
        until = np.append(self.time[1:], self.time[-1])
        held = (self.count >= level) & (until > start) & (self.time < end)
        if not held.any():
            return None
        first, last = np.flatnonzero(held)[[0, -1]]
        return max(int(self.time[first]), start), min(int(until[last]), end)


def steady_windows(columns: RequestColumns, phases: Sequence[PhaseFact]) -> tuple[Window, ...]:
    """Windows in time order, at most one per phase; none if the load was never reached. No ``phases``: open loop."""
    started = columns.intended != MISSING
    if not started.any():
        return ()
    load = _load(columns)
    if phases:
        return _closed_loop(columns, load, phases)
    return _open_loop(columns, load)


def completed_sessions_per_s(columns: RequestColumns, windows: Sequence[Window]) -> float:
    """Sessions per second whose last request ended in the steady windows."""
    length_s = sum(window.duration_s for window in windows)
    if length_s <= 0:
        return 0.0
    last = session_ends_ns(columns)
    ended = sum(int(((last > window.start_ns) & (last <= window.end_ns)).sum()) for window in windows)
    return ended / length_s


def session_ends_ns(columns: RequestColumns) -> Ints:
    """When the last request of each session ended; the largest integer for sessions that did not end."""
    _, which = np.unique(columns.session, return_inverse=True)
    last = np.full(which.max() + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, which, np.where(columns.end == MISSING, np.iinfo(np.int64).max, columns.end))
    return last


def _load(columns: RequestColumns) -> _OpenSessions:
    started = columns.intended != MISSING
    session, intended, end = columns.session[started], columns.intended[started], columns.end[started]
    last = np.where(end == MISSING, columns.last_token[started], end)
    horizon = max(int(last.max()), int(intended.max()))
    last = np.where(last == MISSING, horizon, last)  # interrupted while open
    _, which = np.unique(session, return_inverse=True)
    opened = np.full(which.max() + 1, np.iinfo(np.int64).max)
    closed = np.full(which.max() + 1, np.iinfo(np.int64).min)
    np.minimum.at(opened, which, intended)
    np.maximum.at(closed, which, last)
    times, index = np.unique(np.concatenate([opened, closed]), return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, index[: len(opened)], 1)
    np.add.at(change, index[len(opened) :], -1)  # a slot that is freed and refilled at the same time is not a dip
    return _OpenSessions(times, np.cumsum(change))


def _closed_loop(columns: RequestColumns, load: _OpenSessions, phases: Sequence[PhaseFact]) -> tuple[Window, ...]:
    starts = [_first_intended(columns, phase.name) for phase in phases]
    known = [(phase, start) for phase, start in zip(phases, starts, strict=True) if start is not None]
    ends = [start for _, start in known[1:]] + [int(load.time[-1])]
    windows = []
    for (phase, start), end in zip(known, ends, strict=True):
        target = phase.max_concurrency
        span = load.first_and_last_at(LEVEL * target, start, end)
        if span is not None and span[1] > span[0]:
            windows.append(Window(phase.name, *span, float(target)))
    return tuple(windows)


def _open_loop(columns: RequestColumns, load: _OpenSessions) -> tuple[Window, ...]:
    intended = columns.intended[columns.intended != MISSING]
    first, last = int(intended.min()), int(intended.max())
    if last <= first:
        return ()
    target = load.mean(first, last)
    span = load.first_and_last_at(LEVEL * target, first, last)
    if span is None or span[0] >= last:
        return ()
    return (Window("", span[0], last, target),)


def _first_intended(columns: RequestColumns, phase: str) -> int | None:
    times = columns.intended[(columns.phase == phase) & (columns.intended != MISSING)]
    return int(times.min()) if len(times) else None
