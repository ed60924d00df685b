"""One scenario file drives the simulator, the emulated vLLM and a server over HTTP: same phases, same requests."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pytest

from ebbench.devices.loader import load_device
from ebbench.engines.base import Engine
from ebbench.engines.endpoint import EndpointEngine
from ebbench.engines.setup import select_engine
from ebbench.engines.sim import SimEngine
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.plan import Plan
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

OPTIONS = EngineOptions(max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=4096)
SMALL = """
name = "two"
description = "Two levels"
loop = "closed"

[[phases]]
name = "low"
requests = 12
max_concurrency = 2
input = { family = "uniform", mean = 60 }
output = { family = "uniform", mean = 6 }

[[phases]]
name = "high"
requests = 18
max_concurrency = 6
input = { family = "uniform", mean = 20 }
output = { family = "uniform", mean = 12 }
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "two.toml"
    path.write_text(SMALL)
    return build_plan("balanced", str(path), source="profile")


def assert_served_whole(engine: Engine, plan: Plan, settings: EngineOptions = OPTIONS) -> None:
    device = load_device("rtx-pro-6000", "qwen3-8b")
    requests = engine.run(plan, parse_policy("v1"), device, settings, None).requests
    assert requests.num_rows == 30
    assert pc.all(pc.equal(requests["status"], "ok")).as_py()
    assert requests["phase"].to_pylist() == plan.table["phase"].to_pylist()
    assert requests["output_tokens"].to_pylist() == plan.table["output_tokens"].to_pylist()


def test_the_simulator_serves_the_whole_scenario(plan: Plan) -> None:
    assert_served_whole(SimEngine(), plan)


@pytest.mark.vllm
def test_the_emulated_vllm_serves_the_whole_scenario(plan: Plan) -> None:
    pytest.importorskip("vllm")
    assert_served_whole(select_engine("emulated")[0], plan)


def test_the_client_sends_the_whole_scenario_over_http(plan: Plan) -> None:
    options = ClientOptions(workers=0, metrics_interval_s=None, idle_timeout_s=5.0)
    with FakeServerProcess(FakeConfig(ttft_ms=2, itl_ms=1)) as server:
        assert_served_whole(EndpointEngine(server.url, client=options), plan, EngineOptions())
