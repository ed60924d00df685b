"""--duration in a closed loop: no session is released after so many seconds, in virtual time and against a server."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.devices.base import Device
from ebbench.devices.loader import load_device
from ebbench.engines.endpoint import EndpointEngine
from ebbench.engines.setup import unknown_device
from ebbench.engines.sim import SimEngine
from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.process import FakeServerProcess
from ebbench.records.manifest import plan_hash
from ebbench.runs.execute import run_plan
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.client.client_runs import column
from vllm_eb.policy import parse_policy

OPTIONS = EngineOptions(max_num_seqs=64, max_num_batched_tokens=512)
V1 = parse_policy("v1")


@pytest.fixture(scope="module")
def device() -> Device:
    return load_device("h200", "qwen3-8b")


def session_starts_s(requests: pa.Table) -> npt.NDArray[np.float64]:
    first = requests.filter(np.asarray(requests["turn"]) == 0)
    return np.asarray(first["intended_ns"]) / 1e9


@settings(max_examples=15, deadline=None)
@given(
    workload=st.sampled_from(["balanced", "wildchat"]), concurrency=st.integers(1, 12),
    duration_s=st.floats(0.05, 20.0), warmup=st.integers(0, 3),
)  # fmt: skip
def test_in_virtual_time_exactly_the_sessions_that_begin_in_time(
    device: Device, workload: str, concurrency: int, duration_s: float, warmup: int
) -> None:
    asked: dict[str, Any] = {"num_prompts": 40, "max_concurrency": concurrency, "source": "profile", "with_text": False}
    whole = build_plan(workload, **asked)
    plan = build_plan(workload, duration_s=duration_s, **asked)
    assert plan.table.equals(whole.table)
    options = EngineOptions(max_num_seqs=64, max_num_batched_tokens=512, warmup=warmup)
    part, result = run_plan(SimEngine(), plan, V1, device, options, None)
    everything = SimEngine().run(whole, V1, device, options).requests
    in_time = int((session_starts_s(everything) < duration_s).sum())
    assert len(set(part.table["session"].to_pylist())) == in_time
    assert column(result, "request_id") == part.table["request_id"].to_pylist()
    assert set(column(result, "status")) == {"ok"}, "what was released goes on to its end"
    # Up to the end of the duration nothing differs from the run that goes on.
    count = result.requests.num_rows
    early = np.asarray(result.requests["intended_ns"]) < duration_s * 1e9
    for name in ("intended_ns", "first_token_ns"):
        ours, theirs = np.asarray(result.requests[name])[early], np.asarray(everything[name])[:count][early]
        known = theirs < duration_s * 1e9
        assert (ours[known] == theirs[known]).all()


def test_the_plan_hash_of_a_timed_run_does_not_depend_on_the_policy(device: Device) -> None:
    asked: dict[str, Any] = {"num_prompts": 200, "max_concurrency": 16, "source": "profile"}
    plan = build_plan("sharegpt", duration_s=5.0, **asked)
    parts = [run_plan(SimEngine(), plan, parse_policy(name), device, OPTIONS, None)[0] for name in ("v1", "eb")]
    assert len({len(part) for part in parts}) == 2, "each releases as many as it can"
    assert {plan_hash(part) for part in parts} == {plan_hash(plan)}
    assert plan_hash(plan) != plan_hash(build_plan("sharegpt", **asked))
    assert plan_hash(plan) != plan_hash(build_plan("sharegpt", duration_s=6.0, **asked))


def test_a_plan_that_ends_before_its_duration_says_so(device: Device) -> None:
    plan = build_plan("balanced", num_prompts=5, duration_s=1e6)
    part, result = run_plan(SimEngine(), plan, V1, device, OPTIONS, None)
    assert len(part) == 5
    assert any("--num-prompts" in warning for warning in map(str, result.warnings))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("workload", ["balanced", "wildchat"])
def test_duration_ends_the_release_on_a_server(workload: str, workers: int) -> None:
    plan = build_plan(
        workload, num_prompts=400, max_concurrency=6, duration_s=0.6, source="profile", with_text=False, output_len=5
    )
    client = ClientOptions(workers=workers, metrics_interval_s=None)
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=2)) as server:
        engine = EndpointEngine(url=server.url, client=client)
        part, result = run_plan(engine, plan, V1, unknown_device("unknown", "fake-model"), EngineOptions(), None)
        received = len(server.ledger())
    assert 6 <= len(part) < len(plan)
    assert column(result, "request_id") == part.table["request_id"].to_pylist()
    assert set(column(result, "status")) == {"ok"}
    assert received == len(part), "every request that the server saw is in the run"
    sessions = set(part.table["session"].to_pylist())
    assert part.table.num_rows == sum(session in sessions for session in plan.table["session"].to_pylist())


def test_open_loops_and_traces_end_with_their_plan(tmp_path: Path) -> None:
    plan = build_plan("balanced", "poisson", request_rate=50.0, duration_s=4.0, seed=3)
    arrivals_s = np.asarray(plan.table["arrival_ns"]) / 1e9
    assert arrivals_s.max() < 4.0
    assert 150 < len(plan) < 250
    assert plan.release_for_s is None
    fewer = build_plan("balanced", "poisson", request_rate=50.0, duration_s=4.0, seed=3, num_prompts=20)
    assert len(fewer) == 20
    path = tmp_path / "trace"
    path.write_text("".join(f'{{"timestamp": {t}, "input_length": 9, "output_length": 3}}\n' for t in (0, 400, 2000)))
    assert len(build_plan(f"trace:{path}", duration_s=1.0)) == 2
    assert len(build_plan(f"trace:{path}", duration_s=1.0, speed=4.0)) == 3
