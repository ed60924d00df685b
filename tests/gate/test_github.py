"""The action and the example workflows: valid, and their shell steps do what they say."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gate_data import SMALL, invoke

GITHUB = Path(__file__).resolve().parents[2] / ".github"
ACTION = GITHUB / "actions" / "gate" / "action.yml"
EXAMPLES = sorted((GITHUB / "workflow-examples").glob("*.yml"))


def step(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A step of the only job."""
    (job,) = document["jobs"].values()
    (found,) = [each for each in job["steps"] if each.get("name") == name]
    return dict(found)


def shim(path: Path) -> None:
    """`ebbench` of this installation under another path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    program = "from ebbench.cli.main import run; run()"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n')
    path.chmod(0o755)


def bash(script: str, place: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step: bash -eo pipefail."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=place, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def gate_step(place: Path, baseline: Path, candidate: Path, **changes: str) -> tuple[int, str, str]:
    """Run the action's step; returns its exit code, its output file and its stdout."""
    document = yaml.safe_load(ACTION.read_text())
    (only,) = document["runs"]["steps"]
    inputs = {name: value.get("default", "") for name, value in document["inputs"].items()}
    inputs |= {
        "baseline": str(baseline),
        "candidate": str(candidate),
        "ebbench": str(place / "bin" / "ebbench"),
    } | changes
    environment = {name: inputs[value.split(".")[1].split(" ")[0]] for name, value in only["env"].items()}
    shim(place / "bin" / "ebbench")
    output, summary = place / "output", place / "summary.md"
    done = bash(only["run"], place, GITHUB_OUTPUT=str(output), GITHUB_STEP_SUMMARY=str(summary), **environment)
    return done.returncode, output.read_text(), summary.read_text() + done.stdout if summary.exists() else done.stdout


def test_the_action_passes_and_writes_its_outputs(measured: Path, tmp_path: Path) -> None:
    code, output, shown = gate_step(tmp_path, measured / "v1", measured / "copy", margin="3 ttft:10")
    assert (code, output) == (0, "outcome=pass\n")
    assert "✅ PASS" in shown
    assert (tmp_path / "ebbench-gate.xml").exists()


def test_the_action_fails_on_a_regression(measured: Path, tmp_path: Path) -> None:
    code, output, shown = gate_step(tmp_path, measured / "v1", measured / "v0")
    assert (code, output) == (1, "outcome=fail\n")
    assert "❌ FAIL" in shown


def test_inconclusive_fails_or_warns_as_asked(measured: Path, tmp_path: Path) -> None:
    one = measured / "v1" / "v1-seed0"
    code, output, _ = gate_step(tmp_path, one, one)
    assert (code, output) == (5, "outcome=inconclusive\n")
    (tmp_path / "output").unlink()
    code, output, shown = gate_step(tmp_path, one, one, inconclusive="warn")
    assert (code, output) == (0, "outcome=inconclusive\n")
    assert "::warning" in shown


def test_what_cannot_be_compared_is_an_error_unless_allowed(measured: Path, tmp_path: Path) -> None:
    invoke(*SMALL, "--policy", "v1", "--max-num-seqs", "512", "--output-dir", tmp_path / "other")
    one = measured / "v1" / "v1-seed0"
    code, output, _ = gate_step(tmp_path, one, tmp_path / "other")
    assert (code, output) == (3, "outcome=error\n")
    (tmp_path / "output").unlink()
    assert gate_step(tmp_path, one, tmp_path / "other", allow="options")[0] == 5


def test_names_cannot_inject_commands(measured: Path, tmp_path: Path) -> None:
    hostile = tmp_path / '$(touch injected) "; touch injected; "'
    code, _, _ = gate_step(tmp_path, hostile, measured / "v1")
    assert code == 3
    assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize("path", [ACTION, *EXAMPLES], ids=lambda path: path.name)
def test_files_are_valid_and_never_paste_inputs_into_scripts(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    steps = document["runs"]["steps"] if "runs" in document else step_list(document)
    for each in steps:
        assert "uses" in each or "run" in each
        assert "${{" not in each.get("run", "")
        if "run" in each:
            assert subprocess.run(["bash", "-n", "-c", each["run"]], check=False).returncode == 0
    if "runs" not in document:
        assert document["permissions"] == {"contents": "read"}


def step_list(document: dict[str, Any]) -> list[dict[str, Any]]:
    (job,) = document["jobs"].values()
    return list(job["steps"])


def test_the_emulated_example_measures_what_it_gates(tmp_path: Path) -> None:
    """Its own steps, on the quicker simulator and with fewer requests."""
    document = yaml.safe_load((GITHUB / "workflow-examples" / "gate-emulated.yml").read_text())
    for side in ("baseline", "candidate"):
        shim(tmp_path / f"venv-{side}" / "bin" / "ebbench")
    quick = document["env"] | {"ENGINE": "sim", "PROMPTS": "48", "CONCURRENCY": "16"}
    done = bash(step(document, "measure")["run"], tmp_path, **quick)
    assert done.returncode == 0, done.stderr
    gate = step(document, "gate")
    assert gate["uses"] == "./candidate/.github/actions/gate"
    assert set(gate["with"]) <= set(yaml.safe_load(ACTION.read_text())["inputs"])
    assert (tmp_path / gate["with"]["ebbench"]).exists()
    code, output, _ = gate_step(tmp_path, tmp_path / gate["with"]["baseline"], tmp_path / gate["with"]["candidate"])
    assert (code, output) == (0, "outcome=pass\n")


def test_the_gpu_example_interleaves_two_installations(tmp_path: Path) -> None:
    document = yaml.safe_load((GITHUB / "workflow-examples" / "gate-gpu.yml").read_text())
    for side in ("baseline", "candidate"):
        shim(tmp_path / f"venv-{side}" / "bin" / "ebbench")
    quick = document["env"] | {"ENGINE": "sim", "MODEL": "qwen3-8b", "PROMPTS": "32", "CONCURRENCY": "8", "PAIRS": "1"}
    done = bash(step(document, "measure in turns and gate")["run"], tmp_path, **quick)
    assert done.returncode == 5, done.stderr
    assert "1 pair(s) where the test needs 6" in done.stdout
    assert sorted(path.name for path in (tmp_path / "runs").glob("*/*")) == ["pair-000", "pair-000"]
