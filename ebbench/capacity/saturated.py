"""The rate at which a system that is never idle completes sessions, from closed loops in simulation.

A closed loop with twice as many open sessions as a batch holds keeps the batch full. For 18 combinations of three
devices, three workloads and two policies no smaller loop completed more than 1 % more.

Where requests share prefixes, such as the turns of a conversation, fewer open sessions may complete several times as
much, because the prefix cache then holds their prefixes: an H200 completed 1.6 conversations/s of wildchat with 2,048
open and 4.2/s with 256. There loops of falling size are tried, and the highest rate counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.steady import completed_sessions_per_s, session_ends_ns, steady_windows
from ebbench.records.manifest import phase_facts
from ebbench.records.plan import Plan

SESSIONS_PER_OPEN = 8
"""Sessions of a closed loop per open one: within 4 % of the rate with 60 (five settings on three GPUs, three seeds).
With 3, and the filling counted, the rate was 9 to 15 % too low."""
_SMALLEST = 8
_PAST_THE_PEAK = 0.7
"""Loops of falling size end at this share of the highest rate so far: with fewer open sessions a batch is emptier."""


class Saturated(NamedTuple):
    """The highest rate in sessions/s, and the number of open sessions that completed it."""

    per_s: float
    concurrency: int


def saturated_rate(loop: Callable[[int], tuple[float, bool]], max_num_seqs: int) -> Saturated:
    """The saturated rate of an engine whose batches hold ``max_num_seqs`` sequences.

    ``loop``: carries out a closed loop of so many open sessions; returns the sessions/s that it completed
    (:func:`completed_once_full`), and whether requests share prefixes (:func:`shares_prefixes`).
    """
    concurrency = 2 * max_num_seqs
    rate, shared = loop(concurrency)
    best = Saturated(rate, concurrency)
    while shared and concurrency > _SMALLEST:
        concurrency //= 2
        rate, _ = loop(concurrency)
        if rate < _PAST_THE_PEAK * best.per_s:
            break
        best = max(best, Saturated(rate, concurrency))
    return best


def completed_once_full(requests: pa.Table, plan: Plan, concurrency: int) -> float:
    """Sessions/s that a closed loop of ``concurrency`` open sessions completed, once as many had ended.

    Until then the batch is filled and has answers of one age, of which few end. ``requests``: those of the run.
    """
    columns = RequestColumns.of(requests)
    windows = steady_windows(columns, phase_facts(plan))
    ends = np.sort(session_ends_ns(columns))
    full_ns = int(ends[min(concurrency, len(ends)) - 1])
    later = [replace(window, start_ns=full_ns) for window in windows if window.start_ns < full_ns < window.end_ns]
    return completed_sessions_per_s(columns, later or windows)


def shares_prefixes(plan: Plan) -> bool:
    """Whether requests of the plan may find prefixes of others in the cache: turns of a session, or hashed blocks."""
    return bool(np.any(plan.table["turn"])) or plan.table["hash_ids"].null_count < len(plan)
