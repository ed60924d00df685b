"""Sweeps against a server: one cell at a time, with the load generator's options; what is INVALID is named."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from tests.sweep.sweep_data import TINY, invoke, spec_file

TEXT = (
    TINY.replace('policy = ["v1", "eb"]', "max_concurrency = [1, 2]")
    .replace("max_concurrency = 16\n", "")
    .replace("num_prompts = 40", "num_prompts = 10")
    .replace("max_num_seqs = 16\n", "")
    + "warmup = 2\nworkers = 1\nlag_limit_ms = 5000\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServerProcess]:
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=20)) as running:
        yield running


def ledger(server: FakeServerProcess) -> list[dict[str, int]]:
    with urllib.request.urlopen(f"{server.url}/ledger") as answer:
        found: list[dict[str, int]] = json.loads(answer.read())
    return found


def resets(server: FakeServerProcess) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        return int(float(re.search(r"^fake:cache_resets_total\S* (\S+)", answer.read().decode(), re.M)[1]))  # type: ignore[index]


def test_cells_run_one_at_a_time_each_with_warmup_and_reset(server: FakeServerProcess, tmp_path: Path) -> None:
    spec = spec_file(tmp_path, TEXT + f'engine = "{server.url}"\nvocab_size = 500\nextra_body = {{ top_p = 0.5 }}\n')
    done = invoke("sweep", spec, "-o", tmp_path / "out", "--workers", 4, "-q", "--json")
    assert done.exit_code == 0, done.output
    assert resets(server) == 4
    entries = ledger(server)
    assert len(entries) == 4 * 12, "ten requests and two of warm-up per cell"
    spans = sorted((entry["received_ns"], entry["done_ns"]) for entry in entries)
    for first in range(0, 48, 12):
        cell = spans[first : first + 12]
        assert first + 12 == 48 or max(done for _, done in cell) < spans[first + 12][0], "cells overlap"
    rows = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert {(row["engine"], row["vocab_size"], row["extra_body"]) for row in rows} == {
        (server.url, 500, '{"top_p": 0.5}')
    }
    assert {(row["max_num_seqs"], row["max_num_batched_tokens"], row["num_kv_blocks"]) for row in rows} == {(None,) * 3}
    assert {row["warmup"] for row in rows} == {2}
    (one, *_), shown = json.loads(done.stdout)["findings"], invoke("sweep", spec, "-o", tmp_path / "out", "-q").stdout
    assert (one["best_budget"], one["best_size"]) == (None, None)
    assert "best B" not in shown
    assert "req/s" in shown


def test_a_sweep_whose_requests_fail_names_the_cells_and_is_no_success(tmp_path: Path) -> None:
    with FakeServerProcess(FakeConfig(faults=(parse_fault("status:code=500"),))) as broken:
        spec = spec_file(tmp_path, TEXT.replace("warmup = 2", "") + f'engine = "{broken.url}"\n')
        done = invoke("sweep", spec, "-o", tmp_path / "out", "-q")
        document = json.loads(invoke("sweep", spec, "-o", tmp_path / "out", "-q", "--json").stdout)
    assert done.exit_code == 4
    assert "4 of 4 cells are INVALID" in done.stderr
    assert done.stdout.count("max_concurrency=1, seed=") + done.stdout.count("seed=0, max_concurrency=1") >= 1
    assert len(document["invalid"]) == 4
    assert all(one["reasons"] for one in document["invalid"])
    assert document["from_before"] == 0, "an INVALID run in real time is measured again"


def test_simulated_cells_that_are_invalid_are_not_run_again(tmp_path: Path) -> None:
    text = TINY.replace("repeats = 2", "").replace('"v1", "eb"', '"v1"') + "num_kv_blocks = 40\n"
    spec = spec_file(tmp_path, text)
    first = json.loads(invoke("sweep", spec, "-o", tmp_path / "out", "-q", "--json").stdout)
    again = json.loads(invoke("sweep", spec, "-o", tmp_path / "out", "-q", "--json").stdout)
    assert (first["from_before"], again["from_before"]) == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TINY + "vocab_size = 100\n", "--vocab-size is for sending requests, which engine sim does not"),
        (TINY + 'dispatch = "sbs"\n', "give --topology"),
        (TINY + "ramp_up_s = 3.0\n", "needs a server"),
        (
            TINY.replace("max_num_seqs = 16\n", "") + 'engine = "http://127.0.0.1:1"\n',
            "runs the one policy it was started with",
        ),
        (TEXT + 'engine = "http://127.0.0.1:1"\ngpu_memory_utilization = 0.5\n', "gpu_memory_utilization is set where"),
        (TINY + 'engine = "http://127.0.0.1:1"\n', "max_num_seqs is set where a server is started"),
        (
            TINY.replace("max_num_seqs = 16\n", "").replace("[common]", "max_num_batched_tokens = [64, 128]\n[common]")
            + 'engine = "http://127.0.0.1:1"\n',
            "max_num_batched_tokens is set where a server is started",
        ),
    ],
)
def test_settings_that_an_engine_cannot_apply_are_refused(tmp_path: Path, text: str, message: str) -> None:
    done = invoke("sweep", spec_file(tmp_path, text), "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_topology_is_simulated_as_run_simulates_it(tmp_path: Path) -> None:
    text = (
        TINY.replace('"v1", "eb"', '"v1"').replace("repeats = 2", "") + 'topology = "dp=2"\ndispatch = "round-robin"\n'
    )
    assert invoke("sweep", spec_file(tmp_path, text), "-o", tmp_path / "out", "-q").exit_code == 0
    done = invoke(
        "run", "balanced", "--source", "profile", "-n", 40, "--input-len", 32, "--output-len", 8, "-c", 16,
        "--max-num-seqs", 16, "-p", "v1", "-q", "--engine", "sim", "--topology", "dp=2", "--dispatch", "round-robin",
        "--json", "-o", tmp_path / "run",
    )  # fmt: skip
    (row,) = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert row["median_ttft_ms"] == json.loads(done.stdout)[0]["median_ttft_ms"]
    assert (row["topology"], row["dispatch"]) == ("dp=2", "round-robin")
