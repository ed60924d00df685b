"""Whole runs: schedules, sessions, workers, interruptions, and client stalls that make a run INVALID."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ebbench.client import DriveResult, drive
from ebbench.errors import UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess, LedgerEntry, parse_fault
from ebbench.records.plan import ClosedPhase, Progress
from ebbench.records.schema import REQUESTS
from ebbench.spec.client import ClientOptions
from ebbench.workloads import build_plan
from tests.client.client_runs import column, plan_of, run

QUICK = FakeConfig(ttft_ms=2, itl_ms=1)


def test_an_open_loop_keeps_its_intended_times_with_many_workers() -> None:
    arrivals_ms = [5.0 * i for i in range(30)]
    with FakeServerProcess(QUICK) as server:
        result = run(server.url, plan_of(30, arrivals_ms=arrivals_ms, concurrency=None), workers=3)
    assert column(result, "intended_ns") == [round(ms * 1e6) for ms in arrivals_ms]
    assert set(column(result, "status")) == {"ok"}
    assert set(column(result, "worker")) == {0, 1, 2}
    for row in result.requests.to_pylist():
        assert row["sent_ns"] >= row["intended_ns"]


def test_a_capped_open_loop_waits_but_does_not_move_the_intended_start() -> None:
    plan = plan_of(8, arrivals_ms=[0.0] * 8, concurrency=2, output_tokens=20)
    with FakeServerProcess(QUICK) as server:
        result = run(server.url, plan, workers=2)
        assert _most_at_once(server.ledger()) == 2
    assert column(result, "intended_ns") == [0] * 8
    assert set(column(result, "status")) == {"ok"}


@pytest.mark.parametrize("workers", [0, 3])
def test_a_closed_loop_holds_its_concurrency_in_each_phase(workers: int) -> None:
    phases = (ClosedPhase("a", 12, 3), ClosedPhase("b", 30, 9), ClosedPhase("c", 10, 2))
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=1)) as server:
        result = run(server.url, plan_of(52, phases=phases), workers=workers)
        entries = server.ledger()
    assert set(column(result, "status")) == {"ok"}
    assert _most_at_once(entries[:12]) == 3
    assert _most_at_once(entries) == 9
    if workers == 0:
        assert column(result, "sent_ns") == sorted(column(result, "sent_ns")), "released in plan order"
    intended = column(result, "intended_ns")
    assert intended[:3] == [0, 400_000, 800_000]  # the slots of a phase open one after the other
    assert set(intended[3:12]) <= set(column(result, "end_ns"))  # and later become free when a request ends


def _most_at_once(entries: list[LedgerEntry]) -> int:
    """The most requests the server had open at a time, from its own ledger."""
    events = sorted([(e.received_ns, 1) for e in entries] + [(e.done_ns or 0, -1) for e in entries])
    return int(np.cumsum([step for _, step in events]).max())


def test_turns_follow_each_other_and_real_answers_enter_the_next_prompt() -> None:
    plan = plan_of(2, turns=3, prompts=["one two", " three", " four"] * 2, output_tokens=4)
    with FakeServerProcess(QUICK) as server:
        prompt_tokens = [2, 2 + 4 + 1, 7 + 4 + 1]  # the fake server counts words; each answer has four
        for endpoint in ("completions", "chat"):
            result = run(server.url, plan, endpoint=endpoint, id_prefix=endpoint)
            rows = result.requests.to_pylist()
            assert [row["input_tokens"] for row in rows] == prompt_tokens * 2
            for before, after in pairwise(rows):
                if after["turn"] > 0:
                    assert after["intended_ns"] == before["end_ns"]


def test_prompts_that_hold_their_history_are_sent_unchanged() -> None:
    plan = plan_of(1, turns=2, prompts=["a b c", "a b c d e f"])
    with FakeServerProcess(QUICK) as server:
        result = run(server.url, plan)
    assert column(result, "input_tokens") == [3, 6]


def test_a_failed_turn_ends_its_session_and_the_rest_is_accounted_for() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1, faults=(parse_fault("status:request=2"),))) as server:
        result = run(server.url, plan_of(2, turns=3, concurrency=1))
        assert len(server.ledger()) == 5
    assert column(result, "status") == ["ok", "failed", "never_sent", "ok", "ok", "ok"]
    assert column(result, "error_class")[2] == "earlier_turn_failed"


def test_batches_arrive_while_the_run_goes_on_and_add_up() -> None:
    batches: list[pa.Table] = []
    snapshots: list[Progress] = []

    class Watcher:
        def update(self, progress: Progress) -> None:
            snapshots.append(progress)

    faults = (parse_fault("status:code=503,request=3"),)
    with FakeServerProcess(FakeConfig(ttft_ms=100, itl_ms=10, faults=faults)) as server:
        result = drive(server.url, plan_of(20), ClientOptions(workers=1), Watcher(), batches.append, {})
    assert len(batches) > 1
    together = pa.concat_tables(batches)
    assert together.schema == REQUESTS
    assert sorted(together.column("request_id").to_pylist()) == sorted(column(result, "request_id"))
    last = snapshots[-1]
    assert (last.completed, last.planned, last.output_tokens) == (19, 20, 19 * 6)
    assert last.failures == {"http_503": 1}
    assert last.ttft_ms is not None
    assert last.ttft_ms >= 100
    assert last.tpot_ms is not None
    assert result.server_metrics.num_rows > 0
    names = set(result.server_metrics.column("name").to_pylist())
    assert "vllm:generation_tokens_total" in names


def test_warm_up_is_not_recorded_and_the_prefix_cache_is_reset_after_it() -> None:
    with FakeServerProcess(QUICK) as server:
        result = run(server.url, plan_of(4), warmup=3, metrics_interval_s=0.05)
        ids = [entry.request_id for entry in server.ledger()]
    assert sum(name.startswith("warmup-") for name in ids) == 3
    assert result.requests.num_rows == 4
    assert result.facts["prefix_cache_reset"]
    table = result.server_metrics.to_pylist()
    assert {row["value"] for row in table if row["name"] == "fake:cache_resets_total"} == {1.0}


def test_text_is_kept_on_request_and_the_model_must_be_served() -> None:
    with FakeServerProcess(QUICK) as server:
        result = run(server.url, plan_of(2, output_tokens=3), keep_text=True)
        assert column(result, "text") == [" a a a"] * 2
        with pytest.raises(UsageError, match="does not serve 'other'; it serves fake-model"):
            run(server.url, plan_of(1), model="other")
    with pytest.raises(UsageError, match="no server URL"):
        run("localhost:8000", plan_of(1))


def _workers() -> list[int]:
    """Process ids of this process's client workers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"-m\0ebbench.client\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def _while_running(
    server: FakeServerProcess, options: ClientOptions, act: Callable[[], None], *, answers: int = 1, **plan: Any
) -> DriveResult:
    """Drive in a thread of its own and ``act`` once the server has given so many answers."""
    results: list[DriveResult] = []
    body = threading.Thread(target=lambda: results.append(drive(server.url, plan_of(**plan), options, environ={})))
    body.start()
    deadline = time.monotonic() + 120
    while len(server.ledger()) < answers and time.monotonic() < deadline:
        time.sleep(0.05)
    act()
    body.join(timeout=60)
    assert results, "the run did not end"
    return results[0]


def test_a_worker_that_is_stopped_for_a_while_makes_the_run_invalid() -> None:
    def stop_for_a_while() -> None:
        (worker,) = _workers()
        os.kill(worker, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(worker, signal.SIGCONT)

    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=10)) as server:
        result = _while_running(server, ClientOptions(workers=1), stop_for_a_while, sessions=24, output_tokens=20)
    assert set(column(result, "status")) == {"ok"}
    assert any("event loop stalled" in reason for reason in map(str, result.invalid))


def test_a_loop_stalled_by_its_own_process_makes_the_run_invalid() -> None:
    class Slow:
        def update(self, progress: Progress) -> None:
            time.sleep(0.15)

    with FakeServerProcess(FakeConfig(ttft_ms=5, itl_ms=10)) as server:
        result = drive(server.url, plan_of(8, output_tokens=30), ClientOptions(workers=0), Slow(), environ={})
    assert any("event loop stalled" in reason for reason in map(str, result.invalid))


def test_a_killed_worker_loses_only_its_own_requests() -> None:
    def kill_one() -> None:
        os.kill(_workers()[0], signal.SIGKILL)

    options = ClientOptions(workers=2, metrics_interval_s=None)
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=20)) as server:
        # After as many answers as are open at a time, each worker has begun with its share.
        result = _while_running(server, options, kill_one, answers=8, sessions=60, output_tokens=30, concurrency=8)
    statuses = column(result, "status")
    assert len(statuses) == 60
    assert {"failed", "never_sent"} <= set(statuses) <= {"ok", "failed", "cancelled", "never_sent"}
    lost = [row for row in result.requests.to_pylist() if row["status"] == "failed"]
    assert {row["error_class"] for row in lost} == {"worker_lost"}
    assert any("died" in reason for reason in map(str, result.invalid))
    assert _workers() == []


@pytest.mark.parametrize("interrupts", [1, 2])
def test_one_interrupt_drains_and_two_abort(interrupts: int) -> None:
    class Interrupting:
        sent = 0

        def update(self, progress: Progress) -> None:
            if progress.completed >= 4 and self.sent < interrupts:
                self.sent += 1
                os.kill(os.getpid(), signal.SIGINT)

    faults = (parse_fault("stall:after=1,request=2"),) if interrupts == 2 else ()
    before = signal.getsignal(signal.SIGINT)
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=20, faults=faults)) as server:
        options = ClientOptions(workers=1, idle_timeout_s=60)
        result = drive(server.url, plan_of(200, output_tokens=5), options, Interrupting(), environ={})
        answered = {e.request_id.split("-")[1] for e in server.ledger() if e.outcome == "length"}
    assert signal.getsignal(signal.SIGINT) == before
    assert result.interrupted
    statuses = column(result, "status")
    assert len(statuses) == 200
    assert statuses.count("never_sent") > 100
    kept = {r["request_id"] for r in result.requests.to_pylist() if r["status"] == "ok"}
    if interrupts == 1:
        assert set(statuses) == {"ok", "never_sent"}
        assert kept == answered
    else:
        assert "cancelled" in statuses
        assert kept <= answered


def test_an_interrupt_ends_a_session_after_its_running_turn() -> None:
    class Interrupting:
        sent = False

        def update(self, progress: Progress) -> None:
            if progress.completed >= 2 and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)

    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=10)) as server:
        plan = plan_of(2, turns=300, output_tokens=3)
        result = drive(server.url, plan, ClientOptions(workers=1), Interrupting(), environ={})
    statuses = column(result, "status")
    assert set(statuses) == {"ok", "never_sent"}
    assert 2 <= statuses.count("ok") < 300
    assert set(column(result, "error_class")) == {None, "not_released"}


def test_a_poisson_plan_has_the_dispersion_and_the_rate_it_claims() -> None:
    plan = build_plan("balanced", "poisson", num_prompts=200_000, request_rate=200.0, seed=3, source="profile")
    arrivals_s = plan.table.column("arrival_ns").to_numpy() / 1e9
    assert len(arrivals_s) / arrivals_s[-1] == pytest.approx(200, rel=0.01)
    counts = np.bincount((arrivals_s / 0.05).astype(int))[:-1]  # 20,000 windows: the index's error is 0.01
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.05)


def test_workers_share_one_schedule_so_a_poisson_plan_stays_poisson() -> None:
    plan = build_plan(
        "balanced", "poisson", num_prompts=300, request_rate=200.0, seed=5, source="profile", input_len=8, output_len=2
    )
    with FakeServerProcess(QUICK) as server:
        result = run(server.url, plan, workers=4)
        received = sorted(entry.received_ns for entry in server.ledger())
    assert column(result, "intended_ns") == plan.table.column("arrival_ns").to_pylist()
    assert len(received) == 300
    # What reached the server is the plan, gap by gap; the tolerance is for a busy test machine.
    planned = np.diff(plan.table.column("arrival_ns").to_numpy())
    assert np.median(np.abs(np.diff(received) - planned)) < 5e6
    assert result.facts["client_workers"] == 4
