"""Every admitted request ends exactly once and gives its KV blocks back, whatever happens; the engine never gets stuck.

Driven through the real engine core on the emulated device with lengths, memory, aborts, pauses and priorities that
hypothesis chooses, with memory so tight that the gate and preemption work all the time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbench.spec.server import EngineOptions
from tests.vllm.emulation import CALIBRATION, TestCost
from vllm_eb.config import SCHEDULER, additional_config
from vllm_eb.policy import parse_policy

pytestmark = pytest.mark.vllm

ONLINE = "update_every=3,min_samples=2,window=20"
POLICIES = (
    "v0", "cadence:every=4", "deferred:k=2", "deferred:k=7", "eb:theta=0.05", "eb:theta=0.95", f"eb:{ONLINE}",
    f"ebplus:margin=-1,sticky=-1,{ONLINE}",
    f"ebplus:{ONLINE}", "marginal:update_every=3",
    "marginal:update_every=3,ttft=0.05,tpot=0.012",
)  # fmt: skip
BLOCK, MAX_STEPS_A_TOKEN = 4, 12


@dataclass(frozen=True)
class Scene:
    """One adversarial run. ``actions`` maps a turn of the engine loop to what is done before it."""

    policy: str
    requests: list[tuple[int, int, int]]  # prompt tokens, output tokens, turn of arrival
    spare_blocks: int
    seqs: int
    budget: int
    asynchronous: bool
    caching: bool
    priorities: bool
    aborts: dict[int, int]  # turn -> request
    pauses: dict[int, int]  # turn -> turns until resumed


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    lengths = st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 60))
    requests = draw(st.lists(lengths, min_size=1, max_size=30))
    seqs = draw(st.integers(1, 24))
    turns = st.integers(0, 120)
    policy = draw(st.sampled_from(POLICIES))
    return Scene(
        policy=policy,
        requests=requests,
        spare_blocks=draw(st.integers(0, 6)),
        seqs=seqs,
        budget=draw(st.integers(seqs, 64)),
        asynchronous=draw(st.booleans()),
        caching=draw(st.booleans()),
        priorities="ttft" not in policy and draw(st.booleans()),  # both order the queue
        aborts=draw(st.dictionaries(turns, st.integers(0, len(requests) - 1), max_size=6)),
        pauses=draw(st.dictionaries(turns, st.integers(1, 20), max_size=2)),
    )


@dataclass
class Ledger:
    """What became of each request."""

    endings: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    aborted: set[str] = field(default_factory=set)

    def take(self, outputs: Any) -> None:
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                self.tokens[output.request_id] += len(output.new_token_ids)
                self.endings[output.request_id] += output.finish_reason is not None


def play(scene: Scene) -> tuple[Any, Ledger]:
    """Run a scene to its end; fails if the engine needs far more turns than its requests have tokens."""
    from vllm.v1.core.sched.interface import PauseState

    from ebbench.engines.emulated_core import StepReader, VirtualClock, build_core, make_request

    longest = max(prompt + output for prompt, output, _ in scene.requests)
    options = EngineOptions(
        max_num_seqs=scene.seqs,
        max_num_batched_tokens=scene.budget,
        block_size=BLOCK,
        enable_prefix_caching=scene.caching,
        async_scheduling=scene.asynchronous,
    )
    core = build_core(
        -(-longest // BLOCK) + scene.spare_blocks,
        options,
        SCHEDULER,
        additional_config(parse_policy(scene.policy), CALIBRATION),
        scheduling_policy="priority" if scene.priorities else "fcfs",
    )
    streams: dict[str, list[int]] = {}
    clock = VirtualClock()
    core.model_executor.attach(clock, TestCost(), StepReader(streams))
    core.model_executor.on_step = core.model_executor.on_preempted = lambda *_: None
    core.scheduler.use_clock(clock.now_s)
    ledger, resume_at = Ledger(), -1
    arrivals = sorted((turn, number) for number, (_, _, turn) in enumerate(scene.requests))
    limit = 200 + MAX_STEPS_A_TOKEN * sum(prompt + output for prompt, output, _ in scene.requests)
    turn = 0
    while True:
        while arrivals and arrivals[0][0] <= turn:
            number = arrivals.pop(0)[1]
            prompt, output, _ = scene.requests[number]
            streams[f"r{number}"] = list(range(number, number + prompt + output))
            core.add_request(make_request(core, f"r{number}", streams[f"r{number}"][:prompt], output, number % 3))
        victim = f"r{scene.aborts.get(turn)}"
        if victim in core.scheduler.requests:
            core.abort_requests([victim])
            ledger.aborted.add(victim)
        if turn in scene.pauses:
            core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            resume_at = turn + scene.pauses[turn]
        if turn == resume_at:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)
        if not arrivals and not core.batch_queue and not core.scheduler.requests and turn > resume_at:
            return core, ledger
        if core.scheduler.has_requests() or core.batch_queue:
            ledger.take(core.step_fn()[0])
        turn += 1
        assert turn < limit, f"stuck: {core.scheduler.get_request_counts()} running and waiting"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenes())
def test_every_request_ends_once_and_returns_its_blocks(scene: Scene) -> None:
    core, ledger = play(scene)
    for number, (_, output, _) in enumerate(scene.requests):
        name = f"r{number}"
        if name in ledger.aborted:
            assert ledger.endings[name] == 0
            assert ledger.tokens[name] <= output
        else:
            assert (ledger.endings[name], ledger.tokens[name]) == (1, output), name
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert core.scheduler.get_request_counts() == (0, 0)
    assert not core.scheduler.running
