"""The simulator's shortcuts do not change results: coasted decode steps, and cached blocks counted per session."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.devices.geometry import KvGroup, KvLayout
from ebbench.engines import sim
from ebbench.engines.base import EngineResult
from ebbench.simulation import engine as engine_module
from ebbench.simulation.engine import OpenGate, PolicyGate
from ebbench.simulation.kv import CachingKv
from ebbench.simulation.loop import EventLoop
from ebbench.simulation.step import Step
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.simulation.worlds import World, plan, worlds

NEVER = 1 << 60
PRESSED = World(
    plan([(40, 50), (3, 90), (70, 20)] * 12, turns=3, concurrency=9),
    "v1",
    EngineOptions(max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=40),
)


def equal(first: EngineResult, second: EngineResult) -> bool:
    return all(getattr(first, name).equals(getattr(second, name)) for name in ("requests", "steps", "decisions"))


def noted(ordinary: Callable[[Any, Step], None], times_ns: list[int]) -> Callable[[Any, Step], None]:
    """``Gate.fill`` that keeps the times at which it was called."""

    def fill(self: Any, step: Step) -> None:
        times_ns.append(step.scheduled_ns)
        ordinary(self, step)

    return fill


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_coasting_makes_the_same_steps(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "SHORTEST_RUN", 1)
        in_one_go = world.run()
        patch.setattr(engine_module, "SHORTEST_RUN", NEVER)
        assert equal(in_one_go, world.run())


WINDOWS = [
    (KvGroup(1, 16), KvGroup(3, 16, window=24)),
    (KvGroup(1, 64), KvGroup(2, 16, window=33), KvGroup(1, 4, window=8)),
    (KvGroup(1, 16), KvGroup(2, 16, chunk=32)),
    (KvGroup(1, 32), KvGroup(3, 32, per_sequence=1)),
]


@given(worlds(), st.sampled_from(WINDOWS), st.sampled_from((0, 1, 9, 1000)))
@settings(max_examples=25, deadline=None)
def test_coasting_gives_blocks_back_in_time(world: World, groups: tuple[KvGroup, ...], more: int) -> None:
    """Where layers keep windows, chunks or states: also with requests that wait for those blocks."""
    budget = world.options.max_num_batched_tokens
    layout = KvLayout(groups, 1, 512, budget * (2 if world.options.async_scheduling else 1))
    options = replace(world.options, num_kv_blocks=layout.most(512) + more, max_model_len=512)
    world = replace(world, layout=layout, options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "SHORTEST_RUN", 1)
        in_one_go = world.run()
        patch.setattr(engine_module, "SHORTEST_RUN", NEVER)
        assert equal(in_one_go, world.run())


@pytest.mark.parametrize("seed", range(8))
def test_a_request_is_admitted_when_a_state_gives_a_block_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that arrives while a state has two blocks, and finds none free: in the step that gives one back."""
    rng = random.Random(seed)
    layout = KvLayout((KvGroup(1, 16), KvGroup(rng.randint(1, 3), 16, per_sequence=2)), 1, 4096, 512)
    requests = build_plan(
        "balanced", scenario="poisson", num_prompts=60, seed=seed, request_rate=rng.choice([20.0, 60.0, 200.0]),
        input_len=rng.randint(8, 40), output_len=rng.randint(40, 200),
    )  # fmt: skip
    options = EngineOptions(
        max_num_seqs=64, max_num_batched_tokens=256, num_kv_blocks=layout.most(512) + rng.randint(0, 20),
        max_model_len=4096, async_scheduling=bool(seed % 2),
    )  # fmt: skip
    world = World(requests, "v1", options, layout)
    in_one_go = world.run()
    monkeypatch.setattr(engine_module, "SHORTEST_RUN", NEVER)
    assert equal(in_one_go, world.run())


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("quiet_ns", [NEVER, 30_000_000])
def test_only_attempts_that_must_fail_are_left_out(
    asynchronous: bool, quiet_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with its last token in flight stands in the way of an attempt; no step less is coasted for it.

    ``quiet_ns``: how long it is known that nothing arrives. It is short where other engines run.
    """
    options = EngineOptions(max_num_seqs=16, max_num_batched_tokens=64, async_scheduling=asynchronous)
    # Requests wait for seats. In many steps one answer ends, or several, or one in each of two steps in a row.
    world = World(plan([(4, 2 + row * row % 37) for row in range(200)], concurrency=20), "v1", options)
    quiet_until = EventLoop._quiet_until_ns
    monkeypatch.setattr(EventLoop, "_quiet_until_ns", lambda self: min(quiet_until(self), self.now_ns + quiet_ns))
    in_the_way: dict[int, bool] = {}  # at the attempt at that time
    asked: list[int] = []
    ordinary = engine_module.Coasting.make_steps

    def attempt(self: engine_module.Coasting, now_ns: int, until_ns: int) -> bool:
        state, running = self._scheduler.state, self._scheduler.running
        in_the_way[now_ns] = bool((state.computed == state.last)[running].any())
        return ordinary(self, now_ns, until_ns)

    monkeypatch.setattr(OpenGate, "fill", noted(OpenGate.fill, asked))
    monkeypatch.setattr(engine_module.Coasting, "make_steps", attempt)
    world.run()
    made, one_by_one = set(in_the_way), asked.copy()
    in_the_way.clear()
    asked.clear()
    monkeypatch.setattr(engine_module.Coasting, "due", lambda self: self._scheduler.only_decodes)
    world.run()
    left_out = set(in_the_way) - made
    assert asked == one_by_one
    assert all(in_the_way[time_ns] for time_ns in left_out)
    assert len(left_out) >= sum(in_the_way.values()) / 2
    assert bool(left_out) == asynchronous


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_counting_by_stream_equals_blocks_with_identities(world: World) -> None:
    by_stream = world.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim, "streams_take_turns", lambda _: False)
        assert equal(by_stream, world.run())


@pytest.mark.parametrize("policy", ["v1", "v0", "eb:k=2", "ebplus:update_every=4,min_samples=3"])
def test_most_steps_of_long_answers_are_coasted(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for kind in (OpenGate, PolicyGate):
        monkeypatch.setattr(kind, "fill", noted(kind.fill, asked))
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=1000)
    steps = World(plan([(20, 200)] * 8, concurrency=4), policy, options).run().steps.num_rows
    assert len(asked) < steps / 4


def test_preempted_sessions_need_no_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PRESSED.run()
    assert sum(expected.steps["preemptions"].to_pylist()) > 0
    assert sum(expected.requests["cached_tokens"].to_pylist()) > 0

    def refuse(*_: object) -> None:
        raise AssertionError("blocks with identities were asked for")

    monkeypatch.setattr(CachingKv, "__init__", refuse)
    assert equal(expected, PRESSED.run())
