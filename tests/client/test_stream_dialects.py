"""Streams as servers really write them: the client takes what the OpenAI clients take, and names what went wrong."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebbench.client.dialects import DIALECTS
from ebbench.client.messages import RequestRecord
from ebbench.client.progress import requests_table
from ebbench.client.response import StreamedResponse, classify
from tests.client.client_runs import column, plan_of, run
from tests.client.raw_server import END, EVENTS, Asked, chunk, counted, delta, event, raw_server, said

A, B, C, USAGE, DONE = (
    event(said("a")),
    event(said("b")),
    event(said("c", "length")),
    event(counted(3)),
    b"data: [DONE]\n\n",
)
REASON = "no KV block is left (17)"
BAD_LETTER = b'{"choices":[{"text":"\xe4\xb8","finish_reason":null}]}'

ACCEPTED = {
    "choices is null beside usage": A + B + C + event({**counted(3), "choices": None}) + DONE,
    "no choices beside usage": A + B + C + event({"usage": counted(3)["usage"]}) + DONE,
    "whole numbers as floats": A + B + C + event(counted(3.0, 5.0)) + DONE,
    "details as an empty list": A + B + C + event(counted(3, prompt_tokens_details=[])),
    "the last line has no end": A + B + C + USAGE[:-2],
    "the last event has no blank line": A + B + C + USAGE[:-1],
    "no blank line between events": b"".join(each[:-1] for each in (A, B, C, USAGE, DONE)),
    "no line end between events": b"".join(each[:-2] for each in (A, B, C, USAGE)) + DONE,
    "two objects in a line": A + B[:-2] + b" " + C[6:] + USAGE,
    "an answer that mentions a field": event(said("a}data: {")) + B + C + USAGE,
    "no data": A + b"data:\n\ndata: \n\n" + B + C + USAGE,
    "null for data": A + b"data: null\n\n" + B + C + USAGE,
    "a comment in the data": A + b"data: : keep-alive\n\n" + B + C + USAGE,
    "a ping of its own kind": A + b"event: ping\ndata: {\"t\": 1}\n\n" + B + C + USAGE,
    "an empty object": A + b"data: {}\n\n" + B + C + USAGE,
    "a choice that is null": A + b'data: {"choices":[null]}\n\n' + B + C + USAGE,
    "not UTF-8": A + event(BAD_LETTER) + C + USAGE,
    "a count of 5,000 digits": A + B + C + event(
        b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"queue_tokens":%b}}' % (b"9" * 5000)
    ),
    "half a surrogate pair": A + event(rb'{"choices":[{"text":"\ud83d"}]}') + C + USAGE,
    "NaN": A + event(b'{"choices":[{"text":"b","logprobs":[NaN]}]}') + C + USAGE,
    "pretty-printed": A + B + b'data: {"choices":\ndata: [{"text": "c",\ndata: "finish_reason": "stop"}]}\n\n' + USAGE,
    "an empty finish reason until the last": event(said("a", "")) + event(said("b", "")) + C + USAGE,
    "empty error fields": event(said("a", error="")) + event(said("b", error={})) + event(said("c", "x")) + USAGE,
    "filter results first": event({"choices": [], "prompt_filter_results": [{"index": 0}]}) + A + B + C + USAGE,
    "usage in the last choice (Moonshot)": A + B + event({"choices": [
        {"text": "c", "finish_reason": "stop", "usage": counted(3)["usage"]}
    ]}) + DONE,
    "usage in each message": b"".join(
        event(said(t, f, usage={"completion_tokens": n})) for t, f, n in (("a", "", 1), ("b", "", 2), ("c", "stop", 3))
    ),
}  # fmt: skip


@pytest.mark.parametrize("transport", ["direct", "httpx"])
def test_messages_that_the_openai_clients_take_are_answers(transport: str) -> None:
    forms = list(ACCEPTED.values())

    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(forms[asked.number]) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(len(forms), concurrency=1, output_tokens=3), transport=transport, keep_text=True)
    rows = done.requests.to_pylist()
    assert {
        name: (row["error_class"], row["error_body"]) for name, row in zip(ACCEPTED, rows, strict=True)
    } == dict.fromkeys(ACCEPTED, (None, None))
    assert {row["output_tokens"] for row in rows} == {3}
    assert {row["text"] for row in rows} == {"abc", "a\ufffdc", "a?c", "a}data: {bc"}


FAILURES: dict[str, bytes] = {
    "an object": event({"error": {"message": REASON, "code": 500}}),
    "a text": event({"error": REASON, "error_type": "generation"}),
    "an object of kind error": event({"object": "error", "message": REASON}),
    "a message of type error": event({"type": "error", "error": {"type": "overloaded", "message": REASON}}),
    "a field named error": b'error: {"code":500,"message":"%b"}\n\n' % REASON.encode(),
    "an event named error": b'event: error\ndata: {"message":"%b"}\n\n' % REASON.encode(),
    "nested too deep": event(b'{"error":{"message":"%b","trace":%b}}' % (REASON.encode(), b"[" * 9000 + b"]" * 9000)),
    "an event named error, as text": b"event: error\ndata: %b\n\n" % REASON.encode(),
    "a detail": event({"detail": REASON}),
    "a list of details": event({"detail": [{"loc": ["body"], "msg": REASON}]}),
    "a list of errors": event({"errors": [{"message": REASON}]}),
    "a number beside the message": event({"error": 1, "message": REASON}),
    "a message of failure": event({"type": "response.failed", "response": {"error": {"message": REASON}}}),
    "no success": event({"success": False, "message": REASON}),
    "a status code as text": event({"status_code": "500", "message": REASON}),
    "a fault": event({"fault": {"faultstring": REASON}}),
    "a code beside the text": event({"text": REASON, "error_code": 50002}),
    "a status code": event({"code": 503, "message": REASON}),
    "JSON without a field": b'{"error": {"message": "%b"}}\n' % REASON.encode(),
    "JSON without a line end": b'{"error": {"message": "%b"}}' % REASON.encode(),
    "JSON twice without a line end": b'{"error": "%b"} {"error": "closed"}' % REASON.encode(),
    "JSON over several lines": b'{\n "error": {\n  "message": "%b"\n }\n}\n' % REASON.encode(),
    "in the choice": event({"choices": [{"text": "", "finish_reason": "error", "error": {"message": REASON}}]}),
    "beside a choice": event(said("", "stop", error={"message": REASON})) + event(counted(2)),
    "beside no choices": event({"choices": [], "error": {"message": REASON}}),
    "beside usage": event({**counted(2), "status": "error", "msg": REASON}),
    "before a good end": event({"error": {"message": REASON}}) + event(said("", "stop")) + event(counted(2)),
    "text that is no JSON": b"data: %b\n\n" % REASON.encode(),
    "a field without a line end": event({"error": {"message": REASON}})[:-2],
    "text outside the stream": b"502 Bad Gateway\n%b\n" % REASON.encode(),
}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_reason_that_a_server_gives_inside_a_stream_is_kept(endpoint: str) -> None:
    forms = list(FAILURES.values())

    async def answer(asked: Asked) -> None:
        start = A + B if endpoint == "completions" else event(delta(content="a")) + event(delta(content="b"))
        await asked.send(EVENTS + chunk(start) + chunk(forms[asked.number]) + chunk(DONE) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(len(forms), concurrency=1), endpoint=endpoint)
    rows = dict(zip(FAILURES, done.requests.to_pylist(), strict=True))
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(FAILURES, "failed")
    assert all(REASON in row["error_body"] for row in rows.values())
    more = {name for name, row in rows.items() if row["error_body"] != REASON}
    assert more == {"a list of details", "nested too deep", "text outside the stream"}, (
        "these have more than the reason"
    )


@pytest.mark.parametrize("finish", ["", None, "null", "None", " ", "FINISH_REASON_UNSPECIFIED"])
def test_a_stream_cut_without_a_finish_reason_is_truncated(finish: str | None) -> None:
    async def answer(asked: Asked) -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        await asked.send(EVENTS + chunk(event(said("a", finish)) + event(said("b", finish, usage=usage))) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(2), ignore_eos=False)
    assert column(done, "error_class") == ["truncated"] * 2


@pytest.mark.parametrize("transport", ["direct", "httpx"])
def test_an_answer_ends_at_its_end_mark_although_its_body_goes_on(transport: str) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(A + B) + chunk(C + USAGE + DONE))
        await asyncio.sleep(30)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(3, concurrency=1, output_tokens=3), transport=transport, idle_timeout_s=25.0)
        assert len(server.asked) == 3
    assert column(done, "status") == ["ok"] * 3
    assert max(column(done, "end_ns")) < 20e9


def test_an_end_mark_without_the_numbers_of_tokens_ends_nothing() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(A + B + C + DONE))
        await asyncio.sleep(0.5)
        await asked.send(chunk(USAGE) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(1, output_tokens=3))
    assert column(done, "status") == ["ok"]


@pytest.mark.parametrize("transport", ["direct", "httpx"])
def test_a_connection_is_kept_although_the_body_ends_a_little_later(transport: str) -> None:
    connections = set()

    async def answer(asked: Asked) -> None:
        connections.add(asked.writer.get_extra_info("peername"))
        await asked.send(EVENTS + chunk(A + B + C + USAGE + DONE))
        await asyncio.sleep(0.005)
        await asked.send(END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(10, concurrency=1, output_tokens=3), transport=transport)
    assert column(done, "status") == ["ok"] * 10
    assert len(connections) < 5  # one, and others only where this machine stalled for 0.1 s


@pytest.mark.parametrize("transport", ["direct", "httpx"])
def test_the_client_asks_for_an_uncompressed_stream_and_names_another(transport: str) -> None:
    async def answer(asked: Asked) -> None:
        squeezed = zlib.compress(REASON.encode() if asked.number else A + B + C + USAGE, wbits=31)
        head = EVENTS.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
        await asked.send((head.replace(b"200 OK", b"503 Busy") if asked.number else head) + chunk(squeezed) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(2, concurrency=1, output_tokens=3), transport=transport)
        assert server.asked[0].headers["accept-encoding"] == "identity"
    assert column(done, "error_class") == ["compressed_stream", "http_503"]
    assert "content-encoding gzip" in column(done, "error_body")[0]
    assert column(done, "error_body")[1] == REASON


CHAT: dict[str, list[dict[str, Any]]] = {
    "parts of a text (Mistral)": [
        delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]),
        delta("stop", content=[{"type": "text", "text": "yes"}]),
    ],
    "a refusal": [delta(refusal="I can"), delta("stop", refusal="not")],
    "one tool call as an object (TGI)": [delta(tool_calls={"function": {"name": "f"}}), delta("stop", content="x")],
    "the older function call": [delta(function_call={"name": "f"}), delta("function_call", content="")],
    "a numbered finish reason": [delta(content="a"), {"choices": [{"delta": {"content": "b"}, "finish_reason": 1}]}],
    "the role again and again": [delta(role="assistant", content="a"), delta("stop", role="assistant", content="b")],
}


@pytest.mark.parametrize("transport", ["direct", "httpx"])
@pytest.mark.parametrize(
    "kind",
    [
        b"content-encoding: Identity\r\n",
        b"content-type: text/plain\r\ncontent-encoding:\r\n",
        b"content-type: application/octet-stream\r\ncontent-encoding: UTF-8\r\n",
    ],
)
def test_a_stream_is_one_whatever_its_type_says_or_not(kind: bytes, transport: str) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + kind + b"transfer-encoding: chunked\r\n\r\n"

    async def answer(asked: Asked) -> None:
        text = b"upstream is starting" if asked.number % 2 else A + B + C + USAGE
        await asked.send(head + chunk(text) + END)

    with raw_server(answer) as server:
        rows = run(server.url, plan_of(2, concurrency=1, output_tokens=3), transport=transport).requests.to_pylist()
    assert [row["error_class"] for row in rows] == [None, "not_a_stream"]
    assert "upstream is starting" in rows[1]["error_body"]


def test_a_page_without_end_is_given_up() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS)
        for _ in range(300):
            await asked.send(chunk(b"nothing of a stream\n" * 100))
        await asyncio.sleep(20)

    with raw_server(answer) as server:
        (row,) = run(server.url, plan_of(1)).requests.to_pylist()
    assert (row["status"], row["error_class"]) == ("failed", "not_a_stream")


def test_chat_messages_of_other_servers_are_answers() -> None:
    forms = list(CHAT.values())

    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(event(delta(role="assistant", content=""))))
        for message in [*forms[asked.number], counted(2)]:
            await asked.event(message)
        await asked.send(END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(len(forms), concurrency=1, output_tokens=2), endpoint="chat")
    rows = dict(zip(CHAT, done.requests.to_pylist(), strict=True))
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(CHAT, "ok")
    assert rows["parts of a text (Mistral)"]["thinking_tokens"] == 1


def test_a_message_without_the_blank_line_after_it_has_its_own_time() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS)
        for part in (A, B, C):
            await asked.send(chunk(part[:-1]))
            await asyncio.sleep(0.05)
        await asked.send(chunk(USAGE) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(1, output_tokens=3))
    (gaps,) = column(done, "itl_ns")
    assert min(gaps) > 20e6


def test_an_event_that_never_ends_is_given_up() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(A) + chunk(b"data: {"))
        for _ in range(200):
            await asked.send(chunk(b"x" * (1 << 20)))
        await asyncio.sleep(30)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(1))
    assert column(done, "error_body") == ["an event of more than 64 MiB, or a line without an end"]


TEXTS = st.text(st.characters(exclude_categories=()), max_size=5)  # also half surrogate pairs
ODD_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["choices", "usage", "error", "model", "delta", "text", "finish_reason", "content", "role", "reasoning",
     "tool_calls", "completion_tokens", "prompt_tokens", "prompt_tokens_details", "completion_tokens_details",
     "cached_tokens", "reasoning_tokens", "status", "code", "detail", "message", "object", "type"]
)  # fmt: skip
MESSAGES = st.recursive(
    st.dictionaries(NAMES, ODD_VALUES, max_size=4),
    lambda inner: st.dictionaries(NAMES, inner | st.lists(inner, max_size=2) | ODD_VALUES, max_size=4),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@example([{"choices": [{"finish_reason": "\ud83d"}], "error": "\ud83d"}], False, b"")
@given(st.lists(MESSAGES, max_size=4), st.booleans(), st.binary(max_size=20))
def test_whatever_a_server_sends_becomes_a_row(messages: list[Any], chat: bool, rest: bytes) -> None:
    answer = StreamedResponse(DIALECTS["chat" if chat else "completions"], keep_text=True)
    answer.sent(1)
    good = delta("stop", content="a") if chat else said("a", "stop")
    for number, message in enumerate([good, *messages], start=2):
        answer.feed(event(message), number * 10**6)
    answer.feed(rest, 10**9)
    answer.ended()
    found, counts = classify(answer, 10**6, exact=False), answer.counts()
    record = RequestRecord(
        0, 0, found.status, token_ns=found.tokens.times_ns.tobytes(), bundled=found.tokens.bundled,
        first_tokens=found.tokens.first, output_tokens=found.output_tokens, prompt_tokens=counts.prompt,
        cached_tokens=counts.cached, finish_reason=answer.finish_reason, error_body=found.error_body, text=answer.text,
        thinking_tokens=found.hidden_tokens or answer.thinking_tokens, odd_numbers=dict(counts.odd),
        other_model=answer.model,
    )  # fmt: skip
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RequestRecord)
    (row,) = requests_table([record], plan_of(1).table, 0, texts=True, thinking=True).to_pylist()
    assert row["status"] == found.status
    assert row["status"] != "ok" or len(row["itl_ns"]) + 1 + found.hidden_tokens == row["output_tokens"]
