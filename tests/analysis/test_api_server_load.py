"""The warning of simulated runs whose tokens one API server process could not stream."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app


def made(tmp_path: Path, *options: str, policy: str = "v1") -> dict[str, Any]:
    arguments = [
        "run", "balanced", "--source", "profile", "--policy", policy, "--device", "h200", "--model", "gemma-3-1b-it",
        "--num-prompts", "300", "--input-len", "100", "--output-len", "200", "--json", "--quiet",
        "--output-dir", str(tmp_path / "run"), "--api-server", "off", *options,
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)
    return dict(run)


def warnings_of(tmp_path: Path, *options: str) -> list[str]:
    return [str(warning) for warning in made(tmp_path, *options)["warnings"]]


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--max-concurrency", "4"), 1),
        (("--max-concurrency", "4", "--api-server", "datacenter"), 0),
        (("--max-concurrency", "300", "--max-num-seqs", "4"), 0),  # requests wait for seats much longer than a step
        (("--request-rate", "20"), 0),  # arrives at any time of a step
    ],
)
def test_a_closed_loop_with_free_seats_says_that_its_ttft_is_a_step_too_short(
    tmp_path: Path, options: tuple[str, ...], expected: int
) -> None:
    assert sum("a step too short" in text for text in warnings_of(tmp_path, *options)) == expected


def test_the_api_server_makes_the_ttft_of_such_a_loop_a_step_longer(tmp_path: Path) -> None:
    loop = ("--max-concurrency", "16", "--model", "qwen3-8b")
    without, behind = (made(tmp_path / name, *loop, "--api-server", name) for name in ("off", "datacenter"))
    longer_ms = behind["median_ttft_ms"] - without["median_ttft_ms"]
    assert longer_ms == pytest.approx(without["median_tpot_ms"], rel=0.6)
