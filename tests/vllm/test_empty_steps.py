"""Steps without tokens: none while requests could be served, and none that takes something with it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.vllm.core_engine import PHASED, POLICIES, Engine

pytestmark = pytest.mark.vllm


def answers_of_one_token(policy: str, *, asynchronous: bool, prompt: int = 30) -> tuple[int, int, float]:
    """600 schedule() calls while 64 requests wait: how many were empty, requests that ended, and in which time."""
    engine = Engine(policy, blocks=2000, seqs=32, budget=256, asynchronous=asynchronous)
    sent = 0
    while len(engine.outputs) < 600:
        while len(engine.scheduler.requests) < 96:
            engine.add(f"r{sent}", prompt, 1)
            sent += 1
        engine.turn()
    empty = sum(not output.total_num_scheduled_tokens for output in engine.outputs)
    return empty, len(engine.ended), engine.clock.now_s()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("policy", [one for one in POLICIES if one != "stock"])
def test_answers_of_one_token_leave_no_step_empty_and_end_as_fast_as_under_stock(
    policy: str, asynchronous: bool
) -> None:
    empty, ended, seconds = answers_of_one_token(policy, asynchronous=asynchronous)
    stock_empty, stock_ended, stock_seconds = answers_of_one_token("stock", asynchronous=asynchronous)
    assert stock_empty == 0
    assert empty == 0
    assert ended >= 0.98 * stock_ended
    assert ended / seconds >= 0.98 * stock_ended / stock_seconds


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


@pytest.mark.parametrize("policy", PHASED)
def test_no_event_of_a_connector_is_lost_with_a_step_that_is_given_up(policy: str) -> None:
    engine = Engine(policy, blocks=120)
    connector = engine.scheduler.aux_output_connector = Connector()
    for number in range(80):
        engine.add(f"r{number}", 60, 20 + 13 * number % 80)
    engine.run(6000)
    assert len(engine.ended) == 80
    events = [event for output in engine.outputs for event in output.aux_output_connector_metadata]
    assert connector.finished > 80, "nothing was preempted: the KV cache was meant to be too small"
    assert len(events) + len(connector.pending) == connector.finished


@pytest.mark.parametrize("policy", PHASED)
def test_every_output_that_vllm_makes_is_handed_on(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an output may hold in a future vLLM: none is made and thrown away."""
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
