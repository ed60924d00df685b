"""A policy of the user is one module: it runs in the simulator, on the command line, in reports and in vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebbench.spec.server import EngineOptions
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
    begun = [row for row in result.decisions.to_pylist() if row["phase"] == "prefill" and row["reason"] == "slots_free"]
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder outside the checkout with the policy's package, which is on no import path."""
    return made_policy.write(tmp_path)


def in_project(folder: Path, *words: str, **environ: str) -> str:
    """What the installed program, which has no working directory on its import path, prints there."""
    program = [sys.executable, "-P", "-c", "from ebbench.cli.main import run; run()", *words]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = ("balanced", "-n", "20", "-c", "8", "--source", "profile")


def test_an_own_policy_is_found_in_the_working_directory(project: Path) -> None:
    assert f"{made_policy.NAME}:steps=4" in in_project(
        project, "run", *LOAD, "--policy", f"{made_policy.NAME}:steps=4", "--json", "--quiet", "-o", "out"
    )


def test_the_processes_of_a_sweep_find_an_own_policy_too(project: Path) -> None:
    grid = f"""name = "own"
[common]
workload = "balanced"
source = "profile"
num_prompts = 20
max_concurrency = 8
[grid]
policy = ["v1", "{made_policy.NAME}:steps=4"]
"""
    (project / "grid.toml").write_text(grid)
    found = json.loads(in_project(project, "sweep", "grid.toml", "--workers", "2", "--json", "--quiet"))
    assert found["failed"] == []


def test_servers_find_it_last_on_their_import_path(own: str) -> None:
    from ebbench.engines.vllm_command import import_path

    with_policy, without = (import_path(policy).split(os.pathsep) for policy in (parse_policy(f"{own}:steps=4"), None))
    package = sys.modules[own.partition(".")[0]]  # an earlier test may have imported it from its own folder
    assert with_policy == [*without, str(Path(package.__file__ or "").parents[1])]
    assert import_path(parse_policy("eb")).split(os.pathsep) == without


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
