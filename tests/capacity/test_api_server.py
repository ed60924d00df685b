"""Capacity and plans of small models are limited by vLLM's API server, which a simulation leaves out unless asked."""

from pathlib import Path

from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.errors import UsageError

LEFT_OUT = "processes of vLLM's API server"
SMALL = ["sharegpt", "--source", "profile", "--device", "h200", "--model", "gemma-3-1b-it", "--goodput", "ttft:500"]


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def capacity(folder: Path, *options: str) -> str:
    limits = ("--num-prompts", "300", "--max-probes", "5", "--policy", "v1", "--output-dir", str(folder))
    return printed("capacity", *SMALL, *limits, *options)


def plan(*options: str) -> str:
    return printed("plan", *SMALL, "--tp", "1", "--policy", "v1", "--max-num-seqs", "256", *options)


def test_a_capacity_beyond_the_api_server_is_pointed_out(tmp_path: Path) -> None:
    assert LEFT_OUT in capacity(tmp_path / "one")
    assert LEFT_OUT not in capacity(tmp_path / "simulated", "--api-server", "datacenter")
    assert LEFT_OUT not in capacity(tmp_path / "sixteen", "--topology", "dp=16", "--max-probes", "2")


def test_a_plan_beyond_the_api_server_is_pointed_out_and_one_with_it_takes_more_replicas() -> None:
    without = plan("--request-rate", "100")
    assert LEFT_OUT in without
    assert "Cheapest: 1 x h200" in without
    simulated = plan("--request-rate", "100", "--api-server", "datacenter")
    assert LEFT_OUT not in simulated
    assert "Cheapest: 2 x h200" in simulated or "Cheapest: 3 x h200" in simulated
    assert LEFT_OUT not in plan("--request-rate", "10")


def test_a_count_without_a_class_is_refused() -> None:
    arguments = ["plan", *SMALL, "--request-rate", "10", "--api-server-count", "2"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError) or result.exit_code == 2
    assert "--api-server" in str(result.exception) + result.output


def test_advice_says_that_the_api_server_is_left_out(tmp_path: Path) -> None:
    load = ("--num-prompts", "200", "--max-concurrency", "64", "--seeds", "1", "--no-crossover")
    said = printed("advise", *SMALL[:-2], "--policy", "v1", "--policy", "eb", *load, "--runs", str(tmp_path))
    assert LEFT_OUT in said
