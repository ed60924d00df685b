"""Pauses, parallel requests of a session and hang-ups over HTTP."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from ebbench.client import drive
from ebbench.client.bodies import RequestBodies, Turn
from ebbench.fakeserver import FakeConfig, FakeServerProcess, LedgerEntry, parse_fault
from ebbench.records.plan import Plan, Progress
from ebbench.records.schema import PLAN_EXTRAS
from ebbench.spec.client import ClientOptions
from tests.client.client_runs import column, plan_of, run

QUICK = FakeConfig(ttft_ms=5, itl_ms=2)


def with_columns(plan: Plan, **columns: Sequence[Any]) -> Plan:
    table = plan.table
    for name, values in columns.items():
        field = PLAN_EXTRAS.field(name) if name in PLAN_EXTRAS.names else table.schema.field(name)
        if name in table.column_names:
            table = table.drop([name])
        table = table.append_column(field, pa.array(values, field.type))
    return replace(plan, table=table)


def closed(server: FakeServerProcess) -> list[LedgerEntry]:
    """The ledger once the server has noticed the end of every request."""
    while any(entry.outcome == "open" for entry in server.ledger()):
        time.sleep(0.01)
    return server.ledger()


def test_a_pause_delays_the_next_turn() -> None:
    plan = with_columns(plan_of(1, turns=2, concurrency=1), pause_ns=[None, 150_000_000])
    with FakeServerProcess(QUICK) as server:
        first, second = run(server.url, plan).requests.to_pylist()
    assert second["intended_ns"] == first["end_ns"] + 150_000_000
    assert second["sent_ns"] >= second["intended_ns"]
    assert second["status"] == "ok"


@pytest.mark.parametrize("workers", [0, 2])
def test_sub_requests_are_open_at_the_same_time_and_are_joined(workers: int) -> None:
    plan = with_columns(
        plan_of(3, turns=5, concurrency=3, output_tokens=20),
        after=[None, [0], [0], [0], [1, 2, 3]] * 3,
        content=list(range(15)),
    )
    with FakeServerProcess(QUICK) as server:
        rows = run(server.url, plan, workers=workers).requests.to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    for session in range(3):
        start, *parallel, joined = rows[5 * session : 5 * session + 5]
        assert {row["intended_ns"] for row in parallel} == {start["end_ns"]}
        assert max(row["first_token_ns"] for row in parallel) < min(row["end_ns"] for row in parallel)
        assert joined["intended_ns"] == max(row["end_ns"] for row in parallel)


@pytest.mark.parametrize("output_tokens", [(5, 5, 60), (5, 60, 5)])
def test_a_closed_loop_waits_for_the_last_parallel_request(
    output_tokens: tuple[int, ...],
) -> None:
    plan = with_columns(
        plan_of(2, turns=3, concurrency=1),
        after=[None, [0], [0]] * 2,
        content=list(range(6)),
        output_tokens=output_tokens * 2,
    )
    with FakeServerProcess(QUICK) as server:
        rows = run(server.url, plan).requests.to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * 6
    assert rows[3]["intended_ns"] == max(row["end_ns"] for row in rows[:3])


def test_a_failed_sub_request_ends_only_what_waits_for_it() -> None:
    plan = with_columns(plan_of(1, turns=5, concurrency=1), after=[None, [0], [0], [1, 2], [2]], content=list(range(5)))
    config = replace(QUICK, faults=(parse_fault("status:request=2,code=500"),))
    with FakeServerProcess(config) as server:
        rows = run(server.url, plan).requests.to_pylist()
    failed = {row["turn"] for row in rows if row["status"] == "failed"}
    assert len(failed) == 1
    assert failed < {1, 2}
    lost = {3} if failed == {1} else {3, 4}
    for row in rows:
        if row["turn"] in lost:
            assert (row["status"], row["error_class"]) == ("never_sent", "earlier_turn_failed")
        elif row["turn"] not in failed:
            assert row["status"] == "ok"


def test_a_client_that_hangs_up_is_abandoned_with_the_tokens_made_so_far() -> None:
    plan = plan_of(2, turns=2, concurrency=2, output_tokens=600)
    plan = with_columns(plan, hang_up_ns=[800_000_000, None, None, None])
    with FakeServerProcess(replace(QUICK, itl_ms=5)) as server:
        result = run(server.url, plan)
        entries = {entry.request_id.split("-")[-1]: entry for entry in closed(server)}
    left, never, *whole = result.requests.to_pylist()
    assert (left["status"], left["error_class"], left["finish_reason"]) == ("abandoned", None, None)
    assert (never["status"], never["error_class"]) == ("never_sent", "earlier_turn_abandoned")
    assert [row["status"] for row in whole] == ["ok", "ok"]
    seen = entries["r0"]
    assert seen.outcome == "disconnected"
    assert 1 < left["output_tokens"] <= seen.tokens < 600
    assert left["output_tokens"] == len(left["itl_ns"]) + 1
    assert left["end_ns"] - left["sent_ns"] >= 800_000_000


def test_bundled_tokens_before_a_hang_up_count_by_the_usage_so_far() -> None:
    config = replace(QUICK, itl_ms=5, faults=(parse_fault("bundle:tokens=4"),))
    plan = with_columns(plan_of(1, concurrency=1, output_tokens=4000), hang_up_ns=[800_000_000])
    with FakeServerProcess(config) as server:
        (left,) = run(server.url, plan).requests.to_pylist()
        (seen,) = closed(server)
    assert left["status"] == "abandoned"
    assert left["output_tokens"] % 4 == 0
    assert 4 < left["output_tokens"] <= seen.tokens


def test_an_aborted_request_closes_its_connection() -> None:
    plan = plan_of(12, concurrency=1, output_tokens=120)  # 600 ms per response, if it is not stopped
    with FakeServerProcess(replace(QUICK, itl_ms=5)) as server:
        result = run(server.url, plan, total_timeout_s=0.2)
        outcomes = {entry.outcome for entry in closed(server)}
    assert set(column(result, "status")) == {"timed_out"}
    assert outcomes == {"disconnected"}


def test_only_requests_that_may_hang_up_ask_for_usage_per_message() -> None:
    turn = Turn(0, "r", 0, 5, 6, 0, None, None)
    bodies = RequestBodies("m", ClientOptions())
    asked = [json.loads(bodies.build(turn, may_hang_up=may))["stream_options"] for may in (False, True)]
    assert asked == [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]


def test_ctrl_c_ends_a_pause_at_once() -> None:
    class Interrupting:
        sent = False

        def update(self, progress: Progress) -> None:
            if progress.completed >= 1 and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)

    plan = with_columns(plan_of(1, turns=2, concurrency=1), pause_ns=[None, 600 * 10**9])
    with FakeServerProcess(QUICK) as server:
        result = drive(server.url, plan, ClientOptions(workers=1, metrics_interval_s=None), Interrupting(), environ={})
    assert result.interrupted
    assert column(result, "status") == ["ok", "never_sent"]
    assert column(result, "error_class") == [None, "not_released"]
