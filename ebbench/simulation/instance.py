"""One engine instance: vLLM v1's engine loop (0.32) in virtual time.

``wake`` does what the engine core does between two blocking waits and returns when it wants to be woken next; the
event loop owns the clock. What a step holds is the scheduler's (:mod:`ebbench.simulation.scheduling`) under its policy
(:mod:`ebbench.simulation.phases`), how long it lasts the device's cost model.

Asynchronous scheduling is vLLM's: up to two steps are out at a time, so step n+1 is scheduled before the completions
of step n are known and a freed slot is seen one step late. A step that could schedule nothing takes no time but, as in
vLLM, a place in the queue of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebbench.devices.base import CostModel, StepShape
from ebbench.simulation.kv import KvBlocks
from ebbench.simulation.phases import PhasedScheduler
from ebbench.simulation.state import Ints, RequestState
from ebbench.simulation.step import NS_PER_S, SchedulerLimits, Step, StepSink
from vllm_eb.controller import Controller

SHORTEST_COAST = 2  # steps; one alone is made as fast the ordinary way


class Instance(PhasedScheduler):
    """A scheduler with its engine loop and its device."""

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
        super().__init__(state, limits, kv, controller)
        self._cost, self._sink, self.index = cost, sink, index
        self._blocked = False
        self._device_free_ns = 0

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

    def queued_tokens(self) -> int:
        """Prompt tokens it has received and not scheduled."""
        state = self._state
        partial = self.running[state.partial[self.running]]
        queued = int((state.target[partial] - state.computed[partial]).sum()) if len(partial) else 0
        for rows in (self.waiting, self._inbox):
            if rows:
                queued += int(state.target[np.fromiter(rows, np.int64, len(rows))].sum())
        return queued

    def running_ages(self) -> Sequence[int]:
        """Output tokens so far of every running request."""
        ages: list[int] = self._state.outputs(self.running).tolist()
        return ages

    def wake(self, now_ns: int, until_ns: int = 0) -> tuple[int | None, list[int]]:
        """Take up the engine loop at ``now_ns``. Returns when to be woken again (None: on arrival) and what ended.

        The caller passes on the ended rows and wakes it again at the same time before anything later happens, so
        that requests released by a completion are there for the next scheduling step. Before ``until_ns`` nothing
        else will happen anywhere, so steps up to then may be made at once.
        """
        if self._blocked:
            self._blocked = False
            ended = self._update(self._queue.popleft())
            if ended:
                return now_ns, ended
        depth = 2 if self._limits.async_scheduling else 1
        if until_ns > now_ns and len(self._queue) == depth - 1 and self._coast(now_ns, until_ns):
            self._blocked = True
            return self._queue[0].end_ns, []
        fruitless = 0
        while True:
            self._take_in(now_ns)
            if len(self.running) or self.waiting:
                step = self._schedule(now_ns)
                self._queue.append(step)
                if step.empty and all(queued.empty for queued in self._queue):
                    # Nothing in flight and nothing scheduled. A prompt that preempted itself fits now; after that
                    # only an arrival can help.
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

    def _coast(self, now_ns: int, until_ns: int) -> bool:
        """Make decode steps that hold exactly the running requests, as many as there are before something happens.

        That is a last token to schedule, an arrival, KV blocks running out or a policy that wants something else. The
        arrays are brought up to date once for all of the steps. False: not one such step, nothing was done.
        """
        kv = self._counted
        if kv is None:
            return False
        most = self._can_coast()
        if most < SHORTEST_COAST:
            return False
        state, rows, block_size = self._state, self.running, self._limits.block_size
        seqs, computed = len(rows), state.computed[rows]
        growing = np.bincount(-computed % block_size, minlength=block_size).tolist()  # blocks needed, by step
        kv_tokens, ones = int(np.add.reduce(computed)), self._ones[:seqs]
        before, wake_ns, made = len(self._queue), now_ns, 0
        while made < most and wake_ns < until_ns and growing[made % block_size] <= kv.free:
            step = Step(wake_ns, rows=rows, tokens=ones, sampled=rows, decode_seqs=seqs)
            if self._controller is not None and not self._may_decode(step, self._controller):
                break
            kv.take(growing[made % block_size])
            made += 1
            kv_tokens += seqs
            self._time(step, StepShape((), seqs, kv_tokens, seqs))
            self._queue.append(step)
            wake_ns = self._queue[made - 1].end_ns
        if made:
            computed += made
            state.computed[rows] = computed
            state.target[rows] += made
            state.held_blocks[rows] = -(-computed // block_size)
            self._deliver(rows, before, made - 1)
        return made > 0

    def _can_coast(self) -> int:
        """How many steps the running requests can decode with nobody joining or leaving; 0: none."""
        state, rows = self._state, self.running
        if self._prefilling or self._stale or self._inbox or not len(rows):
            return 0
        if len(rows) > self._limits.max_num_batched_tokens or (self._queue and self._queue[0].empty):
            return 0
        if self._controller is None:
            if self._admissible(self._limits.max_num_seqs):
                return 0
        elif self._controller.orders_queue:
            return 0
        return int(np.minimum.reduce(state.last.take(rows) - state.computed.take(rows)))

    def _deliver(self, rows: Ints, before: int, count: int) -> None:
        """Deliver the tokens of the ``count`` oldest steps: ``before`` of any kind, then decodes of ``rows``."""
        state = self._state
        for _ in range(min(before, count)):
            self._update(self._queue.popleft())
        ends_ns = [self._queue.popleft().end_ns for _ in range(count - before)]
        if ends_ns:
            slots = state.next_slot[rows]
            state.token_ns[slots[:, None] + np.arange(len(ends_ns))] = ends_ns
            state.next_slot[rows] = slots + len(ends_ns)

    def _schedule(self, now_ns: int) -> Step:
        step = self._assemble(now_ns)
        if not step.empty:
            self._run(step)
        return step

    def _run(self, step: Step) -> None:
        """Advance the scheduled requests, time the step on the device and hand it to the sink."""
        state, rows = self._state, step.rows
        before = state.computed.take(rows)
        after = before + step.tokens
        state.computed[rows] = after
        if not self._prefilling:
            step.sampled, step.decode_seqs = rows, len(rows)
            state.target[rows] += 1
            self._time(step, StepShape((), len(rows), int(np.add.reduce(after)), len(rows)))
            return
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
        self._prefilling -= int(np.count_nonzero(finished))
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
        slots = state.next_slot.take(sampled)
        state.token_ns[slots] = step.end_ns
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
