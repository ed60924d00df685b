"""Two vLLM servers behind the gateway: the plugin's signals arrive, the policies schedule, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulation import DEVICE, Traffic, make_plan

from ebbench.client import ClientOptions
from ebbench.engines.base import EngineOptions
from ebbench.engines.replicas import ReplicatedVllmEngine
from ebbench.engines.vllm_command import Emulation
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
