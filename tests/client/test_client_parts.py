"""A plan split over client machines, and the alignment of their clocks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.client.messages import Place, RequestRecord
from ebbench.client.nodes import (
    ClientNode,
    ClockOffset,
    NodeSenders,
    Sending,
    alignment_error_ns,
    check_reachable,
    client_nodes,
    clock_offset,
    measured_offset,
    this_place,
)
from ebbench.client.session_plan import MachineLoad, PlanPart, shares, split
from ebbench.config.server_url import ServerUrl
from ebbench.errors import EbbenchError, UsageError
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.spec.client import ClientOptions, read_senders
from tests.client.client_runs import plan_of


def part_of(plan: Plan, dropped: frozenset[int] = frozenset()) -> PlanPart:
    load = MachineLoad(
        ServerUrl.parse("http://10.0.0.9"), "m", ClientOptions(), "x-", plan.phases, plan.max_concurrency, dropped, 100
    )
    return PlanPart(np.arange(len(plan)), plan.table, load)


@st.composite
def plans(draw: st.DrawFn) -> tuple[PlanPart, int]:
    machines = draw(st.integers(1, 5))
    turns = draw(st.integers(1, 3))
    if draw(st.booleans()):
        limits = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(machines, 12)), min_size=1, max_size=4))
        phases = tuple(ClosedPhase(str(i), count + machines, limit) for i, (count, limit) in enumerate(limits))
        plan = plan_of(sum(phase.sessions for phase in phases), turns=turns, phases=phases)
    else:
        times = draw(st.lists(st.integers(0, 50), min_size=machines, max_size=40))
        cap = draw(st.none() | st.integers(machines, 9))
        plan = plan_of(len(times), turns=turns, arrivals_ms=[float(ms) for ms in times], concurrency=cap)
    dropped = frozenset(draw(st.sets(st.integers(0, len(plan) - 1), max_size=4)))
    return part_of(plan, dropped), machines


@given(plans())
def test_every_session_is_in_one_part_with_all_its_turns(asked: tuple[PlanPart, int]) -> None:
    plan, machines = asked
    parts = split(plan, machines)
    assert sorted(np.concatenate([part.rows for part in parts]).tolist()) == list(range(len(plan.rows)))
    assert {int(part.rows[row]) for part in parts for row in part.load.dropped} == plan.load.dropped
    seen: set[int] = set()
    for part in parts:
        assert part.table.equals(plan.table.take(part.rows))
        own = set(part.table["session"].to_pylist())
        assert own
        assert not own & seen
        seen |= own
        released = [int(part.rows[row]) for row in part.sessions.rows]
        position = {row: place for place, row in enumerate(plan.sessions.rows)}
        assert [position[row] for row in released] == sorted(position[row] for row in released)
    for number, phase in enumerate(plan.load.phases):
        assert sum(part.load.phases[number].max_concurrency for part in parts) == phase.max_concurrency
        assert sum(part.load.phases[number].sessions for part in parts) == phase.sessions
        for part in parts:  # each machine's share of the sessions is its share of the slots, to less than a session
            due = phase.sessions * part.load.phases[number].max_concurrency / phase.max_concurrency
            assert abs(part.load.phases[number].sessions - due) < machines
    if plan.load.max_concurrency is not None:
        assert sum(part.load.max_concurrency or 0 for part in parts) == plan.load.max_concurrency


@given(st.integers(1, 500), st.integers(1, 40))
def test_shares_differ_by_one_at_most(limit: int, machines: int) -> None:
    found = shares(limit, machines)
    assert (sum(found), len(found)) == (limit, machines)
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(8, concurrency=2),
        plan_of(2, concurrency=8),
        plan_of(9, arrivals_ms=[0.0] * 9, concurrency=2),
        plan_of(3, phases=(ClosedPhase("a", 2, 4), ClosedPhase("b", 1, 4))),
    ],
)
def test_a_machine_without_slot_or_session_is_refused(plan: Plan) -> None:
    with pytest.raises(UsageError, match="3 client nodes need a session each"):
        split(part_of(plan), 3)


@given(
    offset=st.integers(-(10**15), 10**15), exchanges=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)),
    min_size=1, max_size=20),
)  # fmt: skip
def test_the_clock_offset_is_off_by_half_a_round_trip_at_most(offset: int, exchanges: list[tuple[int, int]]) -> None:
    now, found = 10**12, []
    for there_ns, back_ns in exchanges:
        found.append(clock_offset(now, now + there_ns + offset, now + there_ns + back_ns))
        now += 10**9
    best = min(found, key=lambda one: one.round_trip_ns)
    assert abs(best.offset_ns - offset) <= best.error_ns


@given(
    start=st.integers(-(10**9), 10**9), drift=st.integers(-(10**8), 10**8),
    errors=st.tuples(*[st.tuples(st.integers(0, 10**6), st.floats(-1, 1))] * 2),
)  # fmt: skip
def test_the_alignment_error_bounds_drift_and_both_estimates(
    start: int, drift: int, errors: tuple[tuple[int, float], tuple[int, float]]
) -> None:
    """Whatever the true offsets were within the errors of both estimates, the one used is off by less."""
    (before_error, before_way), (after_error, after_way) = errors
    before = ClockOffset(start + round(before_error * before_way), 2 * before_error)
    after = ClockOffset(start + drift + round(after_error * after_way), 2 * after_error)
    worst = max(abs(before.offset_ns - start), abs(before.offset_ns - (start + drift)))
    assert worst <= alignment_error_ns(before, after)


def test_the_offset_is_measured_on_a_clock_that_is_ahead() -> None:
    ahead_ns = 3_600 * 10**9

    async def read() -> int:
        await asyncio.sleep(0.0005)
        return time.monotonic_ns() + ahead_ns

    found = asyncio.run(measured_offset(read, 10))
    assert abs(found.offset_ns - ahead_ns) <= found.error_ns


def node(address: str = "10.0.0.2", **place: Any) -> ClientNode:
    here = this_place()
    there = Place(**{name: place.get(name, getattr(here, name)) for name in here.__struct_fields__})
    return ClientNode(None, address, None, there)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:8000", "https://[::1]:8000"])
def test_a_loopback_address_is_refused_where_a_node_is_elsewhere(url: str) -> None:
    check_reachable(url, [node(), node()])
    for elsewhere in (node(machine="another"), node(network="net:[1]")):
        with pytest.raises(UsageError, match=r"10\.0\.0\.2 cannot reach"):
            check_reachable(url, [node(), elsewhere])
        check_reachable("http://10.0.0.1:8000", [node(), elsewhere])


def sending(plan: Plan, machines: int = 2) -> NodeSenders:
    parts = split(part_of(plan), machines)
    nodes = [node(f"10.0.0.{i}") for i in range(machines)]
    found = [Sending(one, part) for one, part in zip(nodes, parts, strict=True)]
    for one in found:
        one.before, one.after = ClockOffset(5, 2_000_000), ClockOffset(4_000_005, 2_000_000)
    return NodeSenders(found, {})


def test_clocks_that_agree_worse_than_the_lag_limit_make_the_run_invalid() -> None:
    senders = sending(plan_of(8))
    found = senders.findings(limit_ms=5.1)
    assert found.facts["clock_alignment_error_ms"] == 5.0  # a drift of 4 ms, known to 1 ms
    assert found.invalid == ()
    (reason,) = map(str, senders.findings(limit_ms=4.9).invalid)
    assert "agree to 5.0 ms" in reason


def test_requests_of_a_lost_node_are_recorded_once_with_their_own_class() -> None:
    plan = plan_of(10, turns=2, arrivals_ms=[100.0 * i for i in range(10)], concurrency=None)
    senders = sending(plan)
    lost = senders.sending[1]  # sessions 1, 3, 5, 7, 9
    senders.start_ns = 10**12
    # It reported session 1 with its first turn and that it had released 1; by the plan 3 and 5 were due as well.
    lost.released, lost.lost_ns, lost.lost_why = 1, 10**12 + 510_000_000, "gone"
    seen = np.zeros(20, np.bool_)
    for session in (0, 2, 4, 6, 8):
        seen[[2 * session, 2 * session + 1]] = True
    seen[2] = True
    records: dict[int, RequestRecord] = {record.row: record for record in senders.missing(seen)}
    assert sorted(records) == [3, 6, 7, 10, 11, 14, 15, 18, 19]
    assert {record.error_class for record in records.values()} == {"node_lost"}
    assert [row for row, record in sorted(records.items()) if record.status == "failed"] == [3, 6, 7, 10, 11]
    assert {records[row].status for row in (14, 15, 18, 19)} == {"never_sent"}
    assert any("was lost (gone)" in reason for reason in map(str, senders.findings(100.0).invalid))


def test_in_a_closed_loop_a_lost_node_had_released_what_it_reported() -> None:
    senders = sending(plan_of(10, concurrency=4))
    lost = senders.sending[0]  # sessions 0, 2, 4, 6, 8
    lost.released, lost.lost_ns = 2, 1
    seen = np.zeros(10, np.bool_)
    seen[1::2] = True
    statuses = {record.row: record.status for record in senders.missing(seen)}
    assert statuses == {0: "failed", 2: "failed", 4: "never_sent", 6: "never_sent", 8: "never_sent"}


@pytest.mark.parametrize("text", ["ray:", "ray:x", "dask:2", "-1", "1.5"])
def test_workers_are_a_number_of_processes_or_of_nodes(text: str) -> None:
    assert read_senders("3") == {"workers": 3}
    assert read_senders("ray:3") == {"client_nodes": 3}
    with pytest.raises(UsageError, match="number of processes"):
        read_senders(text)


def test_nodes_without_a_cluster_or_without_ray_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(options: ClientOptions) -> None:
        async with client_nodes("http://10.0.0.9", options, {}):
            pass

    with pytest.raises(UsageError, match="give --ray-address"):
        asyncio.run(start(ClientOptions(client_nodes=2)))
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(EbbenchError, match=r"pip install 'ebbench\[sweep\]'"):
        asyncio.run(start(replace(ClientOptions(client_nodes=2), ray_address="auto")))
