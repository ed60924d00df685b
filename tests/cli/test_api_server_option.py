"""``--api-server`` on the command line: what is shown and compared, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.errors import EbbenchError, UsageError

SMALL = ("run", "sharegpt", "--source", "profile", "-n", "40", "-c", "16", "--policy", "v1", "--device", "h200")


def run(folder: Path, *options: str) -> str:
    arguments = [*SMALL, "--engine", "sim", "--output-dir", str(folder), *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_header_json_and_comparison_say_that_it_is_on(tmp_path: Path) -> None:
    assert "API server" not in run(tmp_path / "off", "--quiet")
    assert "API server datacenter x 2" in run(
        tmp_path / "two", "--quiet", "--api-server", "datacenter", "--api-server-count", "2"
    )
    (shown,) = json.loads(run(tmp_path / "one", "--json", "--api-server", "datacenter"))
    assert shown["api_server"] == "datacenter"
    compared = CliRunner().invoke(app, ["compare", str(tmp_path / "off"), str(tmp_path / "one")], standalone_mode=False)
    assert isinstance(compared.exception, EbbenchError)
    assert "api_server" in str(compared.exception)


@pytest.mark.parametrize("engine", ["http://127.0.0.1:9", "vllm"])
def test_engines_with_a_real_one_refuse(engine: str, tmp_path: Path) -> None:
    arguments = [*SMALL, "--engine", engine, "--output-dir", str(tmp_path / "run"), "--api-server", "datacenter"]
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert "real one" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [(("--api-server", "datacentre"), "datacenter"), (("--api-server-count", "2"), "--api-server datacenter")],
)
def test_a_wrong_api_server_setting_is_refused_with_the_nearest_right_one(
    options: tuple[str, ...], remedy: str, tmp_path: Path
) -> None:
    arguments = [*SMALL, "--engine", "sim", "--output-dir", str(tmp_path / "run"), *options]
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert remedy in str(result.exception)
