"""``ebbench advise`` for several engines: what they share, what is refused, and the commands that it names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbench.advice import sentences
from ebbench.advice.candidates import engine_count
from ebbench.advice.choice import AdviceQuestion
from ebbench.analysis.metrics import Slo
from ebbench.cli.main import app
from ebbench.errors import UsageError
from ebbench.spec.run import simulated

FEW = (
    *(
        "balanced",
        "--input-len",
        "200",
        "--output-len",
        "60",
        "-n",
        "200",
        "-c",
        "64",
        "--seeds",
        "1",
        "-p",
        "v1",
        "-p",
    ),
    *("eb", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--no-crossover", "--workers", "1", "-q"),
)


def advised(runs: Path, *options: str) -> dict[str, Any]:
    at = FEW.index("-c")
    few = FEW[:at] + FEW[at + 2 :] if "-c" in options else FEW
    done = CliRunner().invoke(app, ["advise", *few, *options, "--runs", str(runs), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(*options: str) -> str:
    result = CliRunner().invoke(app, ["advise", *FEW, *options], standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    return str(result.exception)


def test_engines_share_the_requests_in_theory_and_in_runs(tmp_path: Path) -> None:
    one, four = advised(tmp_path, "-c", "16"), advised(tmp_path, "--topology", "dp=4")
    assert (one["engines"], four["engines"]) == (1, 4)
    assert four["load"]["concurrency"] == 64
    assert four["theory"]["n"] == one["theory"]["n"] == 16
    assert four["server"] == {"topology": "dp=4"}
    rates = [found["scores"][0]["tokens_per_s"] for found in (one, four)]
    assert 3.0 < rates[1] / rates[0] < 4.5


def test_tp_is_the_topology_of_one_engine(tmp_path: Path) -> None:
    short, long = advised(tmp_path, "--tp", "2"), advised(tmp_path, "--topology", "tp=2")
    assert short["server"] == long["server"] == {"topology": "tp=2"}
    assert short["scores"] == long["scores"]
    assert short["engines"] == 1


def test_what_cannot_be_advised_on_is_refused() -> None:
    assert "separates prefill from decode" in refused("--topology", "2p2d")
    assert "ebbench run balanced --topology 1p1d,tp=2 --policy v1" in refused("--topology", "1p1d,tp=2")
    assert "leave out --tp 2" in refused("--topology", "dp=2", "--tp", "2")
    assert "changes nothing in dp=2" in refused("--topology", "dp=2", "--link", "pcie")
    assert "unknown topology" in refused("--topology", "four")


def test_the_number_of_engines_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["advise", *FEW, "--topology", "dp=4", "--runs", str(tmp_path)])
    said = " ".join(done.output.split())
    assert "64 requests open at most, 16 of them in the batch of each of 4 engines" in said
    assert "on rtx-pro-6000 --topology dp=4" in said


def question(server: dict[str, str]) -> AdviceQuestion:
    spec = simulated("balanced", "v1", "h200", "qwen3-30b-a3b", 64, 8192, in_front=True).changed(**server)
    return AdviceQuestion(spec, 1, Slo(), ("v1",))


@pytest.mark.parametrize(
    ("server", "options"),
    [
        ({"topology": "tp=2", "link": "nvlink", "api_server": "datacenter"}, ["--tp", "2", "--link", "nvlink"]),
        ({"topology": "tp=1,dp=4,ep=4", "link": "nvlink"}, []),
        ({"topology": "dp=2,tp=2", "quantization": "fp8"}, ["--tp", "2", "--quantization", "fp8"]),
        ({}, []),
    ],
)
def test_the_device_command_that_is_named_runs(server: dict[str, str], options: list[str]) -> None:
    advice = SimpleNamespace(question=question(server), load=None, notes=())
    last = sentences.limits_of_it(advice)[-1]  # type: ignore[arg-type]
    command = shlex.split(last.split("`")[1])
    assert command == ["ebbench", "devices", "show", "h200", "--model", "qwen3-30b-a3b", *options]
    assert CliRunner().invoke(app, command[1:]).exit_code == 0


@pytest.mark.parametrize(
    ("policy", "topology", "told"),
    [
        ("marginal", "tp=1,dp=4,ep=4", True),
        ("marginal", "dp=4,lockstep=on", True),
        ("marginal", "dp=4", False),
        ("marginal", "tp=2", False),
        ("ebplus", "tp=1,dp=4,ep=4", False),
    ],
)
def test_ranks_that_refill_together_need_an_option_of_vllm(policy: str, topology: str, told: bool) -> None:
    chosen = SimpleNamespace(policy=policy, max_num_batched_tokens=64)
    threshold = SimpleNamespace(theta_star=0.1)
    theory = SimpleNamespace(threshold=threshold, n_star=8, k_star=1)
    asked = question({"topology": topology})
    lines = sentences.parameters(SimpleNamespace(question=asked, theory=theory, tuning=None, chosen=chosen))  # type: ignore[arg-type]
    assert any("--prefill-schedule-interval 64" in line for line in lines) is told


@pytest.mark.parametrize(
    ("topology", "shown"),
    [("tp=2", "--tp 2"), ("tp=2,dp=4,ep=8", "--topology tp=2,dp=4,ep=8"), ("dp=4", "--topology dp=4")],
)
def test_the_topology_is_shown_as_an_option_of_advise(topology: str, shown: str) -> None:
    assert sentences.server_options(question({"topology": topology}).server) == shown


@pytest.mark.parametrize(
    ("topology", "engines"), [("tp=4", 1), ("dp=3,tp=2", 3), ("tp=1,dp=4,ep=4", 4), ("instances=2,dp=4,ep=4", 8)]
)
def test_every_rank_is_an_engine(topology: str, engines: int) -> None:
    assert engine_count(question({"topology": topology})) == engines
