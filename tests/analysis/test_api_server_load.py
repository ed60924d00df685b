"""The warning of simulated runs whose tokens one API server process could not stream."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app


def made(tmp_path: Path, *options: str, policy: str = "v1") -> dict[str, Any]:
    usual = {
        "--source": "profile", "--policy": policy, "--device": "h200", "--model": "gemma-3-1b-it",
        "--num-prompts": "300", "--input-len": "100", "--output-len": "200", "--output-dir": str(tmp_path / "run"),
        "--api-server": "off",
    }  # fmt: skip
    given = [word for name, value in usual.items() if name not in options for word in (name, value)]
    arguments = ["run", "balanced", "--json", "--quiet", *given, *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)
    return dict(run)


def warnings_of(tmp_path: Path, *options: str) -> list[str]:
    return [warning["text"] for warning in made(tmp_path, *options)["warnings"]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--max-concurrency", "256"), 1),  # some 40,000 tokens/s
        (("--max-concurrency", "1"), 0),
        (("--max-concurrency", "256", "--topology", "dp=8"), 0),  # eight processes
        (("--max-concurrency", "256", "--api-server", "datacenter"), 0),
    ],
)
def test_answers_that_an_api_server_could_not_stream_are_pointed_out(
    tmp_path: Path, options: tuple[str, ...], expected: int
) -> None:
    found = [text for text in warnings_of(tmp_path, *options) if "left out here" in text]
    assert len(found) == expected


MANY = ("--max-concurrency", "512", "--num-prompts", "2000")


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (("--max-concurrency", "256"), "--api-server-count 2"),
        ((*MANY, "--topology", "dp=2"), "--api-server-count 2"),
        ((*MANY, "--topology", "dp=2", "--api-server-count", "1"), "--api-server-count 2"),
        ((*MANY, "--topology", "dp=2", "--api-server-count", "8"), ""),
        (("--max-concurrency", "256", "--api-server-count", "4"), ""),
        (("--max-concurrency", "16"), ""),
    ],
)
def test_api_servers_that_limit_a_run_are_pointed_out(tmp_path: Path, options: tuple[str, ...], more: str) -> None:
    found = [text for text in warnings_of(tmp_path, "--api-server", "datacenter", *options) if "it limits" in text]
    assert len(found) == bool(more)
    assert all(more in text for text in found)


def test_an_idle_api_server_hardly_changes_the_ttft_of_a_closed_loop(tmp_path: Path) -> None:
    """A client's next request misses the step that begins at the end of the one before, with or without the server."""
    loop = ("--max-concurrency", "16", "--model", "qwen3-8b")
    without, behind = (made(tmp_path / name, *loop, "--api-server", name) for name in ("off", "datacenter"))
    longer_ms = behind["median_ttft_ms"] - without["median_ttft_ms"]
    assert 0 < longer_ms < 0.3 * without["median_tpot_ms"]
