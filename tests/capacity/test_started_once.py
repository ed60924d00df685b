"""Servers of a capacity search are started once per policy, also several behind a gateway; fake servers stand in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.engines import vllm
from ebbench.engines.vllm_command import Serving
from ebbench.records.run import Run

pytest.importorskip("uvicorn")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Serving]:
    """The servers that were started: fake ones in place of vLLM."""
    seen: list[Serving] = []

    def line(serving: Serving) -> list[str]:
        seen.append(serving)
        words = ("fake-server", "--port", serving.port, "--ttft-ms", 5, "--itl-ms", 1, "--max-running", 4)
        return [sys.executable, "-m", "ebbench", *map(str, words)]

    monkeypatch.setattr(vllm, "executable_line", line)
    return seen


@pytest.mark.parametrize("count", [1, 2])
def test_all_runs_of_a_policy_use_the_same_servers(started: list[Serving], tmp_path: Path, count: int) -> None:
    several = ["--replicas", str(count)] if count > 1 else []
    done = CliRunner().invoke(
        app,
        ["capacity", "balanced", "--engine", "vllm", "--model", "qwen3-8b", "--policy", "v1", *several, "--by",
         "concurrency", "--goodput", "e2el:60000", "--input-len", "16", "--output-len", "4", "-n", "24",
         "--max-probes", "3", "--lag-limit-ms", "60000", "--vocab-size", "500", "-o", str(tmp_path / "out")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output + done.stderr
    runs = [Run.load(path.parent) for path in (tmp_path / "out").glob("*/manifest.json")]
    assert len(runs) >= 3
    assert len(started) == count, "one start per server"
    assert {run.manifest.facts["prefix_cache_reset"] for run in runs} == {True}
    assert {run.manifest.facts["server"] for run in runs} == {runs[0].manifest.facts["server"]}
    assert all((run.path / "server.log").exists() for run in runs)
