"""Waves and dummy passes of data-parallel ranks: vLLM's own busy loop per rank, the scheduler under each policy."""

from __future__ import annotations

import random
import threading
from typing import Any

import pyarrow as pa
import pytest

from ebbench.simulation.engine import EngineLoop, Unit
from ebbench.simulation.kv import CountingKv
from ebbench.simulation.scheduler import Scheduler
from ebbench.simulation.state import RequestState
from ebbench.simulation.step import StepLog
from ebbench.spec.server import EngineOptions
from tests.simulation.worlds import plan
from tests.vllm.core_engine import POLICIES, Engine
from tests.vllm.emulation import CALIBRATION, TestCost
from tests.vllm.waves import LockstepError, Meeting, Ranks
from vllm_eb import compat
from vllm_eb.controller import Controller
from vllm_eb.policy import parse_policy

pytestmark = [pytest.mark.vllm]

PROMPT, OUTPUT, BLOCKS = 30, 24, 40
"""Three requests of this size fill the KV cache: the prefill phase for a fourth one comes out empty."""


@pytest.fixture(autouse=True)
def meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree in this process."""
    from vllm.config import ParallelConfig

    def agree(group: Any, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        meeting, rank = group
        found: tuple[bool, bool] = meeting.meet(rank, "count", has_unfinished, pending_pause)
        return found

    monkeypatch.setattr(ParallelConfig, "sync_dp_state", agree)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("policy", POLICIES)
def test_waves_end_and_begin_again_and_every_rank_makes_every_pass(policy: str, asynchronous: bool) -> None:
    made = Ranks(lambda: Engine(policy, blocks=BLOCKS, seqs=6, budget=64, asynchronous=asynchronous))
    first, second = (rank.engine for rank in made.ranks)
    wanted = {f"a{number}": OUTPUT for number in range(9)} | {"b0": 1, "b1": 12, "b2": 12, "a9": 5, "a10": 2}
    with made:
        # One rank has more than its KV cache holds, the other one a single token to make.
        made.begin({0: [first.make(f"a{number}", PROMPT, OUTPUT) for number in range(9)], 1: [second.make("b0", 4, 1)]})
        made.wave_ends()
        passes = made.ranks[1].passes
        assert passes.count("dummy") > passes.count("real"), "the second rank was meant to be idle"
        # All were idle. Now the other rank has work, and a request comes to the first one in the middle of the wave.
        late = first.make("a9", PROMPT, 5)
        made.meeting.after[made.meeting.made["pass"] + 4] = lambda: made.add({0: [late]})
        made.begin({1: [second.make("b1", PROMPT, 12), second.make("b2", PROMPT, 12)]})
        made.wave_ends()
        made.begin({0: [first.make("a10", PROMPT, 2)]})
        made.wave_ends()
    assert made.complete == [0, 1, 2]
    assert made.ended == set(wanted)
    assert {name: made.tokens[name] for name in wanted} == wanted
    assert {len(rank.passes) for rank in made.ranks} == {made.meeting.made["pass"]}
    assert not any(rank.core.scheduler.has_requests() for rank in made.ranks)


@pytest.mark.parametrize("policy", ["v0", "eb:theta=0.3"])
def test_a_prefill_phase_that_would_be_empty_costs_no_pass(policy: str) -> None:
    """The decode step that replaces it is the rank's pass: no dummy pass comes in between."""
    made = Ranks(lambda: Engine(policy, blocks=BLOCKS, seqs=6, budget=64, asynchronous=False))
    first = made.ranks[0].engine
    with made:
        made.begin({0: [first.make(f"a{number}", PROMPT, OUTPUT) for number in range(9)]})
        made.wave_ends()
    reasons = [record.reason for record in first.scheduler.controller.drain_records()]
    assert reasons.count("no_kv_blocks") > 1
    passes = made.ranks[0].passes
    assert passes.index("dummy") == passes.count("real") > 9 * OUTPUT / 3


def test_a_rank_that_counts_while_the_other_makes_a_pass_is_noticed() -> None:
    meeting, raised = Meeting(2), []

    def other() -> None:
        with pytest.raises(LockstepError):
            meeting.meet(1, "count")
        raised.append(1)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(LockstepError, match="pass"):
        meeting.meet(0, "pass")
    thread.join(10.0)
    assert raised


ALIGNED = ("marginal", "marginal:mix=off")
SEQS, BUDGET, PLENTY = 12, 200, 4000


def aligned(monkeypatch: pytest.MonkeyPatch, policy: str, interval: int) -> Ranks:
    """Two ranks that know that they make every pass together."""
    monkeypatch.setattr(compat, "lockstep_ranks", lambda _: 2)
    further = {"prefill_schedule_interval": interval}
    return Ranks(lambda: Engine(policy, blocks=PLENTY, seqs=SEQS, budget=BUDGET, asynchronous=False, further=further))


@pytest.mark.parametrize("interval", [1, 8, 64])
@pytest.mark.parametrize("policy", ALIGNED)
def test_ranks_in_lockstep_make_the_steps_of_the_simulator(
    monkeypatch: pytest.MonkeyPatch, policy: str, interval: int
) -> None:
    rng = random.Random(interval)
    lengths = [(rng.randint(20, 120), rng.randint(10, 90)) for _ in range(120)]
    made = aligned(monkeypatch, policy, interval)
    with made:
        requests: dict[int, list[Any]] = {0: [], 1: []}
        for row, (prompt, output) in enumerate(lengths):
            requests[row % 2].append(made.ranks[row % 2].engine.make(f"r{row}", prompt, output))
        made.begin(requests)
        made.wave_ends()
    passes = simulated_passes(policy, lengths, interval)
    for rank, simulated in zip(made.ranks, passes, strict=True):
        assert rank.contents[: len(simulated)] == simulated
        assert set(rank.contents[len(simulated) :]) <= {(0, 0)}  # dummy passes up to the end of the wave


def simulated_passes(policy: str, lengths: list[tuple[int, int]], interval: int) -> list[list[tuple[int, int]]]:
    """Prompt tokens and decodes of every pass of two simulated ranks, which got every other request at the start."""
    state = RequestState(plan(lengths, concurrency=len(lengths)))
    limits = EngineOptions(max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, block_size=4, async_scheduling=False)
    log, units = StepLog(), []
    for rank in range(2):
        controller = Controller(
            parse_policy(policy), CALIBRATION, max_num_seqs=SEQS, block_size=4, num_blocks=PLENTY,
            max_num_batched_tokens=BUDGET, ranks=2, pass_interval=interval,
        )  # fmt: skip
        units.append(Unit.of(rank, Scheduler(state, limits, CountingKv(state, PLENTY, caching=False)), controller))
        for row in range(rank, len(lengths), 2):
            units[rank].scheduler.add(row)
    engine, now_ns = EngineLoop(units, TestCost(), log), 0
    while (again_ns := engine.wake(now_ns)[0]) is not None:
        now_ns = again_ns
    steps = log.parts(pa.array([str(row) for row in range(len(lengths))]), PLENTY).table().to_pylist()
    numbers = {start: number for number, start in enumerate(sorted({step["start_ns"] for step in steps}))}
    passes = [[(0, 0)] * len(numbers) for _ in units]
    for step in steps:
        passes[step["instance"]][numbers[step["start_ns"]]] = (step["prefill_tokens"], step["decode_seqs"])
    return passes


def test_a_rank_that_had_nothing_to_do_meets_the_other_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler is not called in dummy passes; vLLM's interval tells it the number of the pass."""
    interval, alone = 8, 21
    made = aligned(monkeypatch, "marginal:mix=off", interval)
    first, second = (rank.engine for rank in made.ranks)
    seen: list[tuple[int, int]] = []  # passes made before, and the number of the pass, in each decision of the second
    decide = second.scheduler.controller.decide

    def watched(view: Any) -> Any:
        seen.append((made.meeting.made["pass"], view.pass_number))
        return decide(view)

    monkeypatch.setattr(second.scheduler.controller, "decide", watched)
    with made:
        late = [second.make(f"b{number}", PROMPT, 30 + number % 7) for number in range(60)]
        made.meeting.after[alone] = lambda: made.add({1: late})
        made.begin({0: [first.make(f"a{number}", PROMPT, 30 + number % 7) for number in range(60)]})
        made.wave_ends()
    assert made.ranks[1].passes[:alone].count("dummy") == alone
    corrected = next(place for place, (made_before, _) in enumerate(seen) if made_before % interval == 0)
    assert seen[0][0] % interval != seen[0][1] % interval, "the rank was meant to have missed passes"
    assert len(seen) > 60
    assert all(before % interval == number % interval for before, number in seen[corrected:])
