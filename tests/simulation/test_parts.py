"""Unit tests of the simulator: scheduler, gates, step timer, engine loop."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pyarrow as pa

from ebbench.devices.base import StepShape
from ebbench.records.plan import ClosedPhase
from ebbench.simulation.engine import EngineLoop, OpenGate, StepTimer, Unit
from ebbench.simulation.kv import CountingKv
from ebbench.simulation.releases import Releases
from ebbench.simulation.scheduler import Scheduler, SchedulerListener
from ebbench.simulation.state import RequestState
from ebbench.simulation.step import Step, StepLog
from ebbench.spec.server import EngineOptions
from tests.simulation.worlds import plan

MS = 1_000_000


class Heard(SchedulerListener):
    """Records the scheduler's calls about admitted and finished requests."""

    def __init__(self) -> None:
        self.admissions: list[tuple[int, bool]] = []
        self.ends: list[int] = []

    def admitted(self, row: int, cached_tokens: int, now_ns: int, *, first: bool) -> None:
        self.admissions.append((row, first))

    def withdrawn(self, row: int, output_tokens: int) -> None: ...

    def finished(self, row: int) -> None:
        self.ends.append(row)


class TenPerToken:
    """10 ms per scheduled token."""

    def step_s(self, shape: StepShape) -> float:
        return 0.01 * (sum(tokens for tokens, _ in shape.prefill) + shape.decode_seqs)


def scheduler(
    lengths: list[tuple[int, int]], blocks: int = 100, budget: int = 32, *, keep_finished: bool = False
) -> Scheduler:
    state = RequestState(plan(lengths, concurrency=8))
    limits = EngineOptions(max_num_seqs=4, max_num_batched_tokens=budget, async_scheduling=False)
    return Scheduler(state, limits, CountingKv(state, blocks, caching=False), keep_finished=keep_finished)


def step_of(made: Scheduler, now_ns: int) -> Step:
    step = Step(now_ns)
    OpenGate(made).fill(step)
    made.advance(step)
    step.end_ns = now_ns + MS
    return step


def decoding(requests: list[tuple[int, int]]) -> Scheduler:
    """A scheduler that has computed the prompts of the requests in its first step."""
    made = scheduler(requests)
    for row in range(len(requests)):
        made.add(row)
    made.take_arrivals(0)
    step_of(made, 0)
    made.deliver()
    return made


def test_a_token_budget_below_the_decodes_leaves_the_last_ones_out() -> None:
    made = decoding([(8, 4)] * 3)
    step = Step(MS)
    made.fill(step, made.running, admit=False, running_limit=4, token_budget=2)
    assert step.rows.tolist() == [0, 1]
    assert step.tokens.tolist() == [1, 1]


def test_a_scheduler_chunks_prompts_by_its_token_budget() -> None:
    made, heard = scheduler([(40, 2), (10, 1)]), Heard()
    made.listeners.append(heard)
    for row in (0, 1):
        made.add(row)
    assert not made.has_requests
    made.take_arrivals(5)
    first = step_of(made, 5)
    assert (first.rows.tolist(), first.tokens.tolist(), first.sampled.tolist()) == ([0], [32], [])
    assert made.deliver() == []
    second = step_of(made, 5 + MS)
    assert (second.rows.tolist(), second.tokens.tolist(), second.sampled.tolist()) == ([0, 1], [8, 10], [0, 1])
    assert made.deliver() == [1]
    assert made.state.token_ns.tolist() == [5 + 2 * MS, -1, 5 + 2 * MS]
    step_of(made, 5 + 2 * MS)
    assert made.deliver() == [0]
    assert heard.admissions == [(0, True), (1, True)]
    assert heard.ends == [1, 0]
    assert made.kv_blocks_used == 0


def test_a_decode_step_keeps_no_array_of_its_own() -> None:
    """The log keeps thousands of steps: an array in each would take new memory at every step."""
    made = decoding([(8, 9)] * 4)
    step = step_of(made, MS)
    assert step.decode_seqs == 4
    arrays = [value for field in fields(step) if isinstance(value := getattr(step, field.name), np.ndarray)]
    shared = (made.running, made.ones)
    assert [array for array in arrays if len(array) and not any(np.shares_memory(array, one) for one in shared)] == []


def test_blocks_of_finished_requests_stay_taken_until_transferred() -> None:
    made = scheduler([(20, 1)], keep_finished=True)
    made.add(0)
    made.take_arrivals(0)
    step_of(made, 0)
    assert made.deliver() == [0]
    assert made.kv_blocks_used == 2
    made.free_finished(0)
    made.free_finished(0)
    assert made.kv_blocks_used == 0


def test_delivered_kv_is_not_computed_again_until_a_preemption_loses_it() -> None:
    made = scheduler([(31, 40), (31, 40)], blocks=5)
    for row in (0, 1):
        made.delivered[row] = 30
        made.add(row)
    made.take_arrivals(0)
    assert made.queued_tokens() == 2
    assert step_of(made, 0).tokens.tolist() == [1, 1]
    now_ns, preempted = 0, False
    while not preempted:
        made.deliver()
        now_ns += MS
        preempted = bool(step_of(made, now_ns).preempted)
    assert made.delivered == {0: 30}


def test_a_device_runs_one_step_after_the_other() -> None:
    timer = StepTimer()
    assert timer.run(0, 0.01) == (0, 10 * MS)
    assert timer.run(5 * MS, 0.01) == (10 * MS, 20 * MS)
    assert timer.run(50 * MS, 0.01) == (50 * MS, 60 * MS)


def test_units_in_lockstep_take_as_long_as_the_slowest() -> None:
    state = RequestState(plan([(3, 1), (7, 1)], concurrency=8))
    limits = EngineOptions(max_num_seqs=4, max_num_batched_tokens=32, async_scheduling=False)
    units = [Unit.of(i, Scheduler(state, limits, CountingKv(state, 10, caching=False)), None) for i in range(3)]
    log = StepLog()
    engine = EngineLoop(units, TenPerToken(), log)
    units[0].scheduler.add(0)
    units[2].scheduler.add(1)
    assert engine.wake(0) == (70 * MS, [])
    assert engine.wake(70 * MS) == (70 * MS, [0, 1])
    assert engine.wake(70 * MS) == (None, [])
    made = log.parts(pa.array(["a", "b"]), 10).table().to_pylist()
    assert [(one["instance"], one["start_ns"], one["end_ns"]) for one in made] == [(0, 0, 70 * MS), (2, 0, 70 * MS)]
    assert engine.idle
    assert np.array_equal(state.token_ns, [70 * MS, 70 * MS])


def test_each_phase_of_a_closed_loop_has_its_concurrency() -> None:
    phases = [ClosedPhase("a", 1, 1), ClosedPhase("b", 3, 1), ClosedPhase("c", 2, 2)]
    releases = Releases(plan([(5, 3)] * 6, phases=phases))
    assert releases.start() == [0]
    # With the last session of "b" the concurrency of "c" applies.
    assert [releases.ended(row) for row in range(6)] == [[1], [2], [3, 4], [5], [], []]
