"""The pure parts of the client: parsing, accounting, pacing, the shared schedule."""

from __future__ import annotations

import contextlib
from array import array

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.dialects import DIALECTS
from ebbench.client.release_schedule import NEVER, Arrivals, ReleaseSchedule, Slots, ramped, slow_start_ns
from ebbench.client.response import FirstMessage, StreamedResponse, classify, token_times
from ebbench.client.server_queries import parse
from ebbench.client.session_plan import plan_sessions, unique_ids
from ebbench.client.stream_messages import SseSplitter
from ebbench.client.verdict import lag_percentile_ns
from ebbench.errors import UsageError
from ebbench.fakeserver.scheduled_response import Messages
from ebbench.network.credentials import api_key
from ebbench.records import CHUNK_TOKENS
from ebbench.records.plan import ClosedPhase, token_ids
from ebbench.spec.client import ClientOptions
from tests.client.client_runs import plan_of

TEXT = "größe 漢字 🙂"


def _stream(line_end: str) -> bytes:
    events = [
        {"choices": [{"text": TEXT, "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": None}]},
        {"choices": [{"text": "end", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}},
    ]
    lines = ["\ufeff: hello", "event: x"]
    for event in events:
        lines += ["data: " + msgspec.json.encode(event).decode(), "id: 7", "", ": comment", ""]
    return (line_end.join([*lines, "data:[DONE]", "", ""])).encode()


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@given(data=st.data())
def test_any_split_of_the_bytes_gives_the_same_answer(line_end: str, data: st.DataObject) -> None:
    stream = _stream(line_end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=40)))
    answer = StreamedResponse(DIALECTS["completions"], keep_text=True)
    for piece, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(stream)], strict=True)):
        answer.feed(stream[start:end], piece + 1)
    assert answer.error_class is None
    assert answer.text == TEXT + "end"
    assert answer.finish_reason == "length"
    assert answer.done
    assert len(answer.times_ns) == 3
    assert classify(answer, 3, exact=True).status == "ok"


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_every_single_byte_split_gives_the_same_answer(line_end: str) -> None:
    stream = _stream(line_end)
    for cut in range(len(stream)):
        answer = StreamedResponse(DIALECTS["completions"], keep_text=True)
        answer.feed(stream[:cut], 1)
        answer.feed(stream[cut:], 2)
        assert (answer.text, answer.finish_reason, answer.done) == (TEXT + "end", "length", True), cut


def test_a_line_end_split_between_reads_is_one_line_end() -> None:
    splitter = SseSplitter()
    assert list(splitter.feed(b"data: a\r")) == []
    assert [event.data for event in splitter.feed(b"\ndata: b\r\n\r")] == [b"a\nb"]
    assert [event.data for event in splitter.feed(b"\ndata: c\r\n\r\n")] == [b"c"]
    assert not splitter.pending


def test_a_chat_stream_counts_content_not_the_role() -> None:
    messages = Messages("x", "m", chat=True, crlf=False)
    answer = StreamedResponse(DIALECTS["chat"], keep_text=True)
    for now, data in enumerate([messages.role(), messages.token(1, None), messages.token(1, "stop")], start=1):
        answer.feed(data, now)
    answer.feed(messages.usage(4, 2), 9)
    assert list(answer.times_ns) == [2, 3]
    assert classify(answer, 5, exact=False).output_tokens == 2


def test_reasoning_counts_as_output() -> None:
    answer = StreamedResponse(DIALECTS["chat"], keep_text=False)
    answer.feed(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n', 1)
    answer.feed(b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n', 2)
    assert list(answer.times_ns) == [1, 2]
    assert answer.empty == []


@pytest.mark.parametrize(
    "thought",
    ['"thinking":"so"', '"reasoning_text":"so"', '"reasoning_details":[{"type":"reasoning.text","text":"so"}]'],
)
def test_thinking_under_another_name_is_the_first_token(thought: str) -> None:
    answer = StreamedResponse(DIALECTS["chat"], keep_text=False)
    answer.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', 1)
    answer.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":"",%b}}]}\n\n' % thought.encode(), 2)
    answer.feed(b'data: {"choices":[{"delta":{"content":"yes"},"finish_reason":"stop"}]}\n\n', 3)
    answer.feed(b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n', 4)
    assert list(classify(answer, 2, exact=True).tokens.times_ns) == [2, 3]
    assert (answer.thinking_tokens, answer.first_answer_ns) == (1, 3)


def test_an_answer_begins_in_the_message_that_ends_the_thinking() -> None:
    answer = StreamedResponse(DIALECTS["chat"], keep_text=True)
    answer.feed(b'data: {"choices":[{"delta":{"reasoning":"so"}}]}\n\n', 1)
    answer.feed(b'data: {"choices":[{"delta":{"reasoning":".","content":"yes"}}]}\n\n', 2)
    answer.feed(b'data: {"choices":[{"delta":{"content":"!"}}]}\n\n', 3)
    assert (answer.first_answer_ns, answer.thinking_messages, answer.letters, answer.text) == (2, 2, 7, "yes!")


def test_a_token_without_text_beside_a_repeated_role_has_its_time() -> None:
    answer = StreamedResponse(DIALECTS["chat"], keep_text=False)
    for now, text in enumerate(["", "a", "", "b"], start=1):
        answer.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":"%b"}}]}\n\n' % text.encode(), now)
    answer.feed(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"completion_tokens":3}}\n\n', 9)
    assert list(classify(answer, 3, exact=True).tokens.times_ns) == [2, 3, 4]


def test_a_zero_that_repeats_a_count_does_not_replace_it() -> None:
    answer = StreamedResponse(DIALECTS["messages"], keep_text=False)
    answer.feed(b'data: {"type":"message_start","message":{"usage":{"input_tokens":8,"output_tokens":1}}}\n\n', 1)
    answer.feed(b'data: {"type":"message_delta","usage":{"input_tokens":0,"output_tokens":2}}\n\n', 2)
    assert (answer.counts().prompt, answer.counts().completion) == (8, 2)


def test_an_error_at_the_top_level_of_a_message_is_an_error() -> None:
    answer = StreamedResponse(DIALECTS["completions"], keep_text=False)
    answer.feed(b'data: {"object":"error","message":"out of memory","code":500}\n\n', 1)
    assert (answer.error_class, answer.error_body) == ("error_frame", "out of memory")
    harmless = StreamedResponse(DIALECTS["completions"], keep_text=False)
    harmless.feed(b'data: {"object":"ping"}\n\n', 1)
    assert harmless.error_class is None


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("usage", ['{"prompt_tokens":5,"completion_tokens":1}', "null"])
@pytest.mark.parametrize("reason", ["abort", "error", "Cancelled", "timeout", "insufficient_system_resource"])
def test_an_answer_the_server_gave_up_is_failed(reason: str, usage: str, exact: bool) -> None:
    answer = StreamedResponse(DIALECTS["completions"], keep_text=False)
    choice = f'{{"text":"a","finish_reason":"{reason}"}}'
    answer.feed(f'data: {{"choices":[{choice}],"usage":{usage}}}\n\ndata: [DONE]\n\n'.encode(), 1)
    verdict = classify(answer, 1, exact)
    assert (verdict.status, verdict.error_class) == ("failed", "aborted")
    assert verdict.error_body == f"the server ended the response with finish reason '{reason}' after 1 messages"


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_any_other_finish_reason_is_an_end(reason: str) -> None:
    answer = StreamedResponse(DIALECTS["completions"], keep_text=False)
    answer.feed(b'data: {"choices":[{"text":"a","finish_reason":"%b"}]}\n\n' % reason.encode(), 1)
    answer.feed(b'data: {"usage":{"completion_tokens":1}}\n\n', 2)
    assert classify(answer, 5, exact=False).status == "ok"


@pytest.mark.parametrize(
    ("times", "empty", "count", "expected", "bundled", "first"),
    [
        ([1, 2, 3], [], 3, [1, 2, 3], 0, 1),
        ([1, 2, 3], [], 9, [1, 2, 3], 6, 3),  # three tokens per message
        ([1, 2, 3], [2], 2, [1, 2], 0, 1),  # a closing message without text is no token
        ([1, 2, 3], [1], 3, [1, 2, 3], 0, 1),  # but an empty text may be one
        ([1, 2, 3, 4], [1, 3], 3, [1, 2, 3], 0, 1),
        ([1, 2, 3], [0], 2, [2, 3], 0, 1),  # the first token comes with the first text
        ([1, 2, 3], [0], 3, [2, 3], 1, 2),  # an empty token before it had no time of its own
        ([1, 2, 3], [0], 8, [2, 3], 6, 4),  # a message ahead of the prefill, then four tokens per message
        ([1, 2, 3, 4], [0, 3], 8, [2, 3], 6, 4),  # and a closing one
        ([1, 2, 3], [0, 1, 2], 2, [1, 2], 0, 1),  # no text at all
        ([1, 2, 3, 4], [], 2, [1, 4], 0, 1),  # a token in several messages
        ([1, 2, 3], [], 1, [1], 0, 1),
        ([], [], 4, [], 0, 1),
        ([1, 2], [], None, [1, 2], 0, 1),
    ],
)
def test_messages_are_reconciled_with_usage(
    times: list[int], empty: list[int], count: int | None, expected: list[int], bundled: int, first: int
) -> None:
    assert token_times(times, empty, count) == (array("q", expected), bundled, first)


@pytest.mark.parametrize(
    ("known", "first"),
    [
        (FirstMessage(tokens=2, share=0.9), 2),  # the server's count decides
        (FirstMessage(share=0.1), 1),  # then the length of the text
        (FirstMessage(share=0.5), 5),
        (FirstMessage(tokens=50), 8),  # the other two messages carry one each at least
    ],
)
def test_tokens_of_the_first_message_are_counted_or_estimated(known: FirstMessage, first: int) -> None:
    assert token_times([1, 2, 3], [], 10, known).first == first


@given(
    times=st.lists(st.integers(1, 10**6), min_size=1, max_size=30).map(sorted),
    count=st.integers(1, 60),
    data=st.data(),
)
def test_reconciled_times_always_add_up_to_the_count(times: list[int], count: int, data: st.DataObject) -> None:
    empty = sorted(data.draw(st.sets(st.integers(0, len(times) - 1))))
    kept, bundled, first = token_times(times, empty, count)
    assert len(kept) + bundled == count
    assert 1 <= first <= 1 + bundled
    assert set(kept) <= set(times)
    assert list(kept) == sorted(kept)


def test_a_wait_is_the_time_until_the_next_arrival() -> None:
    arrivals = Arrivals([0, 10, 10, 25])
    assert [arrivals.wait_ns(5, sent) for sent in range(5)] == [0, 5, 5, 20, NEVER]
    assert arrivals.wait_ns(100, 3) == 0


def _schedule(sessions: int, slots: Slots, arrivals: Arrivals | None = None) -> ReleaseSchedule:
    schedule = ReleaseSchedule(
        [0] * ReleaseSchedule.size(sessions), contextlib.nullcontext(), sessions, slots, arrivals
    )
    schedule.begin(1000)
    return schedule


@given(
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_the_schedule_keeps_order_and_limits(sizes: list[tuple[int, int]], order: object) -> None:
    phases = [ClosedPhase(str(i), n, limit) for i, (n, limit) in enumerate(sizes)]
    limit_of = [p.max_concurrency for p in phases for _ in range(p.sessions)]
    schedule = _schedule(len(limit_of), Slots.of_phases(phases))
    open_sessions: list[int] = []
    released: list[int] = []
    intended: list[int] = []
    now = 2000
    while True:
        while (release := schedule.take()) is not None:
            assert release.session == len(released)
            assert len(open_sessions) < limit_of[release.session]
            open_sessions.append(release.session)
            released.append(release.session)
            intended.append(release.intended_ns)
        if not open_sessions:
            break
        # No slot may stay empty while a session waits for it.
        assert schedule.finished or len(open_sessions) >= limit_of[len(released)]
        open_sessions.pop(order.randrange(len(open_sessions)))  # type: ignore[attr-defined]
        now += 7
        schedule.end(now)
    assert released == list(range(len(limit_of)))
    assert intended == sorted(intended)
    assert all(time == 1000 or (time - 2000) % 7 == 0 for time in intended)
    assert set(intended[: min(sizes[0])]) == {1000}


def test_new_slots_open_one_after_the_other() -> None:
    slots = Slots.of_phases([ClosedPhase("a", 6, 4), ClosedPhase("b", 9, 5)], spacing_ns=10)
    schedule = _schedule(15, slots)
    assert [schedule.take(), schedule.take()] == [(0, 1000), (1, 1010)]
    schedule.end(1015)
    assert [schedule.take() for _ in range(4)] == [(2, 1015), (3, 1020), (4, 1030), None]
    schedule.end(1100)
    # The first session of phase b finds a fifth slot, opened when its predecessor was released.
    assert [schedule.take() for _ in range(3)] == [(5, 1100), (6, 1100), None]


def test_a_lower_limit_lets_slots_lapse() -> None:
    schedule = _schedule(9, Slots.of_phases([ClosedPhase("a", 3, 3), ClosedPhase("b", 6, 1)]))
    assert [schedule.take() for _ in range(4)] == [(0, 1000), (1, 1000), (2, 1000), None]
    schedule.end(2000)
    schedule.end(3000)
    assert schedule.take() is None
    schedule.end(4000)
    assert [schedule.take(), schedule.take()] == [(3, 4000), None]


def test_the_slot_that_became_free_first_is_filled_first() -> None:
    schedule = _schedule(5, Slots.constant(2))
    assert [schedule.take(), schedule.take(), schedule.take()] == [(0, 1000), (1, 1000), None]
    schedule.end(5000)
    schedule.end(6000)
    assert [schedule.take(), schedule.take(), schedule.take()] == [(2, 5000), (3, 6000), None]
    schedule.stop()
    schedule.end(7000)
    assert schedule.take() is None
    assert schedule.finished


def test_an_open_loop_dates_a_release_by_its_arrival() -> None:
    schedule = _schedule(3, Slots.constant(1), Arrivals([5, 6, 10**18]))
    assert schedule.take() == (0, 1005)
    assert schedule.take() is None  # due, but over the limit
    schedule.end(9000)
    assert schedule.take() == (1, 1006)
    schedule.end(9500)
    assert schedule.take() is None  # not due


def test_lag_is_weighted_by_the_time_it_lasts() -> None:
    period = 10
    assert lag_percentile_ns([], 0.99) == 0.0
    assert lag_percentile_ns([0] * 100, 0.99, period) == pytest.approx(0.0, abs=1e-6)
    # 1,000 ticks on time and one of 1,000 ns: 9.1 % of the time was spent in the stall.
    late = [0] * 999 + [1000]
    total = 1000 * period + 1000
    assert lag_percentile_ns(late, 0.99, period) == pytest.approx(1000 - 0.01 * total)


def test_bodies_of_completions_and_chat() -> None:
    turn = Turn(0, "a", 1, 3, 9, 5, None, "and you?")
    completions = RequestBodies("m", ClientOptions(extra_body={"top_p": 0.5, "temperature": 1.0}))
    body = msgspec.json.decode(completions.build(turn, [("hi", " there")]))
    assert body["prompt"] == "hi there" + "and you?"
    assert (body["max_tokens"], body["ignore_eos"], body["top_p"], body["temperature"]) == (9, True, 0.5, 1.0)
    assert body["stream_options"] == {"include_usage": True}
    chat = msgspec.json.decode(
        RequestBodies("m", ClientOptions(endpoint="chat", ignore_eos=False)).build(turn, [("hi", " there")])
    )
    assert [m["role"] for m in chat["messages"]] == ["user", "assistant", "user"]
    assert chat["max_completion_tokens"] == 9
    assert "ignore_eos" not in chat
    ids = msgspec.json.decode(completions.build(Turn(0, "a", 0, 3, 9, 5, None, None)))["prompt"]
    assert ids == token_ids(5, None, 0, 3, 30_000).tolist()


@given(
    content=st.integers(-(2**63), 2**63 - 1),
    start=st.integers(0, 3000),
    count=st.integers(0, 1500),
    hashes=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
)
def test_token_ids_are_a_pure_function_of_position(content: int, start: int, count: int, hashes: list[int]) -> None:
    whole = token_ids(content, hashes, 0, start + count, 1000)
    assert np.array_equal(token_ids(content, hashes, start, count, 1000), whole[start:])
    assert whole.size == 0 or (whole.min() >= 0 and whole.max() < 1000)


def test_equal_hash_ids_give_equal_chunks_and_others_do_not() -> None:
    one = token_ids(1, [7, 8], 0, 3 * CHUNK_TOKENS, 50_000)
    two = token_ids(2, [7, 9], 0, 3 * CHUNK_TOKENS, 50_000)
    chunks = [slice(i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS) for i in range(3)]
    assert np.array_equal(one[chunks[0]], two[chunks[0]])
    for chunk in chunks[1:]:
        assert np.mean(one[chunk] == two[chunk]) < 0.01
    assert np.bincount(token_ids(3, None, 0, 100_000, 10)).min() > 9_500
    with pytest.raises(ValueError, match="is invalid"):
        token_ids(1, None, -1, 5, 10)


def test_sessions_are_grouped_by_first_appearance_and_turns_ordered() -> None:
    plan = plan_of(3, turns=2)
    shuffled = plan.table.take(pa.array([3, 0, 5, 2, 1, 4]))
    session_plan = plan_sessions(shuffled, plan.phases, None)
    ids = [[session_plan.turn(row).request_id for row in session_plan.turns(s)] for s in range(session_plan.sessions)]
    assert ids == [["r2", "r3"], ["r0", "r1"], ["r4", "r5"]]


def test_open_loop_sessions_are_released_in_the_order_of_arrival() -> None:
    plan = plan_of(3, arrivals_ms=[30, 10, 20], concurrency=None)
    session_plan = plan_sessions(plan.table, (), None)
    assert [session_plan.turn(session_plan.turns(s)[0]).request_id for s in range(3)] == ["r1", "r2", "r0"]
    assert session_plan.arrivals is not None
    assert list(session_plan.arrivals.arrival_ns) == [10_000_000, 20_000_000, 30_000_000]
    with pytest.raises(UsageError, match="arrival time"):
        plan_sessions(plan_of(2).table, (), None)
    with pytest.raises(UsageError, match="no requests"):
        plan_sessions(plan.table.slice(0, 0), (), None)


@given(st.lists(st.sampled_from(["a", "b", "a#2", "a#3"]), min_size=1, max_size=12))
def test_ids_become_unique_and_first_ones_stay(ids: list[str]) -> None:
    table, changed = unique_ids(plan_of(len(ids), ids=ids).table)
    unique = table.column("request_id").to_pylist()
    assert len(set(unique)) == len(ids)
    assert changed == len(ids) - len(set(ids))
    for position, name in enumerate(ids):
        if name not in ids[:position]:
            assert unique[position] == name


def test_prometheus_samples_are_keyed_by_name_and_labels() -> None:
    page = 'a_total{y="2",x="1"} 3\na_created{x="1"} 9\n# TYPE b gauge\nb 0.5\n'
    assert parse(page) == {("a_total", '{"x":"1","y":"2"}'): 3.0, ("b", "{}"): 0.5}
    assert parse("not { metrics") == {}


def test_options_refuse_what_makes_no_sense() -> None:
    for settings, message in [
        ({"endpoint": "answers"}, "unknown endpoint"),
        ({"idle_timeout_s": 0}, "--idle-timeout"),
        ({"workers": -1}, "--workers"),
        ({"headers": {"x": "a\r\nb: c"}}, "line break"),
        ({"extra_body": {"n": 2}}, "several answers"),
        ({"vocab_size": 0}, "--vocab-size"),
        ({"warmup": -1}, "--warmup"),
    ]:
        with pytest.raises(UsageError, match=message):
            ClientOptions(**settings)  # type: ignore[arg-type]
    assert api_key({"OPENAI_API_KEY": "a", "EBBENCH_API_KEY": "b"}) == "b"
    assert api_key({"OPENAI_API_KEY": "a", "EBBENCH_API_KEY": " \n"}) == "a"
    assert api_key({"OPENAI_API_KEY": ""}) is None


@pytest.mark.parametrize("key", ["a\r\nx-other: b", "clé"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(key: str) -> None:
    assert api_key({"OPENAI_API_KEY": "a-b\n"}) == "a-b"
    with pytest.raises(UsageError, match="OPENAI_API_KEY holds") as refused:
        api_key({"OPENAI_API_KEY": key})
    assert key not in str(refused.value)


def test_a_ramp_slows_the_start_and_keeps_the_rest() -> None:
    planned = np.arange(0, 10_000, 10, dtype=np.int64)
    slowed = slow_start_ns(planned, 2_000)
    assert slowed[0] == 0
    assert np.all(np.diff(slowed) >= 10)
    after = planned >= 1_000  # half the ramp's arrivals are missing, the others come half a ramp later
    assert np.array_equal(slowed[after], planned[after] + 1_000)
    for t in (500, 1_000, 2_000):  # by t the ramp has let through rate * t^2 / (2 ramp)
        assert np.sum(slowed < t) == pytest.approx(t * t / 4_000 / 10, abs=1.5)


def test_a_ramp_of_a_plan_moves_first_turns_only_or_spaces_the_slots() -> None:
    open_loop = plan_of(3, arrivals_ms=[0, 100, 900], turns=2, concurrency=None)
    plan, options = ramped(open_loop, ClientOptions(), 1.0)
    assert plan.table.column("arrival_ns").to_pylist()[::2] == [0, round((0.2e18) ** 0.5), 1_400_000_000]
    assert plan.table.column("arrival_ns").to_pylist()[1::2] == [None] * 3
    assert plan.facts["ramp_up_s"] == 1.0
    assert options == ClientOptions()
    closed, options = ramped(plan_of(8, concurrency=4), ClientOptions(), 1.0)
    assert options.slot_spacing_s == 0.25
    assert closed.table.equals(plan_of(8, concurrency=4).table)
    with pytest.raises(UsageError, match="--ramp-up"):
        ramped(open_loop, ClientOptions(), 0.0)
