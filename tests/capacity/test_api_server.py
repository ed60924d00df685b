"""Capacity, plans and advice of small models are limited by vLLM's API server, which is simulated where it matters."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.errors import UsageError
from ebbench.records.run import Run

LEFT_OUT, BUSY = "They are left out here", "so it is simulated"
SMALL = ["sharegpt", "--source", "profile", "--device", "h200", "--model", "gemma-3-1b-it", "--goodput", "ttft:500"]


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a plan's sessions: enough for these loads, which lie far from one replica's."""
    monkeypatch.setattr("ebbench.sizing.candidates.SESSIONS", 250)


def printed(*arguments: str) -> str:
    """What is printed as the answer, and before it."""
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def capacity(folder: Path, *options: str) -> str:
    limits = ("--num-prompts", "200", "--policy", "v1", "--output-dir", str(folder))
    probes = () if "--max-probes" in options else ("--max-probes", "5")
    return printed("capacity", *SMALL, *limits, *probes, *options)


def plan(*options: str) -> str:
    return printed("plan", *SMALL, "--tp", "1", "--policy", "v1", "--max-num-seqs", "128", *options)


def test_probes_that_keep_the_api_server_busy_have_it(tmp_path: Path) -> None:
    said = capacity(tmp_path / "auto")
    assert BUSY in said
    assert LEFT_OUT not in said
    (found,) = json.loads((tmp_path / "auto" / "capacity-answers.json").read_text())
    assert 25 < found["capacity_requests_per_s"] < 60
    probes = [Run.load(path.parent).manifest for path in (tmp_path / "auto").glob("*-seed*/manifest.json")]
    simulated = {probe.facts["request_rate"]: probe.facts["api_server"] for probe in probes}
    assert set(simulated.values()) == {"datacenter", "off"}
    assert simulated == dict(zip(sorted(simulated), sorted(simulated.values(), reverse=True), strict=True))
    assert BUSY in capacity(tmp_path / "auto"), "a search that goes on comes to the same end"


def test_a_stated_api_server_is_searched_as_stated(tmp_path: Path) -> None:
    without = capacity(tmp_path / "off", "--api-server", "off")
    assert LEFT_OUT in without
    assert BUSY not in without
    always = capacity(tmp_path / "simulated", "--api-server", "datacenter")
    assert LEFT_OUT not in always
    assert BUSY not in always
    assert "API server" not in capacity(tmp_path / "sixteen", "--topology", "dp=16", "--max-probes", "2")


def test_a_plan_that_the_api_server_limits_takes_more_replicas() -> None:
    without = plan("--request-rate", "100", "--api-server", "off")
    assert LEFT_OUT in without
    assert "Cheapest that carries this rate: 1 x h200" in without
    simulated = plan("--request-rate", "100")
    assert BUSY in simulated
    assert LEFT_OUT not in simulated
    assert "Cheapest that carries this rate: 2 x h200" in simulated or "Cheapest: 3 x h200" in simulated


@pytest.mark.nightly
def test_a_plan_with_api_servers_to_spare_is_not_limited_by_them() -> None:
    assert "API server" not in plan("--request-rate", "30")
    more = plan("--request-rate", "100", "--api-server-count", "4")
    assert BUSY not in more
    assert "--api-server datacenter --api-server-count 4" in more
    assert "Cheapest that carries this rate: 1 x h200" in more


def test_a_count_of_processes_that_are_left_out_is_refused() -> None:
    arguments = ["plan", *SMALL, "--request-rate", "10", "--api-server", "off", "--api-server-count", "2"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError) or result.exit_code == 2
    assert "--api-server" in str(result.exception) + result.output


def test_advice_simulates_the_api_server_that_would_be_busy(tmp_path: Path) -> None:
    def advice(*options: str) -> str:
        load = ("--num-prompts", "100", "--seeds", "1", "--no-crossover")
        asked = ("advise", *SMALL[:-2], "--policy", "v1", "--policy", "eb", *load, "--runs", str(tmp_path))
        concurrency = () if "--max-concurrency" in options else ("--max-concurrency", "64")
        return printed(*asked, *concurrency, *options)

    assert BUSY in advice()
    always = advice("--api-server", "datacenter")
    assert "gemma-3-1b-it on h200 --api-server datacenter" in always
    assert "`ebbench devices show h200 --model gemma-3-1b-it`" in always, "which has no such option"
    without = advice("--api-server", "off")
    assert LEFT_OUT in without
    assert BUSY not in without
    assert "API server" not in advice("--max-concurrency", "8")
