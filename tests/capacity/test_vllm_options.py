"""Options for vLLM after -- reach the servers of a capacity search, and only engines that start vLLM take them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.engines.setup import make_engine
from ebbench.engines.vllm import VllmEngine
from ebbench.errors import UsageError
from ebbench.sizing import command
from ebbench.spec.run import RunSpec


def invoke(tmp_path: Path, *words: str) -> Result:
    command = ["capacity", "balanced", "--goodput", "ttft:500", "--policy", "v1", "-o", str(tmp_path / "out"), *words]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


def test_vllm_options_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[VllmEngine] = []

    def engine(spec: RunSpec) -> tuple[object, str]:
        made, _ = make_engine(spec)
        assert isinstance(made, VllmEngine)
        seen.append(made)
        raise UsageError("seen")

    monkeypatch.setattr(command, "make_engine", engine)
    invoke(tmp_path, "--engine", "vllm", "--model", "a/b", "--", "--load-format", "dummy")
    assert [made.vllm_options for made in seen] == [("--load-format", "dummy")]


def test_the_simulator_refuses_options_of_vllm(tmp_path: Path) -> None:
    result = invoke(tmp_path, "--engine", "sim", "--", "--load-format", "dummy")
    assert result.exit_code == 2
    assert "--load-format dummy" in result.stderr
