"""Clients that hang up on clusters: every stage drops their requests, frees their KV, and counts what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure
from ebbench.config.topology import TopologySpec, parse_topology
from ebbench.engines import sim
from ebbench.engines.base import EngineResult
from ebbench.records.plan import Plan, turn_graph
from ebbench.records.schema import PLAN, PLAN_EXTRAS
from ebbench.simulation.loop import EventLoop
from ebbench.spec.server import EngineOptions
from tests.cluster.cluster_worlds import FixedAndToken, device, ns, plan, pools, run
from tests.vllm.emulation import Traffic, as_agents, make_plan
from vllm_eb.policy import parse_policy

MS = 1_000_000
FAST = FixedAndToken(3e-3, 2e-5, 4e-5)


def hanging_up(made: Plan, after_ns: list[int | None]) -> Plan:
    field = PLAN_EXTRAS.field("hang_up_ns")
    return replace(made, table=made.table.append_column(field, pa.array(after_ns, field.type)))


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[EventLoop]:
    """The event loops of the test's runs, in order."""
    kept: list[EventLoop] = []

    class Kept(EventLoop):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            kept.append(self)

    monkeypatch.setattr(sim, "EventLoop", Kept)
    return kept


def check_everything_is_free(loop: EventLoop) -> None:
    for stage in loop.stages:
        for unit in stage.units:
            scheduler = unit.scheduler
            assert scheduler.kv.free == scheduler.kv.total
            assert not scheduler.has_requests
            assert not scheduler.prefilling
        if stage.dispatcher is not None:
            assert stage.dispatcher.waiting == 0
            assert stage.dispatcher.fleet.open_requests == 0
    if loop.handover is not None:
        fabric = loop.handover.fabric
        assert [store.held for store in fabric.stores] == [{}] * len(fabric.stores)
        assert [store.held_bytes for store in fabric.stores] == [0] * len(fabric.stores)
        assert not any(fabric.moving(row) for row in range(loop.front.state.count))
        assert not loop.handover.unit_of


POOLS: dict[str, dict[str, Any]] = {
    "plain": {"latency_ms": 1.0},
    "slow": {"bandwidth_gb_per_s": 0.002},
    "backpressure": {"backpressure": True, "store_gb": 0.0008, "bandwidth_gb_per_s": 0.01},
    "admission": {"held_until": "admission", "bandwidth_gb_per_s": 0.01},
    "first token from prefill": {"first_token": "prefill", "bandwidth_gb_per_s": 0.01},
}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    topology=st.sampled_from([*POOLS, "dp=3", "instances=2,tp=1,dp=3,ep=3", "2pdp2-1ddp2"]),
    dispatch=st.sampled_from(["round-robin", "least-outstanding", "prefix-affine", "sbs", "sbs:bypass=off"]),
    decode=st.sampled_from(["round-robin", "iqr", "least-outstanding"]),
    network_ms=st.sampled_from([0.0, 2.0]),
    patience_s=st.sampled_from([0.005, 0.05, 0.3]),
    options=st.fixed_dictionaries(
        {
            "async_scheduling": st.booleans(),
            "num_kv_blocks": st.sampled_from([60, 2000]),
            "enable_prefix_caching": st.booleans(),
            "api_server": st.sampled_from(["off", "datacenter"]),
            "warmup": st.sampled_from([0, 3]),
        }
    ),
)
def test_requests_end_once_and_all_kv_is_freed(  # type: ignore[no-untyped-def]
    loops, seed, topology, dispatch, decode, network_ms, patience_s, options
) -> None:
    if topology in POOLS:
        spec = pools(2, 2, **POOLS[topology])
    elif topology == "2pdp2-1ddp2":
        both = parse_topology("instances=2,tp=1,dp=2,ep=2").replicas
        assert both is not None
        spec = msgspec.structs.replace(pools(1, 1), prefill=both, decode=msgspec.structs.replace(both, instances=1))
    else:
        spec = parse_topology(topology)
    spec = msgspec.structs.replace(spec, network_ms=network_ms)
    made = as_agents(make_plan(Traffic(sessions=14, turns=3, concurrency=9, seed=seed)), seed, hang_ups=False)
    rng = np.random.default_rng(seed)
    after = [int(patience_s * 1e9 * rng.exponential()) if rng.random() < 0.6 else None for _ in range(len(made))]
    rows = made.table.to_pylist()
    for row, patience_ns in zip(rows, after, strict=True):
        row["hang_up_ns"] = patience_ns
    made = replace(made, table=pa.Table.from_pylist(rows, schema=pa.schema([*PLAN, *PLAN_EXTRAS])))
    result = run(
        spec, made, dispatch, decode_dispatch=decode, on=device(FAST), max_num_seqs=6, max_num_batched_tokens=256,
        **options,
    )  # fmt: skip
    loop = loops[-1]
    check_everything_is_free(loop)
    assert loop.ended == len(made) + options["warmup"]
    check_ends(made, result)
    steps = result.steps
    assert (np.array(steps["kv_blocks_used"]) <= np.array(steps["kv_blocks_total"])).all()


def check_ends(made: Plan, result: EngineResult) -> None:
    requests, graph = result.requests.to_pylist(), turn_graph(made.table)
    unsent = {one for at, row in enumerate(requests) if row["status"] != "ok" for one in graph.descendants(at)}
    for place, row in enumerate(requests):
        patience_ns = made.table["hang_up_ns"][place].as_py()
        if place in unsent:
            assert (row["status"], row["sent_ns"]) == ("never_sent", None)
        elif row["status"] == "ok":
            assert row["output_tokens"] == row["output_tokens_planned"]
            assert patience_ns is None or row["end_ns"] <= row["sent_ns"] + patience_ns
        else:
            assert row["status"] == "abandoned"
            assert row["end_ns"] == row["sent_ns"] + patience_ns
            assert row["output_tokens"] < row["output_tokens_planned"]
            assert row["last_token_ns"] is None or row["last_token_ns"] <= row["end_ns"]


@pytest.mark.parametrize("topology", ["1p1d", "slow", "backpressure", "sbs"])
def test_patience_beyond_the_run_changes_nothing(topology: str) -> None:
    made = make_plan(Traffic(sessions=30, turns=2, concurrency=12, seed=5))
    spec = pools(2, 2, **POOLS.get(topology, {}))
    dispatch = "sbs" if topology == "sbs" else "round-robin"
    whole = run(spec, made, dispatch, on=device(FAST))
    patient = run(spec, hanging_up(made, [10**14] * len(made)), dispatch, on=device(FAST))
    assert patient.requests.drop_columns("prefilled_ns").equals(whole.requests)
    assert patient.steps.equals(whole.steps)
    assert patient.facts == whole.facts


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_unit_agrees_with_the_engine_alone(asynchronous: bool) -> None:
    made = as_agents(make_plan(Traffic(sessions=30, turns=4, concurrency=12, seed=3)), 3)
    options: dict[str, Any] = {"async_scheduling": asynchronous, "num_kv_blocks": 60, "max_num_batched_tokens": 256}
    alone = sim.SimEngine().run(made, parse_policy("v1"), device(FAST), EngineOptions(max_num_seqs=64, **options))
    assert {"ok", "abandoned"} <= set(alone.requests["status"].to_pylist())
    one = run("dp=1", made, on=device(FAST), **options)
    assert one.requests.drop_columns("worker").equals(alone.requests.drop_columns("worker"))
    assert one.steps.equals(alone.steps)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_prefill_unit_agrees_with_an_engine_that_makes_first_tokens(asynchronous: bool) -> None:
    made = plan([(50 + 40 * i, 1) for i in range(30)], [0.001 * i for i in range(30)])
    made = hanging_up(made, [(3 + 5 * i % 17) * MS for i in range(30)])
    options: dict[str, Any] = {"async_scheduling": asynchronous, "max_num_batched_tokens": 256}
    alone = sim.SimEngine().run(made, parse_policy("v1"), device(FAST), EngineOptions(max_num_seqs=64, **options))
    pair = run(pools(1, 1, first_token="prefill"), made, on=device(FAST), **options)
    assert {"ok", "abandoned"} == set(alone.requests["status"].to_pylist())
    assert pair.requests.drop_columns(["worker", "prefilled_ns"]).equals(alone.requests.drop_columns("worker"))
    assert pair.facts["transfers"] == 0


# One prefill and one decode unit: a step takes 100 ms, and the transfer of 1,000 tokens 1 s.
SLOW = {"bandwidth_gb_per_s": 0.001, "latency_ms": 0.0}


def walk(spec: TopologySpec, patience_ms: list[int | None], **options: Any) -> EngineResult:
    """Requests of 1,000 and 5 tokens that are sent together."""
    after = [None if one is None else one * MS for one in patience_ms]
    made = hanging_up(plan([(1000, 5)] * len(after), [0.0] * len(after)), after)
    return run(spec, made, max_num_batched_tokens=1000, **options)


def test_a_request_that_leaves_the_prefill_queue_is_never_computed() -> None:
    result = walk(pools(1, 1, **SLOW), [None, 50])
    assert [row["prefill_tokens"] for row in result.steps.to_pylist() if row["instance"] == 0] == [1000]
    assert result.facts["transfers"] == 1
    assert measure(RequestColumns.of(result.requests)).abandoned_input_tokens == 0


def test_a_hang_up_during_the_prompts_last_step_loses_the_prompt() -> None:
    result = walk(pools(1, 1, **SLOW), [50, None])
    assert [row["prefill_tokens"] for row in result.steps.to_pylist() if row["instance"] == 0] == [1000, 1000]
    assert result.requests["prefilled_ns"].to_pylist() == [None, 200 * MS]
    assert ns(result, "end_ns")[0] == 50 * MS


def test_a_request_that_waits_for_its_link_makes_room_for_the_next() -> None:
    # The prompts end at 0.1, 0.2 and 0.3 s; each transfer takes a second.
    whole = walk(pools(1, 1, **SLOW), [None, None, None])
    assert ns(whole, "first_token_ns").tolist() == [1200 * MS, 2200 * MS, 3200 * MS]
    result = walk(pools(1, 1, **SLOW), [None, 600, None])
    assert result.facts["transfers"] == 2
    assert result.requests["first_token_ns"].to_pylist() == [1200 * MS, None, 2200 * MS]
    assert measure(RequestColumns.of(result.requests)).abandoned_input_tokens == 1000


def test_a_transfer_that_has_begun_goes_on_to_its_end() -> None:
    result = walk(pools(1, 1, **SLOW), [600, None])
    assert result.facts["transfers"] == 2
    assert result.requests["first_token_ns"].to_pylist() == [None, 2200 * MS]


def test_a_kept_prompt_is_freed_when_its_client_hangs_up() -> None:
    """The prefill unit has room for one prompt: the second can begin when the first leaves the queue of its link."""
    made = hanging_up(plan([(1000, 5)] * 3, [0.0] * 3), [None, 600 * MS, None])
    # 126 blocks hold two prompts of 1,000 tokens; the third begins when the second is given up at 0.6 s.
    result = run(pools(1, 1, **SLOW), made, max_num_batched_tokens=1000, num_kv_blocks=126)
    assert ns(result, "scheduled_ns").tolist() == [0, 100 * MS, 600 * MS]
    whole = run(pools(1, 1, **SLOW), plan([(1000, 5)] * 3, [0.0] * 3), max_num_batched_tokens=1000, num_kv_blocks=126)
    assert ns(whole, "scheduled_ns").tolist() == [0, 100 * MS, 1100 * MS]


def test_a_decoding_request_frees_its_copy_and_its_slot() -> None:
    full = {**SLOW, "backpressure": True, "store_gb": 0.0015}  # room for one prompt
    # The first decodes from 1.1 s; it would end at 1.6 s.
    result = walk(pools(1, 1, **full), [1250, None])
    assert result.requests["output_tokens"].to_pylist() == [1, 5]
    assert result.requests["status"].to_pylist() == ["abandoned", "ok"]
    assert ns(result, "first_token_ns")[1] in (2350 * MS, 2400 * MS)  # the transfer began at 1.25 s
    metrics = measure(RequestColumns.of(result.requests))
    assert (metrics.abandoned_input_tokens, metrics.abandoned_output_tokens) == (1000, 1)
