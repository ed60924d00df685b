"""Steps without tokens: none while requests could be served, and none that loses an event of a connector."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.vllm.core_engine import PHASED, POLICIES, Engine

pytestmark = pytest.mark.vllm


@dataclass(frozen=True)
class OneToken:
    """Results of steps while requests for one output token each wait."""

    empty: int
    ended: int
    seconds: float


@cache
def answers_of_one_token(
    policy: str, *, asynchronous: bool, blocks: int = 2000, longest: int = 30, calls: int = 600
) -> OneToken:
    """So many schedule() calls while 64 requests wait; virtual time, so the figures are exact."""
    engine = Engine(policy, blocks=blocks, seqs=32, budget=256, asynchronous=asynchronous)
    dice = random.Random(1)
    sent = 0
    while len(engine.outputs) < calls:
        while len(engine.scheduler.requests) < 96:
            engine.add(f"r{sent}", 30 if longest == 30 else dice.randint(5, longest), 1)
            sent += 1
        engine.turn()
    empty = sum(not output.total_num_scheduled_tokens for output in engine.outputs)
    return OneToken(empty, len(engine.ended), engine.clock.now_s())


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("policy", [one for one in (*POLICIES, "eb") if one != "stock"])
def test_answers_of_one_token_leave_no_step_empty(policy: str, asynchronous: bool) -> None:
    assert answers_of_one_token(policy, asynchronous=asynchronous) == answers_of_one_token(
        "stock", asynchronous=asynchronous
    )


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    "policy",
    ["eb:update_every=20", "ebplus:margin=-1,sticky=-1,update_every=2,min_samples=2", "marginal:ttft=0.2,tpot=0.02"],
)
def test_answers_of_one_token_need_no_kv_kept_free_for_them(policy: str, asynchronous: bool) -> None:
    """None grows, so a bound on the batch for the sake of growing answers only costs throughput."""
    little = {"asynchronous": asynchronous, "blocks": 60, "longest": 200, "calls": 1500}
    ours, stock = answers_of_one_token(policy, **little), answers_of_one_token("stock", **little)
    assert ours.ended / ours.seconds >= 0.99 * stock.ended / stock.seconds
    assert ours.empty <= stock.empty


@pytest.mark.parametrize("policy", PHASED)
def test_a_prompt_is_scheduled_while_another_request_is_computed(policy: str) -> None:
    """Two steps in flight without asynchronous scheduling: the first request has no token to continue with."""
    engine = Engine(policy, asynchronous=False)
    engine.add("first", 30, 5)
    engine.scheduler.schedule()
    engine.add("second", 30, 5)
    assert set(engine.scheduler.schedule().num_scheduled_tokens) == {"second"}


class Connector:
    """Counts like the scheduler's side of the routed-experts connector: events go out once, with the next output."""

    def __init__(self) -> None:
        self.pending: list[str] = []
        self.finished = 0

    def request_finished(self, request: Any) -> None:
        self.pending.append(request.request_id)
        self.finished += 1

    def build_connector_meta(self, output: Any, requests: Any) -> Any:
        events, self.pending = self.pending, []
        return events

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def events_lost(policy: str) -> int:
    """Events of a connector that no output carried, of 80 requests whose prompts often do not fit into what is free."""
    engine = Engine(policy, blocks=120)
    connector = engine.scheduler.aux_output_connector = Connector()
    for number in range(80):
        engine.add(f"r{number}", 10 + 37 * number % 170, 20 + 13 * number % 80)
    engine.run(6000)
    assert len(engine.ended) == 80
    events = [event for output in engine.outputs for event in output.aux_output_connector_metadata]
    return connector.finished - len(events) - len(connector.pending)


@pytest.mark.parametrize("policy", PHASED)
def test_no_event_of_a_connector_is_lost_with_a_step_that_is_given_up(policy: str) -> None:
    assert events_lost(policy) == 0


def test_throwing_away_an_empty_output_would_lose_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version of the plugin did this; if no event were lost here, the test above could not fail."""
    from vllm_eb.scheduler import _PhasedScheduler

    def made_and_thrown_away(self: Any, decision: Any, view: Any, args: Any, kwargs: Any) -> Any:
        output = self._partial_step(list(self._prefilling), decision.running_limit - view.decoding, args, kwargs)
        if output.total_num_scheduled_tokens or not view.decodes:
            return output
        self.controller.prefill_blocked(view)
        return self._schedule_as_decided(self.controller.decide(view), view, args, kwargs)

    monkeypatch.setattr(_PhasedScheduler, "_prefill_step", made_and_thrown_away)
    assert events_lost("v0") > 0


@pytest.mark.parametrize("policy", PHASED)
def test_every_output_that_vllm_makes_is_handed_on(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No scheduler output is created and discarded, so that fields of a future vLLM are not lost either."""
    from vllm.v1.core.sched import scheduler

    made: list[Any] = []
    kind = scheduler.SchedulerOutput

    def noted(**fields: Any) -> Any:
        made.append(kind(**fields))
        return made[-1]

    monkeypatch.setattr(scheduler, "SchedulerOutput", noted)
    engine = Engine(policy, blocks=120)
    for number in range(40):
        engine.add(f"r{number}", 60, 100)
    engine.run(6000)
    assert Counter(map(id, made)) == Counter(map(id, engine.outputs))
