"""Several instances under one virtual clock: one replica equals ``sim``, no request is lost, barriers, order."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.config.topology import PoolSpec, TopologySpec, parse_topology
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.simulation import engine as engine_module
from ebbench.simulation.engine import OpenGate
from ebbench.simulation.step import Step
from ebbench.spec.server import EngineOptions
from tests.cluster.cluster_worlds import FixedAndToken, device, ns, plan, pools, run
from vllm_eb.policy import parse_policy

DISPATCH = ("round-robin", "least-outstanding", "power-of-two", "prefix-affine", "iqr", "sbs", "sbs:bypass=off")
MS = 1_000_000


def some_plan(seed: int, count: int = 40, rate: float | None = 60.0):  # type: ignore[no-untyped-def]
    rng = random.Random(seed)
    lengths = [(rng.randint(1, 300), rng.randint(1, 30)) for _ in range(count)]
    arrivals = list(itertools.accumulate(rng.expovariate(rate) for _ in lengths)) if rate else None
    return plan(lengths, arrivals, concurrency=12)


@pytest.mark.parametrize(("policy", "rate", "kv", "asynchronous"), list(itertools.product(
    ("v1", "eb:k=3", "ebplus:margin=-1,sticky=-1,update_every=10,min_samples=8,window=40"), (None, 60.0), (40, 4000),
    (True, False),
)))  # fmt: skip
def test_one_replica_is_the_sim_engine_row_by_row(policy: str, rate: float | None, kv: int, asynchronous: bool) -> None:
    requests = some_plan(1, rate=rate)
    options: dict[str, Any] = {
        "max_num_seqs": 10,
        "max_num_batched_tokens": 256,
        "num_kv_blocks": kv,
        "async_scheduling": asynchronous,
    }
    on = device(FixedAndToken(3e-3, 2e-5, 4e-5))
    alone = SimEngine().run(requests, parse_policy(policy), on, EngineOptions(**options))
    for name in ("round-robin", "least-outstanding", "power-of-two"):
        cluster = run("dp=1", requests, name, on=on, policy=policy, **options)
        assert cluster.steps.equals(alone.steps)
        assert cluster.decisions.equals(alone.decisions)
        assert cluster.requests.drop_columns("worker").equals(alone.requests.drop_columns("worker"))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    topology=st.sampled_from(["dp=3", "instances=2,tp=1,dp=3,ep=3", "dp=1", "pools", "pools-back", "pools-prefill"]),
    dispatch=st.sampled_from(DISPATCH),
    decode=st.sampled_from(["round-robin", "iqr", "least-outstanding"]),
    rate=st.sampled_from([None, 30.0, 400.0]),
    network_ms=st.sampled_from([0.0, 2.0]),
    tight=st.booleans(),
    asynchronous=st.booleans(),
)
def test_conservation_causality_and_determinism(  # type: ignore[no-untyped-def]
    seed, topology, dispatch, decode, rate, network_ms, tight, asynchronous
) -> None:
    requests = some_plan(seed, rate=rate)
    if topology.startswith("pools"):
        extra: dict[str, dict[str, Any]] = {
            "pools-back": {"backpressure": True, "store_gb": 0.0008},
            "pools-prefill": {"first_token": "prefill"},
        }
        spec = pools(2, 2, **({"held_until": "admission"} | extra.get(topology, {"latency_ms": 1.0})))
    else:
        spec = parse_topology(topology)
    spec = TopologySpec(
        **{name: getattr(spec, name) for name in ("replicas", "prefill", "decode", "transfer")}, network_ms=network_ms
    )
    options = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 40 if tight else 2000,
        "async_scheduling": asynchronous,
    }
    on = device(FixedAndToken(3e-3, 2e-5, 4e-5))
    first = run(spec, requests, dispatch, decode_dispatch=decode, on=on, **options)
    assert first.requests["status"].to_pylist() == ["ok"] * len(requests)
    assert first.requests["output_tokens"].to_pylist() == requests.table["output_tokens"].to_pylist()
    sent, scheduled, token = (ns(first, name) for name in ("sent_ns", "scheduled_ns", "first_token_ns"))
    assert (sent <= scheduled).all()
    assert (sent + round(network_ms * MS) <= scheduled).all()
    assert (scheduled < token).all()
    assert (token <= ns(first, "last_token_ns")).all()
    for gaps in first.requests["itl_ns"].to_pylist():
        assert all(gap >= 0 for gap in gaps)
    # No unit holds more blocks than it has, and at the end of the run none hold any.
    steps = first.steps
    assert (np.array(steps["kv_blocks_used"]) <= np.array(steps["kv_blocks_total"])).all()
    second = run(spec, requests, dispatch, decode_dispatch=decode, on=on, **options)
    assert second.requests.equals(first.requests)
    assert second.steps.equals(first.steps)


def test_a_group_steps_together_and_as_long_as_its_slowest_unit() -> None:
    lengths = [(100, 1), (900, 1), (50, 1), (50, 1)]
    result = run("tp=1,dp=2,ep=2", plan(lengths, [0.0] * 4), on=device(FixedAndToken(0.1, 1e-4)))
    steps = result.steps.to_pylist()
    assert {(s["start_ns"], s["end_ns"]) for s in steps} == {(0, 195 * MS)}  # 0.1 s + 950 tokens
    assert sorted(s["prefill_tokens"] for s in steps) == [150, 950]


def test_units_of_a_group_can_be_given_targets() -> None:
    """A policy that orders its queue gets the arrival time of each request of its unit."""
    requests = plan([(100, 8), (200, 8), (50, 8), (400, 8)] * 4, [0.0] * 8 + [0.05] * 8)
    result = run("tp=1,dp=2,ep=2", requests, policy="marginal:ttft=1,tpot=0.02")
    assert set(result.requests["status"].to_pylist()) == {"ok"}


def test_units_of_different_instances_do_not_wait_for_each_other() -> None:
    spec = TopologySpec(replicas=PoolSpec(instances=2, dp=2, ep=2))
    result = run(spec, plan([(100, 1), (900, 1)], [0.0] * 2), on=device(FixedAndToken(0.1, 1e-4)))
    assert sorted(s["end_ns"] for s in result.steps.to_pylist()) == [110 * MS, 190 * MS]


def test_asynchronous_groups_schedule_the_next_pass_while_one_runs() -> None:
    lengths = [(2048, 1)] * 2 + [(10, 1)]
    arrivals = [0.0, 0.0, 0.15]
    together = run("tp=1,dp=1,ep=1", plan(lengths, arrivals), async_scheduling=True)
    group = run("tp=1,dp=2,ep=2", plan(lengths[:2] + lengths, [0.0] * 4 + [0.15]), async_scheduling=True)
    assert ns(together, "first_token_ns").tolist() == [100 * MS, 200 * MS, 300 * MS]
    assert ns(group, "first_token_ns").tolist() == [100 * MS, 100 * MS, 200 * MS, 200 * MS, 300 * MS]


def test_network_delay_is_paid_once_each_way() -> None:
    spec = TopologySpec(replicas=PoolSpec(instances=1), network_ms=7.0)
    result = run(spec, plan([(10, 1)], [1.0]))
    assert ns(result, "first_token_ns")[0] == 1000 * MS + 7 * MS + 100 * MS


@pytest.mark.parametrize(("dispatch", "wait_share"), [("round-robin", 1 / 2), ("sbs:bypass=off", 1 / 8)])
def test_waiting_is_half_a_pass_immediately_and_an_nth_of_it_staggered(dispatch: str, wait_share: float) -> None:
    """Section 3.2: uniform arrivals, N instances of pass time T always busy: T/2 against T/(2N)."""
    count, instances, pass_s = 1600, 4, 0.1
    rng = np.random.default_rng(3)
    # Two arrivals a staggered interval at uniform times, so that no pass is without work.
    arrivals = np.sort(np.concatenate([rng.uniform(i, i + 1, 2) for i in range(count // 2)])) * pass_s / instances
    result = run(f"dp={instances}", plan([(10, 1)] * count, arrivals.tolist()), dispatch)
    waited_s = (ns(result, "first_token_ns") - ns(result, "intended_ns")) / 1e9 - pass_s
    steady = waited_s[count // 4 :]
    assert steady.mean() == pytest.approx(wait_share * pass_s, rel=0.12)


def _pool_ttft_s(topology: str, dispatch: str, rate: float) -> tuple[float, float]:
    """Mean and p99 of a prefill pool whose prompts are lognormal, chunks of 2,048, 0.5 ms each way."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1 / rate, 1500))
    lengths = [(int(n), 1) for n in np.clip(rng.lognormal(6.5, 1.0, 1500), 20, 8000)]
    spec = msgspec.structs.replace(parse_topology(topology), network_ms=0.5)
    on = device(FixedAndToken(0.03, 1e-4))
    result = run(spec, plan(lengths, arrivals.tolist()), dispatch, on=on, max_num_batched_tokens=2048)
    ttft_s = (ns(result, "first_token_ns") - ns(result, "sent_ns")) / 1e9
    return float(ttft_s.mean()), float(np.quantile(ttft_s, 0.99))


@pytest.mark.parametrize("topology", ["dp=1", "dp=4", "tp=1,dp=4,ep=4"])
@pytest.mark.parametrize("load", [0.03, 0.2, 0.5, 0.8, 0.95])
def test_staggered_dispatch_to_a_prefill_pool_is_no_worse_than_immediate(topology: str, load: float) -> None:
    units = 1 if topology == "dp=1" else 4
    rate = load * units * 2048 / (0.03 + 0.2048) / 980
    immediate = [_pool_ttft_s(topology, name, rate) for name in ("round-robin", "least-outstanding")]
    mean_s, p99_s = _pool_ttft_s(topology, "sbs", rate)
    assert mean_s <= min(mean for mean, _ in immediate) * 1.002  # the way there and back counts, 1 ms in all
    assert p99_s <= min(p99 for _, p99 in immediate) * 1.3


def test_staggered_dispatch_is_immediate_under_a_light_load() -> None:
    for topology in ("dp=1", "tp=1,dp=4,ep=4"):
        assert _pool_ttft_s(topology, "sbs", 0.02) == _pool_ttft_s(topology, "least-outstanding", 0.02)


def test_a_pool_for_first_tokens_only_is_staggered_from_the_start() -> None:
    arrivals = [0.0, 0.01, 0.02, 0.03]
    held = run("dp=1", plan([(1500, 1)] * 4, arrivals), "sbs")
    at_once = run("dp=1", plan([(1500, 2)] * 4, arrivals), "sbs")  # whole engines, taken to generate
    assert held.facts["dispatch_wait_ms"] > 0
    assert at_once.facts["dispatch_wait_ms"] == 0


def test_staggered_flow_control_fails_requests_with_429_and_goes_on() -> None:
    result = run("dp=1", plan([(2000, 1)] * 30, [0.0] * 30), "sbs:cycle_limit=3,bypass=off")
    status = result.requests["status"].to_pylist()
    refused = result.requests.filter(np.array(status) == "failed")
    assert 0 < refused.num_rows < 30
    assert set(refused["http_status"].to_pylist()) == {429}
    assert status.count("ok") + refused.num_rows == 30
    assert set(result.requests["error_class"].to_pylist()) == {None, "http_429"}


def test_every_request_knows_its_unit_and_facts_say_where_it_waited() -> None:
    result = run("dp=3", plan([(10, 2)] * 9, [0.0] * 9))
    assert sorted(result.requests["worker"].to_pylist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert result.facts["topology"] == "dp=3"
    assert result.facts["gpus"] == 3
    assert result.facts["dispatch_wait_ms"] == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [("dp=0", "at least 1"), ("4q", "write for example"), ("tp=4,dp=8,ep=31", "tp x dp"), ("", "empty"),
     ("2p2d,instances=2", "already gives the number of instances"), ("dp=x", "whole number"), ("dp=2,dp=3", "twice"),
     ("tpp=2", "did you mean 'tp'")],
)  # fmt: skip
def test_unknown_topologies_are_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_topology(text)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("network_ms = 1e300\nreplicas = {}", "network_ms must be at least 0 and at most"),
        ("replicas = { instances = 1000000000000 }", "at most 10,000 units"),
        ("prefill = {}\ndecode = {}\ntransfer = { latency_ms = 1e300 }", "latency_ms must be"),
        ("prefill = {}\ndecode = {}\ntransfer = { bandwidth_gb_per_s = 1e-300 }", "bandwidth_gb_per_s must be"),
        ("prefill = {}\ndecode = {}\ntransfer = { kv_bytes_per_token = 9999999999999 }", "kv_bytes_per_token must be"),
    ],
)
def test_numbers_that_no_simulation_can_hold_are_refused(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(f"[topology]\n{line}\n")
    with pytest.raises(UsageError, match=why):
        parse_topology(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "dp=4", "1p3d", "2p2d", "3p1d", "tp=4,dp=8,ep=32", "dp=2,tp=2", "instances=3,tp=4,dp=8,ep=32", "tp=2,ep=2",
        "instances=2,tp=2,ep=2",
    ],
)  # fmt: skip
def test_labels_read_back(text: str) -> None:
    assert parse_topology(parse_topology(text).label) == parse_topology(text)


def test_the_label_of_unlike_pools_names_both_shapes() -> None:
    """Runs are told apart by it."""
    decode = PoolSpec(instances=2, tp=4, dp=2, ep=8)
    spec = TopologySpec(prefill=PoolSpec(instances=3), decode=decode)
    assert spec.label == "3p2d, prefill tp=1, decode tp=4,dp=2,ep=8"


def test_pools_refuse_policies_that_have_nothing_to_decide() -> None:
    with pytest.raises(UsageError, match="use --policy v1"):
        run(pools(1, 1), plan([(10, 2)], [0.0]), policy="eb:k=2")


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def step_s(self: FixedAndToken, shape: object) -> float:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        return 0.1

    monkeypatch.setattr(FixedAndToken, "step_s", step_s)
    result = run("dp=2", plan([(10, 5)] * 40, [i * 0.2 for i in range(40)]))
    assert result.interrupted
    status = result.requests["status"].to_pylist()
    assert 0 < status.count("ok") < 40
    assert status.count("ok") + status.count("cancelled") + status.count("never_sent") == 40


@pytest.mark.parametrize("topology", ["replicas=2", "tp=1,dp=2,ep=2", "pools"])
@pytest.mark.parametrize("rate", [None, 40.0])
def test_warmup_requests_of_a_topology_leave_no_trace(topology: str, rate: float | None) -> None:
    requests = some_plan(5, rate=rate)
    spec = pools(1, 1) if topology == "pools" else topology
    on = device(FixedAndToken(3e-3, 2e-5, 4e-5))
    # An even number, so that round robin ends where it began.
    cold, warm = (run(spec, requests, on=on, policy="v1", warmup=count) for count in (0, 16))
    assert warm.requests.drop_columns("worker").equals(cold.requests.drop_columns("worker"))
    order = [("scheduled_ns", "ascending"), ("instance", "ascending"), ("start_ns", "ascending")]
    first, second = (result.steps.drop_columns("step_id").sort_by(order) for result in (cold, warm))
    assert first.equals(second)
    assert warm.facts.get("transfers") == cold.facts.get("transfers")


def test_each_instance_of_a_topology_learns_from_the_warmup() -> None:
    learns = "eb:update_every=4,min_samples=3"
    result = run("replicas=2", some_plan(6, rate=None), policy=learns, warmup=60)
    for instance in (0, 1):
        updates = [row for row in result.decisions.to_pylist() if row["kind"] == "update"]
        first = next(row for row in updates if row["instance"] == instance)
        assert first["samples"] > 10
        assert first["time_ns"] >= 0
        assert first["step_id"] >= 0


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    topology=st.sampled_from(["dp=3", "pools"]),
    policy=st.sampled_from(["v1", "eb:k=2"]),
    rate=st.sampled_from([None, 5.0, 60.0]),
    asynchronous=st.booleans(),
)
def test_coasting_makes_the_same_steps_on_several_instances(  # type: ignore[no-untyped-def]
    seed, topology, policy, rate, asynchronous
) -> None:
    spec = pools(1, 2) if topology == "pools" else topology
    settings = {"async_scheduling": asynchronous, "policy": "v1" if topology == "pools" else policy}
    settings["on"] = device(FixedAndToken(3e-3, 2e-5, 4e-5))
    with pytest.MonkeyPatch.context() as patch:
        coasted = run(spec, some_plan(seed, rate=rate), "least-outstanding", **settings)
        patch.setattr(engine_module, "SHORTEST_RUN", 1 << 60)
        one_by_one = run(spec, some_plan(seed, rate=rate), "least-outstanding", **settings)
    assert coasted.requests.equals(one_by_one.requests)
    assert coasted.decisions.equals(one_by_one.decisions)
    order = [("scheduled_ns", "ascending"), ("instance", "ascending"), ("start_ns", "ascending")]
    first, second = (result.steps.drop_columns("step_id").sort_by(order) for result in (coasted, one_by_one))
    assert first.equals(second)


def test_replicas_coast_between_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    ordinary = OpenGate.fill

    def counted(gate: OpenGate, step: Step) -> None:
        filled.append(step.scheduled_ns)
        ordinary(gate, step)

    monkeypatch.setattr(OpenGate, "fill", counted)
    steps = run("dp=3", plan([(20, 200)] * 9, [i * 1.0 for i in range(9)])).steps.num_rows
    assert len(filled) < steps / 4


def test_pools_keep_the_arrival_as_intended_time_under_a_cap() -> None:
    requests = replace(plan([(50, 5)] * 6, [i * 0.01 for i in range(6)]), max_concurrency=1)
    result = run(pools(1, 1), requests)
    assert ns(result, "intended_ns").tolist() == [i * 10 * MS for i in range(6)]
    assert (ns(result, "sent_ns")[1:] > ns(result, "intended_ns")[1:]).all()
