"""``--scheduling-policy priority`` in the simulator: who goes first, who is preempted, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.engines.base import check_options
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from tests.simulation.worlds import World, device, plan, worlds
from vllm_eb.policy import parse_policy

OPTIONS = EngineOptions(max_num_seqs=2, max_num_batched_tokens=64, num_kv_blocks=100, scheduling_policy="priority")


def with_priorities(made: Plan, priorities: list[int | None]) -> Plan:
    """The plan with a priority per row."""
    return replace(made, table=made.table.append_column("priority", pa.array(priorities, pa.int32())))


def first_scheduled(world: World) -> list[int]:
    """Rows in the order in which the engine began them."""
    times = world.run().requests["scheduled_ns"].to_pylist()
    return sorted(range(len(times)), key=times.__getitem__)


@pytest.mark.parametrize("policy", ["v1", "v0", "eb:k=1", "marginal"])
def test_the_lowest_value_goes_first_then_the_earliest(policy: str) -> None:
    made = with_priorities(plan([(20, 30)] * 6, gap_ns=1000), [0, 0, 5, -1, 5, None])
    order = first_scheduled(World(made, policy, OPTIONS))
    assert order == [0, 3, 1, 5, 2, 4], "the first comes to an idle server"


def test_priorities_may_have_all_their_32_bits() -> None:
    least, most = -(2**31), 2**31 - 1
    made = with_priorities(plan([(20, 30)] * 6, gap_ns=1000), [0, most, most, least, least, None])
    assert first_scheduled(World(made, "v1", OPTIONS)) == [0, 3, 4, 5, 1, 2]


@given(worlds())
def test_equal_priorities_are_first_come_first_served(world: World) -> None:
    roomy = replace(world.options, num_kv_blocks=5000)  # without preemptions, which have another victim and place
    if parse_policy(world.policy).orders_queue:
        return
    usual = replace(world, options=roomy).run()
    by_priority = replace(world, options=replace(roomy, scheduling_policy="priority")).run()
    assert by_priority.requests.equals(usual.requests)
    assert by_priority.steps.equals(usual.steps)


@given(worlds(), st.lists(st.integers(-2, 2), min_size=40, max_size=40))
def test_no_request_is_preempted_while_one_of_a_higher_value_runs(world: World, values: list[int]) -> None:
    if parse_policy(world.policy).orders_queue:
        return
    made = with_priorities(world.plan, list(values[: len(world.plan)]))
    result = World(made, world.policy, replace(world.options, scheduling_policy="priority")).run()
    assert set(result.requests["status"].to_pylist()) == {"ok"}
    value_of = dict(zip(made.table["request_id"].to_pylist(), values, strict=False))
    for step in result.steps.to_pylist():
        assert not {*step["preempted_ids"]} & {*step["request_ids"]}
        if step["preempted_ids"] and step["request_ids"]:
            kept = max(value_of[name] for name in step["request_ids"])
            assert kept <= min(value_of[name] for name in step["preempted_ids"])


def test_a_request_that_already_has_tokens_in_the_step_is_preempted() -> None:
    # Both need a third block in one step. The first takes the only free one; the second has the lower value.
    made = with_priorities(plan([(16, 40), (16, 40)], gap_ns=1), [9, 0])
    options = replace(OPTIONS, num_kv_blocks=5)
    result = World(made, "v1", options).run()
    rows = result.requests.to_pylist()
    assert [row["preemptions"] > 0 for row in rows] == [True, False]
    assert rows[1]["end_ns"] < rows[0]["end_ns"]
    step = next(step for step in result.steps.to_pylist() if step["preempted_ids"])
    assert (step["preempted_ids"], step["request_ids"]) == (["r0000"], ["r0001"])


def test_priorities_need_a_server_that_schedules_by_them() -> None:
    made = with_priorities(plan([(20, 30)] * 4, gap_ns=1), [0, 1, 2, 3])
    with pytest.raises(UsageError, match="add --scheduling-policy priority"):
        SimEngine().run(made, parse_policy("v1"), device(), replace(OPTIONS, scheduling_policy="fcfs"))


@pytest.mark.parametrize("policy", ["v1:order=shortest", "eb:theta=0.5,order=shortest", "marginal:ttft=1"])
def test_a_policy_with_an_order_of_its_own_is_refused(policy: str) -> None:
    with pytest.raises(UsageError, match="orders waiting requests by its own rule"):
        check_options(OPTIONS, [parse_policy("v1"), parse_policy(policy)])
    with pytest.raises(UsageError, match="orders waiting requests by its own rule"):
        SimEngine().run(plan([(20, 30)] * 2, gap_ns=1), parse_policy(policy), device(), OPTIONS)


def test_warmup_requests_have_the_middle_priority() -> None:
    made = with_priorities(plan([(20, 10)] * 4, gap_ns=1), [1, 0, 1, 0])
    warm = World(made, "v1", replace(OPTIONS, warmup=3)).run()
    assert warm.requests["status"].to_pylist() == ["ok"] * 4


def test_an_unknown_scheduling_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown --scheduling-policy 'lifo'; known: fcfs, priority"):
        EngineOptions(scheduling_policy="lifo")  # type: ignore[arg-type]
