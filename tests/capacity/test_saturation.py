"""Scenarios whose rates are shares of saturation measure it themselves: in virtual time, and on servers."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.engines.emulated import EmulatedEngine
from ebbench.engines.sim import SimEngine
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.run import Run
from ebbench.records.warnings import Fact, fact
from ebbench.render.documents import Console
from ebbench.runs.prepare import Series, device_of
from ebbench.runs.stored import listed
from ebbench.sizing.drive import SearchOutcome
from ebbench.sizing.estimate import Estimate, Probe
from ebbench.sizing.saturation import read_saturation, with_saturation
from ebbench.sizing.sentences import SATURATION
from ebbench.spec.run import RunSpec
from ebbench.spec.server import EngineOptions
from ebbench.workloads.options import PlanOptions
from tests.capacity.test_plan import READING
from vllm_eb.policy import parse_policy

OPTIONS = (
    "run sharegpt --source profile --scenario bursts-on-off --device h200 --model qwen3-8b --max-num-seqs 32 -n 100 -q"
)


def test_shares_are_of_the_saturated_rate_of_this_device(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = CliRunner().invoke(app, [*OPTIONS.split(), "--policy", "v1", "-o", str(folder)])
    assert done.exit_code == 0, done.output
    measured = json.loads((folder / "manifest.json").read_text())["facts"]["saturation_rate"]
    saturated = "run sharegpt --source profile -c 64 --device h200 --model qwen3-8b --max-num-seqs 32 -n 4800 -q --json"
    run = CliRunner().invoke(app, [*saturated.split(), "--policy", "v1", "-o", str(tmp_path / "saturated")])
    assert measured == pytest.approx(json.loads(run.stdout)[0]["request_throughput"], rel=0.05)


def test_a_given_rate_is_taken(tmp_path: Path) -> None:
    given = [*OPTIONS.split(), "--policy", "v1", "--saturation-rate", "5", "-o", str(tmp_path / "run")]
    assert CliRunner().invoke(app, given).exit_code == 0
    facts = json.loads((tmp_path / "run" / "manifest.json").read_text())["facts"]
    assert facts["saturation_rate"] == 5


def test_a_log_of_fewer_requests_than_a_batch_holds_is_read_again(tmp_path: Path) -> None:
    """Its saturated rate was 0 sessions/s, then unknown; read again, the log fills a batch."""
    log = tmp_path / "own.csv"
    log.write_text("when,fed,made\n" + "".join(f"{second},100,20\n" for second in range(40)))
    options = f"run log:{log} --columns input=fed,output=made,time=when --scenario ramp --policy v1 -q"
    done = CliRunner().invoke(app, [*options.split(), "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "run" / "manifest.json").read_text())["facts"]
    assert facts["saturation_rate"] > 100


def test_the_emulated_engine_takes_the_rate_that_the_simulator_measures(tmp_path: Path) -> None:
    """Both make the same steps, and the simulator takes seconds."""
    series, silent = configured("sim"), Console(quiet=True)
    device = device_of(series.spec)
    simulated = with_saturation(series, SimEngine(), device, silent, beside=tmp_path / "run", quiet=True)

    class Emulated(EmulatedEngine):
        def run(self, *_arguments: object, **_further: object) -> NoReturn:
            raise AssertionError("the emulated engine is not run")

    emulated = with_saturation(series, Emulated(), device, silent, beside=tmp_path / "run", quiet=True)
    rate = emulated.spec.plan.saturation_rate
    assert isinstance(rate, float)
    assert rate > 0
    assert rate == simulated.spec.plan.saturation_rate


def test_a_server_that_does_not_answer_is_an_error_of_one_line(tmp_path: Path) -> None:
    options = [*OPTIONS.split(), "--engine", "http://127.0.0.1:9", "--policy", "v1", "-o", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [option for option in options if option != "-q"])
    assert done.exit_code == 4
    assert "127.0.0.1:9" in done.output
    assert "Traceback" not in done.output


def test_the_rate_of_a_server_is_found_by_doubling_its_open_sessions(tmp_path: Path) -> None:
    """Two slots of 100 ms each complete 20 sessions/s at most; a busy machine completes fewer."""
    folder = tmp_path / "run"
    options = "balanced --input-len 20 --output-len 5 --length-distribution fixed -n 40 --lag-limit-ms 5000"
    with FakeServerProcess(FakeConfig(ttft_ms=60, itl_ms=10, max_running=2)) as server:
        where = ["--engine", server.url, "--scenario", "bursts-on-off", "-o", str(folder)]
        done = CliRunner().invoke(app, ["run", *options.split(), *where])
    assert done.exit_code == 0, done.output
    assert "measured first, for at most 600 s" in done.output
    facts = json.loads((folder / "manifest.json").read_text())["facts"]
    assert 10 < facts["saturation_rate"] < 21
    loops = sorted(run.manifest.phases[0].max_concurrency for run in probes(tmp_path / "run-saturation"))
    assert loops[:3] == [1, 4, 8]
    assert f"--saturation-rate {facts['saturation_rate']:g}" in done.output
    [run, search] = sorted(listed([tmp_path]).runs, key=lambda one: one.path.name)
    assert (run.kind, search.kind, search.probes) == ("run", "search", len(probes(search.path)))


def test_without_a_usable_run_the_rate_has_to_be_given(tmp_path: Path) -> None:
    options = "balanced --input-len 20 --output-len 5 -n 40 --lag-limit-ms 0.0001 -q"
    with FakeServerProcess(FakeConfig(ttft_ms=5, itl_ms=1)) as server:
        where = ["--engine", server.url, "--scenario", "ramp", "-o", str(tmp_path / "run")]
        done = CliRunner().invoke(app, ["run", *options.split(), *where])
    assert done.exit_code == 4
    assert len(done.stderr.strip().splitlines()) == 1
    assert "INVALID" in done.stderr


@pytest.mark.parametrize(
    ("limited_by", "stopped", "words"),
    [
        ("queue", None, "8 open sessions complete no more per second than 4"),
        ("not reached", None, "8 open sessions, twice what a batch holds"),
        (
            "not reached",
            fact("max_time", limit_s=600.0, next_run_s=90.0),
            "the budget of 600 (the next run takes 90 s)",
        ),
        ("errors", None, "requests fail"),
    ],
)
def test_the_highest_rate_counts_and_its_doubts_are_said(limited_by: str, stopped: Fact | None, words: str) -> None:
    """With more conversations open than the prefix cache serves, the largest loop completes fewer."""
    readings = tuple(
        replace(READING, probe=Probe(load, 0, ()), completed_sessions_per_s=per_s)
        for load, per_s in ((8.0, 18.0), (4.0, 21.0))
    )
    found = read_saturation(
        SearchOutcome(Estimate(8, 8, inf, limited_by, False), readings, READING, stopped), "v1", 30.0
    )
    assert found.values["rate"] == 21.0
    told = found.worded(SATURATION)
    assert words in told
    assert "--saturation-rate 21" in told


def probes(folder: Path) -> list[Run]:
    return [Run.load(manifest.parent) for manifest in folder.glob("*/manifest.json")]


def configured(engine: str) -> Series:
    plan = PlanOptions("sharegpt", "bursts-on-off", num_prompts=100, source="profile")
    server = EngineOptions(max_num_seqs=32)
    spec = RunSpec(plan, engine=engine, device="h200", model="qwen3-8b", server=server)
    return Series(spec, (parse_policy("v1"),))
