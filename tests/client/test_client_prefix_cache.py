"""How much of the prompts came from a server's prefix cache, and whether the plan accounts for it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.analysis.summary import Drafted
from ebbench.client.load_generator import drive
from ebbench.client.prefix_cache import drafts, hit_rate, repeated_share, unplanned_hits
from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from ebbench.records.plan import Plan
from ebbench.records.schema import PLAN, SERVER_METRICS
from ebbench.spec.client import ClientOptions
from ebbench.workloads import build_plan
from tests.analysis.made_runs import request, requests_table

NO_METRICS = SERVER_METRICS.empty_table()


def plan(*rows: dict[str, Any]) -> pa.Table:
    common = {"request_id": "", "session": 0, "turn": 0, "phase": "", "output_tokens": 10, "content": 0}
    return pa.Table.from_pylist([common | row for row in rows], schema=PLAN)


def metrics(*samples: tuple[str, str, float]) -> pa.Table:
    rows = [{"time_ns": i, "name": n, "labels": labels, "value": v} for i, (n, labels, v) in enumerate(samples)]
    return pa.Table.from_pylist(rows, schema=SERVER_METRICS)


def test_usage_decides_over_completed_requests_that_report_it() -> None:
    table = requests_table(
        [
            request(0, cached_tokens=50),
            request(1),
            request(2, cached_tokens=90, status="failed"),
            request(3, cached_tokens=0),
        ]
    )
    assert hit_rate(table, NO_METRICS) == (pytest.approx(50 / 200), "usage")


def test_without_usage_the_growth_of_the_servers_counters_is_taken() -> None:
    queries, hits = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    first, second = '{"engine":"0"}', '{"engine":"1"}'
    before = [(queries, first, 1000.0), (hits, first, 900.0), (queries, second, 0.0), (hits, second, 0.0)]
    after = [(queries, first, 1300.0), (hits, first, 960.0), (queries, second, 100.0), (hits, second, 40.0)]
    assert hit_rate(requests_table([request(0)]), metrics(*before, *after)) == (pytest.approx(100 / 400), "metrics")


def test_a_server_that_reports_nothing_has_no_rate() -> None:
    assert hit_rate(requests_table([request(0)]), NO_METRICS) == (None, "")


def test_drafts_are_the_growth_of_the_servers_counters_over_all_engines() -> None:
    name = "vllm:spec_decode_num_"
    engines = ['{"engine":"0"}', '{"engine":"1"}']
    places = [f'{{"engine":"{engine}","position":"{place}"}}' for engine in (0, 1) for place in (0, 1)]

    def page(steps: float, drafted: float, *accepted: float) -> list[tuple[str, str, float]]:
        rows = [(f"{name}drafts_total", labels, steps) for labels in engines]
        rows += [(f"{name}draft_tokens_total", labels, drafted) for labels in engines]
        positions = zip(places, accepted * 2, strict=True)
        return rows + [(f"{name}accepted_tokens_per_pos_total", labels, value) for labels, value in positions]

    found = Drafted.of(
        drafts(requests_table([request(0)]), metrics(*page(100, 200, 90, 50), *page(200, 400, 170, 100)))
    )
    assert found is not None
    assert found.figures() == {
        "mean_acceptance_length": pytest.approx(2.3),
        "acceptance": pytest.approx([0.8, 0.5]),
        "draft_acceptance_rate": pytest.approx(260 / 400),
        "drafted_tokens": 400,
        "accepted_tokens": 260,
    }
    assert drafts(requests_table([request(0)]), metrics(*page(100, 200, 90, 50))) == {}
    assert drafts(requests_table([request(0)]), metrics(*page(100, 200, 90, 50), *page(10, 20, 9, 5))) == {}
    assert drafts(requests_table([request(0)]), NO_METRICS) == {}


def test_the_repeated_share_counts_earlier_turns_and_shared_blocks() -> None:
    assert repeated_share(plan({"content": 1, "input_tokens": 100}, {"content": 2, "input_tokens": 100})) == 0
    turns = plan({"content": 1, "input_tokens": 100}, {"content": 1, "turn": 1, "input_tokens": 300})
    assert repeated_share(turns) == pytest.approx(110 / 400)
    blocks = plan(
        {"content": 1, "input_tokens": 1024, "hash_ids": [7, 8]},
        {"content": 2, "input_tokens": 1024, "hash_ids": [7, 9]},
    )
    assert repeated_share(blocks) == pytest.approx(512 / 2048)


@given(st.floats(0, 1))
def test_only_hits_beyond_the_plan_are_warned_of(rate: float) -> None:
    turns = plan({"content": 1, "input_tokens": 100}, {"content": 1, "turn": 1, "input_tokens": 300})
    assert (unplanned_hits(rate, turns) is None) == (rate <= 110 / 400 + 0.02)


def test_real_text_may_repeat_in_ways_the_plan_does_not_know() -> None:
    assert unplanned_hits(0.9, plan({"input_tokens": 100, "prompt": "You are a helpful assistant."})) is None


def run(*faults: str) -> Any:
    made: Plan = build_plan(
        "balanced", "saturated", seed=1, num_prompts=12, max_concurrency=4, input_len=40, output_len=3
    )
    with FakeServerProcess(FakeConfig(ttft_ms=5, itl_ms=1, faults=tuple(map(parse_fault, faults)))) as server:
        return drive(server.url, made, ClientOptions(workers=1))


def test_a_server_that_has_seen_the_prompts_is_recognised() -> None:
    warm = run("cached:share=0.5")
    assert warm.facts["prefix_hit_rate"] == pytest.approx(0.5, abs=0.02)
    assert warm.facts["prefix_hit_source"] == "usage"
    assert any("prefix cache" in warning for warning in map(str, warm.warnings))
    cold = run("cached:share=0")
    assert cold.facts["prefix_hit_rate"] == 0
    assert not any("prefix cache" in warning for warning in map(str, cold.warnings))
    assert run().facts["prefix_hit_rate"] is None
