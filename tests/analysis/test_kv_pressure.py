"""A full KV cache is said where it cost something: requests that wait for memory, tokens computed again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from ebbench.analysis.explain import WORTH_SAYING, KvPressure, kv_pressure, kv_pressure_by_metrics
from ebbench.records.run import Run
from ebbench.records.schema import SERVER_METRICS
from tests.gate.gate_data import invoke

LOAD = ("run", "balanced", "--engine", "sim", "-n", 60, "-c", 40, "-p", "v1", "-q", "--max-model-len", 1024)


LENGTHS = ("--input-len", 320, "--output-len", 160, "--length-distribution", "fixed")


def simulated(tmp_path: Path, blocks: int, *more: object, lengths: tuple[int, int] = (320, 160)) -> tuple[Run, str]:
    """A run with so many KV blocks, and what was printed."""
    options = ("--input-len", lengths[0], "--output-len", lengths[1], "--length-distribution", "fixed")
    done = invoke(*LOAD, *options, "--num-kv-blocks", blocks, *more, "-o", tmp_path / "run")
    assert done.exit_code == 0, done.output
    return Run.load(tmp_path / "run"), " ".join(done.stdout.split())


def pressure_of(run: Run) -> KvPressure | None:
    return kv_pressure(run.steps, run.requests, run.manifest.options)


def test_preemptions_and_waiting_for_memory_are_said(tmp_path: Path) -> None:
    run, shown = simulated(tmp_path, 260)
    found = pressure_of(run)
    assert found is not None
    assert found.full_share > 0.5
    assert found.running < 14
    assert found.preemptions > 0
    assert f"KV cache full: requests waited for memory {100 * found.full_share:.1f} % of the time" in shown
    assert f"of 1,024 slots in use; {found.preemptions} preemption" in shown
    assert f"{found.repeated_tokens:,} tokens computed again" in shown


def test_repeated_tokens_are_those_that_preemption_repeats(tmp_path: Path) -> None:
    """By invariant: tokens given are prompts and all but the last outputs, and what preemptions repeat."""
    run, _ = simulated(tmp_path, 260)
    found = pressure_of(run)
    assert found is not None
    given = sum(sum(tokens) for tokens in run.steps["request_tokens"].to_pylist())
    once = 60 * (320 + 160 - 1) - sum(run.requests["cached_tokens"].to_pylist())
    # A resumed request gives its last token in the prefill that repeats the others: one token less as decode.
    assert abs((given - once) - (found.repeated_tokens or 0)) <= found.preemptions


def test_a_cache_with_room_is_not_mentioned(tmp_path: Path) -> None:
    run, shown = simulated(tmp_path, 4_000)
    assert "KV cache full" not in shown
    found = pressure_of(run)
    assert found is not None
    assert (found.full_share, found.preemptions, found.matters) == (0.0, 0, False)


def test_waiting_for_a_slot_is_no_waiting_for_memory(tmp_path: Path) -> None:
    run, shown = simulated(tmp_path, 1_000, "--max-num-seqs", 4)
    assert "KV cache full" not in shown
    assert np.max(run.steps["waiting"].to_numpy()) > 0


def test_policies_are_told_apart(tmp_path: Path) -> None:
    invoke(*LOAD, "-p", "ebplus", "--input-len", 320, "--output-len", 160, "--num-kv-blocks", 260, "-o", tmp_path / "r")
    shown = " ".join(invoke("show", tmp_path / "r").stdout.split())
    assert "v1: KV cache full: requests waited" in shown or shown.count("KV cache full: requests waited") == 1
    assert shown.count("More memory for it") == 1


def of_server(samples: list[tuple[float, str, float]]) -> KvPressure | None:
    """Of 60 requests to a server whose metrics changed like that: seconds, name, value."""
    rows = [{"time_ns": int(at * 1e9), "name": name, "labels": "{}", "value": value} for at, name, value in samples]
    return kv_pressure_by_metrics(pa.Table.from_pylist(rows, schema=SERVER_METRICS), 60, None)


def test_a_server_says_it_in_its_metrics() -> None:
    usage, waiting, running = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:num_requests_running"
    samples = [
        (-1.0, "vllm:num_preemptions_total", 7.0), (0.0, usage, 0.5), (0.0, waiting, 0.0), (0.0, running, 2.0),
        (4.0, usage, 0.99), (4.0, waiting, 5.0), (4.0, running, 12.0), (9.0, "vllm:num_preemptions_total", 31.0),
        (9.0, usage, 0.4), (10.0, waiting, 0.0),
    ]  # fmt: skip
    found = of_server(samples)
    assert found is not None
    assert (found.full_share, found.running, found.preemptions) == (pytest.approx(0.5), 12.0, 24)
    (line,) = map(str, found.warnings)
    assert "requests waited for memory 50.0 % of the time, with 12 sequences running; 24 preemptions." in line
    sglang = [(0.0, "sglang:token_usage", 0.95), (0.0, "sglang:num_queue_reqs", 3.0), (8.0, "sglang:token_usage", 0.96)]
    assert (of_server(sglang) or found).full_share == 1.0
    assert of_server([(0.0, "process_start_time_seconds", 1.0)]) is None
    few = of_server([(0.0, "vllm:num_preemptions_total", 0.0), (1.0, "vllm:num_preemptions_total", 1.0)])
    assert few is not None
    assert few.preempted_share < WORTH_SAYING
    assert few.warnings == ()


FULL = "KV cache full: requests waited for memory"


def test_json_has_the_shares_and_the_warning(tmp_path: Path) -> None:
    run, _ = simulated(tmp_path, 260)
    for command in (
        ("show", tmp_path / "run", "--json"),
        (*LOAD, *LENGTHS, "--num-kv-blocks", 260, "--json", "-o", tmp_path / "j"),
    ):
        (row,) = json.loads(invoke(*command).stdout)
        found = pressure_of(run)
        assert found is not None
        assert (row["kv_full_share"], row["repeated_tokens"]) == (found.full_share, found.repeated_tokens)
        assert row["preemptions"] == found.preemptions
        assert any(each["text"].startswith(FULL) for each in row["warnings"] if each["code"] == "kv-cache")


def test_a_sweep_names_the_cells_whose_cache_was_full(tmp_path: Path) -> None:
    spec = tmp_path / "s.toml"
    spec.write_text(
        'name = "s"\n[common]\nworkload = "balanced"\nengine = "sim"\nnum_prompts = 60\n'
        "max_concurrency = 40\n"
        'input_len = 320\noutput_len = 160\nlength_distribution = "fixed"\nmax_model_len = 1024\n'
        '[grid]\npolicy = ["v1"]\nnum_kv_blocks = [260, 4000]\n'
    )
    done = invoke("sweep", spec, "-o", tmp_path / "out", "--workers", 1, "-q")
    assert done.exit_code == 0, done.output
    assert f"num_kv_blocks=260: {FULL}" in " ".join(done.stdout.split())
    rows = pa.parquet.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    shares = {row["num_kv_blocks"]: row["kv_full_share"] for row in rows}
    assert shares[260] > WORTH_SAYING > shares[4000] == 0.0
    assert [FULL in row["warnings"] for row in sorted(rows, key=lambda row: row["num_kv_blocks"])] == [True, False]


def test_capacity_says_it_of_the_probe_that_it_shows(tmp_path: Path) -> None:
    options = ("capacity", "balanced", *LENGTHS, "--goodput", "e2el:60000", "-p", "v1", "-n", 300, "-q")
    limits = ("--num-kv-blocks", 260, "--max-model-len", 1024, "--max-probes", 12)
    done = invoke(*options, *limits, "-o", tmp_path / "c")
    assert done.exit_code == 0, done.output
    near = json.loads((tmp_path / "c" / "capacity-answers.json").read_text())[0]
    assert near["kv_full_share"] > WORTH_SAYING
    assert f"At {near['nearest_load']:.3g}/s: {FULL} {100 * near['kv_full_share']:.1f} %" in " ".join(
        done.stdout.split()
    )
    assert any(text.startswith(FULL) for text in near["warnings"])
