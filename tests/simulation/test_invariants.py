"""Invariants S1-S10 of docs/invariants.md, over random settings chosen by hypothesis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from ebbench.engines import sim
from ebbench.simulation.engine import EngineLoop, Unit
from ebbench.simulation.front_end import FrontEnd
from ebbench.simulation.kv import CachingKv, CountingKv, StreamKv
from ebbench.simulation.loop import EventLoop, Stage
from ebbench.simulation.scheduler import Scheduler
from ebbench.simulation.state import RequestState
from ebbench.simulation.step import StepLog
from ebbench.spec.server import EngineOptions
from tests.simulation.worlds import MARGINAL, World, device, plan, worlds


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_s1_every_request_ends_once_with_all_its_tokens(world: World) -> None:
    requests = world.run().requests.to_pylist()
    assert [r["request_id"] for r in requests] == world.plan.table["request_id"].to_pylist()
    for request in requests:
        assert request["status"] == "ok"
        assert request["output_tokens"] == request["output_tokens_planned"]
        assert len(request["itl_ns"]) == request["output_tokens"] - 1
        assert request["first_token_ns"] + sum(request["itl_ns"]) == request["last_token_ns"] == request["end_ns"]


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_s2_scheduled_tokens_add_up(world: World) -> None:
    """After its last preemption a request is given everything but its last output token and what the cache held.

    Before that, a preemption loses what was computed, one token at least, unless the token in flight ended the request.
    A step that only preempts and then holds nothing has no row, so its preemption cannot be placed in time.
    """
    result = world.run()
    given_tokens: Counter[str] = Counter()
    since_preempted: Counter[str] = Counter()
    placed: Counter[str] = Counter()
    for step in result.steps.to_pylist():
        for name in step["preempted_ids"]:
            since_preempted[name] = 0
            placed[name] += 1
        for name, tokens in zip(step["request_ids"], step["request_tokens"], strict=True):
            given_tokens[name] += tokens
            since_preempted[name] += tokens
    for request in result.requests.to_pylist():
        name, whole = request["request_id"], request["input_tokens"] + request["output_tokens"] - 1
        if not request["preemptions"]:
            assert given_tokens[name] == whole - request["cached_tokens"]
            continue
        ended_in_flight = not since_preempted[name]
        if not ended_in_flight and placed[name] == request["preemptions"]:
            found_in_cache = whole - since_preempted[name]
            assert found_in_cache >= 0
            assert found_in_cache % 16 == 0 if world.options.enable_prefix_caching else found_in_cache == 0
        if ended_in_flight:
            assert world.options.async_scheduling, "only with asynchronous scheduling a token is in flight"
        # A preempted request loses what it has computed, one token at least; the prefix cache may give it back.
        once = whole - request["cached_tokens"]
        least = 0 if world.options.enable_prefix_caching else request["preemptions"] - ended_in_flight
        assert once + least <= given_tokens[name] <= once + request["preemptions"] * whole


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_s3_kv_blocks_are_conserved(world: World) -> None:
    """No more blocks are held than exist; at the end all are free, each once and without a reference."""
    for step in world.run().steps.to_pylist():
        assert 0 < step["kv_blocks_used"] <= step["kv_blocks_total"] == world.options.num_kv_blocks
    blocks = world.options.num_kv_blocks
    assert blocks is not None
    state = RequestState(world.plan)
    kv = CachingKv(state, blocks, world.options.block_size)
    scheduler = Scheduler(state, world.options, kv)
    engine = EngineLoop([Unit.of(0, scheduler, None)], device().cost, StepLog())
    EventLoop(world.plan, Stage(state, [engine], [FrontEnd.of(world.options, None, 1, state)])).run()
    assert kv.free == kv.total
    assert len(kv.free_contents()) == blocks
    assert not state.held_blocks.any()
    assert not scheduler.waiting
    assert not len(scheduler.running)


@pytest.mark.parametrize(
    ("manager", "changes"),
    [
        (CountingKv, {"enable_prefix_caching": False}),
        (StreamKv, {"enable_prefix_caching": True}),
        (CachingKv, {"enable_prefix_caching": True}),
    ],
    ids=["counting", "stream", "caching"],
)
@given(world=worlds())
@settings(max_examples=60, deadline=None)
def test_s3_no_policy_leaves_blocks_behind_under_any_kv_manager(
    manager: type[CountingKv | StreamKv | CachingKv], changes: dict[str, Any], world: World
) -> None:
    """A run of the engine; the KV manager that it chose for the plan is examined after the run."""
    world = replace(world, options=replace(world.options, **changes))
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if manager is CachingKv:
            patch.setattr(sim, "streams_take_turns", lambda _: False)
        for kind in (CountingKv, StreamKv, CachingKv):
            patch.setattr(kind, "__init__", _noted(kind.__init__, made))
        world.run()
    used = made[-1]
    assert isinstance(used, manager)
    assert used.free == used.total == world.options.num_kv_blocks


def _noted(build: Callable[..., None], made: list[Any]) -> Callable[..., None]:
    """A constructor that also appends each object to ``made``."""

    def noted(self: Any, *args: Any, **options: Any) -> None:
        made.append(self)
        build(self, *args, **options)

    return noted


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_s4_time_is_monotone_and_causal(world: World) -> None:
    result = world.run()
    previous_end = previous_scheduled = 0
    for step in result.steps.to_pylist():
        assert previous_scheduled <= step["scheduled_ns"] <= step["start_ns"] < step["end_ns"]
        assert step["start_ns"] >= previous_end
        previous_end, previous_scheduled = step["end_ns"], step["scheduled_ns"]
    for request in result.requests.to_pylist():
        assert request["intended_ns"] <= request["sent_ns"] <= request["scheduled_ns"] < request["first_token_ns"]
        assert all(gap > 0 for gap in request["itl_ns"])


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_s5_limits_hold_in_every_step(world: World) -> None:
    for step in world.run().steps.to_pylist():
        assert sum(step["request_tokens"]) <= world.options.max_num_batched_tokens
        assert step["running"] <= world.options.max_num_seqs
        assert len(set(step["request_ids"])) == len(step["request_ids"]) <= step["running"]
        assert step["prefill_tokens"] + step["decode_seqs"] == sum(step["request_tokens"])
        assert min(step["request_tokens"]) > 0


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_s6_exclusive_steps_are_exclusive(world: World) -> None:
    """Under EB no decode in a prefill step and no prefill in a decode step."""
    phases = {(s["mode"], s["phase"]) for s in world.run().steps.to_pylist()}
    assert ("eb", "mixed") not in phases
    if world.policy.partition(":")[0] in ("v1", "cadence", "ppas", "batchwait", "slochunk"):
        assert {mode for mode, _ in phases} == {"mb"}
    elif not world.policy.startswith("ebplus") and world.policy not in MARGINAL[::2]:
        assert {mode for mode, _ in phases} == {"eb"}


@given(worlds())
@settings(max_examples=40, deadline=None)
def test_s7_same_world_same_bytes(world: World) -> None:
    first, second = world.run(), world.run()
    assert first.requests.equals(second.requests)
    assert first.steps.equals(second.steps)
    assert first.decisions.equals(second.decisions)


@given(worlds())
@settings(max_examples=60, deadline=None)
def test_s8_sessions_take_turns(world: World) -> None:
    ends: dict[tuple[int, int], int] = {}
    for request in world.run().requests.to_pylist():
        before = ends.get((request["session"], request["turn"] - 1))
        if before is not None:
            assert request["intended_ns"] == before
        ends[request["session"], request["turn"]] = request["end_ns"]


@given(worlds().filter(lambda world: world.plan.closed_loop))
@settings(max_examples=60, deadline=None)
def test_s9_closed_loop_keeps_its_concurrency(world: World) -> None:
    limit = world.plan.phases[0].max_concurrency
    events = []
    for request in world.run().requests.to_pylist():
        events += [(request["sent_ns"], 1), (request["end_ns"], -1)]
    open_now = 0
    most = 0
    for _, change in sorted(events):
        open_now += change
        most = max(most, open_now)
    assert most == min(limit, world.plan.phases[0].sessions)


@pytest.mark.parametrize("policy", ["eb:update_every=4,min_samples=3", "v1"])
@pytest.mark.parametrize("caching", [True, False])
def test_s10_prefix_cache_is_used_by_follow_up_turns_only_when_on(policy: str, caching: bool) -> None:
    world = World(
        plan([(40, 24)] * 12, turns=3, concurrency=2),
        policy,
        EngineOptions(max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=500, enable_prefix_caching=caching),
    )
    by_turn: dict[int, set[int]] = {}
    for request in world.run().requests.to_pylist():
        by_turn.setdefault(request["turn"], set()).add(request["cached_tokens"])
    # History of a second turn: 64 tokens, of which 63 have KV, so three full blocks of 16; of a third: 127, so seven.
    assert by_turn == ({0: {0}, 1: {48}, 2: {112}} if caching else {0: {0}, 1: {0}, 2: {0}})


def test_under_overload_late_requests_are_served_in_the_end() -> None:
    """A closed loop that replaces every ended request by a new one, which is punctual: those at the start grow old."""
    lengths = [(64, 16)] * 3000
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=512, block_size=16, num_kv_blocks=400)
    result = World(plan(lengths, concurrency=60), "marginal:ttft=0.4,tpot=0.05,mix=off", options).run()
    first_ns = [request["first_token_ns"] for request in result.requests.to_pylist()]
    assert max(first_ns[:60]) < sorted(first_ns)[len(first_ns) * 9 // 10]
