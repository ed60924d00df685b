"""Servers whose API is not OpenAI's completions: what is sent to them, and what their documented streams say.

The streams are written by hand after the servers' public documentation and sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.environment import run_environment
from ebbench.analysis.metrics import Slo, measure
from ebbench.analysis.validity import invalid_reasons
from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.dialects import DIALECTS, token_counts
from ebbench.client.response import classify, response_to
from ebbench.config.server_url import PATHS, Endpoint
from ebbench.engines.setup import make_engine
from ebbench.errors import UsageError
from ebbench.records.run import Run
from ebbench.spec.client import ClientOptions
from ebbench.spec.run import make_spec
from ebbench.workloads.planner import make_plan
from tests.client.client_runs import column, plan_of, run
from tests.client.raw_server import END, EVENTS, Asked, chunk, counted, delta, event, raw_server, said, whole
from tests.client.test_stream_dialects import ODD_VALUES
from tests.gate.gate_data import invoke

LINES = EVENTS.replace(b"text/event-stream", b"application/x-ndjson")


def named(kind: str, **fields: Any) -> bytes:
    """An event with its type in both places, as Responses and Messages have it."""
    return b"event: %b\n" % kind.encode() + event({"type": kind, **fields})


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


RESPONSES = b"".join(
    [
        named("response.created", response={"id": "resp_1", "model": "m", "status": "in_progress", "usage": None}),
        named("response.output_item.added", output_index=0, item={"type": "reasoning", "content": []}),
        named("response.reasoning_text.delta", item_id="a", delta="so "),
        named("response.reasoning_text.done", item_id="a", text="so "),
        named("response.content_part.added", part={"type": "output_text", "text": ""}),
        named("response.output_text.delta", item_id="b", delta="one"),
        named("response.output_text.delta", item_id="b", delta=" two"),
        named("response.output_text.done", item_id="b", text="one two"),
        named(
            "response.completed",
            response={
                "model": "m",
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
                "usage": {
                    "input_tokens": 12, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 3,
                    "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 15,
                },
            },
        ),
    ]
)  # fmt: skip
MESSAGES = b"".join(
    [
        named(
            "message_start",
            message={
                "model": "m", "role": "assistant", "content": [], "stop_reason": None,
                "usage": {"input_tokens": 3, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 1,
                          "output_tokens": 1},
            },
        ),
        named("content_block_start", index=0, content_block={"type": "thinking", "thinking": ""}),
        named("ping"),
        named("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "so "}),
        named("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "x"}),
        named("content_block_stop", index=0),
        named("content_block_start", index=1, content_block={"type": "text", "text": ""}),
        named("content_block_delta", index=1, delta={"type": "text_delta", "text": "one"}),
        named("content_block_delta", index=1, delta={"type": "text_delta", "text": " two"}),
        named("message_delta", delta={"stop_reason": "max_tokens", "stop_sequence": None}, usage={"output_tokens": 3}),
        named("message_stop"),
    ]
)  # fmt: skip
SGLANG = b"".join(
    event({"text": text, "output_ids": [7] * count, "meta_info": {
        "id": "x", "finish_reason": {"type": "length", "length": 3} if count == 3 else None, "prompt_tokens": 12,
        "completion_tokens": count, "cached_tokens": 8, "weight_version": "default"}})
    for count, text in ((1, "so "), (2, "so one"), (3, "so one two"))
) + b"data: [DONE]\n\n"  # fmt: skip
LLAMA_CPP = b"".join(
    [
        *(
            event({"index": 0, "content": text, "tokens": [7], "stop": False, "id_slot": -1, "tokens_predicted": number,
                   "tokens_evaluated": 12})
            for number, text in enumerate(("so ", "one", " two"), start=1)
        ),
        event({"index": 0, "content": "", "tokens": [], "stop": True, "model": "m", "tokens_predicted": 3,
               "tokens_evaluated": 12, "stop_type": "limit", "stopping_word": "", "tokens_cached": 14,
               "timings": {"cache_n": 8, "prompt_n": 4, "predicted_n": 3}}),
    ]
)  # fmt: skip
TGI = b"".join(
    b"data:"
    + event({"index": number, "token": {"id": 7, "text": text, "logprob": -1.0, "special": False},
             "generated_text": "so one two" if number == 3 else None,
             "details": {"finish_reason": "length", "generated_tokens": 3, "seed": None, "input_length": 12}
             if number == 3 else None})[6:]
    for number, text in enumerate(("so ", "one", " two"), start=1)
)  # fmt: skip
OLLAMA = b"".join(
    [
        line(model="m", created_at="2026", message={"role": "assistant", "content": "", "thinking": "so "}, done=False),
        line(model="m", message={"role": "assistant", "content": "one"}, done=False),
        line(model="m", message={"role": "assistant", "content": " two"}, done=False),
        line(model="m", message={"role": "assistant", "content": ""}, done=True, done_reason="length",
             total_duration=5_000_000, prompt_eval_count=12, prompt_eval_duration=2_000_000, eval_count=3,
             eval_duration=3_000_000),
    ]
)  # fmt: skip
STREAMS: dict[Endpoint, bytes] = {
    "responses": RESPONSES, "messages": MESSAGES, "sglang": SGLANG, "llama.cpp": LLAMA_CPP, "tgi": TGI,
    "ollama": OLLAMA,
}  # fmt: skip
THINKS, CACHES = {"responses", "messages", "ollama"}, {"responses", "messages", "sglang", "llama.cpp"}


@pytest.mark.parametrize("transport", ["direct", "httpx"])
@pytest.mark.parametrize("endpoint", STREAMS)
def test_the_stream_of_each_api_is_measured(endpoint: Endpoint, transport: str) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send((LINES if endpoint == "ollama" else EVENTS) + chunk(STREAMS[endpoint]) + END)

    with raw_server(answer) as server:
        plan = plan_of(1, input_tokens=12, output_tokens=3)
        done = run(server.url, plan, endpoint=endpoint, transport=transport, keep_text=True)
        (asked,) = server.asked
    (row,) = done.requests.to_pylist()
    assert (row["status"], row["error_body"]) == ("ok", None)
    assert asked.path.endswith(PATHS[endpoint])
    assert (row["input_tokens"], row["output_tokens"]) == (12, 3)
    assert row["cached_tokens"] == (8 if endpoint in CACHES else None)
    assert row["finish_reason"] in {"length", "limit", "max_tokens", "max_output_tokens"}
    assert row["text"] == ("one two" if endpoint in THINKS else "so one two")
    assert row.get("thinking_tokens") == (1 if endpoint in THINKS else None)
    assert len(row["itl_ns"]) == 2


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
def test_a_type_may_stand_in_the_line_of_the_event_alone(endpoint: Endpoint) -> None:
    untyped = re.sub(rb'data: {"type": "[\w.]+"(, )?', b"data: {", STREAMS[endpoint])
    assert untyped.count(b"data: {}") == (2 if endpoint == "messages" else 0)  # ping and message_stop hold nothing else

    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(untyped) + END)

    with raw_server(answer) as server:
        (row,) = run(server.url, plan_of(1, input_tokens=12, output_tokens=3), endpoint=endpoint).requests.to_pylist()
    assert (row["status"], row["error_body"]) == ("ok", None)
    assert (row["output_tokens"], len(row["itl_ns"])) == (3, 2)


def test_the_output_tokens_at_the_start_of_a_message_are_not_its_count() -> None:
    async def answer(asked: Asked) -> None:
        end = b'usage": {"output_tokens": 3}'
        assert end in MESSAGES
        await asked.send(EVENTS + chunk(MESSAGES.replace(end, b'usage": null')) + END)

    with raw_server(answer) as server:
        (row,) = run(server.url, plan_of(1, output_tokens=3), endpoint="messages").requests.to_pylist()
    assert (row["status"], row["error_class"], row["output_tokens"]) == ("failed", "no_usage", None)
    assert '"input_tokens": 3' in row["error_body"]


@pytest.mark.parametrize(
    ("endpoint", "usage"),
    [
        ("completions", {"input_tokens": 7, "output_tokens": 3}),
        ("chat", {"input_tokens": 7, "output_tokens": 3, "completion_tokens": None}),
        ("responses", {"prompt_tokens": 7, "completion_tokens": 3}),
    ],
)
def test_usage_may_have_the_names_of_another_api(endpoint: Endpoint, usage: dict[str, Any]) -> None:
    counts = token_counts(usage, DIALECTS[endpoint].counts)
    assert (counts.prompt, counts.completion, counts.odd) == (7, 3, {})


def test_a_total_that_holds_more_than_prompt_and_output_is_named() -> None:
    counts = token_counts({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 30}, DIALECTS["chat"].counts)
    assert (counts.prompt, counts.completion) == (7, 3)
    assert counts.odd == {"total_tokens": "30 where 7 and 3 are counted"}
    assert not token_counts({"input_tokens": 7, "output_tokens": 3, "total_tokens": 10.0}, DIALECTS["chat"].counts).odd


BODIES: dict[Endpoint, dict[str, Any]] = {
    "responses": {"model": "m", "stream": True, "store": False, "temperature": 0.0, "ignore_eos": True,
                  "max_output_tokens": 6},
    "messages": {"model": "m", "stream": True, "temperature": 0.0, "ignore_eos": True, "max_tokens": 6},
    "sglang": {"stream": True, "sampling_params": {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 6}},
    "llama.cpp": {"stream": True, "temperature": 0.0, "ignore_eos": True, "n_predict": 6},
    "tgi": {"stream": True, "parameters": {"details": True, "do_sample": False, "max_new_tokens": 6}},
    "ollama": {"model": "m", "stream": True, "options": {"temperature": 0.0, "num_predict": 6}},
    "triton": {"stream": True, "temperature": 0.0, "max_tokens": 6},
    "embeddings": {"model": "m"},
    "rerank": {"model": "m"},
}  # fmt: skip


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_body_has_the_fields_of_its_api(endpoint: Endpoint) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with raw_server(answer) as server:
        run(server.url, plan_of(1, input_tokens=9), endpoint=endpoint, model="m", documents=2)
        (asked,) = server.asked
    sent = dict(asked.body)
    prompt = {name: sent.pop(name) for name in ("query", DIALECTS[endpoint].prompt) if name in sent}
    assert sent == BODIES[endpoint]
    if endpoint == "rerank":
        assert [len(text.split()) for text in (prompt["query"], *prompt["documents"])] == [3, 3, 3]
    elif DIALECTS[endpoint].holds == "messages":
        ((role, text),) = [(one["role"], one["content"]) for one in prompt.popitem()[1]]
        assert (role, len(text.split())) == ("user", 9)
    else:
        given = prompt.popitem()[1]
        assert len(given.split() if isinstance(given, str) else given) == 9


def test_a_short_prompt_is_shared_between_fewer_documents() -> None:
    """A server refuses empty documents."""
    for words, documents in ((1, 1), (2, 1), (4, 3), (30, 16)):
        bodies = RequestBodies("m", ClientOptions(endpoint="rerank", documents=16))
        body = json.loads(bodies.build(Turn(0, "r", 0, words, 1, 7, None, None)))
        assert (len(body["documents"]), all([body["query"], *body["documents"]])) == (documents, True)


def test_another_field_limits_the_output_where_it_is_named() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(SGLANG) + END)

    with raw_server(answer) as server:
        run(server.url, plan_of(1), endpoint="chat", max_tokens_field="max_tokens")
        run(server.url, plan_of(1), endpoint="tgi", max_tokens_field="parameters.max_tokens")
        chat, tgi = (asked.body for asked in server.asked)
    assert (chat["max_tokens"], "max_completion_tokens" in chat) == (6, False)
    assert tgi["parameters"]["max_tokens"] == 6


def test_a_turn_of_a_session_carries_the_earlier_ones() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(MESSAGES) + END)

    with raw_server(answer) as server:
        plan = plan_of(1, turns=2, output_tokens=3, prompts=["first", "second"])
        run(server.url, plan, {"EBBENCH_API_KEY": "sesame-open"}, endpoint="messages")
        first, second = server.asked
    assert second.body["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one two"},
        {"role": "user", "content": "second"},
    ]
    assert first.headers["anthropic-version"]
    assert (first.headers["x-api-key"], first.headers["authorization"]) == ("sesame-open", "Bearer sesame-open")


OPENAI: dict[str, list[bytes]] = {
    "SGLang": [
        event(delta(role="assistant", content="") | {"usage": None}),
        event(delta(reasoning_content="so ", content=None)),
        event(delta(content="one", reasoning_content=None)),
        event({"choices": [{"index": 0, "delta": {"content": " two"}, "finish_reason": None, "matched_stop": None}]}),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length", "matched_stop": None}]}),
        event(counted(3, 12, prompt_tokens_details={"cached_tokens": 8}, reasoning_tokens=1)),
    ],
    "TensorRT-LLM": [
        event(delta(role="assistant")),
        event(delta(content="so ", reasoning_content=None, tool_calls=[])),
        event(delta(content="one", tool_calls=[])),
        event(delta("length", content=" two", tool_calls=[]) | {"usage": None}),
        event(counted(3, 12)),
    ],
    "llama.cpp": [
        event(delta(role="assistant", content=None)),
        event(delta(reasoning_content="so ")),
        event(delta(content="one")),
        event(delta(content=" two")),
        event(delta("length")),
        event(counted(3, 12) | {"timings": {"prompt_n": 4, "predicted_n": 3, "cache_n": 8}}),
    ],
    "TGI": [
        b"data:" + event(delta(role="assistant", content="so "))[6:],
        b"data:" + event(delta(role="assistant", content="one") | {"usage": None})[6:],
        b"data:" + event(delta("length", role="assistant", content=" two"))[6:],
        b"data:" + event(counted(3, 12))[6:],
    ],
    "Ollama": [
        event(delta(role="assistant", content="", reasoning="so ")),
        event(delta(role="assistant", content="one")),
        event(delta(role="assistant", content=" two")),
        event(delta("length", role="assistant", content="")),
        event(counted(3, 12)),
    ],
}


def test_the_chat_streams_of_other_servers_are_measured() -> None:
    forms = list(OPENAI.values())

    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(b"".join(forms[asked.number]) + b"data: [DONE]\n\n") + END)

    with raw_server(answer) as server:
        plan = plan_of(len(forms), concurrency=1, input_tokens=12, output_tokens=3)
        done = run(server.url, plan, endpoint="chat")
    rows = dict(zip(OPENAI, done.requests.to_pylist(), strict=True))
    assert {name: (row["status"], row["error_body"]) for name, row in rows.items()} == dict.fromkeys(
        OPENAI, ("ok", None)
    )
    assert {name: len(row["itl_ns"]) for name, row in rows.items()} == dict.fromkeys(OPENAI, 2)
    assert {name for name, row in rows.items() if row["thinking_tokens"] == 1} == {"SGLang", "llama.cpp", "Ollama"}
    assert {row["input_tokens"] for row in rows.values()} == {12}


FAILURES: dict[str, tuple[Endpoint, bytes]] = {
    "Responses": (
        "responses",
        named("response.failed", response={"status": "failed", "error": {"message": "no room"}}),
    ),
    "Responses, at once": ("responses", event({"type": "error", "code": "x", "message": "no room", "param": None})),
    "Messages": ("messages", named("error", error={"type": "overloaded_error", "message": "no room"})),
    "Messages, unnamed": ("messages", event({"type": "error", "error": {"type": "api_error", "message": "no room"}})),
    "SGLang": ("sglang", event({"error": {"message": "no room", "type": "BadRequest"}})),
    "llama.cpp": ("llama.cpp", event({"error": {"code": 500, "message": "no room", "type": "server_error"}})),
    "TGI": ("tgi", event({"error": "no room", "error_type": "generation"})),
    "Ollama": ("ollama", line(error="no room")),
    "Triton": ("triton", event({"error": "no room"})),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_inside_a_stream_is_named_in_every_api(name: str) -> None:
    endpoint, failure = FAILURES[name]

    async def answer(asked: Asked) -> None:
        start = STREAMS.get(endpoint, b"").split(b"\n\n")[0] if endpoint != "ollama" else b""
        await asked.send((LINES if endpoint == "ollama" else EVENTS) + chunk(start + b"\n\n" + failure) + END)

    with raw_server(answer) as server:
        (row,) = run(server.url, plan_of(1), endpoint=endpoint, model="m").requests.to_pylist()
    assert (row["status"], row["error_class"], row["error_body"]) == ("failed", "error_frame", "no room")


@pytest.mark.parametrize("endpoint", STREAMS)
def test_a_stream_that_breaks_off_is_truncated_in_every_api(endpoint: Endpoint) -> None:
    async def answer(asked: Asked) -> None:
        cut = STREAMS[endpoint].rindex(b"two")
        await asked.send((LINES if endpoint == "ollama" else EVENTS) + chunk(STREAMS[endpoint][: cut - 200]) + END)

    with raw_server(answer) as server:
        (row,) = run(server.url, plan_of(1), endpoint=endpoint).requests.to_pylist()
    assert row["status"] == "failed"
    assert row["error_class"] in ("truncated", "malformed_frame")


# What vLLM 0.32 sends for a reasoning model, in its order: several tokens in a delta, the end of the thinking in no
# message of its own, a signature, and no count of thinking tokens in Messages.
VLLM_RESPONSES = b"".join(
    [
        named("response.created", response={"model": "m", "status": "in_progress", "usage": None}, sequence_number=0),
        named("response.in_progress", response={"model": "m", "status": "in_progress", "usage": None}),
        named("response.output_item.added", item={"type": "reasoning", "summary": [], "content": None}),
        named("response.content_part.added", part={"text": "", "type": "reasoning_text"}),
        named("response.reasoning_text.delta", delta="pear", content_index=0),
        named("response.reasoning_text.delta", delta="figs plum", content_index=0),
        named("response.reasoning_text.done", text="pearfigs plum"),
        named("response.content_part.done", part={"text": "pearfigs plum", "type": "reasoning_text"}),
        named("response.output_item.done", item={"type": "reasoning", "content": [{"text": "pearfigs plum"}]}),
        named("response.output_item.added", item={"type": "message", "content": [], "role": "assistant"}),
        named("response.content_part.added", part={"type": "output_text", "text": "", "annotations": []}),
        named("response.output_text.delta", delta="lime", logprobs=[]),
        named("response.output_text.delta", delta="kiwi dill", logprobs=[]),
        named("response.output_text.done", text="limekiwi dill", logprobs=[]),
        named("response.output_item.done", item={"type": "message", "status": "completed"}),
        named(
            "response.completed",
            response={
                "model": "m", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},
                "usage": {
                    "input_tokens": 87,
                    "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
                    "output_tokens": 7,
                    "output_tokens_details": {"reasoning_tokens": 3, "tool_output_tokens": 0},
                    "total_tokens": 94,
                },
            },
        ),
    ]
)  # fmt: skip
VLLM_MESSAGES = b"".join(
    [
        named("message_start", message={"id": "chatcmpl-1", "model": "m", "content": [], "stop_reason": None,
                                        "usage": {"input_tokens": 87, "output_tokens": 0}}),
        named("content_block_start", content_block={"type": "thinking", "thinking": ""}, index=0),
        named("content_block_delta", delta={"type": "thinking_delta", "thinking": "pear"}, index=0),
        named("content_block_delta", delta={"type": "thinking_delta", "thinking": "figs plum"}, index=0),
        named("content_block_delta", delta={"type": "signature_delta", "signature": "1c88a837"}, index=0),
        named("content_block_stop", index=0),
        named("content_block_start", content_block={"type": "text", "text": ""}, index=1),
        named("content_block_delta", delta={"type": "text_delta", "text": "lime"}, index=1),
        named("content_block_delta", delta={"type": "text_delta", "text": "kiwi dill"}, index=1),
        named("content_block_stop", index=1),
        named("message_delta", delta={"stop_reason": "max_tokens", "stop_sequence": None},
              usage={"input_tokens": 23, "output_tokens": 7, "cache_creation_input_tokens": 0,
                     "cache_read_input_tokens": 64}),
        named("message_stop"),
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("endpoint", "stream", "thinking_tokens"),
    [("responses", VLLM_RESPONSES, 3), ("messages", VLLM_MESSAGES, 4)],  # 4: two messages, half of 3 tokens beyond them
)
def test_streams_of_a_reasoning_model_under_vllm(endpoint: Endpoint, stream: bytes, thinking_tokens: int) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(stream) + END)

    with raw_server(answer) as server:
        (row,) = run(server.url, plan_of(1, output_tokens=7), endpoint=endpoint, keep_text=True).requests.to_pylist()
    assert (row["status"], row["error_body"], row["text"]) == ("ok", None, "limekiwi dill")
    assert (row["input_tokens"], row["cached_tokens"], row["output_tokens"]) == (87, 64, 7)
    assert (row["thinking_tokens"], row["bundled_tokens"]) == (thinking_tokens, True)
    assert row["first_token_ns"] <= row["first_answer_ns"] <= row["last_token_ns"]


VECTOR = {"object": "embedding", "index": 0, "embedding": [0.25] * 4000}
WHOLE: dict[str, tuple[Endpoint, Any, int]] = {
    "embeddings": ("embeddings", {"data": [VECTOR], "usage": {"prompt_tokens": 9, "total_tokens": 9}}, 9),
    "embeddings without usage": ("embeddings", {"data": [VECTOR], "usage": None}, 5),
    "rerank (vLLM)": ("rerank", {"results": [{"index": 0, "relevance_score": 0.5}], "usage": {"total_tokens": 9}}, 9),
    "rerank (Cohere)": ("rerank", {"results": [{"index": 0}], "meta": {"tokens": {"input_tokens": 9}}}, 9),
    "rerank (SGLang)": ("rerank", [{"score": 0.5, "document": "a", "index": 0}], 5),
}


@pytest.mark.parametrize("transport", ["direct", "httpx"])
def test_answers_without_output_tokens_are_measured_whole(transport: str) -> None:
    for endpoint, document, prompt_tokens in WHOLE.values():
        body = json.dumps(document, indent=1).encode()

        async def answer(asked: Asked, body: bytes = body) -> None:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            await asked.send(head + body[:50])
            await asked.send(body[50:])

        with raw_server(answer) as server:
            (row,) = run(server.url, plan_of(1), endpoint=endpoint, transport=transport).requests.to_pylist()
        assert (row["status"], row["error_body"]) == ("ok", None)
        assert (row["input_tokens"], row["output_tokens"], row["itl_ns"]) == (prompt_tokens, None, [])
        assert row["last_token_ns"] == row["end_ns"]


@pytest.mark.parametrize(
    ("document", "error_class", "reason"),
    [
        ({"data": [], "model": "m"}, "empty_output", "no vectors or scores"),
        ({"data": [{"index": 0, "embedding": None}]}, "empty_output", "no vectors or scores"),
        ({"data": [{"index": 0, "embedding": [0.5]}, {"index": 1, "embedding": []}]}, "empty_output", "no vectors"),
        ({"results": [{"index": 0, "relevance_score": None}]}, "empty_output", "no vectors or scores"),
        ({"error": {"message": "no room"}}, "error_frame", "no room"),
        ("text", "not_json", "hello"),
    ],
)
def test_answers_without_vectors_fail(document: Any, error_class: str, reason: str) -> None:
    async def answer(asked: Asked) -> None:
        if document == "text":
            await asked.send(whole(b"hello"))
        else:
            await asked.send(
                whole(json.dumps(document).encode()).replace(b"OK\r\n", b"OK\r\ncontent-type: application/json\r\n")
            )

    with raw_server(answer) as server:
        (row,) = run(server.url, plan_of(1), endpoint="embeddings").requests.to_pylist()
    assert (row["error_class"], reason in row["error_body"]) == (error_class, True)


def tokenizer_file(folder: Path) -> Path:
    """A tokenizer with one token per word."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


TRITON = b"".join(event({"model_name": "m", "text_output": text}) for text in ("so", " one", " two"))
UNCOUNTED: dict[str, tuple[Endpoint, bytes]] = {
    "completions": ("completions", event(said("so one")) + event(said(" two", "stop")) + b"data: [DONE]\n\n"),
    "chat": (
        "chat",
        event(delta(reasoning="so ")) + event(delta(content="one ")) + event(delta("stop", content="two")),
    ),
    "triton": ("triton", TRITON),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_output_without_counts_is_counted_and_marked(name: str, tmp_path: Path) -> None:
    endpoint, stream = UNCOUNTED[name]

    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(stream) + END)

    file = tokenizer_file(tmp_path)
    with raw_server(answer) as server:
        plain = run(server.url, plan_of(2), endpoint=endpoint, model="m")
        done = run(server.url, plan_of(2), endpoint=endpoint, model="m", tokenizer=str(file))
    assert column(plain, "error_class") == ["no_usage"] * 2
    assert column(done, "status") == ["ok"] * 2
    assert column(done, "output_tokens") == [3, 3]
    assert column(done, "estimated_tokens") == [True, True]
    assert done.facts["estimated_tokens"] == {"answers": 2, "by": f"tokenizer {file}"}
    (told,) = [str(one) for one in done.warnings if one.code == "estimated-tokens"]
    assert "2 of 2 answers" in told
    assert "estimate" in told


def test_counts_of_the_server_come_before_the_tokenizer(tmp_path: Path) -> None:
    async def answer(asked: Asked) -> None:
        number = 6 if asked.number == 0 else -1
        await asked.send(EVENTS + chunk(event(said("so one two", "stop")) + event(counted(number))) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(2, concurrency=1), tokenizer=str(tokenizer_file(tmp_path)))
    assert column(done, "output_tokens") == [6, None]
    assert column(done, "error_class") == [None, "bad_usage"]
    assert "estimated_tokens" not in done.facts


def test_only_complete_answers_count_as_estimated(tmp_path: Path) -> None:
    async def answer(asked: Asked) -> None:
        text = "" if asked.number else "one two"
        await asked.send(EVENTS + chunk(event(said(text, "stop"))) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(2, concurrency=1), tokenizer=str(tokenizer_file(tmp_path)))
    assert column(done, "error_class") == [None, "empty_output"]
    assert done.facts["estimated_tokens"]["answers"] == 1


@pytest.mark.parametrize("transport", ["direct", "httpx"])
def test_ids_are_left_out_for_servers_that_refuse_them(transport: str) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(SGLANG) + END)

    with raw_server(answer) as server:
        run(server.url, plan_of(1, output_tokens=3), endpoint="sglang", transport=transport)
        run(server.url, plan_of(1, output_tokens=3), endpoint="sglang", transport=transport, request_ids=False)
        assert ["x-request-id" in asked.headers for asked in server.asked] == [True, False]


def test_an_absent_tokenizer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # or a hub out of reach is asked for a minute

    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(event(said("one", "stop"))) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(1), tokenizer="no/such-model")
    assert column(done, "error_class") == ["no_usage"]
    assert [note for note in map(str, done.warnings) if "--tokenizer no/such-model is not available" in note]


FIELDS = st.sampled_from(
    ["type", "delta", "text", "thinking", "response", "usage", "input_tokens", "output_tokens", "status", "message",
     "content_block", "meta_info", "finish_reason", "completion_tokens", "output_ids", "content", "stop",
     "tokens_predicted", "tokens_evaluated", "timings", "cache_n", "token", "details", "generated_tokens", "done",
     "eval_count", "prompt_eval_count", "text_output", "data", "results", "meta", "tokens", "error", "model",
     "cache_read_input_tokens", "incomplete_details", "reason", "stop_reason", "partial_json"]
)  # fmt: skip
KINDS = st.sampled_from(
    ["response.created", "response.output_text.delta", "response.completed", "response.reasoning_text.delta",
     "message_start", "message_delta", "content_block_delta", "content_block_start", "message_stop"]
)  # fmt: skip
OBJECTS: st.SearchStrategy[Mapping[str, Any]] = st.recursive(
    st.dictionaries(FIELDS, ODD_VALUES, max_size=5),
    lambda inner: st.dictionaries(FIELDS, inner | ODD_VALUES | KINDS, max_size=5),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), st.lists(st.tuples(OBJECTS, st.none() | KINDS), max_size=4))
def test_whatever_a_server_sends_by_any_api_is_classified(
    endpoint: Endpoint, messages: list[tuple[Mapping[str, Any], str | None]]
) -> None:
    answer = response_to(DIALECTS[endpoint], keep_text=True)
    answer.sent(1)
    answer.feed(STREAMS.get(endpoint, b""), 10**6)
    for number, (message, kind) in enumerate(messages, start=2):
        answer.feed(event(message if kind is None else {**message, "type": kind}), number * 10**6)
    answer.ended()
    verdict, counts = classify(answer, 3, exact=False), answer.counts()
    assert verdict.status in ("ok", "failed")
    assert all(count is None or 0 <= count < 2**31 for count in (counts.prompt, counts.completion, counts.cached))
    assert (answer.text or "").encode() is not None


def test_limits_on_tokens_are_refused_where_there_are_none() -> None:
    settings: dict[str, Any] = {"workload": "balanced", "engine": "http://127.0.0.1:9", "endpoint": "embeddings"}
    with pytest.raises(UsageError, match="ttft:50: answers of --endpoint embeddings have no tokens"):
        make_engine(make_spec(settings | {"goodput": "e2el:90 ttft:50"}))
    make_engine(make_spec(settings | {"goodput": "e2el:90"}))


def test_answers_without_tokens_have_no_time_to_a_first_one() -> None:
    async def answer(asked: Asked) -> None:
        body = json.dumps({"data": [VECTOR]}).encode()
        await asked.send(whole(body).replace(b"OK\r\n", b"OK\r\ncontent-type: application/json\r\n"))

    with raw_server(answer) as server:
        done = run(server.url, plan_of(3), endpoint="embeddings")
    columns = RequestColumns.of(done.requests)
    found = measure(columns, slo=Slo(e2el=60_000.0))
    assert (found.completed, found.ttft.count, found.tpot.count, found.e2el.count) == (3, 0, 0, 3)
    assert (found.output_throughput, found.slo_attainment) == (0.0, 1.0)
    assert found.input_throughput
    assert measure(columns, slo=Slo(ttft=60_000.0)).slo_attainment == 0.0
    assert invalid_reasons(done.requests, plan_of(3).table, columns, found, paced_sends=False) == ()


def test_tables_of_answers_without_tokens_rank_by_prompts(tmp_path: Path) -> None:
    async def answer(asked: Asked) -> None:
        body = json.dumps({"data": [VECTOR], "usage": {"prompt_tokens": 5, "total_tokens": 5}}).encode()
        await asked.send(whole(body).replace(b"OK\r\n", b"OK\r\ncontent-type: application/json\r\n"))

    options = ("--source", "profile", "--no-power", "--lag-limit-ms", 60000, "-q", "--endpoint", "embeddings")
    with raw_server(answer) as server:
        for name, policy in (("a", "v1"), ("b", "v1"), ("c", "ebplus")):
            where = ("--engine", server.url, "--policy", policy, "-o", tmp_path / name)
            invoke("run", "balanced", "-n", 3, *where, *options)
    shown = invoke("show", tmp_path / "a").stdout
    assert "in tok/s" in shown
    assert not [name for name in ("out tok/s", "TTFT", "TPOT", "ITL", "per user") if name in shown]
    compared = invoke("compare", tmp_path / "a", tmp_path / "b").stdout
    assert "requests/s of v1 (b) against v1" in " ".join(compared.split())
    assert "E2EL median" in compared
    judged = json.loads(invoke("gate", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert [figure["figure"] for figure in judged["figures"] if figure["gated"]] == [
        "request_throughput", "median_e2el_ms",
    ]  # fmt: skip
    assert "requests/s" in invoke("trend", tmp_path / "a", tmp_path / "b").stdout
    invoke("report", tmp_path / "a", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert [f'"cdf_{name}": []' in page for name in ("ttft", "tpot", "itl", "e2el")] == [True, True, True, False]
    both = " ".join(invoke("show", tmp_path / "a", tmp_path / "c").stdout.split())
    assert "put out nothing" not in both
    assert "prompt tokens/s over the whole run" in both or "differ by" in both
    for command in (("show", tmp_path / "a", "--as", "all"), ("figures", "slo", tmp_path / "a", "-o", tmp_path)):
        assert "answers have no tokens" in invoke(*command).output
    refused = invoke("show", tmp_path / "a", "--goodput", "ttft:100")
    assert (refused.exit_code, "have no tokens; limit e2el" in " ".join(refused.output.split())) == (2, True)
    for form in ("vllm", "llm-d", "otava"):
        invoke("runs", "export", tmp_path / "a", "--as", form, "-o", tmp_path / "out")
    of_vllm = json.loads((tmp_path / "out" / "a.vllm.json").read_text())
    assert (of_vllm["ttfts"], of_vllm["max_output_tokens_per_s"]) == ([0.0] * 3, 0.0)
    of_llm_d = json.loads((tmp_path / "out" / "a.llm-d.json").read_text())
    assert list(of_llm_d["results"]["request_performance"]["aggregate"]["latency"]) == ["request_latency"]
    [series] = (tmp_path / "out").glob("*.csv")
    assert "request_throughput,median_e2el_ms" in series.read_text().splitlines()[0]
    assert "output_throughput" not in series.read_text()


def test_a_tokenizer_without_texts_is_for_servers_only() -> None:
    settings: dict[str, Any] = {"workload": "balanced", "source": "profile", "num_prompts": 2, "tokenizer": "x"}
    make_plan(make_spec(settings | {"engine": "http://127.0.0.1:9"}).plan)
    for engine in ("sim", "vllm"):
        with pytest.raises(UsageError, match="--tokenizer counts the tokens of texts"):
            make_plan(make_spec(settings | {"engine": engine}).plan)


def test_an_estimate_is_marked_wherever_a_run_is_shown(tmp_path: Path) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(event(said("one")) + event(said(" two", "stop"))) + END)

    options = ("-n", 3, "--source", "profile", "--no-power", "--lag-limit-ms", 60000, "-q", "-o", tmp_path / "run")
    with raw_server(answer) as server:
        file = tokenizer_file(tmp_path)
        done = invoke("run", "balanced", "--engine", server.url, "--tokenizer", file, "--json", *options)
    (document,) = json.loads(done.stdout)
    assert document["estimated_answers"] == 3
    shown = " ".join(invoke("show", tmp_path / "run").stdout.split())
    assert "v1 (estimated tokens)" in shown
    assert "over the whole run (an estimate)" in shown
    assert "their output tokens are an estimate" in shown
    for kind in ("vllm", "llm-d"):
        invoke("report", tmp_path / "run", "--export", kind, "-o", tmp_path / kind)
        (exported,) = (tmp_path / kind).iterdir()
        assert "estimated tokens" in exported.read_text()


@pytest.mark.parametrize("value", ["4", -1, 2**40, None, 3.5, [], True, {}])
@pytest.mark.parametrize("endpoint", sorted(DIALECTS))
def test_what_is_no_count_is_left_out_and_named_in_every_api(endpoint: Endpoint, value: Any) -> None:
    fields = DIALECTS[endpoint].counts
    usage: dict[str, Any] = {}
    for path in filter(None, (fields.completion, fields.prompt, fields.cached, fields.reasoning, *fields.beside)):
        outer, _, name = path.rpartition(".")
        (usage.setdefault(outer, {}) if outer else usage)[name] = value
    counts = token_counts(usage, fields)
    assert counts[:4] == (None, None, None, None)
    assert bool(counts.odd) == (value is not None)


def test_runs_by_different_apis_are_not_averaged(tmp_path: Path) -> None:
    async def answer(asked: Asked) -> None:
        stream = MESSAGES if asked.path.endswith("messages") else UNCOUNTED["completions"][1]
        await asked.send(EVENTS + chunk(stream) + END)

    size = ("-n", 2, "--source", "profile", "--output-len", 3, "--length-distribution", "fixed")
    options = (*size, "--no-power", "--lag-limit-ms", 60000, "-q", "-p", "v1")
    with raw_server(answer) as server:
        command = ("run", "balanced", "--engine", server.url, *options)
        invoke(*command, "--endpoint", "messages", "-o", tmp_path / "messages")
        invoke(*command, "--tokenizer", tokenizer_file(tmp_path), "-o", tmp_path / "estimated")
    known = [run_environment(Run.load(tmp_path / name).manifest)["endpoint"] for name in ("messages", "estimated")]
    assert known == ["messages", "estimated tokens"]
    shown = " ".join(invoke("show", tmp_path / "messages", tmp_path / "estimated").stdout.split())
    assert "these runs differ in endpoint" in shown
