"""One engine instance: vLLM v1's scheduler (0.32) and engine loop in virtual time.

``wake`` does what the engine core does between two blocking waits and returns when it wants to be woken next; the
event loop owns the clock. Rules that are not written here: which phase a step belongs to, that is the policy core
(:mod:`vllm_eb.controller`), and how long a step lasts, that is the device's cost model.

Asynchronous scheduling is vLLM's: up to two steps are out at a time, so step n+1 is scheduled before the completions
of step n are known and a freed slot is seen one step late. A step that could schedule nothing takes no time but, as in
vLLM, a place in the queue of two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ebbench.devices.base import CostModel, StepShape
from ebbench.simulation.kv import KvBlocks
from ebbench.simulation.state import UNSET, Ints, RequestState
from ebbench.simulation.step import NO_ROWS, NS_PER_S, SchedulerLimits, Step, StepSink
from vllm_eb.controller import Controller, Decision, View


class Instance:
    """Scheduler state and engine loop of one instance."""

    def __init__(
        self,
        state: RequestState,
        limits: SchedulerLimits,
        cost: CostModel,
        kv: KvBlocks,
        controller: Controller | None,
        sink: StepSink,
        index: int = 0,
    ) -> None:
        self._state, self._limits, self._cost, self._kv = state, limits, cost, kv
        self._controller, self._sink, self.index = controller, sink, index
        self._inbox: deque[int] = deque()
        self._seen_ns: dict[int, int] = {}  # when the scheduler first saw a request
        self.waiting: deque[int] = deque()
        self.running: Ints = NO_ROWS
        self._stale: dict[int, bool] = {}  # preempted with a step in flight: does that step sample for it?
        self._queue: deque[Step] = deque()
        self._blocked = False
        self._device_free_ns = 0
        self._steps = 0
        self._preempted = 0  # in the last scheduling step

    @property
    def idle(self) -> bool:
        """Whether a new arrival must wake it."""
        return not self._blocked

    @property
    def mode(self) -> str:
        """Mode in force, for the live line."""
        return self._controller.mode if self._controller is not None else "mb"

    def add(self, row: int) -> None:
        """A request has arrived. It is seen at the next scheduling step."""
        self._inbox.append(row)

    @property
    def kv_blocks_used(self) -> int:
        """KV blocks that hold something still in use."""
        return self._kv.total - self._kv.free

    @property
    def busy(self) -> bool:
        """Whether another step is out after the oldest."""
        return len(self._queue) > 1

    @property
    def generates(self) -> bool:
        """Whether a running request with its prompt computed has tokens left to schedule."""
        state, running = self._state, self.running
        return bool(((state.computed[running] < state.last[running]) & ~state.partial[running]).any())

    def queued_tokens(self) -> int:
        """Prompt tokens it has received and not scheduled."""
        state = self._state
        partial = self.running[state.partial[self.running]]
        queued = int((state.target[partial] - state.computed[partial]).sum()) if len(partial) else 0
        rows = [*self.waiting, *self._inbox]
        return queued + int(state.target[rows].sum()) if rows else queued

    def running_ages(self) -> Sequence[int]:
        """Output tokens so far of every running request."""
        ages: list[int] = self._state.outputs(self.running).tolist()
        return ages

    def wake(self, now_ns: int) -> tuple[int | None, list[int]]:
        """Take up the engine loop at ``now_ns``. Returns when to be woken again (None: on arrival) and what ended.

        The caller passes on the ended rows and wakes it again at the same time before anything later happens, so
        that requests released by a completion are there for the next scheduling step.
        """
        if self._blocked:
            self._blocked = False
            ended = self._update(self._queue.popleft())
            if ended:
                return now_ns, ended
        depth = 2 if self._limits.async_scheduling else 1
        fruitless = 0
        while True:
            self._take_in(now_ns)
            if len(self.running) or self.waiting:
                step = self._schedule(now_ns)
                self._queue.append(step)
                if step.empty and all(queued.empty for queued in self._queue):
                    # Nothing in flight and nothing scheduled. The policy may do better at once (a prefill without
                    # KV blocks is followed by a decode); after that only an arrival can help.
                    self._queue.clear()
                    fruitless += 1
                    if fruitless > 1:
                        return None, []
                    continue
                if len(self._queue) < depth:
                    continue
            elif not self._queue:
                return None, []
            if self._queue[0].empty:
                self._queue.popleft()
                continue
            self._blocked = True
            return self._queue[0].end_ns, []

    def _take_in(self, now_ns: int) -> None:
        for row in self._inbox:
            self._seen_ns[row] = now_ns
        self.waiting.extend(self._inbox)
        self._inbox.clear()

    # One scheduling step.

    def _schedule(self, now_ns: int) -> Step:
        step = Step(now_ns)
        if self._controller is None:
            self._fill(step, self.running, admit=True, running_limit=self._limits.max_num_seqs)
        else:
            self._schedule_by_policy(step, self._controller)
        if not step.empty:
            self._run(step)
        return step

    def _schedule_by_policy(self, step: Step, controller: Controller) -> None:
        prefilling = int(np.count_nonzero(self._state.partial[self.running]))
        view = View(
            now_s=step.scheduled_ns / NS_PER_S,
            step_id=self._steps,
            decoding=len(self.running) - prefilling,
            prefilling=prefilling,
            waiting=len(self.waiting),
            free_blocks=self._kv.free,
            preempted=self._preempted,
            oldest_wait_s=self._order_queue(step.scheduled_ns, controller) if controller.orders_queue else 0.0,
        )
        decision = controller.decide(view)
        self._follow(step, decision)
        self._preempted = len(step.preempted)
        if decision.phase == "prefill" and step.empty:
            controller.prefill_blocked(view)

    def _order_queue(self, now_ns: int, controller: Controller) -> float:
        """Requests too late for their target go behind the others; returns the wait of the first one that is not."""
        limit_s = controller.expire_before_s(now_ns / NS_PER_S)
        limit_ns = -1.0 if limit_s is None else limit_s * NS_PER_S
        state = self._state
        started = [row for row in self.waiting if state.scheduled_ns[row] != UNSET]
        fresh = [row for row in self.waiting if state.scheduled_ns[row] == UNSET]
        in_time = [row for row in fresh if self._seen_ns[row] >= limit_ns]
        self.waiting = deque(started + in_time + [row for row in fresh if self._seen_ns[row] < limit_ns])
        return (now_ns - self._seen_ns[in_time[0]]) / NS_PER_S if in_time else 0.0

    def _follow(self, step: Step, decision: Decision) -> None:
        step.mode, step.k, step.n_limit = decision.mode, decision.k, decision.n_limit
        candidates = self.running
        if decision.phase != "mixed":
            partial = self._state.partial[candidates]
            if decision.phase == "prefill" or partial.any():
                candidates = candidates[partial if decision.phase == "prefill" else ~partial]
        self._fill(step, candidates, admit=decision.phase != "decode", running_limit=decision.running_limit)

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
        state, budget = self._state, self._limits.max_num_batched_tokens
        computed = state.computed[candidates]
        tokens = state.target[candidates] - computed
        tokens[computed >= state.last[candidates]] = 0  # the last token is in flight: no further step is needed
        if threshold:
            np.minimum(tokens, threshold, out=tokens)
        if int(tokens.sum()) > budget:
            before = np.cumsum(tokens) - tokens
            tokens = np.clip(budget - before, 0, tokens)
        block_size = self._limits.block_size
        need = (computed + tokens + (block_size - 1)) // block_size - state.held_blocks[candidates]
        np.maximum(need, 0, out=need)
        if int(need.sum()) <= self._kv.free:
            self._grow(candidates, need)
        else:
            kept = self._grow_preempting(step, candidates, need)
            candidates, tokens = candidates[:kept], tokens[:kept]
        scheduled = tokens > 0
        if not scheduled.all():
            candidates, tokens = candidates[scheduled], tokens[scheduled]
        partial = state.partial[candidates]
        if partial.any():
            # Findable from now on, also for requests admitted in this very step.
            after = state.computed[candidates[partial]] + tokens[partial]
            for row, known in zip(candidates[partial].tolist(), after.tolist(), strict=True):
                self._kv.publish(row, known)
        return candidates, tokens, budget - int(tokens.sum())

    def _grow(self, rows: Ints, need: Ints) -> None:
        """Give each row the blocks it needs; the caller has checked that they are there."""
        growing = np.flatnonzero(need)
        if len(growing):
            rows, blocks = rows[growing], need[growing]
            self._kv.allocate(rows.tolist(), blocks.tolist())
            self._state.held_blocks[rows] += blocks

    def _grow_preempting(self, step: Step, candidates: Ints, need: Ints) -> int:
        """Give blocks in order and, where they run out, preempt from the end; returns how many candidates remain.

        In turns, as vLLM does: what an earlier request takes is taken before a later one's blocks come free.
        """
        done, kept = 0, len(candidates)
        while True:
            fit = done + int(np.searchsorted(np.cumsum(need[done:kept]), self._kv.free, side="right"))
            self._grow(candidates[done:fit], need[done:fit])
            done = fit
            if done >= kept:
                break
            kept -= 1
            self._preempt(step, int(candidates[kept]))
            if kept == done:
                break
        victims = np.zeros(self._state.count, np.bool_)
        victims[step.preempted] = True
        self.running = self.running[~victims[self.running]]
        return kept

    def _preempt(self, step: Step, row: int) -> None:
        state = self._state
        in_flight = next((queued for queued in self._queue if row in queued.rows), None)
        samples = in_flight is not None and bool(np.any(in_flight.sampled == row))
        if in_flight is not None:
            self._stale[row] = samples
        known = int(state.target[row]) - samples
        # vLLM publishes blocks up to the tokens it knew when it scheduled the step in flight.
        known_then = known - (in_flight is not None and self._told_since(row, in_flight.scheduled_ns))
        self._kv.release(row, min(int(state.computed[row]), known_then))
        state.target[row], state.computed[row], state.held_blocks[row] = known, 0, 0
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
        running = len(self.running)
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
            pinned = kv.evictable(hits)
            if -(-known // block_size) - len(hits) + pinned > kv.free:
                break
            self.waiting.popleft()
            need = -(-(cached + chunk) // block_size) - len(hits)
            kv.adopt(row, hits)
            kv.allocate((row,), (need,))
            state.held_blocks[row] = len(hits) + need
            state.computed[row] = cached
            self._note_admission(row, cached, now_ns)
            kv.publish(row, cached + chunk)
            state.partial[row] = True
            rows.append(row)
            tokens.append(chunk)
            budget -= chunk
        self.waiting.extendleft(reversed(skipped))
        if rows:
            self.running = np.concatenate([self.running, np.array(rows, np.int64)])
        return rows, tokens

    def _delivered(self, row: int) -> int:
        """Tokens of a waiting request whose KV came from elsewhere and lies ready to be taken over."""
        return 0

    def _note_admission(self, row: int, cached_tokens: int, now_ns: int) -> None:
        state = self._state
        first = state.scheduled_ns[row] == UNSET
        if first:
            state.scheduled_ns[row] = now_ns
            state.cached_tokens[row] = cached_tokens
        if self._controller is not None:
            if first:
                self._controller.on_prompt(int(state.prompt[row]))
            else:
                self._controller.on_resume()

    def _run(self, step: Step) -> None:
        """Advance the scheduled requests, time the step on the device and hand it to the sink."""
        state, rows = self._state, step.rows
        before = state.computed[rows]
        after = before + step.tokens
        state.computed[rows] = after
        complete = after == state.target[rows]
        step.sampled = rows if complete.all() else rows[complete]
        state.target[step.sampled] += 1
        partial = state.partial[rows]
        if partial.any():
            prefill = np.flatnonzero(partial)
            chunks = tuple(zip(step.tokens[prefill].tolist(), before[prefill].tolist(), strict=True))
            step.prefill_tokens = int(step.tokens[prefill].sum())
            step.decode_seqs = len(rows) - len(prefill)
            decode_kv = int(after.sum()) - int(after[prefill].sum())
            state.partial[rows[prefill]] = ~complete[prefill]
        else:
            chunks, step.decode_seqs, decode_kv = (), len(rows), int(after.sum())
        self._time(step, StepShape(chunks, step.decode_seqs, decode_kv, len(step.sampled)))

    def _time(self, step: Step, shape: StepShape) -> None:
        """Time the step on the device, which takes one after the other, and hand it to the sink."""
        step.start_ns = max(step.scheduled_ns, self._device_free_ns)
        step.end_ns = step.start_ns + round(self._cost.step_s(shape) * NS_PER_S)
        self._device_free_ns = step.end_ns
        self._note(step)

    def _note(self, step: Step) -> None:
        step.kv_blocks_used = self._kv.total - self._kv.free
        step.waiting, step.running = len(self.waiting), len(self.running)
        self._steps += 1
        self._sink.step(self.index, step)

    # What a finished step brought.

    def _update(self, step: Step) -> list[int]:
        """Deliver the tokens of ``step``; returns the rows that ended, in scheduling order."""
        state, sampled = self._state, step.sampled
        if self._stale:
            sampled = self._drain_stale(step)
        slots = state.next_slot[sampled]
        state.token_ns[slots] = step.end_ns
        state.next_slot[sampled] = slots + 1
        finished = slots + 1 == state.first_slot[sampled] + state.max_output[sampled]
        if not finished.any():
            return []
        ended: list[int] = sampled[finished].tolist()
        for row in ended:
            self._finish(row, step.end_ns)
        self.running = self.running[~state.done[self.running]]
        return ended

    def _drain_stale(self, step: Step) -> Ints:
        """A preempted request still gets the token of the step that was in flight."""
        for row in [row for row in self._stale if row in step.rows]:
            if self._stale.pop(row):
                self._state.target[row] += 1
        return step.sampled

    def _finish(self, row: int, now_ns: int) -> None:
        state = self._state
        if state.held_blocks[row]:
            state.done[row] = True
            self._kv.release(row, int(state.last[row]))
            state.held_blocks[row] = 0
        else:
            state.done[row] = True
            self.waiting.remove(row)  # ended by the token in flight when it was preempted
        state.end_ns[row] = now_ns
        if self._controller is not None:
            self._controller.on_finish(int(state.max_output[row]))
