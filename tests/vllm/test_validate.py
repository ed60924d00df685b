"""``ebbench validate`` end to end on a real vLLM: a config.json alone, random weights, no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbench.records.run import Run
from tests.vllm import small_model
from tests.vllm.whole_command import ebbench

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forking")]


def test_a_config_alone_is_calibrated_predicted_and_measured(tmp_path: Path) -> None:
    small_model.write_config(tmp_path / "model")
    done = ebbench(
        "validate", "--model", tmp_path / "model" / "config.json", "--policy", "v1", "--policy", "eb", "--loads", "2,6",
        "--rounds", 1, "--tokens", "16,64,128", "--seqs", "1,4,8", "--contexts", "16,64", "--input-len", 24,
        "--output-len", 12, "--max-time", 500, "--run-time", 1, "--lag-limit-ms", 60000, "--json",
        "-o", tmp_path / "out",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["verdict"] == "undecided", done.stderr  # one round says nothing of the noise
    assert done.returncode == 5
    assert found["runs"]["measured"] == found["runs"]["planned"] == 4
    runs = [Run.load(path.parent) for path in (tmp_path / "out" / "measured").glob("*/manifest.json")]
    assert sorted(run.manifest.policy for run in runs) == ["eb", "eb", "v1", "v1"]
    for run in runs:
        assert run.manifest.engine == "vllm"
        assert set(run.requests["status"].to_pylist()) == {"ok"}
        assert "--load-format dummy" in run.manifest.facts["server_command"]
        assert "--enforce-eager" in run.manifest.facts["server_command"]  # as the steps were measured
        steps = run.table("steps").to_pylist()
        assert bool(steps) == (run.manifest.policy == "eb")  # v1 is vLLM untouched
        # One server served both loads; a run holds its own steps alone, numbered from 0.
        assert [step["step_id"] for step in steps] == list(range(len(steps)))
        planned = set(run.requests["request_id"].to_pylist())
        recorded = {name for step in steps for name in step["request_ids"]}
        assert not steps or planned <= recorded
    commands = {run.manifest.facts["server_command"] for run in runs}
    profile = tmp_path / "out" / "steps" / "round-1" / "profile" / "profile.toml"
    assert "engine vllm with --enforce-eager" in profile.read_text()
    assert len(commands) == 2  # a server for each policy, not for each run
    predicted = [Run.load(path.parent).manifest for path in (tmp_path / "out" / "predicted").glob("*/manifest.json")]
    assert {one.options["api_server"] for one in predicted} == {"datacenter"}
    assert len({one.options["warmup"] for one in predicted}) == 2  # the second load comes after the first
