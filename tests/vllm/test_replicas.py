"""Two vLLM servers behind the gateway: the plugin's signals arrive, the policies schedule, nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulation import DEVICE, Traffic, make_plan

from ebbench.client import ClientOptions
from ebbench.engines.base import EngineOptions
from ebbench.engines.replicas import ReplicatedVllmEngine
from ebbench.engines.vllm_command import Emulation
from ebbench.records.run import Run
from vllm_eb.policy import parse_policy

pytestmark = pytest.mark.vllm


def test_two_servers_behind_the_gateway_with_signals(small_model_folder: Path, tmp_path: Path) -> None:
    engine = ReplicatedVllmEngine(
        model=str(small_model_folder),
        client=ClientOptions(workers=0, metrics_interval_s=None),
        emulation=Emulation("h200", "qwen3-8b", slow_motion=2.0),
        log=tmp_path / "servers.log",
        replicas=2,
        dispatch="sbs",
    )
    plan = make_plan(Traffic(sessions=30, concurrency=10, max_output=20))
    options = EngineOptions(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=2048, num_kv_blocks=300)
    result = engine.run(plan, parse_policy("eb:k=3"), DEVICE, options)
    assert result.requests["status"].to_pylist() == ["ok"] * len(plan)
    steps = result.steps.to_pylist()
    assert {step["instance"] for step in steps} == {0, 1}
    assert [step["step_id"] for step in steps] == list(range(len(steps)))
    served = {step["instance"]: set() for step in steps}  # type: ignore[var-annotated]
    for step in steps:
        served[step["instance"]] |= set(step["request_ids"])
    assert served[0] & served[1] == set()
    assert served[0] | served[1] == set(result.requests["request_id"].to_pylist())
    assert result.facts["replicas"] == 2
    assert "server-1.log" in (tmp_path / "servers.log").read_text()


def test_the_command_line_starts_servers_and_gateway(small_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [
        str(Path(sys.executable).with_name("ebbench")), "run", "sharegpt", "--source", "profile", "--engine", "vllm",
        "--replicas", "2", "--dispatch", "sbs", "--model", str(small_model_folder), "--policy", "eb", "--num-prompts",
        "20", "--max-concurrency", "6", "--max-model-len", "1024", "--drop-too-long", "--json", "-o", str(folder),
    ]  # fmt: skip
    environment = {name: os.environ[name] for name in os.environ if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=560, check=False)
    assert "2 servers behind a gateway, dispatch sbs" in done.stderr
    (summary,) = json.loads(done.stdout)
    assert summary["failed"] == 0
    assert summary["completed"] > 0
    run = Run.load(folder)
    assert set(run.table("steps")["instance"].to_pylist()) == {0, 1}
    assert run.manifest.facts["dispatch"] == "sbs"
