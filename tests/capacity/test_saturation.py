"""Scenarios whose rates are shares of saturation measure it themselves in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app

OPTIONS = (
    "run sharegpt --source profile --scenario bursts-on-off --device h200 --model qwen3-8b --max-num-seqs 32 -n 100 -q"
)


def test_shares_are_of_the_saturated_rate_of_this_device(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = CliRunner().invoke(app, [*OPTIONS.split(), "--policy", "v1", "-o", str(folder)])
    assert done.exit_code == 0, done.output
    measured = json.loads((folder / "manifest.json").read_text())["facts"]["saturation_rate"]
    saturated = "run sharegpt --source profile -c 64 --device h200 --model qwen3-8b --max-num-seqs 32 -n 192 -q --json"
    run = CliRunner().invoke(app, [*saturated.split(), "--policy", "v1", "-o", str(tmp_path / "saturated")])
    assert measured == pytest.approx(json.loads(run.stdout)[0]["request_throughput"], rel=0.15)


def test_a_given_rate_is_taken_and_a_server_is_not_saturated_unasked(tmp_path: Path) -> None:
    given = [*OPTIONS.split(), "--policy", "v1", "--saturation-rate", "5", "-o", str(tmp_path / "run")]
    assert CliRunner().invoke(app, given).exit_code == 0
    facts = json.loads((tmp_path / "run" / "manifest.json").read_text())["facts"]
    assert facts["saturation_rate"] == 5
    refused = CliRunner().invoke(app, [*OPTIONS.split(), "--engine", "http://127.0.0.1:9", "--policy", "v1"])
    assert refused.exit_code == 2
    assert "ebbench capacity" in refused.output
