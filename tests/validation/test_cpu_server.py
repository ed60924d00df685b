"""vLLM's CPU build serves a validation as its steps were measured, and leaves the client a processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ebbench.calibration.measure import ProbeGrid
from ebbench.devices.base import Device
from ebbench.engines.vllm import StartedServers, VllmEngine, server_environment
from ebbench.errors import RunError
from ebbench.process.child import supervised
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec
from ebbench.spec.server import EngineOptions
from ebbench.validation import drive, machine, question
from ebbench.validation.drive import measure_step_times
from ebbench.validation.machine import move_beside_the_client, server_processors, starting_on
from ebbench.validation.question import MeasuringSchedule, PlannedRun, StepTimes, ValidationQuestion, measured_cell
from ebbench.workloads.options import PlanOptions
from vllm_eb.policy import PolicySpec

ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
SPEC = RunSpec(PlanOptions("balanced"), engine="vllm", model="model", server=EngineOptions(api_server="off"))
QUESTION = ValidationQuestion(SPEC, ProbeGrid((16, 64), (1, 4), (16, 64)), (4,))
SHOWN = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


@pytest.mark.parametrize(
    ("usable", "cpu", "engine", "expected"),
    [
        ({0, 1}, True, "vllm", {1}),
        ({2, 5, 7}, True, "vllm", {5, 7}),
        ({3}, True, "vllm", set()),
        ({0, 1}, False, "vllm", set()),
        ({0, 1}, True, "sim", set()),
    ],
    ids=["two", "three of many", "one", "a GPU", "no vLLM"],
)
def test_vllm_gets_all_processors_but_one(
    usable: set[int], cpu: bool, engine: str, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: usable)
    monkeypatch.setattr(machine, "cpu_build", lambda: cpu)
    assert server_processors(replace(QUESTION, spec=QUESTION.spec.changed(engine=engine))) == expected


def test_what_starts_inside_runs_there_and_later_processes_anywhere() -> None:
    usable = os.sched_getaffinity(0)
    chosen = frozenset([max(usable)])
    with starting_on(chosen):
        inside = subprocess.run(SHOWN, capture_output=True, text=True, check=True).stdout
    assert inside.strip() == str(sorted(chosen))
    with pytest.raises(subprocess.CalledProcessError), starting_on(chosen):  # a server that does not start
        subprocess.run([sys.executable, "-c", "1/0"], capture_output=True, check=True)
    assert os.sched_getaffinity(0) == usable
    with starting_on(frozenset()):
        assert os.sched_getaffinity(0) == usable
    assert subprocess.run(SHOWN, capture_output=True, text=True, check=True).stdout.strip() == str(sorted(usable))


def test_step_times_are_measured_on_the_processors_of_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = frozenset([max(os.sched_getaffinity(0))])
    seen = []

    def fails(command: list[str], _grace_s: float, **_options: object) -> tuple[int, str]:
        seen.append(os.sched_getaffinity(0))
        assert command[command.index("--max-time") + 1] == "30"
        return 1, ""

    monkeypatch.setattr(drive, "run_supervised", fails)
    monkeypatch.setattr(drive, "server_processors", lambda _question: chosen)
    with pytest.raises(RunError):
        measure_step_times(QUESTION, tmp_path, 30.0)
    assert seen == [chosen]


@pytest.mark.parametrize("cpu", [True, False])
def test_servers_start_as_their_steps_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    usable, before = os.sched_getaffinity(0), os.environ.get(ONE_PROCESS)
    chosen = frozenset([max(usable)])
    seen: list[object] = []

    class Engine(VllmEngine):
        @contextmanager
        def started(
            self, _policy: PolicySpec, _device: Device, options: EngineOptions, _progress: object
        ) -> Iterator[StartedServers]:
            environment = server_environment()
            seen.append((os.sched_getaffinity(0), environment.get(ONE_PROCESS), options.enforce_eager))
            servers = StartedServers(url="", servings=(), processes=())
            yield servers

    monkeypatch.setattr(drive, "make_engine", lambda _setup: (Engine(), None))
    monkeypatch.setattr(drive, "device_of", lambda _cell: None)
    monkeypatch.setattr(machine, "server_processors", lambda _question: chosen)
    monkeypatch.setattr(machine, "cpu_build", lambda: cpu)
    monkeypatch.setattr(question, "cpu_build", lambda: cpu)
    monkeypatch.setattr(drive, "run_cells", lambda *_cells, **_how: seen.append(os.sched_getaffinity(0)))
    profile = tmp_path / "profile.toml"
    times = StepTimes(profile, profile, 1000, 4, 1.0, 9, 1.0, 1.0, None, 0.001, (0.01,), 1.0, 2.0)
    cell = measured_cell(QUESTION, times, PlannedRun("v1", 0, 0), MeasuringSchedule(1, (12,), ()))
    drive._measure_policy(QUESTION, [cell], RunStore(tmp_path), lambda *_found: None)
    assert seen == [(chosen, "0" if cpu else before, cpu), usable]
    assert os.environ.get(ONE_PROCESS) == before


PARENT_AND_CHILD = """
import subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
    print(child.pid, flush=True)
    input()
    child.communicate(b"\\n")
"""


def test_the_api_server_moves_to_the_client_and_the_engine_core_stays() -> None:
    usable = os.sched_getaffinity(0)
    chosen = frozenset([max(usable)])
    with starting_on(chosen):
        command = supervised([sys.executable, "-c", PARENT_AND_CHILD], 5.0)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    engine_core = int(process.stdout.readline())
    api_server = int(Path(f"/proc/{engine_core}/stat").read_text().split()[3])
    try:
        move_beside_the_client([process.pid], chosen)
        threads = [int(thread.name) for thread in Path(f"/proc/{api_server}/task").iterdir()]
        assert len(threads) == 2
        assert [os.sched_getaffinity(thread) for thread in threads] == [(usable - chosen) or chosen] * 2
        assert os.sched_getaffinity(engine_core) == chosen
    finally:
        process.communicate("\n")
