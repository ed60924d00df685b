"""After a request that a front end refuses with 429, its session ends: in the simulator and in the load generator."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from tests.client import client_runs
from tests.cluster.cluster_worlds import FixedAndToken, device
from tests.cluster.cluster_worlds import run as simulate
from tests.simulation import worlds


def simulated(concurrency: int | None) -> pa.Table:
    """Sessions of three turns under a dispatcher that refuses some of them."""
    plan = worlds.plan([(2000, 1)] * 90, turns=3, concurrency=concurrency, gap_ns=1)
    on = device(FixedAndToken(0.03, 1e-4))
    return simulate("dp=1", plan, "sbs:cycle_limit=3,bypass=off", on=on, max_num_batched_tokens=2048).requests


def sent(concurrency: int | None) -> pa.Table:
    """Sessions of three turns to a server that refuses every fifth request."""
    arrivals_ms = None if concurrency else [float(i) for i in range(30)]
    plan = client_runs.plan_of(30, turns=3, concurrency=concurrency, arrivals_ms=arrivals_ms)
    faults = (parse_fault("status:code=429,every=5"),)
    with FakeServerProcess(FakeConfig(ttft_ms=2, itl_ms=1, faults=faults)) as server:
        return client_runs.run(server.url, plan).requests


@pytest.mark.parametrize("concurrency", [None, 12])
@pytest.mark.parametrize("source", [simulated, sent])
def test_no_turn_is_sent_after_a_refused_one(source: Any, concurrency: int | None) -> None:
    rows = source(concurrency).to_pylist()
    refused_sessions = {row["session"] for row in rows if row["http_status"] == 429}
    assert 0 < len(refused_sessions) < 30
    for row in rows:
        earlier = [one for one in rows if one["session"] == row["session"] and one["turn"] < row["turn"]]
        if any(one["status"] != "ok" for one in earlier):
            assert (row["status"], row["error_class"]) == ("never_sent", "earlier_turn_failed")
            assert row["sent_ns"] is None
        else:
            assert (row["status"], row["http_status"]) in (("ok", None), ("ok", 200), ("failed", 429))
