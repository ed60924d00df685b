"""Faults of servers and connections that the client must survive, against real sockets."""

from __future__ import annotations

import itertools
import os
import time

import pyarrow as pa
import pytest

from ebbench.errors import RunError, UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from ebbench.records.schema import SAME_TIME_NS
from tests.client.client_runs import column, plan_of, run

# fault, expected status, expected class, what the kept body must contain
CASES = [
    ("reset:after=0", "failed", "connection_reset", "middle of the response"),
    ("reset:after=2", "failed", "connection_reset", "middle of the response"),
    ("close:after=2", "failed", "connection_closed", "middle of the response"),
    ("refuse", "failed", "connection_closed", "before any response"),
    ("truncate:after=0", "failed", "truncated", "without a finish reason"),
    ("truncate:after=3", "failed", "truncated", "without a finish reason"),
    ("malformed:after=2", "failed", "malformed_frame", '{"choices":[{"text":'),
    ("error-frame:after=0", "failed", "error_frame", "engine died"),
    ("error-frame:after=2", "failed", "error_frame", "engine died"),
    ("status:code=429,retry_after=7", "failed", "http_429", "(Retry-After: 7)"),
    ("status:code=503", "failed", "http_503", "fault: status 503"),
    ("status:code=400", "failed", "http_400", "fault: status 400"),
    ("empty", "failed", "empty_output", "0 tokens"),
    ("short:after=3", "failed", "short_output", "3 tokens where 6"),
    ("no-usage", "failed", "no_usage", "no usage"),
    ("split", "ok", None, None),
    ("crlf", "ok", None, None),
    ("miscount:factor=2", "ok", None, None),
    ("bundle:tokens=4", "ok", None, None),
]


@pytest.mark.parametrize("transport", ["direct", "httpx"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_each_fault_is_classified_and_nothing_is_retried(endpoint: str, transport: str) -> None:
    # Every second request gets the fault; the request after it must complete.
    faults = tuple(parse_fault(_numbered(fault, 2 * i + 1)) for i, (fault, *_) in enumerate(CASES))
    plan = plan_of(2 * len(CASES), concurrency=1)
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1, faults=faults)) as server:
        result = run(server.url, plan, endpoint=endpoint, transport=transport, id_prefix="")
        ledger = {entry.request_id: entry for entry in server.ledger()}

    rows = result.requests.to_pylist()
    assert len(ledger) == len(rows) == 2 * len(CASES)
    for (fault, status, error_class, body), row, after in zip(CASES, rows[::2], rows[1::2], strict=True):
        assert (row["status"], row["error_class"]) == (status, error_class), fault
        # httpx gives no details of a broken connection, so only the error class is compared.
        detail = "" if transport == "httpx" and error_class in ("connection_reset", "connection_closed") else body
        assert detail is None or detail in row["error_body"], fault
        assert after["status"] == "ok", fault
        if status == "ok":
            assert row["output_tokens"] == ledger[row["request_id"]].tokens == 6, fault
            assert len(row["itl_ns"]) == 5, fault
    by_fault = {fault: row for (fault, *_), row in zip(CASES, rows[::2], strict=True)}
    assert by_fault["bundle:tokens=4"]["bundled_tokens"]
    assert by_fault["bundle:tokens=4"]["itl_ns"].count(0) >= 4  # messages of 4 and 2 tokens: 3 + 1 zeros
    together = [gap < SAME_TIME_NS for gap in by_fault["split"]["itl_ns"]]
    assert by_fault["split"]["bundled_tokens"] == any(together)
    assert by_fault["status:code=429,retry_after=7"]["http_status"] == 429


def _numbered(fault: str, number: int) -> str:
    return f"{fault}{',' if ':' in fault else ':'}request={number}"


def test_a_stalled_server_cannot_hold_the_run() -> None:
    faults = tuple(parse_fault(f"stall:after={after},request={n}") for n, after in ((1, -1), (2, 0), (3, 2)))
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1, faults=faults)) as server:
        result = run(server.url, plan_of(6, concurrency=3), idle_timeout_s=2.0)
    assert column(result, "status") == ["timed_out"] * 3 + ["ok"] * 3
    assert column(result, "error_class")[:3] == ["first_token_timeout", "first_token_timeout", "idle_timeout"]
    assert column(result, "output_tokens")[:3] == [None] * 3


def test_an_answer_that_takes_too_long_ends_at_the_total_timeout() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=50)) as server:
        result = run(server.url, plan_of(1, output_tokens=1000), total_timeout_s=0.4)
        assert [entry.outcome for entry in server.ledger()] == ["disconnected"]
    assert column(result, "error_class") == ["total_timeout"]
    assert column(result, "status") == ["timed_out"]


def test_a_server_killed_after_some_completions_leaves_exact_counts() -> None:
    plan = plan_of(12, concurrency=1)
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1, faults=(parse_fault("kill:after=5"),))) as server:
        result = run(server.url, plan)
        assert server.process is not None
        assert server.process.wait(timeout=60) == 9
    assert column(result, "status") == ["ok"] * 5 + ["failed"] * 7
    assert set(column(result, "error_class")[5:]) <= {"connect_error", "connection_reset", "connection_closed"}


def test_a_server_that_is_not_there_is_reported_with_the_reason() -> None:
    with pytest.raises(RunError, match=r"127\.0\.0\.1:9 is not ready .*: .*is the server running"):
        run("http://127.0.0.1:9", plan_of(1), ready_timeout_s=0)


def test_a_server_that_never_gets_ready_is_not_measured() -> None:
    faults = (parse_fault("unready:ms=60000"), parse_fault("status:code=503"))
    with FakeServerProcess(FakeConfig(faults=faults)) as server:
        with pytest.raises(RunError, match="/health answers 503"):
            run(server.url, plan_of(1), ready_timeout_s=0.3)
        assert len(server.ledger()) == 1, "whether it answers all the same is tried once"


def test_a_taken_port_is_reported() -> None:
    with FakeServerProcess() as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(RunError, match="cannot listen"), FakeServerProcess(FakeConfig(port=port)):
            pytest.fail("two servers on one port")


def test_every_request_may_fail_and_all_are_accounted_for() -> None:
    with FakeServerProcess(FakeConfig(faults=(parse_fault("status:code=500"),))) as server:
        result = run(server.url, plan_of(5))
        with pytest.raises(RunError, match=r"every warm-up request failed.*http_500"):
            run(server.url, plan_of(5), warmup=2)
    assert column(result, "status") == ["failed"] * 5
    assert column(result, "first_token_ns") == [None] * 5


def test_durations_ignore_a_step_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 1e9 + 3600 * next(calls))
    monkeypatch.setattr(time, "time_ns", lambda: 10**18 + 3600 * 10**9 * next(calls))
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1)) as server:
        result = run(server.url, plan_of(4))
    assert all(0 <= end < 60e9 for end in column(result, "end_ns"))


def test_duplicate_ids_become_unique_and_two_clients_never_share_one() -> None:
    plan = plan_of(4, ids=["a", "a", "a#2", "b"])
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1)) as server:
        first, second = run(server.url, plan), run(server.url, plan)
        sent = [entry.request_id for entry in server.ledger()]
    assert column(first, "request_id") == ["a", "a#3", "a#2", "b"]
    assert any("made unique" in text for text in map(str, first.warnings))
    assert len(set(sent)) == 8
    for result in (first, second):
        own = {f"{result.facts['request_id_prefix']}{name}" for name in column(result, "request_id")}
        assert own <= set(sent)


def test_other_token_counts_are_noticed_and_the_servers_are_used() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1, faults=(parse_fault("miscount:factor=1.4"),))) as server:
        result = run(server.url, plan_of(4, input_tokens=100))
    assert column(result, "input_tokens") == [140] * 4
    assert any("counts prompt tokens otherwise" in text and "1.40" in text for text in map(str, result.warnings))


def test_requests_beyond_the_context_are_refused_before_anything_is_sent() -> None:
    plan = plan_of(3, input_tokens=5, output_tokens=6)
    with FakeServerProcess(FakeConfig(max_model_len=10)) as server:
        with pytest.raises(UsageError, match=r"3 of 3 requests exceed .* max_model_len 10"):
            run(server.url, plan)
        with pytest.raises(UsageError, match="every request exceeds"):
            run(server.url, plan, drop_too_long=True)
        assert server.ledger() == []


def test_requests_beyond_the_context_are_dropped_on_request_and_counted() -> None:
    plan = plan_of(3, input_tokens=5, output_tokens=6)
    index = plan.table.schema.get_field_index("output_tokens")
    field = plan.table.schema.field(index)
    table = plan.table.set_column(index, field, pa.array([6, 60, 6], pa.int32()))
    plan = type(plan)(table, plan.phases, {})
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1, max_model_len=20)) as server:
        result = run(server.url, plan, drop_too_long=True)
        assert len(server.ledger()) == 2
    assert column(result, "status") == ["ok", "never_sent", "ok"]
    assert column(result, "error_class")[1] == "too_long"
    assert any("1 request " in text and "left out" in text for text in map(str, result.warnings))


def test_the_api_key_reaches_the_server_and_nothing_else() -> None:
    key = "sk-secret-" + os.urandom(8).hex()
    with FakeServerProcess(FakeConfig(faults=(parse_fault("echo-auth"),))) as server:
        result = run(server.url, plan_of(2), environ={"EBBENCH_API_KEY": key})
        with pytest.raises(RunError, match=r"http_401.*Bearer \[hidden\]"):
            run(server.url, plan_of(2), environ={"EBBENCH_API_KEY": key}, warmup=1)
    assert column(result, "error_class") == ["http_401"] * 2
    assert all("Bearer [hidden]" in str(body) for body in column(result, "error_body"))
    assert key not in repr(result)
    assert key not in str(result.requests.to_pylist())
