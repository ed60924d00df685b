"""``ebbench capacity`` with vLLM: on an emulated device, and on a real server, one for all probes of a policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbench.records.run import Run
from tests.vllm import small_model
from tests.vllm.whole_command import ebbench

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forking")]


def test_one_server_serves_all_probes_of_a_policy(tmp_path: Path) -> None:
    small_model.write_config(tmp_path / "model")
    done = ebbench(
        "capacity", "balanced", "--engine", "vllm", "--model", tmp_path / "model" / "config.json", "--policy", "v1",
        "--input-len", 24, "--output-len", 12, "--max-num-seqs", 8, "--by", "concurrency", "--goodput", "e2el:600000",
        "-n", 40, "--max-probes", 3, "--lag-limit-ms", 60000, "--json", "-o", tmp_path / "out",
        "--", "--load-format", "dummy", "--skip-tokenizer-init",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["probes"] >= 2
    assert found["low"] >= 4
    runs = [Run.load(path.parent) for path in (tmp_path / "out").glob("*/manifest.json")]
    assert len(runs) == found["probes"] + 1  # and one with requests one at a time
    assert all(set(run.requests["status"].to_pylist()) == {"ok"} for run in runs)
    assert len({run.manifest.facts["server_command"] for run in runs}) == 1
    assert "one server for all runs" in done.stderr


def test_two_servers_behind_the_gateway_serve_all_probes_of_a_policy(small_model_folder: Path, tmp_path: Path) -> None:
    """Started once, recorded by the plugin: each run has the steps of its own requests alone."""
    done = ebbench(
        "capacity", "balanced", "--engine", "vllm", "--model", small_model_folder, "--policy", "eb:k=3",
        "--replicas", 2, "--input-len", 24, "--output-len", 12, "--max-num-seqs", 8, "--by", "concurrency",
        "--goodput", "e2el:600000", "-n", 40, "--max-probes", 2, "--lag-limit-ms", 60000, "--max-model-len", 1024,
        "--json", "-o", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("one server for all runs") == 2
    runs = [Run.load(path.parent) for path in (tmp_path / "out").glob("*/manifest.json")]
    assert len(runs) == 3
    for run in runs:
        sent = set(run.requests["request_id"].to_pylist())
        stepped = {name for step in run.table("steps").to_pylist() for name in step["request_ids"]}
        assert stepped == sent
        assert set(run.requests["status"].to_pylist()) == {"ok"}
        assert run.manifest.facts["replicas"] == 2


def test_the_search_on_an_emulated_device_finds_what_the_simulator_finds(tmp_path: Path) -> None:
    options = (
        "capacity", "balanced", "--device", "l40s", "--model", "qwen3-8b", "--policy", "v1", "--max-num-seqs", 8,
        "-n", 150, "--input-len", 200, "--output-len", 20, "--precision", 0.1, "--goodput", "ttft:2000", "-q", "--json",
    )  # fmt: skip
    figures = []
    for engine in ("sim", "emulated"):
        done = ebbench(*options, "--engine", engine, "-o", tmp_path / engine)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)
        figures.append((found["capacity_requests_per_s"], found["limited_by"], found["probes"]))
    assert figures[0][0] == pytest.approx(figures[1][0], rel=0.1)
