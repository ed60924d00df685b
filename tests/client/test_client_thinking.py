"""Answers in two parts over HTTP: thinking, then the answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ebbench.analysis.columns import MISSING, RequestColumns
from ebbench.analysis.metrics import measure, meets, parse_slo
from ebbench.client.dialects import DIALECTS
from ebbench.client.response import StreamedResponse
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from tests.client.client_runs import plan_of, run

QUICK = FakeConfig(ttft_ms=5, itl_ms=4)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_the_first_answer_token_comes_after_the_thinking(field: str) -> None:
    config = replace(QUICK, thinking_tokens=12, thinking_field=field)
    with FakeServerProcess(config) as server:
        result = run(server.url, plan_of(6, output_tokens=20), endpoint="chat")
        entries = {entry.request_id.split("-")[-1]: entry for entry in server.ledger()}
    for row in result.requests.to_pylist():
        assert (row["status"], row["output_tokens"], row["thinking_tokens"]) == ("ok", 20, 12)
        truth = entries[row["request_id"]].token_ns
        assert row["first_answer_ns"] == row["first_token_ns"] + sum(row["itl_ns"][:12])
        assert row["first_answer_ns"] - row["sent_ns"] >= truth[12] - truth[0]
    metrics = measure(RequestColumns.of(result.requests))
    assert metrics.thinking_tokens == 6 * 12
    assert metrics.ttfat.median is not None
    assert metrics.ttft.median is not None
    assert metrics.ttfat.median > metrics.ttft.median


def test_without_thinking_there_is_no_time_to_the_answer() -> None:
    with FakeServerProcess(QUICK) as server:
        result = run(server.url, plan_of(3), endpoint="chat")
    assert Counter(result.requests.column("first_answer_ns").to_pylist()) == {None: 3}
    assert measure(RequestColumns.of(result.requests)).ttfat.count == 0


def test_an_output_without_an_answer_misses_a_limit_on_ttfat() -> None:
    with FakeServerProcess(replace(QUICK, thinking_tokens=50)) as server:
        result = run(server.url, plan_of(3, output_tokens=10), endpoint="chat")
    columns = RequestColumns.of(result.requests)
    assert result.requests.column("thinking_tokens").to_pylist() == [10] * 3
    assert (columns.answer_began == MISSING).all()
    assert not meets(columns, columns.ok, parse_slo(["ttfat:100000"])).any()
    assert meets(columns, columns.ok, parse_slo(["e2el:100000"])).all()


def test_later_turns_repeat_answers_and_not_thinking() -> None:
    response = StreamedResponse(DIALECTS["chat"], keep_text=True)
    for delta in ('{"reasoning":"hm"}', '{"content":"yes"}'):
        response.feed(b'data: {"choices":[{"delta":%b}]}\n\n' % delta.encode(), 7)
    assert response.text == "yes"
    assert (response.thinking_tokens, response.first_answer_ns) == (1, 7)


def test_the_servers_count_of_thinking_tokens_decides() -> None:
    response = StreamedResponse(DIALECTS["chat"], keep_text=False)
    response.feed(b'data: {"choices":[{"delta":{"reasoning":"a b c"}}]}\n\n', 7)
    usage = b'{"choices":[],"usage":{"completion_tokens":9,"completion_tokens_details":{"reasoning_tokens":3}}}'
    response.feed(b"data: %b\n\n" % usage, 8)
    assert response.thinking_tokens == 3


def test_a_tool_call_after_thinking_begins_the_answer() -> None:
    response = StreamedResponse(DIALECTS["chat"], keep_text=False)
    response.feed(b'data: {"choices":[{"delta":{"reasoning":"a"}}]}\n\n', 7)
    response.feed(b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n', 9)
    assert response.first_answer_ns == 9
