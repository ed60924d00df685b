"""Prefill and decode pools: transfers, pinned blocks, running out of memory, backpressure, first tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace as replace_struct
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.config.topology import DECODE_UTILIZATION, PoolSpec, TopologySpec
from ebbench.devices.loader import load_device, unit_device
from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.simulation.state import StoreFullError
from ebbench.simulation.transfer import ReceiveStore, TransferFabric, TransferLink
from tests.cluster.cluster_worlds import FixedAndToken, device, ns, plan, pools, run

MS = 1_000_000


def test_a_request_is_prefilled_transferred_and_decoded() -> None:
    result = run(pools(1, 1), plan([(500, 3)], [0.0]))
    # 100 ms prefill, 500 KB at 1 GB/s is 0.5 ms, then three steps of 100 ms, the first token from the decode side.
    assert ns(result, "first_token_ns")[0] == 200 * MS + MS // 2
    assert ns(result, "last_token_ns")[0] == 400 * MS + MS // 2
    assert ns(result, "scheduled_ns")[0] == 0
    steps = result.steps.to_pylist()
    assert [(s["instance"], s["prefill_tokens"]) for s in steps] == [(0, 500), (1, 1), (1, 0), (1, 0)]
    assert result.facts["transfers"] == 1
    assert result.facts["transfer_gb"] == pytest.approx(0.0005)


def test_the_first_token_may_come_from_the_prefill_side() -> None:
    result = run(pools(1, 1, first_token="prefill"), plan([(500, 3), (500, 1)], [0.0, 0.0]))
    assert ns(result, "first_token_ns").tolist() == [100 * MS, 100 * MS]
    assert ns(result, "last_token_ns").tolist() == [300 * MS + MS // 2, 100 * MS]
    assert result.facts["transfers"] == 1  # the request of one token has nothing to decode


def test_transfers_share_links_first_come_first_served() -> None:
    result = run(pools(1, 2), plan([(1000, 2), (1000, 2)], [0.0, 0.0]))
    # Both prompts end at 100 ms; the sender's link carries one after the other, 1 ms each.
    assert sorted(ns(result, "first_token_ns").tolist()) == [201 * MS, 202 * MS]


def test_blocks_stay_pinned_until_the_transfer_has_ended() -> None:
    # 8 blocks hold one prompt of 128 tokens; the transfer takes a second, the prefill 0.1 s.
    slow = pools(1, 1, bandwidth_gb_per_s=128e3 / 1e9)
    result = run(slow, plan([(100, 1)] * 2, [0.0, 0.0]), num_kv_blocks=8)
    start = np.array(result.steps["start_ns"])[np.array(result.steps["instance"]) == 0]
    assert start[1] - start[0] >= 100 * MS + round(100e3 / 128e3 * 1e9)


def test_an_overloaded_decode_instance_runs_out_of_memory() -> None:
    requests = plan([(1000, 200)] * 30, concurrency=30)
    result = run(pools(1, 1, store_gb=0.01), requests)  # room for ten prompts
    assert len(result.invalid) == 1
    assert "ran out of memory" in str(result.invalid[0])
    status = result.requests["status"].to_pylist()
    assert status.count("ok") == 0
    classes = result.requests["error_class"].to_pylist()
    assert classes.count("out_of_memory") >= 11
    assert status.count("failed") == classes.count("out_of_memory")


def test_backpressure_holds_transfers_instead() -> None:
    requests = plan([(1000, 20)] * 30, concurrency=30)
    result = run(pools(1, 1, store_gb=0.01, backpressure=True), requests)
    assert result.invalid == ()
    assert result.requests["status"].to_pylist() == ["ok"] * 30
    assert result.facts["receive_store_peak_gb"] <= 0.01


def test_memory_is_given_back_at_admission_if_so_asked() -> None:
    requests = plan([(1000, 50)] * 30, concurrency=30)
    kept = run(pools(1, 1, store_gb=1.0), requests)
    given = run(pools(1, 1, store_gb=1.0, held_until="admission"), requests)
    assert given.facts["receive_store_peak_gb"] < kept.facts["receive_store_peak_gb"]


def test_a_preempted_decode_recomputes_its_prompt() -> None:
    # 20 blocks of 16: three requests of 90 prompt tokens fit at first and outgrow the cache together.
    result = run(pools(1, 1), plan([(90, 60)] * 3, [0.0] * 3), num_kv_blocks=20)
    assert result.requests["status"].to_pylist() == ["ok"] * 3
    assert sum(result.requests["preemptions"].to_pylist()) > 0
    decode = result.steps.filter(np.array(result.steps["instance"]) == 1)
    assert max(decode["prefill_tokens"].to_pylist()) >= 90


def test_iqr_places_decodes_by_batch_and_kv() -> None:
    lengths = [(1000, 40), (10, 40), (10, 40), (10, 40)] * 4
    result = run(pools(1, 4), plan(lengths, [0.0] * 16), decode_dispatch="iqr", max_num_batched_tokens=8192)
    steps = result.steps
    decode = steps.filter(np.array(steps["instance"]) >= 1)
    most = dict.fromkeys(range(1, 5), 0)
    for row in decode.to_pylist():
        most[row["instance"]] = max(most[row["instance"]], row["kv_blocks_used"])
    # One long prompt each, where round robin would give all four to one unit.
    assert max(most.values()) < 2 * min(most.values())


def test_units_with_a_barrier_in_both_pools() -> None:
    spec = TopologySpec(
        prefill=PoolSpec(instances=2, dp=2, ep=2),
        decode=PoolSpec(instances=1, dp=4, ep=4),
        transfer=pools(1, 1).transfer,
    )
    result = run(
        spec, plan([(100 + i, 5) for i in range(40)], [i * 0.02 for i in range(40)]), "sbs", decode_dispatch="iqr"
    )
    assert result.requests["status"].to_pylist() == ["ok"] * 40
    decode = result.steps.filter(np.array(result.steps["instance"]) >= 4).to_pylist()
    ends: dict[int, set[int]] = {}
    for row in decode:
        ends.setdefault(row["start_ns"], set()).add(row["end_ns"])
    assert all(len(values) == 1 for values in ends.values())


def by_priority(lengths: list[tuple[int, int]], priorities: list[int], arrivals_s: list[float]) -> Plan:
    """A plan whose requests have priorities."""
    made = plan(lengths, arrivals_s)
    return replace(made, table=made.table.append_column("priority", pa.array(priorities, pa.int32())))


@pytest.mark.parametrize("dispatch", ["round-robin", "least-outstanding", "power-of-two", "prefix-affine"])
def test_each_replica_takes_the_lowest_priority_first(dispatch: str) -> None:
    values = [int(value) for value in np.random.default_rng(1).integers(-2, 3, 40)]
    made = by_priority([(100, 3)] * 40, values, [0.001 * place for place in range(40)])
    result = run("replicas=2", made, dispatch, max_num_seqs=1, scheduling_policy="priority")
    order = np.argsort(ns(result, "scheduled_ns"))
    for unit in (0, 1):
        _, *rows = [row for row in order.tolist() if ns(result, "worker")[row] == unit]  # the first found it idle
        assert len(rows) > 10
        assert rows == sorted(rows, key=lambda row: (values[row], row))


def test_decode_units_take_the_lowest_priority_first() -> None:
    values = [0, 5, -1, 5, 2, -1, 0]
    made = by_priority([(100, 4)] * 7, values, [0.0] * 7)
    spec = pools(1, 1)
    one_at_a_time = replace_struct(spec, decode=PoolSpec(max_num_seqs=1))
    result = run(one_at_a_time, made, scheduling_policy="priority")
    order = np.argsort(ns(result, "end_ns")).tolist()
    assert order[1:] == sorted(set(range(7)) - {order[0]}, key=lambda row: (values[row], row))


def test_unknown_kv_size_is_refused() -> None:
    spec = pools(1, 1)
    bare = TopologySpec(prefill=spec.prefill, decode=spec.decode)
    with pytest.raises(UsageError, match="kv_bytes_per_token"):
        run(bare, plan([(10, 1)], [0.0]), on=device(FixedAndToken()))


def test_the_fabric_takes_memory_when_a_transfer_begins() -> None:
    fabric = TransferFabric(TransferLink(1e9, 0.0), 1, [ReceiveStore(2e6)], backpressure=False)
    [first] = fabric.offer(0, 0, 0, 1e6, 0)
    assert fabric.offer(1, 0, 0, 1e6, 0) == []
    assert fabric.offer(2, 0, 0, 1e6, 0) == []
    assert fabric.stores[0].held_bytes == 1e6
    [second] = fabric.ended(first, first.end_ns)
    assert second.end_ns == 2 * MS
    with pytest.raises(StoreFullError):
        fabric.ended(second, second.end_ns)


def test_a_decode_pool_has_the_one_policy_that_there_is(tmp_path: Path) -> None:
    """The command without --policy ran v1, stored it, and then failed."""
    args = ["run", "balanced", "-n", "20", "-c", "4", "--topology", "1p1d", "-q", "--json", "-o", str(tmp_path / "run")]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert [each["policy"] for each in json.loads(done.stdout)] == ["v1"]


@pytest.mark.parametrize(
    ("in_file", "asked_for", "used"),
    [(None, None, DECODE_UTILIZATION), (None, 0.4, 0.4), (0.8, 0.4, 0.8), (0.8, None, 0.8)],
)
def test_a_pool_has_the_memory_share_of_its_file_or_the_command(
    in_file: float | None, asked_for: float | None, used: float
) -> None:
    device = load_device("rtx-pro-6000", "qwen3-8b", gpu_memory_utilization=asked_for)
    unit = unit_device(device, PoolSpec(gpu_memory_utilization=in_file), DECODE_UTILIZATION, 1024, 8192)
    expected = load_device("rtx-pro-6000", "qwen3-8b", gpu_memory_utilization=used, max_num_seqs=1024)
    assert unit.device.kv_capacity_tokens == expected.kv_capacity_tokens
    assert unit.spare_bytes == pytest.approx((1 - used) * 101_973_491_712)
