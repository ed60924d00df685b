"""Refusals by vLLM's queue limits, in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.config.topology import parse_topology
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.spec.server import EngineOptions
from tests.simulation.worlds import World, device, plan, worlds
from vllm_eb.policy import parse_policy


@given(worlds(), st.integers(1, 12), st.integers(1, 400))
def test_every_request_ends_or_is_refused(world: World, requests: int, tokens: int) -> None:
    options = replace(world.options, max_num_queued_reqs=requests, max_num_queued_tokens=tokens)
    result = replace(world, options=options).run()
    rows = result.requests.to_pylist()
    scheduled = {name for names in result.steps["request_ids"].to_pylist() for name in names}
    for row in rows:
        assert row["status"] in ("ok", "failed", "never_sent")
        assert (row["status"] == "ok") == (row["request_id"] in scheduled)
        assert (row["http_status"] == 503) == (row["status"] == "failed")
        assert (row["error_class"] == "earlier_turn_failed") == (row["status"] == "never_sent")
    # At any moment at most so many requests are open.
    changes = [(row["sent_ns"], 1, 1) for row in rows if row["status"] == "ok"]
    changes += [(row["end_ns"], 0, -1) for row in rows if row["status"] == "ok"]
    now = 0
    for _, _, change in sorted(changes):
        now += change
        assert now <= requests


@given(worlds())
def test_limits_that_nothing_reaches_change_nothing(world: World) -> None:
    options = replace(world.options, max_num_queued_reqs=10**6, max_num_queued_tokens=10**9)
    assert replace(world, options=options).run().requests.equals(world.run().requests)


def test_a_refused_turn_ends_its_session() -> None:
    made = plan([(10, 20), (10, 20), (10, 20)] * 4, turns=3, gap_ns=1)
    options = EngineOptions(max_num_seqs=2, max_num_batched_tokens=64, num_kv_blocks=100, max_num_queued_reqs=2)
    rows = World(made, "v1", options).run().requests.to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * 6 + ["failed", "never_sent", "never_sent"] * 2


def test_several_instances_are_refused() -> None:
    made, options = plan([(10, 20)] * 4, gap_ns=1), EngineOptions(max_num_queued_reqs=2)
    engine = SimEngine(topology=parse_topology("dp=2"))
    with pytest.raises(UsageError, match="one instance"):
        engine.run(made, parse_policy("v1"), device(), options)
