"""vLLM v1's scheduler (0.32): what one step holds.

Rules that are not written here: which phase a step belongs to, that is the policy core's, asked in
:mod:`ebbench.simulation.phases`. When steps are made and what becomes of them is :mod:`ebbench.simulation.instance`.

Steps are made tens of thousands of times a second, so the arrays are counted and summed by the plain functions
(``np.count_nonzero``, ``np.add.reduce``): the methods ``any``, ``all`` and ``sum`` cost several times as much here.
``a.take(rows)`` costs half of ``a[rows]``.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ebbench.simulation.kv import CountedKv, KvBlocks
from ebbench.simulation.state import UNSET, Ints, RequestState
from ebbench.simulation.step import NO_ROWS, SchedulerLimits, Step


class Scheduler:
    """The queues of one instance, and the step they make."""

    def __init__(self, state: RequestState, limits: SchedulerLimits, kv: KvBlocks) -> None:
        self._state, self._limits, self._kv = state, limits, kv
        self._counted = kv if isinstance(kv, CountedKv) else None  # the same manager, where counts are enough
        self._inbox: deque[int] = deque()
        self._seen_ns: Ints = np.zeros(state.count, np.int64)  # when the scheduler first saw a request
        self.waiting: deque[int] = deque()
        self.running: Ints = NO_ROWS
        self._ones: Ints = np.ones(limits.max_num_seqs, np.int64)
        self._prefilling = 0  # of the running, those with a prompt still to compute: most steps have none
        self._queue: deque[Step] = deque()  # steps that are out
        self._stale: dict[int, bool] = {}  # preempted with a step in flight: does that step sample for it?

    def _take_in(self, now_ns: int) -> None:
        """What has arrived joins the queue."""
        if not self._inbox:
            return
        self._seen_ns[list(self._inbox)] = now_ns
        self.waiting.extend(self._inbox)
        self._inbox.clear()

    def _admissible(self, running_limit: int) -> bool:
        """Whether the first of the waiting requests could join the running ones."""
        if not self.waiting or len(self.running) >= running_limit:
            return False
        row = self.waiting[0]
        known = int(self._state.target[row])
        hits = self._kv.lookup(row, known)
        needed = -(-known // self._limits.block_size) - len(hits) + self._kv.evictable(hits)
        return needed <= self._kv.free

    def _fill(self, step: Step, candidates: Ints, *, admit: bool, running_limit: int) -> None:
        """vLLM's ``schedule()`` with the running requests outside ``candidates`` set aside."""
        threshold = self._limits.long_prefill_token_threshold
        if threshold and len(candidates) + len(self.waiting) <= 1:
            threshold = 0
        rows, tokens, budget = self._schedule_running(step, candidates, threshold)
        if admit and not step.preempted and self.waiting:
            new_rows, new_tokens = self._admit(step.scheduled_ns, budget, threshold, running_limit)
            if new_rows:
                rows = np.concatenate([rows, np.array(new_rows, np.int64)])
                tokens = np.concatenate([tokens, np.array(new_tokens, np.int64)])
        step.rows, step.tokens = rows, tokens

    def _schedule_running(self, step: Step, candidates: Ints, threshold: int) -> tuple[Ints, Ints, int]:
        if not len(candidates):
            return NO_ROWS, NO_ROWS, self._limits.max_num_batched_tokens
        if not self._prefilling and (decodes := self._decode_all(candidates)) is not None:
            return decodes, self._ones[: len(decodes)], self._limits.max_num_batched_tokens - len(decodes)
        state, budget = self._state, self._limits.max_num_batched_tokens
        computed = state.computed.take(candidates)
        tokens = state.target.take(candidates) - computed
        tokens[computed >= state.last.take(candidates)] = 0  # the last token is in flight: no further step is needed
        if threshold:
            np.minimum(tokens, threshold, out=tokens)
        if np.add.reduce(tokens) > budget:
            before = np.cumsum(tokens) - tokens
            tokens = np.clip(budget - before, 0, tokens)
        block_size = self._limits.block_size
        need = (computed + tokens + (block_size - 1)) // block_size - state.held_blocks.take(candidates)
        np.maximum(need, 0, out=need)
        if np.add.reduce(need) <= self._kv.free:
            self._grow(candidates, need)
        else:
            kept = self._grow_preempting(step, candidates, need)
            candidates, tokens = candidates[:kept], tokens[:kept]
        if np.count_nonzero(tokens) < len(tokens):
            scheduled = tokens > 0
            candidates, tokens = candidates[scheduled], tokens[scheduled]
        if self._prefilling:
            # Findable from now on, also for requests admitted in this very step.
            partial = state.partial[candidates]
            after = state.computed[candidates[partial]] + tokens[partial]
            for row, known in zip(candidates[partial].tolist(), after.tolist(), strict=True):
                self._kv.publish(row, known)
        return candidates, tokens, budget - int(np.add.reduce(tokens))

    def _decode_all(self, rows: Ints) -> Ints | None:
        """Blocks for one token each of ``rows``, none of which has prompt tokens left; returns those that get one.

        They are the ones whose last token is not in flight. None, with nothing done, where budget or blocks are short:
        that takes the long way.
        """
        state, block_size = self._state, self._limits.block_size
        computed = state.computed.take(rows)
        due = computed < state.last.take(rows)
        if np.count_nonzero(due) < len(rows):
            rows, computed = rows[due], computed[due]
        growing = rows[computed // block_size == state.held_blocks.take(rows)]
        if len(rows) > self._limits.max_num_batched_tokens or len(growing) > self._kv.free:
            return None
        if len(growing):
            self._take(growing, self._ones[: len(growing)])
        return rows

    def _grow(self, rows: Ints, need: Ints) -> None:
        """Give each row the blocks it needs; the caller has checked that they are there."""
        growing = need.nonzero()[0]
        if len(growing):
            self._take(rows[growing], need[growing])

    def _take(self, rows: Ints, blocks: Ints) -> None:
        if self._counted is not None:
            self._counted.take(int(np.add.reduce(blocks)))
        else:
            self._kv.allocate(rows.tolist(), blocks.tolist())
        self._state.held_blocks[rows] += blocks

    def _grow_preempting(self, step: Step, candidates: Ints, need: Ints) -> int:
        """Give blocks in order and, where they run out, preempt from the end; returns how many candidates remain.

        In turns, as vLLM does: what an earlier request takes is taken before a later one's blocks come free.
        """
        done, kept, taken = 0, len(candidates), 0
        upto = np.cumsum(need)
        while True:
            fit = min(int(upto.searchsorted(taken + self._kv.free, side="right")), kept)
            if fit > done:
                blocks = int(upto[fit - 1])
                if self._counted is not None:
                    self._counted.take(blocks - taken)
                else:
                    growing = done + need[done:fit].nonzero()[0]
                    self._kv.allocate(candidates[growing].tolist(), need[growing].tolist())
                done, taken = fit, blocks
            if done >= kept:
                break
            kept -= 1
            self._preempt(step, int(candidates[kept]))
            if kept == done:
                break
        self._state.held_blocks[candidates[:kept]] += need[:kept]
        victims = np.zeros(self._state.count, np.bool_)
        victims[step.preempted] = True
        self.running = self.running[~victims[self.running]]
        return kept

    def _preempt(self, step: Step, row: int) -> None:
        state = self._state
        in_flight = next((queued for queued in self._queue if row in queued.rows), None)
        samples = in_flight is not None and (in_flight.sampled is in_flight.rows or row in in_flight.sampled)
        if in_flight is not None:
            self._stale[row] = samples
        known = int(state.target[row]) - samples
        # vLLM publishes blocks up to the tokens it knew when it scheduled the step in flight.
        known_then = known - (in_flight is not None and self._told_since(row, in_flight.scheduled_ns))
        self._kv.release(row, min(int(state.computed[row]), known_then))
        state.target[row], state.computed[row], state.held_blocks[row] = known, 0, 0
        self._prefilling -= int(state.partial[row])
        state.partial[row] = False
        state.preemptions[row] += 1
        self.waiting.appendleft(row)
        step.preempted.append(row)

    def _told_since(self, row: int, time_ns: int) -> bool:
        """Whether a token of the row was delivered after a scheduling step at that time."""
        slot = int(self._state.next_slot[row])
        return slot > self._state.first_slot[row] and bool(self._state.token_ns[slot - 1] > time_ns)

    def _admit(self, now_ns: int, budget: int, threshold: int, running_limit: int) -> tuple[list[int], list[int]]:
        state, kv, block_size = self._state, self._kv, self._limits.block_size
        rows: list[int] = []
        tokens: list[int] = []
        skipped: list[int] = []
        running, counted = len(self.running), self._counted
        while budget > 0 and self.waiting and running + len(rows) < running_limit:
            row = self.waiting[0]
            if row in self._stale:
                skipped.append(self.waiting.popleft())
                continue
            known = int(state.target[row])
            hits = kv.lookup(row, known)
            cached = max(len(hits) * block_size, self._delivered(row))
            chunk = known - cached
            if 0 < threshold < chunk:
                chunk = threshold
            chunk = min(chunk, budget)
            pinned = kv.evictable(hits) if hits else 0
            if -(-known // block_size) - len(hits) + pinned > kv.free:
                break
            self.waiting.popleft()
            need = -(-(cached + chunk) // block_size) - len(hits)
            if hits or counted is None:
                kv.adopt(row, hits)
            if counted is not None:
                counted.take(need)
            else:
                kv.allocate((row,), (need,))
            state.held_blocks[row] = len(hits) + need
            state.computed[row] = cached
            self._note_admission(row, cached, now_ns)
            if counted is None:
                kv.publish(row, cached + chunk)
            state.partial[row] = True
            rows.append(row)
            tokens.append(chunk)
            budget -= chunk
        self.waiting.extendleft(reversed(skipped))
        if rows:
            self._prefilling += len(rows)
            self.running = np.concatenate([self.running, np.array(rows, np.int64)])
        return rows, tokens

    def _delivered(self, row: int) -> int:
        """Tokens of a waiting request whose KV came from elsewhere and lies ready to be taken over."""
        return 0

    def _note_admission(self, row: int, cached_tokens: int, now_ns: int) -> None:
        if self._state.scheduled_ns[row] == UNSET:
            self._state.scheduled_ns[row] = now_ns
            self._state.cached_tokens[row] = cached_tokens
