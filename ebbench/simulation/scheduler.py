"""vLLM v1's scheduler (0.32): requests and KV blocks of one unit, and the requests that a step holds.

It implements the rules of ``schedule()`` and ``update_from_output()``: order, chunking, token budget, preemption;
:mod:`ebbench.simulation.admission` has those for waiting requests. :mod:`ebbench.simulation.gate` decides the phase of
a step, :mod:`ebbench.simulation.engine` when steps are made and how long they take.

Tens of thousands of steps are made per second, so sums use plain functions (``np.count_nonzero``, ``np.add.reduce``):
the methods ``any``, ``all`` and ``sum`` cost several times as much. ``a.take(rows)`` costs half of ``a[rows]``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ebbench.devices.base import StepShape
from ebbench.simulation import admission
from ebbench.simulation.api_server import ApiServers
from ebbench.simulation.hang_ups import drop
from ebbench.simulation.kv import CountedKv, KvBlocks
from ebbench.simulation.state import Ints, RequestState
from ebbench.simulation.step import NO_ROWS, SchedulerLimits, Step


class SchedulerListener(Protocol):
    """Called when requests are admitted and when they finish."""

    def admitted(self, row: int, cached_tokens: int, now_ns: int, *, first: bool) -> None:
        """A request got a slot; ``first`` False: after a preemption. ``cached_tokens`` need no computation."""
        ...

    def finished(self, row: int) -> None:
        """All tokens of a request are generated."""
        ...

    def withdrawn(self, row: int, output_tokens: int) -> None:
        """The client of a request hung up after so many tokens."""
        ...


class Scheduler:
    """Waiting and running requests of one unit.

    Requests enter by :meth:`add` and become visible at :meth:`take_arrivals`. A step has three parts: :meth:`fill`
    chooses its requests, :meth:`advance` counts their tokens as scheduled, :meth:`deliver` delivers the sampled tokens
    when the step has ended. ``in_flight``: steps between the last two, oldest first.

    ``delivered`` maps a request whose KV was computed on another instance to the number of tokens it covers; a
    preemption loses it. With ``keep_finished`` the blocks of a finished request stay allocated until
    :meth:`free_finished`.
    """

    def __init__(
        self, state: RequestState, limits: SchedulerLimits, kv: KvBlocks, *, keep_finished: bool = False
    ) -> None:
        self.state, self.limits, self.kv = state, limits, kv
        self.listeners: list[SchedulerListener] = []
        self.api_servers: ApiServers | None = None  # stream the tokens to the clients, if simulated
        self.counted = kv if isinstance(kv, CountedKv) else None  # the same manager, if counting is sufficient
        self.delivered: dict[int, int] = {}
        self.seen_ns: Ints = np.zeros(state.count, np.int64)  # when the scheduler first saw a request
        self.waiting: deque[int] = deque()
        self.running: Ints = NO_ROWS
        self.in_flight: deque[Step] = deque()
        self.prefilling = 0  # running requests with prompt tokens left; 0 in most steps
        self.steps = 0  # scheduled so far
        self.ones: Ints = np.ones(limits.max_num_seqs, np.int64)
        self._arrived: deque[int] = deque()
        self._keep_finished = keep_finished
        self._hung_up: list[int] = []  # rows whose clients hung up, not yet processed
        self.stale: dict[int, bool] = {}  # preempted with a step in flight: whether that step samples a token for it

    # State.

    @property
    def has_requests(self) -> bool:
        """Whether a request is running or waiting; arrivals not yet taken do not count."""
        return bool(self.waiting) or len(self.running) > 0

    @property
    def only_decodes(self) -> bool:
        """Whether all requests are in decode: no prompt, no arrival, no pending preemption."""
        undisturbed = not self.prefilling and not self.stale and not self._arrived and not self._hung_up
        return undisturbed and len(self.running) > 0

    @property
    def kv_blocks_used(self) -> int:
        """KV blocks in use."""
        return self.kv.total - self.kv.free

    @property
    def generates(self) -> bool:
        """Whether a running request with a computed prompt has tokens left to schedule."""
        state, running = self.state, self.running
        if not len(running):
            return False
        first = running[0]  # the first request nearly always decides
        in_decode = not self.prefilling or not state.partial[first]
        if in_decode and state.computed[first] < state.last[first]:
            return True
        return bool(((state.computed[running] < state.last[running]) & ~state.partial[running]).any())

    def queued_tokens(self) -> int:
        """Prompt tokens received and not scheduled, without those whose KV was delivered."""
        return admission.queued_tokens(self, self._arrived)

    def running_ages(self) -> Sequence[int]:
        """Output tokens so far of every running request."""
        ages: list[int] = self.state.outputs(self.running).tolist()
        return ages

    # Arrivals.

    def add(self, row: int) -> None:
        """Add a request that has arrived."""
        self._arrived.append(row)

    def hang_up(self, row: int) -> None:
        """The client of a request has hung up. vLLM notices it before it uses the output of the step in flight."""
        self._hung_up.append(row)

    def forget(self, row: int) -> None:
        """Remove a request from all queues, and from the running ones."""
        for queue in (self._arrived, self.waiting):
            if row in queue:
                queue.remove(row)
        self.stale.pop(row, None)
        self.delivered.pop(row, None)
        self.prefilling -= int(self.state.partial[row])
        self.state.partial[row] = False
        self.running = self.running[self.running != row]

    def take_arrivals(self, now_ns: int) -> None:
        """Move arrivals into the waiting queue, and drop requests whose clients hung up."""
        while self._hung_up:
            drop(self, self._hung_up.pop(0))
        if not self._arrived:
            return
        self.seen_ns[list(self._arrived)] = now_ns
        self.waiting.extend(self._arrived)
        self._arrived.clear()

    # One step.

    def fill(
        self, step: Step, candidates: Ints, *, admit: bool, running_limit: int, token_budget: int | None = None
    ) -> None:
        """vLLM's ``schedule()`` with the running requests outside ``candidates`` set aside.

        ``token_budget``: of this step, where it is less than that of the limits.
        """
        limits = self.limits
        most = limits.max_num_batched_tokens
        if token_budget is not None and token_budget < most:
            most = token_budget
        threshold = admission.chunk_limit(self, len(candidates)) if limits.long_prefill_token_threshold else 0
        rows, tokens, budget = self._schedule_running(step, candidates, threshold, most)
        if admit and not step.preempted and self.waiting:
            new_rows, new_tokens = admission.admit(self, step.scheduled_ns, budget, threshold, running_limit)
            if new_rows:
                rows = np.concatenate([rows, np.array(new_rows, np.int64)])
                tokens = np.concatenate([tokens, np.array(new_tokens, np.int64)])
        step.rows, step.tokens = rows, tokens

    def _schedule_running(self, step: Step, candidates: Ints, threshold: int, budget: int) -> tuple[Ints, Ints, int]:
        if not len(candidates):
            return NO_ROWS, NO_ROWS, budget
        if not self.prefilling and (decodes := self._decode_all(candidates, budget)) is not None:
            rows, step.computed = decodes
            return rows, self.ones[: len(rows)], budget - len(rows)
        state = self.state
        computed = state.computed.take(candidates)
        tokens = state.target.take(candidates) - computed
        tokens[computed >= state.last.take(candidates)] = 0  # the last token is in flight: no further step is needed
        if threshold:
            np.minimum(tokens, threshold, out=tokens)
        if np.add.reduce(tokens) > budget:
            before = np.cumsum(tokens) - tokens
            tokens = np.clip(budget - before, 0, tokens)
        block_size = self.limits.block_size
        need = (computed + tokens + (block_size - 1)) // block_size - state.held_blocks.take(candidates)
        np.maximum(need, 0, out=need)
        if np.add.reduce(need) <= self.kv.free:
            self._grow(candidates, need)
        else:
            kept = self._grow_preempting(step, candidates, need)
            candidates, tokens = candidates[:kept], tokens[:kept]
        if np.count_nonzero(tokens) < len(tokens):
            scheduled = tokens > 0
            candidates, tokens = candidates[scheduled], tokens[scheduled]
        if self.prefilling:
            # From now on prefix lookups find them, also for requests admitted in this step.
            partial = state.partial[candidates]
            after = state.computed[candidates[partial]] + tokens[partial]
            for row, known in zip(candidates[partial].tolist(), after.tolist(), strict=True):
                self.kv.publish(row, known)
        return candidates, tokens, budget - int(np.add.reduce(tokens))

    def _decode_all(self, rows: Ints, budget: int) -> tuple[Ints, Ints] | None:
        """Allocate blocks for one token of each of ``rows``, all in decode; returns the rows that get a token.

        These are the rows whose last token is not in flight; beside them, their computed tokens. Returns None without
        any change if budget or blocks do not suffice; the general path then handles the step.
        """
        state, block_size = self.state, self.limits.block_size
        computed = state.computed.take(rows)
        due = computed < state.last.take(rows)
        if np.count_nonzero(due) < len(rows):
            rows, computed = rows[due], computed[due]
        growing = rows[state.held_blocks.take(rows) * block_size == computed]  # all blocks held are full
        if len(rows) > budget or len(growing) > self.kv.free:
            return None
        if len(growing):
            self._take(growing, self.ones[: len(growing)])
        return rows, computed

    def _grow(self, rows: Ints, need: Ints) -> None:
        """Give each row the blocks it needs; the caller has checked that they are free."""
        growing = need.nonzero()[0]
        if len(growing):
            self._take(rows[growing], need[growing])

    def _take(self, rows: Ints, blocks: Ints) -> None:
        if self.counted is not None:
            self.counted.take(int(np.add.reduce(blocks)))
        else:
            self.kv.allocate(rows.tolist(), blocks.tolist())
        self.state.held_blocks[rows] += blocks

    def _grow_preempting(self, step: Step, candidates: Ints, need: Ints) -> int:
        """Allocate blocks in order and, if they run out, preempt from the end; returns how many candidates remain.

        The order is vLLM's: an earlier request takes its blocks before a later one's blocks are freed.
        """
        done, kept, taken = 0, len(candidates), 0
        upto = np.cumsum(need)
        while True:
            fit = min(int(upto.searchsorted(taken + self.kv.free, side="right")), kept)
            if fit > done:
                blocks = int(upto[fit - 1])
                if self.counted is not None:
                    self.counted.take(blocks - taken)
                else:
                    growing = done + need[done:fit].nonzero()[0]
                    self.kv.allocate(candidates[growing].tolist(), need[growing].tolist())
                done, taken = fit, blocks
            if done >= kept:
                break
            kept -= 1
            self._preempt(step, int(candidates[kept]))
            if kept == done:
                break
        self.state.held_blocks[candidates[:kept]] += need[:kept]
        victims = np.zeros(self.state.count, np.bool_)
        victims[step.preempted] = True
        self.running = self.running[~victims[self.running]]
        return kept

    def _preempt(self, step: Step, row: int) -> None:
        state = self.state
        self.delivered.pop(row, None)
        in_flight = next((queued for queued in self.in_flight if row in queued.rows), None)
        samples = in_flight is not None and (in_flight.sampled is in_flight.rows or row in in_flight.sampled)
        if in_flight is not None:
            self.stale[row] = samples
        known = int(state.target[row]) - samples
        # vLLM publishes blocks up to the tokens known when it scheduled the step in flight.
        known_then = known - (in_flight is not None and self.got_token_since(row, in_flight.scheduled_ns))
        self.kv.release(row, min(int(state.computed[row]), known_then))
        state.target[row], state.computed[row], state.held_blocks[row] = known, 0, 0
        self.prefilling -= int(state.partial[row])
        state.partial[row] = False
        state.preemptions[row] += 1
        self.waiting.appendleft(row)
        step.preempted.append(row)

    def got_token_since(self, row: int, time_ns: int) -> bool:
        """Whether a token of the row was delivered after a scheduling step at ``time_ns``."""
        slot = int(self.state.next_slot[row])
        return slot > self.state.first_slot[row] and bool(self.state.token_ns[slot - 1] > time_ns)

    def advance(self, step: Step) -> StepShape:
        """Count the tokens of a filled step as scheduled; returns the work for the device."""
        state, rows = self.state, step.rows
        self.steps += 1
        self.in_flight.append(step)
        before = step.computed
        if before is None or len(before) != len(rows):
            before = state.computed.take(rows)
        after = before + step.tokens
        step.computed = None  # steps are kept until the log folds them: this array would stay with each
        state.computed[rows] = after
        if not self.prefilling:
            step.sampled, step.decode_seqs = rows, len(rows)
            state.target[rows] = after + 1
            return StepShape((), len(rows), int(np.add.reduce(after)), len(rows))
        complete = after == state.target.take(rows)
        step.sampled = rows if np.count_nonzero(complete) == len(rows) else rows[complete]
        state.target[step.sampled] += 1
        prefill = state.partial.take(rows).nonzero()[0]
        chunks = tuple(zip(step.tokens[prefill].tolist(), before[prefill].tolist(), strict=True))
        step.prefill_tokens = int(np.add.reduce(step.tokens[prefill]))
        step.decode_seqs = len(rows) - len(prefill)
        decode_kv = int(np.add.reduce(after)) - int(np.add.reduce(after[prefill])) if step.decode_seqs else 0
        finished = complete[prefill]
        state.partial[rows[prefill]] = ~finished
        self.prefilling -= int(np.count_nonzero(finished))
        return StepShape(chunks, step.decode_seqs, decode_kv, len(step.sampled))

    def deliver(self) -> list[int]:
        """Deliver the tokens of the oldest step in flight. Returns the rows that it finished, in order."""
        while self._hung_up:
            drop(self, self._hung_up.pop(0))
        step = self.in_flight.popleft()
        state, sampled = self.state, step.sampled
        if self.stale:
            self._drain_stale(step)
        slots = state.next_slot.take(sampled)
        state.token_ns[slots] = step.end_ns
        if self.api_servers is not None:
            self.api_servers.stream(step.end_ns, sampled, slots)
        slots += 1
        state.next_slot[sampled] = slots
        finished = slots == state.end_slot.take(sampled)
        if not np.count_nonzero(finished):
            return []
        ended: list[int] = sampled[finished].tolist()
        for row in ended:
            self._finish(row, step.end_ns)
        self.running = self.running[~state.done.take(self.running)]
        return ended

    def deliver_decodes(self, rows: Ints, count: int) -> None:
        """Deliver the ``count`` oldest steps in flight, all decodes of ``rows``, none of which finishes a request."""
        if not count:
            return
        state = self.state
        ends_ns = [self.in_flight.popleft().end_ns for _ in range(count)]
        slots = state.next_slot[rows]
        state.token_ns[slots[:, None] + np.arange(count)] = ends_ns
        state.next_slot[rows] = slots + count
        if self.api_servers is not None:
            self.api_servers.stream_steps(ends_ns, rows, slots)

    def _drain_stale(self, step: Step) -> None:
        """A preempted request still gets the token of the step that was in flight."""
        for row in [row for row in self.stale if row in step.rows]:
            if self.stale.pop(row):
                self.state.target[row] += 1

    def _finish(self, row: int, now_ns: int) -> None:
        state = self.state
        state.done[row] = True
        if not state.held_blocks[row]:
            self.waiting.remove(row)  # it finished with the token in flight when it was preempted
        elif not self._keep_finished:
            self.kv.release(row, int(state.last[row]))
            state.held_blocks[row] = 0
        state.end_ns[row] = now_ns
        for listener in self.listeners:
            listener.finished(row)

    def free_finished(self, row: int) -> None:
        """Free the blocks of a finished request; a second call has no effect."""
        state = self.state
        if state.held_blocks[row]:
            self.kv.release(row, int(state.last[row]))
            state.held_blocks[row] = 0
