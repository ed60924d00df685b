"""Drafts of speculative decoding as servers report them in their answers: read, stored, summed."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from ebbench.analysis.summary import Drafted
from ebbench.client.dialects import DraftCounts, draft_counts
from ebbench.client.prefix_cache import drafts
from ebbench.records.schema import SERVER_METRICS
from tests.client.client_runs import column, plan_of, run
from tests.client.raw_server import END, EVENTS, Asked, chunk, counted, delta, event, raw_server, said

NO_METRICS = SERVER_METRICS.empty_table()
TOKENS = 6
VLLM = {
    "mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.5, "acceptance_histogram": [0, 1, 1, 0],
    "num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6, "num_spec_tokens": 3,
}  # fmt: skip
SGLANG = {"spec_verify_ct": 2, "spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 3,
          "spec_correct_drafts_histogram": [0, 1, 1]}  # fmt: skip


def completions(last: dict[str, Any], **ending: Any) -> bytes:
    texts = b"".join(event(said("a")) for _ in range(TOKENS - 1))
    return texts + event(said("b", "length", **ending)) + event(last) + event(b"[DONE]")


def in_choice(**fields: Any) -> bytes:
    message = {"choices": [{"index": 0, "text": "b", "finish_reason": "length", **fields}]}
    return event(said("a")) * (TOKENS - 1) + event(message) + event(counted(TOKENS))


def native(**fields: Any) -> bytes:
    messages = [
        {"text": "a" * n, "meta_info": {"completion_tokens": n, "prompt_tokens": 5, "finish_reason": None}}
        for n in range(1, TOKENS + 1)
    ]
    messages[-1]["meta_info"] |= {"finish_reason": {"type": "length"}, **fields}  # type: ignore[operator]
    return b"".join(map(event, messages))


STREAMS = {
    "vLLM": (completions(counted(TOKENS) | {"metrics": {"speculative_decoding": VLLM}}), (2, 6, 3, [0, 1, 1, 0])),
    "SGLang": (in_choice(meta_info=SGLANG), (2, 6, 3, [0, 1, 1])),
    "SGLang, apart": (completions(counted(TOKENS) | {"sglext": {"spec_tokens_details": SGLANG}}), (2, 6, 3, [0, 1, 1])),
    "SGLang, older": (in_choice(meta_info={"spec_verify_ct": 2}), (2, None, 3, None)),
    "llama.cpp": (
        completions(counted(TOKENS) | {"timings": {"draft_n": 6, "draft_n_accepted": 3}}),
        (None, 6, 3, None),
    ),
    "OpenAI": (
        completions(
            counted(
                TOKENS,
                completion_tokens_details={"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 3},
            )
        ),
        (None, 6, 3, None),
    ),
    "TensorRT-LLM": (in_choice(avg_decoded_tokens_per_iter=2.0), (3, None, 3, None)),
}
COLUMNS = ("draft_steps", "drafted_tokens", "accepted_tokens", "acceptance_histogram")


def measured(body: bytes, url_path: str = "", **options: Any) -> Any:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(body) + END)

    with raw_server(answer) as server:
        return run(server.url + url_path, plan_of(3, concurrency=1, output_tokens=TOKENS), **options)


@pytest.mark.parametrize("name", STREAMS)
def test_what_a_server_says_of_its_drafts_is_stored(name: str) -> None:
    body, expected = STREAMS[name]
    done = measured(body)
    assert column(done, "status") == ["ok"] * 3
    assert [column(done, name) for name in COLUMNS] == [[value] * 3 for value in expected]
    drafted = Drafted.of(done.facts)
    assert drafted is not None
    assert drafted.accepted_tokens == 9
    steps, proposed, _, histogram = expected
    assert drafted.mean_acceptance_length == (None if steps is None else 1 + 3 / steps)
    assert drafted.rate == (None if proposed is None else 0.5)
    assert drafted.acceptance == ((1.0, 0.5, 0.0)[: len(drafted.accepted)] if histogram else ())


def test_a_chat_tells_in_its_last_message() -> None:
    texts = event(delta(role="assistant", content="a")) + event(delta(content="a")) * (TOKENS - 2)
    body = texts + event(delta("length", content="b"))
    last = counted(TOKENS) | {"metrics": {"speculative_decoding": VLLM}}
    assert column(measured(body + event(last), endpoint="chat"), "accepted_tokens") == [3] * 3


def test_the_native_api_of_a_server_tells_in_its_counts() -> None:
    done = measured(native(**SGLANG), endpoint="sglang")
    assert column(done, "acceptance_histogram") == [[0, 1, 1]] * 3


def test_answers_without_drafts_have_no_columns_for_them() -> None:
    done = measured(completions(counted(TOKENS)))
    assert not set(COLUMNS) & set(done.requests.column_names)
    assert "speculative" not in done.facts


@pytest.mark.parametrize("odd", ["7", -1, 7.5, math.nan, [3], {"n": 3}, True, 10**30], ids=repr)
@pytest.mark.parametrize("field", ["num_spec_steps", "num_draft_tokens", "acceptance_histogram"])
def test_an_odd_count_costs_neither_run_nor_request(field: str, odd: Any) -> None:
    parts = {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 3, field: odd}
    done = measured(completions(counted(TOKENS) | {"metrics": {"speculative_decoding": parts}}))
    assert column(done, "status") == ["ok"] * 3
    if field == "acceptance_histogram" and odd == [3]:  # three steps that accepted nothing
        assert column(done, "accepted_tokens") == [0] * 3
        return
    assert column(done, "accepted_tokens") == [3] * 3
    assert any(f"{field} in the usage of 3 answers is no possible number" in text for text in map(str, done.warnings))


@pytest.mark.parametrize(
    "parts",
    [None, "none", [], {}, {"acceptance_histogram": None}, {"num_spec_steps": 2}, {"num_draft_tokens": 6}],
    ids=repr,
)
def test_partial_counts_are_left_out(parts: Any) -> None:
    done = measured(completions(counted(TOKENS) | {"metrics": {"speculative_decoding": parts}}))
    assert column(done, "status") == ["ok"] * 3
    drafted = Drafted.of(done.facts)
    assert drafted is None or drafted.accepted_tokens == 9  # 6 tokens in two steps after the first


def test_more_accepted_than_drafted_is_odd() -> None:
    odd: dict[str, str] = {}
    assert draft_counts([{"draft_n": 3, "draft_n_accepted": 4}], 8, odd) is None
    assert odd == {"draft_n_accepted": "4 of 3"}


def test_documents_of_any_depth_are_read() -> None:
    deep: Any = {"draft_n": 1, "draft_n_accepted": 1}
    for _ in range(500):
        deep = [deep]
    assert draft_counts([deep], 8, {}) is None
    assert draft_counts([{"a": [{"timings": {"draft_n": 2, "draft_n_accepted": 1}}]}], 8, {}) == DraftCounts(None, 2, 1)


def requests(*told: tuple[str, int | None, int | None, int | None, list[int] | None]) -> pa.Table:
    names = ("status", *COLUMNS)
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in told])


def counters(steps: float) -> pa.Table:
    rows = []
    for time_ns, value in enumerate((0.0, steps)):
        rows += [
            {"time_ns": time_ns, "name": f"vllm:spec_decode_num_{name}", "labels": labels, "value": value * each}
            for name, labels, each in (
                ("drafts_total", "{}", 1), ("draft_tokens_total", "{}", 3),
                ("accepted_tokens_per_pos_total", '{"position":"0"}', 0.5),
            )
        ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=SERVER_METRICS)


def test_answers_decide_only_where_all_of_them_tell() -> None:
    told, silent = ("ok", 2, 6, 3, [0, 1, 1]), ("ok", None, None, None, None)
    failed = ("failed", None, None, None, None)
    whole = Drafted.of(drafts(requests(told, told, failed), counters(100)))
    assert whole is not None
    assert (whole.steps, whole.accepted) == (4, (4, 2))
    by_server = Drafted.of(drafts(requests(told, silent), counters(100)))
    assert by_server is not None
    assert (by_server.steps, by_server.accepted) == (100, (50,))
    partly = Drafted.of(drafts(requests(told, silent), NO_METRICS))
    assert partly is not None
    assert partly.steps == 2


def test_sums_of_what_some_answers_lack_are_unknown() -> None:
    found = Drafted.of(drafts(requests(("ok", 2, 6, 3, [0, 1, 1]), ("ok", None, 6, 1, None)), NO_METRICS))
    assert found is not None
    assert (found.steps, found.acceptance, found.mean_acceptance_length) == (None, (), None)
    assert found.figures()["draft_acceptance_rate"] == pytest.approx(4 / 12)


def test_steps_of_one_token_each_are_no_drafts() -> None:
    assert Drafted.of(drafts(requests(("ok", 6, None, 0, None)), NO_METRICS)) is None
    assert Drafted.of(drafts(requests(("ok", None, 0, 0, None)), NO_METRICS)) is None
