"""Capacity and plans of recorded requests: logs shorter than a run, their arrivals, and parts of long ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.workloads.log_report import poisson_instead

SERVER = "--device l40s --model qwen3-8b --policy v1 --max-num-seqs 16 -q"


def log_of(path: Path, gaps_s: Any, seed: int = 3) -> str:
    rng, n = np.random.default_rng(seed), len(gaps_s)
    columns = np.cumsum(gaps_s), rng.integers(100, 600, n), rng.integers(20, 120, n)
    rows = "".join(f"{t:.6f},{i},{o}\n" for t, i, o in zip(*columns, strict=True))
    path.write_text(f"timestamp,input_tokens,output_tokens\n{rows}")
    return f"log:{path}"


def poisson(n: int, rate: float = 2.0) -> Any:
    return np.random.default_rng(5).exponential(1 / rate, n)


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """80 requests: a batch of 16 is hardly full before the last of them has come."""
    return log_of(tmp_path_factory.mktemp("logs") / "short.csv", poisson(80))


def test_a_log_shorter_than_a_probe_has_its_traffics_capacity(short: str, tmp_path: Path) -> None:
    search = f"{SERVER} -n 800 --precision 0.05 --goodput ttft:400 --json -o".split()
    (found,) = json.loads(call("capacity", short, *search, str(tmp_path / "search")))
    assert found["stopped"] is None
    assert found["attainment"] >= 0.95
    assert found["nearest_load"] == pytest.approx(found["capacity_requests_per_s"], rel=0.05)
    assert "800 to" in found["warnings"][1] or "800 sessions" in found["warnings"][1]
    assert "taken from a log of 80: it is read again, each time with new contents" in found["warnings"][1]
    rate = f"{found['low']:.4g}"
    run = f"{SERVER} --scenario poisson --request-rate {rate} -n 4000 --seed 77 --goodput ttft:400 --json -o".split()
    (whole,) = json.loads(call("run", short, *run, str(tmp_path / "run")))
    assert whole["planned"] == 4000
    assert whole["slo_attainment"] >= 0.93


def test_a_search_says_that_arrivals_are_not_the_recorded_ones(short: str, tmp_path: Path) -> None:
    search = f"{SERVER} -n 200 --max-probes 3 --goodput ttft:400 -o".split()
    said = " ".join(call("capacity", short, *search, str(tmp_path / "poisson")).split())
    assert "Arrivals are Poisson at each rate. The recorded ones (" in said
    assert "met, " in said
    assert "steady window of the probe nearest to capacity that kept the limits" in said
    own = call("capacity", short, *search, str(tmp_path / "own"), "--scenario", "trace")
    assert "Arrivals are Poisson" not in own
    manifest = json.loads(next((tmp_path / "own").glob("v1-*-seed*/manifest.json")).read_text())
    assert manifest["facts"]["scenario"] == "trace"
    assert manifest["facts"]["speed"] != 1


@pytest.mark.parametrize(
    ("gaps_s", "words"),
    [
        (poisson(400), "about as irregular"),
        (np.full(400, 0.5), "more even (coefficient of variation of the gaps 0.00, Poisson's 1)"),
        (np.tile([0.01] * 9 + [5.0], 40), "burstier"),
        (
            np.concatenate([np.full(300, 2.0), np.full(3000, 0.2)]),
            r"come in waves \(counts per minute vary [\d.]+ times",
        ),
        (poisson(20), "too few to be compared"),
    ],
    ids=["Poisson", "even", "bursts", "a rate that rises", "few"],
)
def test_the_difference_of_recorded_arrivals_has_direction_and_size(tmp_path: Path, gaps_s: Any, words: str) -> None:
    said = poisson_instead(log_of(tmp_path / "log.csv", gaps_s), {})
    assert re.search(words if words.startswith("come") else re.escape(words), said), said


def test_workloads_without_arrivals_have_none_to_be_replaced() -> None:
    assert poisson_instead("sharegpt", {}) == ""


@pytest.mark.usefixtures("fewer_sessions")
def test_a_plan_of_a_short_log_is_that_of_a_long_one(short: str, tmp_path: Path) -> None:
    """At 20/s the log lasts four seconds: on two replicas, which are too few, nothing has queued by then."""
    load = f"{SERVER} --tp 1 --workers 1 --request-rate 20 --goodput ttft:400 --json"
    planned = json.loads(call("plan", short, *load.split()))
    assert "taken from a log of 80: it is read again" in planned["notes"][1]
    assert planned["notes"][0].startswith("Arrivals are Poisson at each rate.")
    header, *rows = Path(short.removeprefix("log:")).read_text().splitlines()
    lengths = [row.split(",", 1)[1] for row in rows * 50]
    times = np.cumsum(poisson(len(lengths)))
    long = tmp_path / "long.csv"
    long.write_text("\n".join([header, *(f"{t:.6f},{row}" for t, row in zip(times, lengths, strict=True)), ""]))
    expected = json.loads(call("plan", f"log:{long}", *load.split()))
    assert [each["replicas"] for each in planned["deployments"]] == [
        each["replicas"] for each in expected["deployments"]
    ]
    assert planned["deployments"][0]["whole"]["met"]


@pytest.mark.usefixtures("fewer_sessions")
def test_a_plan_can_be_of_the_recorded_arrivals(tmp_path: Path) -> None:
    """64 at once and then a pause: more replicas of 16 sequences than Poisson arrivals of the same rate need."""
    log = log_of(tmp_path / "bursts.csv", np.tile([*[0.001] * 63, 8.0], 8))
    load = f"{SERVER} --tp 1 --workers 1 --request-rate 8 --goodput ttft:400 --json".split()
    by_poisson, own = (json.loads(call("plan", log, *load, *more)) for more in ((), ("--scenario", "trace")))
    assert own["deployments"][0]["replicas"] > by_poisson["deployments"][0]["replicas"]
    assert own["scenario"] == "trace"
    assert not any("Poisson" in note for note in own["notes"])
