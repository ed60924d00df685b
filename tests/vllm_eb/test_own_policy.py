"""A policy of the user is one module: it runs in the simulator, on the command line, in reports and in vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebbench.engines.base import EngineOptions
from tests.simulation.worlds import World, plan
from tests.vllm_eb import made_policy
from vllm_eb.policy import PolicyError, known_policy, parse_policy


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its name, with the import path set for this process and those it starts."""
    folder = made_policy.write(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return made_policy.NAME


def test_an_own_policy_is_parsed_checked_and_named_by_its_module(own: str) -> None:
    spec = parse_policy(f"{own}:steps=3")
    assert spec.name == f"{own}:steps=3"
    assert parse_policy(spec.name) == spec
    assert known_policy(spec.name) == spec
    for wrong, says in ((own, f"needs steps=: write {own}:steps=4"), (f"{own}:steps=0", "at least 1")):
        with pytest.raises(PolicyError, match=says):
            parse_policy(wrong)


def test_a_module_that_is_none_is_refused(own: str) -> None:
    with pytest.raises(PolicyError, match="cannot be imported"):
        parse_policy("house_rules.absent")
    with pytest.raises(PolicyError, match="name POLICY"):
        parse_policy("json.decoder")


def test_an_own_policy_decides_in_the_simulator(own: str) -> None:
    lengths = [(20, 3 + row % 9) for row in range(60)]
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=200, num_kv_blocks=1000, async_scheduling=False)
    result = World(plan(lengths, concurrency=16), f"{own}:steps=5", options).run()
    # A prefill begins while others decode in every fifth step only.
    begun = [row for row in result.decisions.to_pylist() if row["phase"] == "prefill" and "beside" in row["reason"]]
    assert begun
    assert all(row["step_id"] % 5 == 0 for row in begun)


def test_an_own_policy_runs_from_the_command_line_beside_v1(own: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "ebbench", "run", "balanced", "-n", "30", "-c", "8", "--source", "profile",
        "--policy", f"{own}:steps=4", "--policy", "v1", "--json", "--quiet", "--output-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{own}:steps=4" in json.dumps(json.loads(done.stdout))
    shown = subprocess.run(
        [sys.executable, "-m", "ebbench", "policies", "show", own], capture_output=True, text=True, check=True
    )
    assert "steps between two refills" in " ".join(shown.stdout.split())


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_own_policy_makes_the_same_steps_in_vllm(own: str) -> None:
    from ebbench.engines.emulated import EmulatedEngine
    from tests.simulation.worlds import device

    lengths = [(20, 3 + row % 9) for row in range(40)]
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=200, num_kv_blocks=1000)
    world = World(plan(lengths, concurrency=16), f"{own}:steps=5", options)
    simulated = world.run()
    emulated = EmulatedEngine().run(world.plan, parse_policy(world.policy), device(), options)
    assert simulated.decisions.equals(emulated.decisions)
    for name in ("scheduled_ns", "end_ns", "prefill_tokens", "decode_seqs"):
        assert simulated.steps[name].to_pylist() == emulated.steps[name].to_pylist()
