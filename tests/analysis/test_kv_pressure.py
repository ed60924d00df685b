"""A full KV cache is said where it cost something: requests that wait for memory, tokens computed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from ebbench.analysis.kv_pressure import WORTH_SAYING, kv_pressure
from ebbench.records.run import Run
from ebbench.records.schema import SERVER_METRICS
from ebbench.render.sentences import memory
from tests.gate.gate_data import invoke

LOAD = ("run", "balanced", "--engine", "sim", "-n", 60, "-c", 40, "-p", "v1", "-q", "--max-model-len", 1024)


def simulated(tmp_path: Path, blocks: int, *more: object, lengths: tuple[int, int] = (320, 160)) -> tuple[Run, str]:
    """A run with so many KV blocks, and what was printed."""
    options = ("--input-len", lengths[0], "--output-len", lengths[1], "--length-distribution", "fixed")
    done = invoke(*LOAD, *options, "--num-kv-blocks", blocks, *more, "-o", tmp_path / "run")
    assert done.exit_code == 0, done.output
    return Run.load(tmp_path / "run"), " ".join(done.stdout.split())


def test_preemptions_and_waiting_for_memory_are_said(tmp_path: Path) -> None:
    run, shown = simulated(tmp_path, 260)
    found = kv_pressure(run)
    assert found is not None
    assert found.full_share > 0.5
    assert found.running < 14
    assert found.preemptions > 0
    assert f"KV cache full: requests waited for memory {100 * found.full_share:.1f} % of the time" in shown
    assert f"of 1,024 slots in use; {found.preemptions} preemption" in shown
    assert f"{found.repeated_tokens:,} tokens computed again" in shown


def test_repeated_tokens_are_those_that_preempted_requests_computed_before(tmp_path: Path) -> None:
    """By invariant: tokens given are prompts and all but the last outputs, and what preemptions repeat."""
    run, _ = simulated(tmp_path, 260)
    found = kv_pressure(run)
    assert found is not None
    given = sum(sum(tokens) for tokens in run.steps["request_tokens"].to_pylist())
    once = 60 * (320 + 160 - 1) - sum(run.requests["cached_tokens"].to_pylist())
    # A resumed request gives its last token in the prefill that repeats the others: one token less as decode.
    assert abs((given - once) - (found.repeated_tokens or 0)) <= found.preemptions


def test_a_cache_with_room_is_not_mentioned(tmp_path: Path) -> None:
    run, shown = simulated(tmp_path, 4_000)
    assert "KV cache full" not in shown
    found = kv_pressure(run)
    assert found is not None
    assert (found.full_share, found.preemptions, found.matters) == (0.0, 0, False)


def test_waiting_for_a_slot_is_no_waiting_for_memory(tmp_path: Path) -> None:
    run, shown = simulated(tmp_path, 1_000, "--max-num-seqs", 4)
    assert "KV cache full" not in shown
    assert np.max(run.steps["waiting"].to_numpy()) > 0


def test_policies_are_told_apart(tmp_path: Path) -> None:
    invoke(*LOAD, "-p", "ebplus", "--input-len", 320, "--output-len", 160, "--num-kv-blocks", 260, "-o", tmp_path / "r")
    shown = " ".join(invoke("show", tmp_path / "r").stdout.split())
    assert "v1: KV cache full: requests waited" in shown


def of_server(run: Run, samples: list[tuple[float, str, float]], requests: int = 60) -> Run:
    """The run as one of a server whose metrics changed like that: seconds, name, value."""
    rows = [{"time_ns": int(at * 1e9), "name": name, "labels": "{}", "value": value} for at, name, value in samples]
    table = pa.Table.from_pylist(rows, schema=SERVER_METRICS)
    manifest = msgspec.structs.replace(
        run.manifest, rows={"requests": requests, "server_metrics": table.num_rows}, engine="endpoint", options={}
    )
    return replace(run, manifest=manifest, tables={"server_metrics": table})


def test_a_server_says_it_in_its_metrics(tmp_path: Path) -> None:
    run, _ = simulated(tmp_path, 4_000)
    usage, waiting, running = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:num_requests_running"
    samples = [
        (-1.0, "vllm:num_preemptions_total", 7.0), (0.0, usage, 0.5), (0.0, waiting, 0.0), (0.0, running, 2.0),
        (4.0, usage, 0.99), (4.0, waiting, 5.0), (4.0, running, 12.0), (9.0, "vllm:num_preemptions_total", 31.0),
        (9.0, usage, 0.4), (10.0, waiting, 0.0),
    ]  # fmt: skip
    found = kv_pressure(of_server(run, samples))
    assert found is not None
    assert (found.full_share, found.running, found.preemptions) == (pytest.approx(0.5), 12.0, 24)
    (line,) = memory(found)
    assert "requests waited for memory 50.0 % of the time, with 12 sequences running; 24 preemptions." in line
    sglang = [(0.0, "sglang:token_usage", 0.95), (0.0, "sglang:num_queue_reqs", 3.0), (8.0, "sglang:token_usage", 0.96)]
    assert (kv_pressure(of_server(run, sglang)) or found).full_share == 1.0
    assert kv_pressure(of_server(run, [(0.0, "process_start_time_seconds", 1.0)])) is None
    few = kv_pressure(
        of_server(run, [(0.0, "vllm:num_preemptions_total", 0.0), (1.0, "vllm:num_preemptions_total", 1.0)])
    )
    assert few is not None
    assert few.preempted_share < WORTH_SAYING
    assert memory(few) == []
