"""Requests that are more than a prompt and a length: adapters, grammars, streaming sessions, stop strings.

Driven through the real engine core on the emulated device; vLLM's own scheduler (``stock``) is the measure.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from tests.vllm.core_engine import PHASED, POLICIES, Engine
from vllm_eb import compat

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_step_holds_more_adapters_than_the_device_has_slots_for(policy: str, asynchronous: bool) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if not compat.can_block_admission(Scheduler):
        pytest.skip("LoRA is refused on this vLLM")
    engine = Engine(policy, asynchronous=asynchronous, budget=64, seqs=8)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=2)
    adapters = [SimpleNamespace(lora_int_id=number, lora_name=f"a{number}", lora_path="/x") for number in (1, 2, 3)]
    named: dict[str, int] = {}
    for number in range(18):
        adapter = adapters[number % 3]
        named[f"r{number}"] = adapter.lora_int_id
        engine.add(f"r{number}", 20, 5 + 3 * number, lora_request=adapter)
    engine.run(4000)
    assert engine.ended == set(named)
    assert max(len({named[name] for name in output.num_scheduled_tokens}) for output in engine.outputs) == 2


def grammar_pending(engine: Engine) -> SimpleNamespace:
    """Add a request that waits for its grammar; setting ``grammar`` of what is returned makes it ready."""
    from vllm.v1.request import RequestStatus

    wanted = SimpleNamespace(grammar=None, reasoning_ended=None, reasoning_end_token_index=None)
    request = engine.make("g", 20, 5, structured_output_request=wanted)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.scheduler.add_request(request)
    return wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_a_grammar_being_compiled_delays_no_other_request(policy: str) -> None:
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    engine = Engine(policy)
    wanted = grammar_pending(engine)
    for number in range(4):
        engine.add(f"r{number}", 20, 100)
    for _ in range(60):
        engine.turn()
    assert min(engine.tokens[f"r{number}"] for number in range(4)) > 40
    assert engine.idle_decoders == 0
    wanted.grammar = create_autospec(StructuredOutputGrammar, instance=True)
    engine.run(1000)
    assert engine.ended == {"g", "r0", "r1", "r2", "r3"}


def test_cadence_keeps_its_interval_beside_a_request_that_cannot_start() -> None:
    engine = Engine("cadence:every=8", asynchronous=False)
    grammar_pending(engine)
    for turn in range(64):
        if turn % 3 == 0:
            engine.add(f"r{turn}", 20, 30)
        engine.turn()
    prefills = [
        place for place, output in enumerate(engine.outputs) if any(n > 1 for n in output.num_scheduled_tokens.values())
    ]
    assert prefills == list(range(0, 64, 8))


@pytest.mark.parametrize("sessions", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_streaming_sessions_between_two_turns_leave_room_for_others(policy: str, sessions: int) -> None:
    engine = Engine(policy, seqs=4)
    for number in range(sessions):
        engine.add(f"s{number}", 20, 5, resumable=True)
    for _ in range(60):
        engine.turn()
    assert engine.scheduler.num_waiting_for_streaming_input == sessions
    for number in range(3):
        engine.add(f"r{number}", 20, 5)
    for _ in range(80):
        engine.turn()
    assert engine.ended >= {"r0", "r1", "r2"}


def test_the_end_of_a_streaming_session_leaves_nothing_behind() -> None:
    engine = Engine("marginal:ttft=1")
    for number in range(5):
        engine.add(f"s{number}", 20, 5, resumable=True)
        for _ in range(30):
            engine.turn()
        end = engine.make(f"s{number}", 1, 1)
        end.resumable = False
        engine.core.add_request(end)
        engine.run(10)
    assert not engine.scheduler.requests
    assert engine.scheduler._waiting_order.arrived_s == {}


@pytest.mark.parametrize("policy", PHASED)
def test_with_the_kv_cache_full_decodes_go_on_in_every_step(policy: str) -> None:
    """An empty step beside running requests costs the engine its overlap and a millisecond."""
    engine = Engine(policy, blocks=120)
    for number in range(40):
        engine.add(f"r{number}", 60, 100)
    engine.run(6000)
    assert len(engine.ended) == 40
    assert engine.idle_decoders == 0
    assert sum(not output.total_num_scheduled_tokens for output in engine.outputs) < 0.05 * len(engine.outputs)


def clients(policy: str, requests: int, *, stopped: bool) -> tuple[Engine, float]:
    """48 clients whose answers have 20 tokens, by their length or by a stop string, which is the front end's abort.

    Returns the engine and its requests per second in the second half.
    """
    engine = Engine(policy, blocks=1600, seqs=64, budget=512)
    waiting: set[str] = set()
    sent = gone = 0
    half_s = 0.0
    while gone < requests:
        while len(waiting) < 48:
            waiting.add(f"r{sent}")
            engine.add(f"r{sent}", 30, 200 if stopped else 20)
            sent += 1
        engine.turn()
        stop = {name for name in waiting if stopped and engine.tokens[name] >= 20}
        engine.core.abort_requests(sorted(stop))
        before, waiting = gone, waiting - stop - engine.ended
        gone = sent - len(waiting)
        if before < requests // 2 <= gone:
            half_s = engine.clock.now_s()
    return engine, requests / 2 / (engine.clock.now_s() - half_s)


@pytest.mark.parametrize("policy", ["eb", "marginal", "marginal:tpot=0.05"])
def test_answers_ended_by_a_stop_string_are_learned_from(policy: str) -> None:
    _, by_length = clients(policy, 1500, stopped=False)
    engine, by_stop = clients(policy, 1500, stopped=True)
    assert by_stop > 0.9 * by_length  # a stopped one is decoded a step or two further
    lengths = [record.values["mu_o"] for record in engine.scheduler.controller.drain_records()]
    assert lengths[-1] == pytest.approx(20, rel=0.2)
