"""Two vLLM servers behind the gateway: the plugin's signals arrive, the policies schedule, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbench.records.run import Run
from tests.vllm.whole_command import ebbench

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forking")]


def test_two_servers_behind_the_gateway_with_signals(small_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = ebbench(
        "run", "balanced", "--input-len", 60, "--output-len", 12, "--engine", "vllm", "--replicas", 2,
        "--dispatch", "sbs", "--model", small_model_folder, "--policy", "eb:k=3", "--num-prompts", 30,
        "--max-concurrency", 10, "--max-model-len", 1024, "--json", "-o", folder,
    )  # fmt: skip
    assert "2 servers behind a gateway, dispatch sbs" in done.stderr
    (summary,) = json.loads(done.stdout)
    assert summary["failed"] == 0
    assert summary["completed"] > 0
    run = Run.load(folder)
    requests, steps = run.table("requests"), run.table("steps").to_pylist()
    assert set(requests["status"].to_pylist()) == {"ok"}
    assert [step["step_id"] for step in steps] == list(range(len(steps)))
    served: dict[int, set[str]] = {0: set(), 1: set()}
    for step in steps:
        served[step["instance"]] |= set(step["request_ids"])
    assert all(served.values())
    assert served[0] & served[1] == set()
    assert served[0] | served[1] == set(requests["request_id"].to_pylist())
    assert (run.manifest.facts["dispatch"], run.manifest.facts["replicas"]) == ("sbs", 2)
    assert "server-1.log" in (folder / "server.log").read_text()
