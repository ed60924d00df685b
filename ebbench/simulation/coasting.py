"""Coasting: makes consecutive decode steps without asking the scheduler and the policy before each step.

Each of these steps holds exactly the running requests. Coasting ends before a request has its last token, before KV
blocks run out, and before any event known to the caller (an arrival, a policy that wants a prefill). The arrays are
updated once for all steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ebbench.devices.base import StepShape
from ebbench.simulation.gate import Gate
from ebbench.simulation.kv import CountedKv
from ebbench.simulation.scheduler import Scheduler
from ebbench.simulation.state import Ints
from ebbench.simulation.step import Step

SHORTEST_RUN = 2  # steps; a single step is as fast without coasting

RunStep = Callable[[Step, StepShape], None]
"""Times a scheduled step on the device and records it."""


class Coasting:
    """Coasts one unit whose KV blocks are counted.

    An attempt looks at all running requests. In a saturated engine one of them ends in nearly every step; attempts that
    are known to fail for that are left out. Results do not depend on it.
    """

    def __init__(self, scheduler: Scheduler, kv: CountedKv, gate: Gate, run_step: RunStep) -> None:
        self._scheduler, self._kv, self._gate, self._run_step = scheduler, kv, gate, run_step
        self._ending = False  # at the next attempt a running request has its last token in flight

    def due(self) -> bool:
        """Whether an attempt may succeed. To be asked before each scheduling step."""
        if self._ending:
            self._ending = False
            return False
        return self._scheduler.only_decodes

    def make_steps(self, now_ns: int, until_ns: int) -> bool:
        """Make decode steps of the running requests; the first is scheduled now, all before ``until_ns``.

        A step is scheduled when the step m places before it ends, with m the number of steps in flight now. The same
        number is in flight afterwards; the tokens of the others are delivered. Returns False if no step was made;
        nothing has then changed.
        """
        scheduler, kv, gate = self._scheduler, self._kv, self._gate
        state, rows, limits = scheduler.state, scheduler.running, scheduler.limits
        if len(rows) > limits.max_num_batched_tokens or not gate.may_coast():
            return False
        computed, in_flight = state.computed.take(rows), scheduler.in_flight
        most, before = int(np.minimum.reduce(state.last.take(rows) - computed)), len(in_flight)
        if most < SHORTEST_RUN:
            self._ending = most == 1 and before > 0
            return False
        seqs, ones, asks, block_size = len(rows), scheduler.ones[: len(rows)], gate.asks_each_step, limits.block_size
        growing = np.bincount(-computed % block_size, minlength=block_size).tolist()  # KV blocks needed, by step
        kv_tokens, made, wake_ns = int(np.add.reduce(computed)), 0, now_ns
        while made < most and wake_ns < until_ns and growing[made % block_size] <= kv.free:
            step = Step(wake_ns, rows=rows, tokens=ones, sampled=rows, decode_seqs=seqs)
            if asks and not gate.admits_decode(step):
                break
            kv.take(growing[made % block_size])
            made += 1
            kv_tokens += seqs
            scheduler.steps += 1
            self._run_step(step, StepShape((), seqs, kv_tokens, seqs))
            in_flight.append(step)
            wake_ns = in_flight[made - 1].end_ns
        if made:
            self._ending = made == most and before > 0
            _commit(scheduler, rows, computed + made)
            for _ in range(min(before, made - 1)):
                scheduler.deliver()
            scheduler.deliver_decodes(rows, max(made - 1 - before, 0))
        return made > 0


def _commit(scheduler: Scheduler, rows: Ints, computed: Ints) -> None:
    """Count the tokens of all steps as scheduled."""
    state = scheduler.state
    state.computed[rows] = computed
    state.target[rows] = computed + 1
    state.held_blocks[rows] = -(-computed // scheduler.limits.block_size)
