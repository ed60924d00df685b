"""The simulator's shortcuts do not change results: coasted decode steps, and cached blocks counted per session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from ebbench.engines import sim
from ebbench.engines.base import EngineOptions, EngineResult
from ebbench.simulation import coasting
from ebbench.simulation.gate import OpenGate, PolicyGate
from ebbench.simulation.kv import CachingKv
from ebbench.simulation.step import Step
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
        patch.setattr(coasting, "SHORTEST_RUN", 1)
        in_one_go = world.run()
        patch.setattr(coasting, "SHORTEST_RUN", NEVER)
        assert equal(in_one_go, world.run())


def test_attempts_to_coast_are_left_out_after_several_failed_in_a_row() -> None:
    """Fewer failures, at the ends of requests, leave out none; a success starts the count again."""

    def left_out(attempts: coasting.Attempts, *made: bool) -> list[int]:
        pauses = []
        for one in made:
            attempts.note(made=one)
            pauses.append(0)
            while not attempts.due():
                pauses[-1] += 1
        return pauses

    few, attempts = coasting.PATIENCE - 1, coasting.Attempts()
    assert left_out(attempts, *[False] * few, True, *[False] * few) == [0] * (2 * few + 1)
    assert left_out(attempts, False, False, True, False) == [1, 2, 0, 0]
    assert max(left_out(coasting.Attempts(), *[False] * 20)) == coasting.LONGEST_PAUSE


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
