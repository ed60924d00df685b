"""Runs for the gate's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gate import gate_data
from tests.gate.gate_data import SMALL, invoke


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six simulated seeds each: ``v1``, ``v0`` (much worse first tokens), and ``copy``, which is v1 again."""
    root = tmp_path_factory.mktemp("measured")
    for name, policy in (("v1", "v1"), ("copy", "v1"), ("v0", "v0")):
        done = invoke(*SMALL, "--policy", policy, "--repeats", "6", "--output-dir", root / name)
        assert done.exit_code == 0, done.output
    return root


@pytest.fixture
def warm(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of a test run `ebbench`, and Python, as forks of a process that has imported it."""
    monkeypatch.setattr(gate_data, "PYTHON", warm_python)
