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
from ebbench.simulation.scheduler import Scheduler
from ebbench.simulation.state import Ints
from ebbench.simulation.step import Step

SHORTEST_RUN = 2  # steps; a single step is as fast without coasting

PATIENCE = 4
"""Failed attempts in a row before the first pause. With 2, runs of 256 sequences lost as much by steps that could have
been coasted as they gained; without pauses, saturated runs of 1,024 sequences take 3 to 4 % longer."""

LONGEST_PAUSE = 8  # steps

RunStep = Callable[[Step, StepShape], None]
"""Times a scheduled step on the device and records it."""


class Attempts:
    """Which attempts to coast are worth making: none for some steps after several failed in a row.

    In a saturated engine a request ends in nearly every step, and an attempt looks at all requests in vain. In others
    few attempts fail in a row, at the ends of requests. Results do not depend on it.
    """

    def __init__(self) -> None:
        self._failed = self._pause = 0

    def due(self) -> bool:
        """Whether to attempt it at this step."""
        if not self._pause:
            return True
        self._pause -= 1
        return False

    def note(self, *, made: bool) -> None:
        """Record whether the attempt made steps."""
        if made:
            self._failed = 0
            return
        self._failed += 1
        if self._failed >= PATIENCE:
            self._pause = min(self._failed - PATIENCE + 1, LONGEST_PAUSE)


def coast(scheduler: Scheduler, gate: Gate, run_step: RunStep, now_ns: int, until_ns: int) -> bool:
    """Make decode steps of the running requests; the first is scheduled now, all before ``until_ns``.

    A step is scheduled when the step m places before it ends, with m the number of steps in flight now. The same number
    is in flight afterwards; the tokens of the others are delivered. Returns False if no step was made; nothing has then
    changed.
    """
    kv, state, rows, limits = scheduler.counted, scheduler.state, scheduler.running, scheduler.limits
    if kv is None or not scheduler.only_decodes or len(rows) > limits.max_num_batched_tokens or not gate.may_coast():
        return False
    computed = state.computed.take(rows)
    most = int(np.minimum.reduce(state.last.take(rows) - computed))
    if most < SHORTEST_RUN:
        return False
    in_flight, block_size = scheduler.in_flight, limits.block_size
    seqs, ones, asks, take = len(rows), scheduler.ones[: len(rows)], gate.asks_each_step, kv.take
    growing = np.bincount(-computed % block_size, minlength=block_size).tolist()  # KV blocks needed, by step
    kv_tokens, before, made, wake_ns = int(np.add.reduce(computed)), len(in_flight), 0, now_ns
    while made < most and wake_ns < until_ns and growing[made % block_size] <= kv.free:
        step = Step(wake_ns, rows=rows, tokens=ones, sampled=rows, decode_seqs=seqs)
        if asks and not gate.admits_decode(step):
            break
        take(growing[made % block_size])
        made += 1
        kv_tokens += seqs
        scheduler.steps += 1
        run_step(step, StepShape((), seqs, kv_tokens, seqs))
        in_flight.append(step)
        wake_ns = in_flight[made - 1].end_ns
    if made:
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
