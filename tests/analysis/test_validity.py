"""What makes a run INVALID, and what a stored run says about itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import Slo, measure
from ebbench.analysis.summary import mean_over_repeats, summarise, summarise_phases
from ebbench.analysis.validity import invalid_reasons
from ebbench.engines.base import EngineResult
from ebbench.errors import DataError
from ebbench.records.manifest import decode_manifest, encode_manifest
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.run import Run, RunWriter
from ebbench.records.warnings import warning
from ebbench.runs.conclude import RunContext, conclude
from ebbench.spec.server import EngineOptions
from tests.analysis.made_runs import MS, MadeEngine, device_of, plan_of, request, requests_table
from tests.records.test_run_directory import manifest as a_manifest
from vllm_eb.policy import parse_policy


def reasons(rows: list[dict[str, Any]], planned: int | None = None, **conditions: Any) -> tuple[str, ...]:
    table = requests_table(rows)
    columns = RequestColumns.of(table)
    plan = plan_of(len(rows) if planned is None else planned).table
    return tuple(map(str, invalid_reasons(table, plan, columns, measure(columns), **conditions)))


def many(count: int, **values: Any) -> list[dict[str, Any]]:
    return [request(i, **values) for i in range(count)]


def test_a_clean_run_is_valid() -> None:
    assert reasons(many(50)) == ()


def test_a_run_is_invalid_from_two_failures_in_a_hundred_requests_on() -> None:
    lost = {"status": "timed_out", "output_tokens": 0}
    assert reasons([*many(99), request(99, **lost)]) == ()
    assert reasons([*many(98), request(98, **lost), request(99, status="failed")]) == (
        "2 of 100 requests failed or timed out, more than 1%",
    )


def test_a_run_in_which_every_request_failed_is_invalid() -> None:
    assert reasons(many(3, status="failed")) == ("every request failed",)


@pytest.mark.parametrize(
    ("rows", "planned", "text"),
    [
        (many(3), 4, "4 requests planned but 3 accounted for"),
        ([*many(3), request(2)], 4, "1 request ids accounted for more than once"),
        ([*many(3), request(9)], 4, "1 requests accounted for that were never planned"),
        ([*many(3), request(3, status="fine")], 4, "unknown request status fine"),
        ([*many(3), request(3, first_token_ns=None)], 4, "1 completed requests lack a start, first-token or last"),
        ([*many(3), request(3, output_tokens=0)], 4, "1 completed requests have no output token"),
        ([*many(3), request(3, last_token_ns=9 * MS)], 4, "1 completed requests have times that run backwards"),
        ([*many(3), request(3, intended_ns=11 * MS, first_token_ns=10 * MS)], 4, "1 completed requests have times"),
        ([], 0, "no request was planned"),
    ],
)
def test_accounting_must_add_up(rows: list[dict[str, Any]], planned: int, text: str) -> None:
    assert any(text in reason for reason in reasons(rows, planned))


def test_equal_times_are_in_order() -> None:
    """One token: its time is the first and the last; a clock of low resolution may show it at the intended start."""
    assert reasons([request(0, first_token_ns=0, last_token_ns=0, output_tokens=1), *many(3)[1:]]) == ()


def test_an_interrupted_run_is_invalid() -> None:
    assert reasons(many(3), interrupted=True) == ("interrupted before the plan was complete",)


@pytest.mark.parametrize(
    ("lag_ms", "first_token_ms", "limit"),
    [
        (9.9, 15, None),  # 10 ms are allowed however short the TTFT is
        (10.1, 15, "10"),
        (49, 1000, None),  # 5 % of a median TTFT of 1 s is 50 ms
        (51, 1000, "50"),
    ],
)
def test_a_client_behind_its_schedule(lag_ms: float, first_token_ms: float, limit: str | None) -> None:
    times = {"first_token_ns": int(first_token_ms * MS), "last_token_ns": int(2000 * MS), "end_ns": 2000 * MS}
    # 2 of 100 late: the 99th percentile is among them.
    rows = [request(i, sent_ns=int(lag_ms * MS) if i < 2 else 0, **times) for i in range(100)]
    found = reasons(rows)
    told = f"the client fell behind its schedule: p99 lag {lag_ms:.1f} ms, limit {limit} ms; use more --workers"
    assert [reason.startswith(told) for reason in found] == [True] * (limit is not None)
    assert reasons(rows, paced_sends=False) == ()
    assert reasons(rows, lag_limit_ms=lag_ms + 1) == ()
    [own] = reasons(rows, lag_limit_ms=lag_ms - 1)
    assert f"limit {lag_ms - 1:.4g} ms" in own


def store(path: Path, plan: Plan, result: EngineResult, **changes: Any) -> Run:
    context = RunContext(plan, parse_policy("ebplus"), "sim", device_of(), EngineOptions(), 1, **changes)
    with RunWriter.create(path) as writer:
        conclude(writer, context, result)
    return Run.load(path)


def run_made(plan: Plan, **faults: Any) -> EngineResult:
    return MadeEngine(**faults).run(plan, parse_policy("ebplus"), device_of(), EngineOptions(), None)


def test_the_manifest_says_what_was_run(tmp_path: Path) -> None:
    plan = plan_of(30, seed=4)
    manifest = store(tmp_path / "run", plan, run_made(plan), slo=Slo(tpot=15)).manifest
    assert (manifest.workload, manifest.scenario, manifest.seed, manifest.source) == (
        "made-up",
        "saturated",
        4,
        "profile",
    )
    assert (manifest.policy, manifest.engine, manifest.device, manifest.model) == (
        "ebplus",
        "sim",
        "made-gpu",
        "made-model",
    )
    assert manifest.options["max_num_seqs"] == 1024
    assert manifest.slo == {"tpot": 15}
    assert {"ebbench", "python", "numpy", "pyarrow"} <= set(manifest.versions)
    assert manifest.calibration is not None
    assert manifest.calibration["mixed"]["a"] == 4e-5
    assert [warning.code for warning in manifest.warnings] == ["", "few-requests"]
    assert (manifest.valid, manifest.clock) == (True, "virtual")


@pytest.mark.parametrize(("loop", "replayed"), [("trace", True), ("open", False), ("closed", False)])
def test_a_stored_run_says_whether_a_trace_was_replayed(tmp_path: Path, loop: str, replayed: bool) -> None:
    plan = plan_of(30)
    plan = replace(plan, facts={**plan.facts, "loop": loop})
    load = summarise(store(tmp_path / "run", plan, run_made(plan))).load
    assert load.replayed is replayed
    assert load.sessions_by_seed is False


def test_a_larger_plan_is_asked_for_in_its_own_unit(tmp_path: Path) -> None:
    """662 requests for p99: as many sessions where each has one, fewer conversations, of a log again and again."""

    def remedy(name: str, plan: Plan) -> str:
        warnings = store(tmp_path / name, plan, run_made(plan)).manifest.warnings
        [warning] = [one for one in warnings if one.code == "few-requests"]
        return warning.way_out

    single = plan_of(30)
    assert remedy("single", single) == "Use --num-prompts 662 or more."
    turns = single.table.set_column(1, "session", pa.array([i // 10 for i in range(30)]))
    assert (
        remedy("turns", replace(single, table=turns))
        == "Use --num-prompts 67 or more: that many conversations, 10.0 requests in each."
    )
    log = replace(single, facts={**single.facts, "log_sessions": 30})
    again = "Use --num-prompts 662 or more; the log holds 30 and is then read again."
    assert remedy("log", log) == again
    long = replace(single, facts={**single.facts, "log_sessions": 900})
    assert remedy("long", long) == "Use --num-prompts 662 or more."
    own = single.table.set_column(single.table.column_names.index("prompt"), "prompt", pa.array(["a"] * 30))
    assert remedy("texts", replace(log, table=own)) == "p99 takes a log of 662 requests or more."


def test_a_longer_run_is_asked_for_by_its_option(tmp_path: Path) -> None:
    plan = plan_of(30)
    warnings = store(tmp_path / "run", replace(plan, max_concurrency=None), run_made(plan)).manifest.warnings
    remedies = [one.way_out for one in warnings if one.code in ("no-steady-window", "short-steady-window")]
    assert all(re.match(r"Use --num-prompts \d+ or more", each) for each in remedies), remedies


def test_the_lag_rule_holds_for_real_clocks_only(tmp_path: Path) -> None:
    plan = plan_of(30)
    result = run_made(plan)
    rows = [row | {"sent_ns": row["intended_ns"] + 12 * MS} for row in result.requests.to_pylist()]
    late = replace(result, requests=requests_table(rows))
    assert store(tmp_path / "virtual", plan, late).manifest.valid
    assert not store(tmp_path / "real", plan, late, clock="real").manifest.valid
    # A cap on open sessions makes requests wait by intention.
    capped = replace(plan, phases=(), max_concurrency=8)
    assert store(tmp_path / "capped", capped, late, clock="real").manifest.valid


def test_phases_add_up_to_the_run(tmp_path: Path) -> None:
    plan = plan_of(100, phases=[ClosedPhase("low", 60, 4), ClosedPhase("high", 40, 16)])
    run = store(tmp_path / "run", plan, run_made(plan), slo=Slo(tpot=15))
    whole, phases = summarise(run), summarise_phases(run)
    assert [phase.phase for phase in phases] == ["low", "high"]
    assert sum(phase.metrics.completed for phase in phases) == whole.metrics.completed == 100
    assert sum(p.metrics.total_output_tokens for p in phases) == whole.metrics.total_output_tokens
    assert all(phase.metrics.steady is not None for phase in phases)
    assert phases[0].metrics.slo_attainment == 1.0
    low, high = (phase.metrics.steady.output_throughput for phase in phases)  # type: ignore[union-attr]
    assert high > 2 * low
    assert phases[1].to_dict()["phase"] == "high"


def test_repeats_are_averaged_with_their_spread() -> None:
    base = {"seed": 1, "valid": True, "interrupted": False, "warnings": ["w"], "reasons": [], "duration": 2.0}
    base |= dict.fromkeys(
        ("planned", "completed", "failed", "timed_out", "cancelled", "never_sent", "total_input_tokens",
         "total_output_tokens", "cached_tokens", "preemptions", "bundled_requests"), 1
    )  # fmt: skip
    first = base | {"output_throughput": 10.0, "p99_ttft_ms": 5.0}
    second = base | {"output_throughput": 14.0, "p99_ttft_ms": None, "seed": 2, "valid": False, "reasons": ["r"]}
    merged = mean_over_repeats([first, second])
    assert merged["output_throughput"] == 12.0
    assert merged["spread"]["output_throughput"] == pytest.approx(8**0.5)
    assert merged["p99_ttft_ms"] is None
    assert (merged["completed"], merged["valid"], merged["reasons"], merged["warnings"]) == (2, False, ["r"], ["w"])
    assert (merged["seed"], merged["seeds"]) == (1, [1, 2])


def test_reasons_are_stored_as_codes_and_old_ones_stay_sentences(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(a_manifest(), valid=False, reasons=(warning("all-failed", planned=3),))
    stored = json.loads(encode_manifest(manifest))
    assert stored["reasons"] == [{"code": "all-failed", "values": {"planned": 3}}]
    for told in (stored["reasons"], ["every request failed"]):
        read = decode_manifest(json.dumps(stored | {"reasons": told}).encode(), tmp_path)
        assert [str(reason) for reason in read.reasons] == ["every request failed"]


def test_invalid_reasons_facts_and_metrics_of_the_engine_are_stored(tmp_path: Path) -> None:
    plan = plan_of(30)
    samples = pa.table({"time_ns": [1], "name": ["vllm:num_requests_running"], "value": [2.0]})
    said = {
        "invalid": (warning("worker-died", worker=2),),
        "facts": {"served_model": "served"},
        "server_metrics": samples,
    }
    run = store(tmp_path / "run", plan, replace(run_made(plan), **said))
    assert [str(reason) for reason in run.manifest.reasons] == ["client worker 2 died; its requests are lost"]
    assert run.manifest.model == run.manifest.facts["served_model"] == "served"
    assert run.table("server_metrics").equals(samples)
    assert run.manifest.rows["server_metrics"] == 1
    (tmp_path / "run" / "server_metrics.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match=r"server_metrics\.parquet: not a readable Parquet file"):
        Run.load(tmp_path / "run")


def test_turns_lost_with_an_earlier_one_count_as_failed() -> None:
    lost = [request(i, status="never_sent", error_class="earlier_turn_failed", sent_ns=None) for i in (98, 99)]
    assert reasons([*many(97), request(97, status="failed"), *lost]) == (
        "3 of 100 requests failed, timed out or came after a turn that did, more than 1%",
    )
    left = [request(i, status="never_sent", error_class="not_released", sent_ns=None) for i in (98, 99)]
    assert reasons([*many(97), request(97, status="failed"), *left]) == ()
    assert reasons([request(0, status="failed"), request(1, **(lost[0] | {"request_id": "r-1"}))]) == (
        "every request failed",
    )
