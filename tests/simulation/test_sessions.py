"""Pauses, parallel requests and hang-ups in the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure
from ebbench.config.topology import parse_topology
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import Plan, turn_graph
from ebbench.records.schema import PLAN, PLAN_EXTRAS
from ebbench.simulation.state import TURNAROUND_NS
from ebbench.spec.server import EngineOptions
from tests.simulation.worlds import device, plan
from tests.vllm.emulation import Traffic, as_agents, make_plan
from vllm_eb.policy import parse_policy

OPTIONS = EngineOptions(max_num_seqs=8, max_num_batched_tokens=200)


def with_columns(made: Plan, **columns: list[Any]) -> Plan:
    rows = made.table.to_pylist()
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    schema = pa.schema([*PLAN, *(field for field in PLAN_EXTRAS if field.name in columns)])
    return replace(made, table=pa.Table.from_pylist(rows, schema=schema))


def simulate(made: Plan, policy: str = "v1", options: EngineOptions = OPTIONS) -> list[dict[str, Any]]:
    result = SimEngine().run(made, parse_policy(policy), device(), options)
    rows: list[dict[str, Any]] = result.requests.to_pylist()
    return rows


def test_a_pause_delays_the_intended_start_of_the_next_turn() -> None:
    first, second, _ = simulate(with_columns(plan([(5, 3)] * 3, turns=3, concurrency=1), pause_ns=[0, 10**9, None]))
    assert second["intended_ns"] == second["sent_ns"] == first["end_ns"] + 10**9


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_request_that_answers_an_end_misses_the_step_that_begins_then(turns: int, asynchronous: bool) -> None:
    made = plan([(5, 30), (5, 40)] * 2, turns=turns, concurrency=2)
    if turns == 2:
        made = with_columns(made, session=[0, 1, 0, 1], turn=[0, 0, 1, 1])
    result = SimEngine().run(made, parse_policy("v1"), device(), replace(OPTIONS, async_scheduling=asynchronous))
    first, _, following, _ = result.requests.to_pylist()
    begins = sorted(result.steps["scheduled_ns"].to_pylist())
    assert first["end_ns"] in begins
    assert following["intended_ns"] == first["end_ns"]
    assert following["scheduled_ns"] == begins[begins.index(first["end_ns"]) + 1]


def test_a_session_keeps_its_slot_while_it_pauses() -> None:
    made = plan([(5, 3)] * 4, turns=2, concurrency=1)
    rows = simulate(with_columns(made, pause_ns=[None, 5 * 10**9, None, None]))
    assert rows[2]["intended_ns"] == rows[1]["end_ns"] > 5 * 10**9


def test_sub_requests_run_at_the_same_time_and_are_joined() -> None:
    made = with_columns(
        plan([(5, 30)] * 4, turns=4, concurrency=1), after=[None, [0], [0], [1, 2]], content=[0, 1, 2, 0]
    )
    first, left, right, joined = simulate(made)
    assert left["intended_ns"] == right["intended_ns"] == first["end_ns"]
    assert left["first_token_ns"] < right["end_ns"]
    assert right["first_token_ns"] < left["end_ns"]
    assert joined["intended_ns"] == max(left["end_ns"], right["end_ns"])


def test_a_client_that_hangs_up_frees_its_slot_and_ends_its_session() -> None:
    made = plan([(5, 500), (5, 3), (5, 3)], turns=2, concurrency=1)
    whole = simulate(made)
    patience_ns = whole[0]["first_token_ns"] + 20 * 10_000_000
    left, never, after = simulate(with_columns(made, hang_up_ns=[patience_ns, None, None]))
    assert (left["status"], left["end_ns"], left["finish_reason"]) == ("abandoned", patience_ns, None)
    made_by_then = 1 + sum(
        1 for i in range(499) if whole[0]["first_token_ns"] + sum(whole[0]["itl_ns"][: i + 1]) <= patience_ns
    )
    assert left["output_tokens"] == made_by_then == len(left["itl_ns"]) + 1
    assert (never["status"], never["error_class"]) == ("never_sent", "earlier_turn_abandoned")
    assert (after["status"], after["intended_ns"]) == ("ok", patience_ns)


def test_patience_longer_than_the_answer_changes_nothing() -> None:
    made = plan([(20, 30)] * 12, concurrency=5)
    assert simulate(with_columns(made, hang_up_ns=[10**12] * 12)) == simulate(made)


def test_the_cost_of_abandoned_requests_is_counted() -> None:
    made = with_columns(plan([(50, 100)] * 8, concurrency=8), hang_up_ns=[10**9] * 4 + [None] * 4)
    result = SimEngine().run(made, parse_policy("v1"), device(), OPTIONS)
    metrics = measure(RequestColumns.of(result.requests))
    left = [row for row in result.requests.to_pylist() if row["status"] == "abandoned"]
    assert metrics.counts["abandoned"] == len(left) == 4
    assert metrics.abandoned_output_tokens == sum(row["output_tokens"] for row in left) > 0
    assert metrics.abandoned_input_tokens == 4 * 50
    assert metrics.total_output_tokens == 4 * 100


@pytest.mark.parametrize("policy", ["v1", "ebplus:update_every=4,min_samples=3,window=20", "marginal"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_every_request_is_accounted_for_and_starts_when_it_may(policy: str, seed: int) -> None:
    made = as_agents(make_plan(Traffic(sessions=12, turns=5, concurrency=6, seed=seed)), seed)
    rows, graph = simulate(made, policy), turn_graph(made.table)
    waited_for: dict[int, list[int]] = {}
    for parent in range(len(rows)):
        for following in graph.followers(parent):
            waited_for.setdefault(following, []).append(parent)
    for place, row in enumerate(rows):
        parents = [rows[one] for one in waited_for.get(place, [])]
        if all(one["status"] == "ok" for one in parents):
            assert row["status"] in ("ok", "abandoned")
            if parents:
                ready_ns = max(one["end_ns"] for one in parents)
                pause_ns = graph.pause_of(place)
                assert row["intended_ns"] == ready_ns + pause_ns
                assert row["sent_ns"] == ready_ns + (pause_ns or TURNAROUND_NS)
        else:
            assert (row["status"], row["error_class"]) == ("never_sent", "earlier_turn_abandoned")
        if row["status"] == "ok":
            assert row["output_tokens"] == row["output_tokens_planned"]
        elif row["status"] == "abandoned":
            assert row["end_ns"] == row["sent_ns"] + made.table["hang_up_ns"][place].as_py()
            assert row["output_tokens"] < row["output_tokens_planned"]


@pytest.mark.parametrize("topology", ["replicas=3", "dp=2"])
def test_replicas_lose_nothing_when_clients_hang_up(topology: str) -> None:
    made = as_agents(make_plan(Traffic(sessions=30, turns=4, concurrency=20, seed=3)), 3)
    engine = SimEngine(topology=parse_topology(topology))
    rows = engine.run(made, parse_policy("v1"), device(), OPTIONS).requests.to_pylist()
    assert {row["status"] for row in rows} == {"ok", "abandoned", "never_sent"}
    assert all(row["error_class"] == "earlier_turn_abandoned" for row in rows if row["status"] == "never_sent")


def test_the_answer_begins_after_the_planned_thinking() -> None:
    made = with_columns(plan([(5, 30)] * 4, concurrency=4), thinking_tokens=[10, 29, 30, None])
    rows = simulate(made)
    for row, thinking in zip(rows[:2], (10, 29), strict=True):
        assert row["thinking_tokens"] == thinking
        assert row["first_answer_ns"] == row["first_token_ns"] + sum(row["itl_ns"][:thinking])
    assert (rows[2]["thinking_tokens"], rows[2]["first_answer_ns"]) == (30, None)  # it ended in its thinking
    assert (rows[3]["thinking_tokens"], rows[3]["first_answer_ns"]) == (None, None)
    result = SimEngine().run(made, parse_policy("v1"), device(), OPTIONS)
    assert measure(RequestColumns.of(result.requests)).ttfat.count == 3  # the last begins with its answer
