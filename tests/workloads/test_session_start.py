"""Sessions that are in the middle of their course when a run begins: the plan, the cache, and both kinds of engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.sessions import figures_by_class, sessions_table
from ebbench.client import drive
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.plan import Plan, primed
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from ebbench.workloads.options import PlanOptions
from ebbench.workloads.planner import make_plan
from tests.simulation.worlds import device
from vllm_eb.policy import parse_policy


def plan_of(workload: str = "wildchat", **options: Any) -> Plan:
    given = {"source": "profile", "num_prompts": 12, "max_concurrency": 4, "with_text": False, **options}
    return make_plan(PlanOptions(workload, **given))


def by_session(plan: Plan) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in plan.table.to_pylist():
        found.setdefault(row["session"], []).append(row)
    return found


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_the_first_open_sessions_begin_within_their_course(one: float, other: float, seed: int) -> None:
    low, high = sorted((round(one, 3), round(other, 3)))
    whole = by_session(plan_of(think_time="2", seed=seed))
    begun = by_session(plan_of(think_time="2", seed=seed, session_start=f"{low}-{high}"))
    assert begun.keys() == whole.keys()
    for session, rows in begun.items():
        first, of = rows[0]["turn"], len(whole[session])
        assert [row["turn"] for row in rows] == list(range(first, of))
        if session >= 4:
            assert first == 0
            continue
        assert 1 <= first <= of - 1
        assert low * (of - 1) - 1e-9 <= first <= high * (of - 1) + 1
        before = whole[session][first - 1]
        assert rows[0]["primed_tokens"] == before["input_tokens"] + before["output_tokens"] <= rows[0]["input_tokens"]
        assert 0 <= (rows[0]["pause_ns"] or 0) <= 2e9


def test_a_plan_without_the_option_has_no_such_column() -> None:
    plan = plan_of()
    assert "primed_tokens" not in plan.table.column_names
    assert primed(plan.table).num_rows == 0


def test_the_simulator_finds_the_history_in_its_cache() -> None:
    plan = plan_of(session_start="0.5", think_time="1")
    result = SimEngine().run(
        plan, parse_policy("v1"), device(), EngineOptions(block_size=16, enable_prefix_caching=True)
    )
    rows = dict(zip(plan.table["request_id"].to_pylist(), plan.table["primed_tokens"].to_pylist(), strict=True))
    assert result.requests.num_rows == len(plan)
    held = [row for row in result.requests.to_pylist() if rows[row["request_id"]]]
    assert len(held) == 4
    for row in held:
        assert row["cached_tokens"] == min(rows[row["request_id"]], row["input_tokens"] - 1) // 16 * 16
        assert row["intended_ns"] <= 1e9
    table = sessions_table(RequestColumns.of(result.requests))
    assert table is not None
    assert [first > 0 for first in table["first_turn"].to_pylist()] == [True] * 4 + [False] * 8
    assert figures_by_class(table)[""].planned == 8


def test_a_server_gets_the_history_after_its_cache_was_emptied() -> None:
    plan = plan_of(session_start="0.5", num_prompts=6, max_concurrency=3)
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=0.1)) as server:
        options = ClientOptions(workers=0, metrics_interval_s=None)
        result = drive(server.url, plan, options, environ={})
        ledger = server.ledger()
    assert result.requests.num_rows == len(plan)
    assert set(result.requests["status"].to_pylist()) == {"ok"}
    assert len(ledger) == len(plan) + 3


def weka(tmp_path: Path) -> Path:
    def request(t: float, blocks: int) -> dict[str, Any]:
        ids = list(range(blocks))
        return {"type": "n", "t": t, "in": 64 * blocks, "out": 20, "api_time": 2.0, "hash_ids": ids}

    sessions = [
        {"id": name, "block_size": 64, "requests": [request(0, 2), request(10, 4), request(90, 6), request(100, 8)]}
        for name in "abc"
    ]
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(map(json.dumps, sessions)))
    return path


def test_recorded_sessions_begin_at_a_moment_of_their_time(tmp_path: Path) -> None:
    log = f"log:{weka(tmp_path)}"
    given = {"source": "auto", "num_prompts": 3, "max_concurrency": 2, "scenario": "saturated"}
    plan = plan_of(log, **given, recorded_pauses=True, session_start="0.5")
    rows = by_session(plan)
    # Half of 100 s: between the requests at 10 s and 90 s, 40 s before the next one; its blocks 0 to 3 were computed.
    assert [[row["turn"] for row in own] for own in rows.values()] == [[2, 3], [2, 3], [0, 1, 2, 3]]
    assert [own[0]["primed_tokens"] for own in rows.values()] == [256, 256, None]
    assert [own[0]["pause_ns"] for own in rows.values()] == [40_000_000_000, 40_000_000_000, None]
    cut = by_session(plan_of(log, **given, recorded_pauses=True, session_start="0.5", max_pause_s=5.0))
    assert [own[0]["pause_ns"] for own in cut.values()] == [5_000_000_000, 5_000_000_000, None]
    assert [row["pause_ns"] for row in cut[2]] == [None, 5_000_000_000, 5_000_000_000, 5_000_000_000]
    assert [len(ids) for ids in primed(plan.table)["hash_ids"].to_pylist()] == [4, 4]


def test_pauses_of_a_log_are_kept_only_if_asked(tmp_path: Path) -> None:
    log = f"log:{weka(tmp_path)}"
    given = {"source": "auto", "num_prompts": 3, "max_concurrency": 2, "scenario": "saturated"}
    assert "pause_ns" not in plan_of(log, **given).table.column_names
    pauses = np.array(plan_of(log, **given, recorded_pauses=True).table["pause_ns"].fill_null(0).to_pylist())
    assert pauses[:4].tolist() == [0, 8e9, 78e9, 8e9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session_start": "1.5"}, "share of a session's course"),
        ({"session_start": "0.8-0.2"}, "share of a session's course"),
        ({"session_start": "0.5", "scenario": "poisson", "request_rate": 1.0, "max_concurrency": None}, "open loop"),
        ({"workload": "sharegpt", "session_start": "0.5"}, "single requests"),
        ({"max_pause_s": 5.0}, "have none"),
        ({"recorded_pauses": True}, "log:FILE"),
    ],
)
def test_what_has_no_effect_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(**options)
