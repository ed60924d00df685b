"""Which waiting requests a step admits, with vLLM's rules (0.32): order, prefix cache, chunks, free KV blocks.

The functions read and change a :class:`~ebbench.simulation.scheduler.Scheduler`, which calls them. By vLLM's default
(``scheduler_reserve_full_isl``) a request is admitted only if the KV of all its tokens fits now; without it, blocks for
its first chunk are sufficient, and a prompt may lack blocks later and preempt others or itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ebbench.simulation.state import UNSET
from ebbench.simulation.step import NO_ROWS

if TYPE_CHECKING:
    from ebbench.simulation.scheduler import Scheduler


def chunk_limit(scheduler: Scheduler, candidates: int) -> int:
    """Most tokens of one request in a step with so many running requests to choose from; 0: no limit.

    vLLM lifts ``long_prefill_token_threshold`` for a request alone. The adaptive form raises it to the budget divided
    by the number of running and waiting requests.
    """
    limits = scheduler.limits
    eligible = candidates + len(scheduler.waiting)
    if not limits.long_prefill_token_threshold or eligible <= 1:
        return 0
    if limits.long_prefill_token_threshold_adaptive:
        return max(limits.long_prefill_token_threshold, limits.max_num_batched_tokens // eligible)
    return limits.long_prefill_token_threshold


def admissible(scheduler: Scheduler, running_limit: int) -> bool:
    """Whether the first waiting request could be admitted now, if one token of the budget is left for it."""
    if not scheduler.waiting or len(scheduler.running) >= running_limit:
        return False
    row = scheduler.waiting[0]
    known = int(scheduler.state.target[row])
    hits = scheduler.kv.lookup(row, known)
    pinned = scheduler.kv.evictable(hits)
    tokens = known if scheduler.limits.scheduler_reserve_full_isl else _cached_tokens(scheduler, row, hits) + 1
    return _fits(scheduler, tokens, hits, pinned)


def admit(
    scheduler: Scheduler, now_ns: int, budget: int, threshold: int, running_limit: int
) -> tuple[list[int], list[int]]:
    """Admit waiting requests in order while ``budget`` tokens, slots up to ``running_limit`` and KV blocks last.

    ``threshold``: most tokens of one request, 0 is no limit. Returns the rows and the tokens of each in this step.
    """
    state, kv, limits, waiting = scheduler.state, scheduler.kv, scheduler.limits, scheduler.waiting
    whole, block_size, delivered = limits.scheduler_reserve_full_isl, limits.block_size, scheduler.delivered
    rows: list[int] = []
    tokens: list[int] = []
    skipped: list[int] = []
    room = running_limit - len(scheduler.running)
    while budget > 0 and waiting and len(rows) < room:
        row = waiting[0]
        if row in scheduler.stale:
            skipped.append(waiting.popleft())
            continue
        known = int(state.target[row])
        hits = kv.lookup(row, known)
        cached, pinned = len(hits) * block_size, kv.evictable(hits) if hits else 0
        if delivered:
            cached = max(cached, delivered.get(row, 0))
        chunk = known - cached
        if 0 < threshold < chunk:
            chunk = threshold
        if chunk > budget:
            chunk = budget
        after = cached + chunk
        if not _fits(scheduler, known if whole else after, hits, pinned):
            break
        waiting.popleft()
        _allocate(scheduler, row, hits, cached, after)
        _note_admission(scheduler, row, cached, now_ns)
        if scheduler.counted is None:
            kv.publish(row, after)
        state.partial[row] = True
        rows.append(row)
        tokens.append(chunk)
        budget -= chunk
    waiting.extendleft(reversed(skipped))
    if rows:
        scheduler.prefilling += len(rows)
        scheduler.running = np.concatenate([scheduler.running, np.array(rows, np.int64)])
    return rows, tokens


def _cached_tokens(scheduler: Scheduler, row: int, hits: Sequence[int]) -> int:
    """Tokens of a waiting request that need no computation: cached on this instance, or received from another."""
    return max(len(hits) * scheduler.limits.block_size, scheduler.delivered.get(row, 0))


def _fits(scheduler: Scheduler, tokens: int, hits: Sequence[int], pinned: int) -> bool:
    """Whether blocks for ``tokens`` tokens are free; ``pinned`` of the blocks that are hit count as free now."""
    return -(-tokens // scheduler.limits.block_size) - len(hits) + pinned <= scheduler.kv.free


def _allocate(scheduler: Scheduler, row: int, hits: Sequence[int], cached: int, after: int) -> None:
    """Give a request the blocks of its ``cached`` tokens and of its first chunk, ``after`` tokens together."""
    need = -(-after // scheduler.limits.block_size) - len(hits)
    counted = scheduler.counted
    if hits or counted is None:
        scheduler.kv.adopt(row, hits)
    if counted is not None:
        counted.take(need)
    else:
        scheduler.kv.allocate((row,), (need,))
    scheduler.state.held_blocks[row] = len(hits) + need
    scheduler.state.computed[row] = cached


def _note_admission(scheduler: Scheduler, row: int, cached_tokens: int, now_ns: int) -> None:
    first = bool(scheduler.state.scheduled_ns[row] == UNSET)
    if first:
        scheduler.state.scheduled_ns[row] = now_ns
        scheduler.state.cached_tokens[row] = cached_tokens
    for listener in scheduler.listeners:
        listener.admitted(row, cached_tokens, now_ns, first=first)


def prompt_tokens(scheduler: Scheduler, wanted: int) -> int:
    """Prompt tokens that the next step could compute, counted up to ``wanted``; see ``View.prompt_tokens``."""
    state, block_size = scheduler.state, scheduler.limits.block_size
    partial = scheduler.running[state.partial[scheduler.running]] if scheduler.prefilling else NO_ROWS
    found = int((state.target[partial] - state.computed[partial]).sum()) if len(partial) else 0
    slots, blocks = scheduler.limits.max_num_seqs - len(scheduler.running), scheduler.kv.free
    for row in scheduler.waiting:
        if found >= wanted or slots <= 0:
            break
        known = int(state.target[row])
        slots -= 1
        blocks -= -(-known // block_size)
        if blocks < 0:
            break
        found += known
    return found


def queued_tokens(scheduler: Scheduler, arrived: Sequence[int]) -> int:
    """Prompt tokens received and not scheduled, without those whose KV was delivered.

    ``arrived``: rows that have come and are not yet in the waiting queue.
    """
    state, delivered = scheduler.state, scheduler.delivered
    partial = scheduler.running[state.partial[scheduler.running]]
    queued = int((state.target[partial] - state.computed[partial]).sum()) if len(partial) else 0
    for rows in (scheduler.waiting, arrived):
        if rows:
            queued += int(state.target[np.fromiter(rows, np.int64, len(rows))].sum())
            queued -= sum(delivered.get(row, 0) for row in rows) if delivered else 0
    return queued
