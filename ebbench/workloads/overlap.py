"""How the requests of a session overlap, as those of sub-agents do, learned from a log and drawn anew.

Requests of a session are taken in the order of their starts. When one starts, some of those that were running have
ended: none, one, several or all. How often depends on how many were running, so that a fork of three sub-agents stays
one of three, whether they start together or one by one, and join or not. What a request continues depends on whether
the one before it was of the session itself, and on whether others are still running.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ebbench.workloads.requests import Int64s, Requests

MAIN, FRESH, BESIDE = range(3)
"""A request continues the session itself, begins anew (as the first one of a sub-agent does), or continues another."""
_FEWEST = 8
_NONE, _SOME, _ONLY, _ALL = range(4)
_CASES = 4


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What has ended when a request starts, by the number of requests that were running (the one before it included).

    ``running``: the largest number of each range, rising; numbers above the last belong to the last range.
    ``none_ended``, ``one_ended``, ``all_ended``: shares per range; else two or more have and others are running, and
    ``some_of_rest`` is the mean share of the rest beyond two that have ended then.
    """

    running: tuple[int, ...]
    none_ended: tuple[float, ...]
    one_ended: tuple[float, ...]
    all_ended: tuple[float, ...]
    some_of_rest: tuple[float, ...]

    def __post_init__(self) -> None:
        shares = (self.none_ended, self.one_ended, self.all_ended, self.some_of_rest)
        if not self.running or any(len(share) != len(self.running) for share in shares):
            raise ValueError("none_ended, one_ended, all_ended and some_of_rest need a share per range of running")


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How requests of a session start beside others.

    ``after``: what has ended, in four cases of the start before: there, none had ended; some had; the only one that was
    running; all of several. ``continues``: shares of the requests that continue the session, begin anew and continue
    another, for the same four cases of their own start, each after a request of these three kinds: twelve rows.
    ``stagger_s``: from the start before to the start of a request at which none had ended. ``fork_pause_s``: pauses
    before requests that others join while they run, ``side_pause_s``: before those that start while others run, and
    ``fork_tools`` and ``side_tools`` the shares of them that tools take. ``side_output``: output tokens of both.
    ``s_per_output_token``: how long requests took per output token, which tells in a draw which of them end first.
    ``side_added``: tokens added to a prompt that does not continue the session.
    """

    after: tuple[Step, ...]
    continues: tuple[tuple[float, float, float], ...]
    s_per_output_token: float = 0.0
    stagger_s: tuple[float, ...] = ()
    fork_pause_s: tuple[float, ...] = ()
    side_pause_s: tuple[float, ...] = ()
    fork_tools: float = 0.0
    side_tools: float = 0.0
    side_added: tuple[float, ...] = ()
    side_output: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.after) != _CASES or len(self.continues) != 3 * _CASES:
            raise ValueError(f"an overlap needs {_CASES} entries of after and {3 * _CASES} of continues")


class Starts(msgspec.Struct, frozen=True):
    """Per later request of the sessions, in order: ``rows``; what it continues (``kind``).

    ``running`` when it starts, before any is taken as ended; ``ended`` of these, which make its ``case``.
    ``kind_before`` and ``case_before`` of the request before it.
    """

    rows: Int64s
    kind: Int64s
    running: Int64s
    ended: Int64s
    case: Int64s
    kind_before: Int64s
    case_before: Int64s

    @property
    def overlaps(self) -> Int64s:
        """Of each start 0: its request runs alone; 1: others start while it runs; 2: it starts while others run."""
        # Sessions lie one after the other, and the first row of each is no entry.
        later = np.append((self.case[1:] <= _SOME) & (np.diff(self.rows) == 1), False)
        kinds: Int64s = np.where(self.ended < self.running, 2, np.where(later, 1, 0))
        return kinds


def _case(ended: int, running: int) -> int:
    if ended == running:
        return _ONLY if running == 1 else _ALL
    return _SOME if ended else _NONE


def find_starts(requests: Requests) -> Starts:
    """The later requests of a log's sessions with what had ended when they started."""
    streams = requests.streams
    after = requests.after or [None] * len(requests)
    columns: list[tuple[int, ...]] = []
    ended_by: list[int] = []  # per turn of the session the turns that had ended at its start, as bits
    kind_before, case_before = MAIN, _ONLY
    seen: set[int] = set()
    main = 0
    rows = zip(requests.turn.tolist(), streams.tolist(), after, strict=True)
    for row, (turn, stream, waits) in enumerate(rows):
        if not turn:
            ended_by, seen, main = [0], {stream}, stream
            kind_before, case_before = MAIN, _ONLY
            continue
        done = 0
        for earlier in [turn - 1] if waits is None else waits:
            done |= ended_by[earlier] | 1 << earlier
        done |= ended_by[-1]
        running = turn - ended_by[-1].bit_count()
        kind = MAIN if stream == main else BESIDE if stream in seen else FRESH
        ended = (done & ~ended_by[-1]).bit_count()
        case = _case(ended, running)
        columns.append((row, kind, running, ended, case, kind_before, case_before))
        kind_before, case_before = kind, case
        seen.add(stream)
        ended_by.append(done)
    return Starts(*np.array(columns, np.int64).reshape(-1, 7).T)


def fit_overlap(starts: Starts, s_per_output_token: float, **others: Any) -> Overlap:
    """The overlap of these starts; ``others``: the other fields of :class:`Overlap`."""
    everything, case = np.arange(len(starts.rows)), starts.case
    after, continues = [], []
    for case_before in range(_CASES):
        rows = np.flatnonzero(starts.case_before == case_before)
        after.append(_step(starts, rows if len(rows) >= _FEWEST else everything))
        own = starts.kind[case == case_before] if (case == case_before).sum() >= _FEWEST else starts.kind
        for kind in (MAIN, FRESH, BESIDE):
            follow = starts.kind[(case == case_before) & (starts.kind_before == kind)]
            kinds = follow if len(follow) >= _FEWEST else own
            shares = np.bincount(kinds, minlength=3) / max(1, len(kinds))
            continues.append((round(float(shares[0]), 4), round(float(shares[1]), 4), round(float(shares[2]), 4)))
    return Overlap(
        after=tuple(after), continues=tuple(continues), s_per_output_token=round(s_per_output_token, 6), **others
    )


def _step(starts: Starts, rows: Int64s) -> Step:
    """What has ended at these starts."""
    running, ended = starts.running[rows], starts.ended[rows]
    tops = _ranges(running)
    which = np.minimum(np.searchsorted(tops, running), len(tops) - 1)
    count = np.bincount(which, minlength=len(tops))

    def share(of: npt.NDArray[np.bool_]) -> tuple[float, ...]:
        return tuple(round(float(mean), 4) for mean in np.bincount(which, of, len(tops)) / count)

    everything = ended == running
    some = (ended > 1) & ~everything
    room = np.bincount(which, np.where(some, running - 3, 0), len(tops))
    rest = np.bincount(which, np.where(some, ended - 2, 0), len(tops)) / np.maximum(room, 1)
    return Step(
        running=tuple(int(top) for top in tops),
        none_ended=share(ended == 0),
        one_ended=share((ended == 1) & ~everything),
        all_ended=share(everything),
        some_of_rest=tuple(round(float(mean), 4) for mean in rest),
    )


def _ranges(running: Int64s) -> Int64s:
    """Tops of ranges of successive numbers, each with enough requests."""
    numbers, counts = np.unique(running, return_counts=True)
    tops, in_range = [], 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        in_range += count
        if in_range >= _FEWEST:
            tops.append(number)
            in_range = 0
    if not tops:
        return numbers[-1:]
    tops[-1] = numbers[-1] if in_range else tops[-1]
    return np.array(tops, np.int64)


class Session(msgspec.Struct, frozen=True):
    """A session as drawn, by turns: the case of each start, and how many of the running requests had ended at it."""

    case: list[int]
    ended: list[int]

    @property
    def overlaps(self) -> list[int]:
        """As :attr:`Starts.overlaps`, of every turn."""
        later = [*(case <= _SOME for case in self.case[1:]), False]
        return [2 if case <= _SOME else int(joined) for case, joined in zip(self.case, later, strict=True)]


class Order(msgspec.Struct):
    """Of each turn those that it waits for, what it continues (``kind``), and ``grew_from``: the turn whose prompt and
    answer its prompt holds, -1 where it begins anew.
    """

    after: list[list[int]] = msgspec.field(default_factory=lambda: [[]])
    kind: list[int] = msgspec.field(default_factory=lambda: [MAIN])
    grew_from: list[int] = msgspec.field(default_factory=lambda: [-1])


def draw_session(overlap: Overlap, turns: int, rng: np.random.Generator) -> Session:
    """A session of ``turns`` requests that overlap as learned."""
    drawn, running = Session([_ONLY], [0]), 0
    for what, size in rng.random((turns - 1, 2)).tolist():
        running += 1
        after = overlap.after[drawn.case[-1]]
        at = min(bisect_left(after.running, running), len(after.running) - 1)
        none, single = after.none_ended[at], after.one_ended[at]
        if what < none:
            ended = 0
        elif what < none + single:
            ended = 1
        elif what < none + single + after.all_ended[at] or running < 3:
            ended = running
        else:
            ended = 2 + int(after.some_of_rest[at] * (running - 3) + size)
        drawn.case.append(_case(ended, running))
        drawn.ended.append(ended)
        running -= ended
    return drawn


def draw_order(
    overlap: Overlap, session: Session, lasts_s: Sequence[float], pause_s: Sequence[float], rng: np.random.Generator
) -> Order:
    """What the requests of a session wait for and continue.

    ``lasts_s``: about how long each takes, ``pause_s``: the pause before it. Those that would end first have ended.
    """
    order, running = Order(), list[int]()
    ends, before, main = [lasts_s[0]], [0], 0  # ``main``: the newest turn of the session itself
    sides: list[int] = []  # newest requests of the sub-agents
    draws = rng.random((len(lasts_s), 2)).tolist()
    for turn in range(1, len(lasts_s)):
        running.append(turn - 1)
        running.sort(key=ends.__getitem__)
        case, gone = session.case[turn], running[: session.ended[turn]]
        free = [request for request in (gone or order.after[-1]) if request in sides]
        kind, grew = _continued(overlap.continues[3 * case + order.kind[-1]], draws[turn], main, free)
        if kind == MAIN and main in running and main not in gone:  # what is continued has ended
            kind, grew, gone = (MAIN, main, [*gone[:-1], main]) if gone else (FRESH, -1, gone)
        running = [request for request in running if request not in gone]
        _add(order, before, gone, grew)
        ends.append(max((ends[request] for request in order.after[-1]), default=0.0) + pause_s[turn] + lasts_s[turn])
        order.kind.append(kind)
        order.grew_from.append(grew)
        if kind == MAIN:
            main = turn
        else:
            sides = [request for request in sides if request != grew] + [turn]
    return order


def _continued(shares: Sequence[float], draws: Sequence[float], main: int, free: Sequence[int]) -> tuple[int, int]:
    """What a request continues, and from which turn: of other requests only one of ``free``."""
    which, pick = draws
    if which < shares[MAIN]:
        return MAIN, main
    if which < shares[MAIN] + shares[FRESH] or not free:
        return FRESH, -1
    return BESIDE, free[int(pick * len(free))]


def _add(order: Order, before: list[int], gone: list[int], grew: int) -> None:
    """Note what the next turn waits for. ``before``: per turn all that it waits for, also indirectly, as bits.

    It waits for what it takes as ended, and not for what had ended before that: in a run requests end in another order.
    """
    waits = {*(gone or order.after[-1]), grew} - {-1}
    done = implied = 0
    for request in waits:
        done |= before[request] | 1 << request
        implied |= before[request]
    order.after.append(sorted(request for request in waits if not implied >> request & 1))
    before.append(done)


def pauses_before(session: Session, pauses: Sequence[Sequence[float]], staggers: Sequence[float]) -> list[float]:
    """Pause of each turn (s) from the end of what it waits for; the first has none, and the number there is unused.

    ``pauses``: as drawn for each kind of :attr:`Session.overlaps`, and ``staggers``, with an entry per turn.
    """
    pauses_s = [0.0]
    for turn, overlaps in list(enumerate(session.overlaps))[1:]:
        at_once = session.case[turn] == _NONE
        pauses_s.append(pauses_s[-1] + staggers[turn] if at_once else pauses[overlaps][turn])
    return pauses_s
