"""Prompts in every n-th step only, unless a waiting request cannot be admitted (equality with vLLM: tests/vllm)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.calibration import Calibration
from vllm_eb.controller import Controller
from vllm_eb.policies.cadence import Cadence
from vllm_eb.policy import parse_policy
from vllm_eb.strategy import View


def served(every: int, arrivals: list[int], slots: int) -> Iterator[tuple[bool, int]]:
    """Per step: whether it held prompts back, and how many requests waited before it; answers never end."""
    cadence, running, waiting = Cadence(every), 1, 0
    for step, coming in enumerate(arrivals):
        waiting += coming
        before = waiting
        held = cadence.hold(View(0.0, step, running, 0, waiting, 1000))
        for _ in range(0 if held else min(waiting, slots - running)):
            cadence.on_prompt(100, 0)
            running, waiting = running + 1, waiting - 1
        yield held, before


@given(every=st.integers(1, 12), arrivals=st.lists(st.integers(0, 2), max_size=60))
def test_with_free_slots_prompts_come_once_per_interval(every: int, arrivals: list[int]) -> None:
    steps = list(served(every, arrivals, slots=1000))
    with_prompts = [number for number, (held, waiting) in enumerate(steps) if waiting and not held]
    assert all(later - earlier >= every for earlier, later in pairwise(with_prompts))
    for number, (held, waiting) in enumerate(steps):
        if waiting and held:
            assert any(earlier > number - every for earlier in with_prompts if earlier < number)


@given(every=st.integers(2, 12), arrivals=st.lists(st.integers(1, 3), min_size=30, max_size=40))
def test_cadence_holds_no_prompt_once_the_slots_are_full(every: int, arrivals: list[int]) -> None:
    running, steps = 1, list(served(every, arrivals, slots=4))
    for number, (held, waiting) in enumerate(steps):
        admitted = 0 if held else min(waiting, 4 - running)
        if not held and waiting > admitted:
            assert not any(later for later, _ in steps[number + 1 :])
            return
        running += admitted


def test_without_answers_to_hold_up_prompts_come_at_once() -> None:
    cadence = Cadence(8)
    for step in range(3):
        assert not cadence.hold(View(0.0, step, 0, 1, 3, 1000))


def test_prompts_found_in_the_cache_do_not_begin_an_interval() -> None:
    cadence = Cadence(8)
    assert not cadence.hold(View(0.0, 0, 5, 0, 1, 1000))
    cadence.on_prompt(100, 99)
    assert not cadence.hold(View(0.0, 1, 6, 0, 1, 1000))
    cadence.on_prompt(100, 98)
    assert cadence.hold(View(0.0, 2, 7, 0, 1, 1000))


def test_a_step_that_preempts_does_not_end_the_backlog() -> None:
    cadence = Cadence(2)
    cadence.hold(View(0.0, 0, 5, 0, 3, 1000))
    assert not cadence.hold(View(0.0, 1, 5, 0, 3, 0))  # no request was admitted: backlog
    assert not cadence.hold(View(0.0, 2, 4, 0, 0, 0, preempted=1))  # no request waits any more, but this step preempted


def test_the_controller_lets_vllm_mix_or_only_decode() -> None:
    made = Controller(
        parse_policy("cadence:every=3"),
        Calibration(1e-3, 1e-5, 1e-2, 1e-4),
        max_num_seqs=9,
        block_size=16,
        num_blocks=99,
        max_num_batched_tokens=8192,
        keep_records=True,
    )
    phases = []
    for step in range(7):
        decision = made.decide(View(0.0, step, 4, 0, 1, 50))
        if decision.phase == "mixed":
            made.on_prompt(100)
        phases.append(decision.phase)
        assert (decision.mode, decision.running_limit, decision.k) == ("mb", 9, None)
    assert phases == ["mixed", "decode", "decode", "mixed", "decode", "decode", "mixed"]
    assert [record.phase for record in made.drain_records()] == ["decode", "mixed", "decode", "mixed"]
