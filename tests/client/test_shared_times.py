"""Latencies of streams in which not every token has a time of its own, from real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure, parse_slo
from ebbench.client import DriveResult
from ebbench.client.verdict import token_time_warning
from tests.client.client_runs import column, plan_of, run
from tests.client.raw_server import END, EVENTS, Asked, chunk, counted, delta, event, raw_server, said

GAP_S = 0.05


def measured(done: DriveResult, *limits: str) -> Any:
    return measure(RequestColumns.of(done.requests), slo=parse_slo(limits))


def asked_of(answer: Any, tokens: int, **options: Any) -> DriveResult:
    with raw_server(answer) as server:
        done = run(server.url, plan_of(3, concurrency=1, output_tokens=tokens), **options)
    assert column(done, "status") == ["ok"] * 3
    return done


def about(ms: float) -> Any:
    """At least ``ms`` and, on a busy machine, up to half as much again."""
    return pytest.approx(1.25 * ms, rel=0.22)


@pytest.mark.parametrize(("messages", "per_message"), [(5, 4), (2, 10)])
def test_tpot_of_several_tokens_per_message_leaves_out_the_first_message(messages: int, per_message: int) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS)
        for number in range(messages):
            await asyncio.sleep(GAP_S)
            await asked.event(said("a " * per_message, "length" if number == messages - 1 else None))
        await asked.send(chunk(event(counted(messages * per_message))) + END)

    done = asked_of(answer, messages * per_message)
    assert measured(done).tpot.median == about(1000 * GAP_S / per_message)
    assert {len(gaps) for gaps in column(done, "itl_ns")} == {messages * per_message - 1}
    (said_once,) = [text for text in map(str, done.warnings) if "time of its own" in text]
    assert "percentiles of ITL" in said_once


@pytest.mark.parametrize("reported", [True, False])
def test_tokens_of_the_first_message_are_counted_or_follow_from_its_text(reported: bool) -> None:
    """One token, then four per message, as with speculative decoding."""

    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS)
        for tokens in (1, 5, 9):
            text = "a " if tokens == 1 or reported else "a a a a "
            usage = {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}} if reported else {}
            await asked.event(said(text, "length" if tokens == 9 else None, **usage))
            await asyncio.sleep(GAP_S)
        await asked.send(chunk(event(counted(9))) + END)

    assert measured(asked_of(answer, 9)).tpot.median == about(1000 * GAP_S / 4)


def test_messages_that_a_proxy_delivers_in_bursts_share_their_time() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS)
        for number in range(3):
            last = number == 2
            burst = b"".join(event(said("a", "length" if last and i == 7 else None)) for i in range(8))
            await asked.send(chunk(burst))
            await asyncio.sleep(GAP_S)
        await asked.send(chunk(event(counted(24))) + END)

    done = asked_of(answer, 24)
    assert measured(done).tpot.median == about(1000 * GAP_S / 8)
    assert column(done, "bundled_tokens") == [True] * 3


def test_an_answer_at_one_time_has_no_tpot_and_misses_its_limit() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(event(said("a " * 40, "length")) + event(counted(40))) + END)

    done = asked_of(answer, 40)
    metrics = measured(done, "tpot:1000")
    assert (metrics.tpot.count, metrics.itl.count, metrics.slo_attainment) == (0, 0, 0.0)
    assert "3 of 3 answers came all at once" in str(token_time_warning(done.requests))


def test_answers_of_one_token_meet_a_limit_on_tpot() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(event(said("a", "stop")) + event(counted(1))) + END)

    metrics = measured(asked_of(answer, 8, ignore_eos=False), "ttft:60000", "tpot:0.001")
    assert (metrics.tpot.count, metrics.slo_attainment) == (0, 1.0)


def test_thinking_that_was_not_sent_is_no_part_of_tpot_and_itl() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS)
        for number in range(5):
            await asked.event(delta("stop" if number == 4 else None, content="a"))
            await asyncio.sleep(GAP_S)
        usage = counted(105, completion_tokens_details={"reasoning_tokens": 100})
        await asked.send(chunk(event(usage)) + END)

    done = asked_of(answer, 200, endpoint="chat", ignore_eos=False)
    metrics = measured(done, f"tpot:{1000 * GAP_S / 2}")
    assert metrics.tpot.median == about(1000 * GAP_S)
    assert metrics.itl.median == about(1000 * GAP_S)
    assert metrics.slo_attainment == 0.0
    assert column(done, "thinking_tokens") == [100] * 3
    assert column(done, "first_answer_ns") == column(done, "first_token_ns")
    assert "TTFT includes it" in str(token_time_warning(done.requests))


@pytest.mark.parametrize("per_message", [1, 4])
@pytest.mark.parametrize(
    ("endpoint", "ahead"),
    [
        ("chat", [delta(role="assistant", content="")]),
        ("chat", [delta(content="")]),
        ("chat", [delta("", role="assistant", content="")]),
        ("completions", [said("")] * 3),
        ("completions", [said(None), said("")]),
    ],
)
def test_messages_without_text_ahead_of_the_first_token_are_no_tokens(
    endpoint: str, ahead: list[dict[str, Any]], per_message: int
) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS)
        for message in ahead:
            await asked.event(message)
        await asyncio.sleep(0.2)
        for number in range(4):
            text, finish = "a " * per_message, "length" if number == 3 else None
            await asked.event(said(text, finish) if endpoint == "completions" else delta(finish, content=text))
            await asyncio.sleep(GAP_S)
        await asked.send(chunk(event(counted(4 * per_message))) + END)

    metrics = measured(asked_of(answer, 4 * per_message, endpoint=endpoint))
    assert metrics.ttft.median >= 200
    assert metrics.tpot.median == about(1000 * GAP_S / per_message)


def test_tokens_with_times_of_their_own_are_no_reason_to_warn() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS)
        for number in range(4):
            await asked.event(said("a", "length" if number == 3 else None))
            await asyncio.sleep(GAP_S)
        await asked.send(chunk(event(counted(4))) + END)

    done = asked_of(answer, 4)
    assert token_time_warning(done.requests) is None
    assert column(done, "bundled_tokens") == [False] * 3
