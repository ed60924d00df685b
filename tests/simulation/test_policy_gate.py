"""Unit tests of PolicyGate: the view that it gives a policy, and how it applies decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest

from ebbench.simulation.engine import PolicyGate
from ebbench.simulation.kv import CountingKv
from ebbench.simulation.scheduler import Scheduler
from ebbench.simulation.state import RequestState
from ebbench.simulation.step import Step
from ebbench.spec.server import EngineOptions
from tests.simulation.worlds import plan
from vllm_eb.controller import Controller
from vllm_eb.queueing import Places
from vllm_eb.strategy import Decision, View

MS = 1_000_000
PREFILL = Decision("prefill", "eb", running_limit=4, k=2, n_limit=4)
DECODE = Decision("decode", "eb", running_limit=4, k=2, n_limit=4)
MIXED = Decision("mixed", "mb", running_limit=4, k=None, n_limit=4)


class Queue:
    """Due in every step; the oldest request has always waited half a second."""

    def due(self, now_s: float, *, admits: bool = False) -> bool:
        return True

    def oldest_wait_s(self, now_s: float) -> float:
        return 0.5


class Scripted:
    """Returns decisions from a list and records its views and calls."""

    mode = "eb"
    queue = Queue()
    prompt_tokens_wanted = 0

    def __init__(self, *decisions: Decision, orders_queue: bool = False) -> None:
        self.decisions, self.orders_queue = list(decisions), orders_queue
        self.views: list[View] = []
        self.blocked: list[View] = []
        self.told: list[tuple[str, tuple[int, ...]]] = []
        self.asked_order: list[tuple[list[float], list[int]]] = []
        self.ages: Callable[[], Sequence[int]] = list

    def follow_ages(self, ages: Callable[[], Sequence[int]]) -> None:
        self.ages = ages

    def decide(self, view: View) -> Decision:
        self.views.append(view)
        return self.decisions.pop(0)

    def prefill_blocked(self, view: View) -> None:
        self.blocked.append(view)

    def on_prompt(self, *values: int) -> None:
        self.told.append(("prompt", values))

    def on_resume(self) -> None:
        self.told.append(("resume", ()))

    draft_lengths = None

    def on_verified(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        assert not any(drafted), "nothing is drafted here"

    def on_finish(self, *values: int) -> None:
        self.told.append(("finish", values))

    def queue_order(self, now_s: float, seen_s: list[float], prompts: list[int]) -> Places:
        self.asked_order.append((seen_s, prompts))
        return Places(sorted(range(len(prompts)), key=prompts.__getitem__))


class Table:
    """A scheduler under a scripted policy, one step of a millisecond after the other."""

    def __init__(
        self, policy: Scripted, lengths: list[tuple[int, int]], *, blocks: int = 100, budget: int = 64, seqs: int = 8
    ) -> None:
        state = RequestState(plan(lengths, concurrency=8))
        limits = EngineOptions(max_num_seqs=seqs, max_num_batched_tokens=budget, async_scheduling=False)
        self.scheduler = Scheduler(state, limits, CountingKv(state, blocks, caching=False))
        self.gate = PolicyGate(self.scheduler, cast(Controller, policy))
        self.now_ns = 0

    def add(self, *rows: int) -> None:
        for row in rows:
            self.scheduler.add(row)
        self.scheduler.take_arrivals(self.now_ns)

    def step(self) -> Step:
        step = Step(self.now_ns)
        self.gate.fill(step)
        if not step.empty:
            self.scheduler.advance(step)
            self.now_ns += MS
            step.end_ns = self.now_ns
            self.scheduler.deliver()
        return step


def rows(step: Step) -> list[int]:
    found: list[int] = step.rows.tolist()
    return found


def test_a_step_sets_requests_of_the_other_phase_aside() -> None:
    policy = Scripted(PREFILL, PREFILL, DECODE, PREFILL, MIXED)
    table = Table(policy, [(40, 9), (60, 9), (8, 9)], budget=48)
    table.add(0, 1)
    assert rows(table.step()) == [0, 1]  # all of request 0 and 8 tokens of request 1
    table.add(2)
    assert rows(table.step()) == [1]  # 48 of its 52 tokens left; request 0 decodes and is set aside
    assert rows(table.step()) == [0]  # request 1 has prompt left, request 2 waits
    assert rows(table.step()) == [1, 2]
    assert rows(table.step()) == [0, 1, 2]
    assert [(view.decoding, view.prefilling, view.waiting) for view in policy.views] == [
        (0, 0, 2), (1, 1, 0 + 1), (1, 1, 1), (1, 1, 1), (3, 0, 0),
    ]  # fmt: skip


def test_a_step_says_under_which_decision_it_was_made() -> None:
    table = Table(Scripted(PREFILL, MIXED), [(8, 3)])
    table.add(0)
    first, second = table.step(), table.step()
    assert (first.mode, first.k, first.n_limit) == ("eb", 2, 4)
    assert (second.mode, second.k, second.n_limit) == ("mb", None, 4)
    assert table.gate.mode == "eb"


def test_a_prefill_step_admits_no_more_than_its_limit() -> None:
    table = Table(Scripted(Decision("prefill", "eb", running_limit=2, k=1, n_limit=2)), [(4, 2)] * 3)
    table.add(0, 1, 2)
    assert rows(table.step()) == [0, 1]
    assert list(table.scheduler.waiting) == [2]


def test_a_step_holds_no_more_tokens_than_its_budget() -> None:
    short = Decision("prefill", "eb", running_limit=4, k=2, n_limit=4, token_budget=10)
    table = Table(Scripted(short, PREFILL), [(40, 2)], budget=64)
    table.add(0)
    assert [table.step().tokens.tolist() for _ in range(2)] == [[10], [30]]


def test_a_prefill_step_without_room_becomes_a_decode_step_at_once() -> None:
    """Four blocks: request 0 holds three, and request 1 needs two."""
    policy = Scripted(PREFILL, PREFILL, DECODE)
    table = Table(policy, [(40, 9), (30, 9)], blocks=4)
    table.add(0)
    table.step()
    table.add(1)
    assert rows(table.step()) == [0]
    assert policy.blocked == policy.views[1:2]


def test_a_prefill_step_without_room_and_without_decodes_stays_empty() -> None:
    policy = Scripted(PREFILL)
    table = Table(policy, [(40, 9)], blocks=2)
    table.add(0)
    assert table.step().empty
    assert len(policy.blocked) == 1


def test_preemptions_are_counted_in_the_next_view_only() -> None:
    policy = Scripted(PREFILL, *[DECODE] * 4)
    table = Table(policy, [(15, 30), (15, 30)], blocks=2)
    table.add(0, 1)
    table.step()  # both hold a block of 16 tokens
    table.step()  # the 16th token of each
    preempting = table.step()  # each needs a second block, and there is none
    assert (rows(preempting), preempting.preempted) == ([0], [1])
    table.step()
    table.step()
    assert [view.preempted for view in policy.views] == [0, 0, 0, 1, 0]


def test_a_policy_is_told_of_prompts_resumptions_and_answers() -> None:
    policy = Scripted(PREFILL, *[DECODE] * 17, PREFILL, DECODE)
    table = Table(policy, [(15, 18), (15, 3)], blocks=2)
    table.add(0, 1)
    for _ in range(3):
        table.step()
    assert policy.ages() == [3]  # request 1 has been preempted
    for _ in range(16):
        table.step()
    assert policy.told == [
        ("prompt", (15, 0)), ("prompt", (15, 0)), ("finish", (18,)), ("resume", ()), ("finish", (3,)),
    ]  # fmt: skip


def test_a_decision_that_ends_coasting_is_used_for_the_next_step() -> None:
    policy = Scripted(PREFILL, DECODE, PREFILL)
    table = Table(policy, [(8, 9), (8, 9)])
    table.add(0)
    table.step()
    assert table.gate.admits_decode(Step(table.now_ns), 0)
    table.add(1)
    assert not table.gate.admits_decode(Step(table.now_ns), 0)
    assert rows(table.step()) == [1]
    assert len(policy.views) == 3


def test_a_mixed_decision_lets_decodes_run_on_unless_a_request_could_join() -> None:
    table = Table(Scripted(PREFILL, MIXED, MIXED), [(8, 9), (8, 9)])
    table.add(0)
    table.step()
    assert table.gate.admits_decode(Step(table.now_ns), 0)
    table.add(1)
    assert not table.gate.admits_decode(Step(table.now_ns), 0)


@pytest.mark.parametrize("orders", [True, False])
def test_the_policy_orders_new_requests_behind_the_preempted(orders: bool) -> None:
    policy = Scripted(*[DECODE] * 2, orders_queue=orders)
    table = Table(policy, [(50, 2), (9, 2), (30, 2), (20, 2)])
    table.add(0)
    table.scheduler.state.scheduled_ns[0] = 0  # it ran before and was preempted
    table.now_ns = 7 * MS
    table.add(1, 2, 3)
    table.step()
    assert table.gate.may_coast()
    assert list(table.scheduler.waiting) == ([0, 1, 3, 2] if orders else [0, 1, 2, 3])
    assert policy.asked_order == ([([0.007] * 3, [9, 30, 20])] if orders else [])
    assert policy.views[0].oldest_wait_s == (0.5 if orders else 0.0)
    assert policy.views[0].free_blocks == 100
