"""Waves and dummy passes of data-parallel ranks: vLLM's own busy loop per rank, the scheduler under each policy."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.vllm.core_engine import POLICIES, Engine
from tests.vllm.waves import LockstepError, Meeting, Ranks

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
    assert reasons.count("no KV blocks for a prefill") > 1
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
