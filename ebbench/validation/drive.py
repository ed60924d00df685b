"""Runs a validation, round by round: step times, predictions from them, then one server per policy.

Step times are measured anew before each round, since a machine's speed changes within minutes: each round's runs are
predicted from the step times next to them. Predictions are stored before their runs are measured. Every measurement is
stored as soon as it ends, so a stopped validation continues there. A server is started only if its runs are expected to
end within the time limit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from ebbench.devices.gridcost import GridCost
from ebbench.engines.setup import make_engine
from ebbench.engines.vllm import VllmEngine, server_environment
from ebbench.errors import DataError, EbbenchError, RunError, UsageError
from ebbench.grouping import alternating
from ebbench.process.child import child_environ, run_supervised
from ebbench.records import files
from ebbench.records.warnings import shown_text
from ebbench.runs.execute import Made, make
from ebbench.runs.pool import InProcess, Outcome
from ebbench.runs.prepare import device_of
from ebbench.runs.store import Measured, RunStore, run_cells, run_missing
from ebbench.spec.run import RunSpec
from ebbench.validation.judge import METRICS, Observation
from ebbench.validation.machine import move_beside_the_client, server_processors, starting_as_measured, starting_on
from ebbench.validation.question import (
    MeasuringSchedule,
    PlannedRun,
    StepTimes,
    TimeBudget,
    ValidationQuestion,
    find_schedule,
    measured_cell,
    predicted_cell,
    server_start_s,
)
from vllm_eb.policy import parse_policy

# Step times for a validation: `ebbench calibrate` in a process of its own, which frees the GPU at its end.

RESULT = "steps.json"
GRACE_S = 15.0
_TAIL_LINES = 8


def steps_folder(folder: Path, number: int) -> Path:
    """Where a validation in ``folder`` keeps the step times of a round, counted from 0."""
    return folder / "steps" / f"round-{number + 1}"


def measure_step_times(question: ValidationQuestion, folder: Path, most_s: float) -> StepTimes:
    """Measure step times on this machine and store them under ``folder``, unless an earlier call stored them there.

    ``most_s``: seconds, after the engine's start, from which no further round of steps begins.
    Raises UsageError for options that calibrate refuses, RunError if vLLM cannot be measured.
    """
    if (folder / RESULT).exists():
        return stored_step_times(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log, out = folder / "calibrate.log", folder / "calibrate.json"
    began = time.monotonic()
    with log.open("wb") as errors, out.open("wb") as output, starting_on(server_processors(question)):
        environ = child_environ(server_environment() if question.real else os.environ)
        status, _ = run_supervised(
            command(question, folder, most_s), GRACE_S, stdout=output, stderr=errors, env=environ
        )
    if status:
        raise _failed(status, log)
    measured = json.loads(out.read_bytes()) | {"seconds": time.monotonic() - began}
    files.write_bytes(json.dumps(measured, indent=1).encode() + b"\n", folder / RESULT)
    return stored_step_times(folder)


def command(question: ValidationQuestion, folder: Path, most_s: float) -> list[str]:
    """The arguments of the `ebbench calibrate` process."""
    grid = question.grid
    sizes = {"--tokens": grid.tokens, "--seqs": grid.seqs, "--contexts": grid.contexts}
    given = [word for name, values in sizes.items() for word in (name, ",".join(map(str, values)))]
    spec = question.spec
    device = ["--device", spec.device] if spec.device is not None else []
    words = [sys.executable, "-m", "ebbench", "calibrate", "--engine", spec.engine, "--model", question.model]
    words += [*device, *given, "--repeats", str(question.repeats), "--check", "0"]
    words += ["--output-dir", str(folder / "profile"), "--json"]
    words += ["--max-time", f"{most_s:.0f}"] if question.real else []
    return words + (["--", *spec.vllm_options] if spec.vllm_options else [])


def stored_step_times(folder: Path) -> StepTimes:
    """Read what :func:`measure_step_times` stored. Raises DataError for a damaged file."""
    path = folder / RESULT
    stored = files.read_stored_json(path)
    try:
        profile = folder / "profile" / "profile.toml"
        grid = stored["calibration"]["grid"]
        times_s = (*grid["prefill"], *chain.from_iterable(grid["decode"]))
        files_and_grid = {"profile": profile, "costs": profile.with_name("calibration.json"), "grid_s": times_s}
        return msgspec.convert(stored | files_and_grid, StepTimes)
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise DataError(f"{path}: damaged ({error}); delete {folder} to measure again") from None


def _failed(status: int, log: Path) -> EbbenchError:
    """The error of a failed calibration, with the last lines of its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.startswith("error: ")), "").removeprefix("error: ")
    if status == UsageError.exit_code and last:
        return UsageError(last)
    if last:
        return RunError(f"step times could not be measured: {last} (log {log})")
    end = "\n".join(lines[-_TAIL_LINES:])
    return RunError(f"step times could not be measured (exit status {status}); log {log}, its end:\n{end}")


ATTEMPTS = 2
"""Measurements of a run that was INVALID."""
Say = Callable[[str], None]
Reached = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcomes:
    """Predictions and measurements. ``steps``: step times, one per round that began. ``stopped``: why measuring ended
    early; empty if it is complete."""

    steps: tuple[StepTimes, ...]
    schedule: MeasuringSchedule
    observations: tuple[Observation, ...]
    planned: int
    stopped: str

    @property
    def invalid(self) -> int:
        """Measured runs that are INVALID."""
        return sum(not observation.valid for observation in self.observations)


def validate(
    question: ValidationQuestion, folder: Path, budget: TimeBudget, say: Say, reached: Reached = lambda *_counts: None
) -> Outcomes:
    """Measure step times, predict the runs, measure them, round by round.

    ``reached`` is called with what is under way, the runs measured so far and all runs. Raises UsageError, RunError;
    stored results stay.
    """
    reached("step times of round 1", 0, 0)
    first = _step_times(question, folder, 0, budget.left_s / question.rounds, say)
    schedule = find_schedule(question, first, folder, budget)
    server_s = server_start_s(question, first) + schedule.server_s
    rounds = _Rounds(question, folder, schedule, budget, say, reached, server_s)
    rounds.predict(first)
    say(announcement(question, schedule, first, rounds.stored_runs()))
    stopped = rounds.measure()
    settings = [setting for number in range(len(rounds.steps)) for setting in _settings(question, number)]
    observations = tuple(filter(None, map(rounds.observation, settings)))
    planned = schedule.rounds * len(question.policies) * len(question.loads)
    return Outcomes(tuple(rounds.steps), schedule, observations, planned, stopped)


def announcement(question: ValidationQuestion, schedule: MeasuringSchedule, steps: StepTimes, stored: int) -> str:
    """The line printed before measuring: number of runs, those measured before (``stored``), expected time."""
    policies, loads = len(question.policies), len(question.loads)
    runs = schedule.rounds * policies * loads
    words = f"{runs} runs: {policies} policies x {loads} loads x {schedule.rounds} rounds, predicted before each round"
    if stored:
        words += f"; {stored} are measured already"
    if not question.real:
        return f"{words}; engine {question.spec.engine} runs them"
    start_s = server_start_s(question, steps)
    total_s = schedule.rounds * policies * (start_s + schedule.server_s) + (schedule.rounds - 1) * steps.seconds
    left_s = total_s * (1.0 - stored / runs)
    how = f"starts of about {start_s:.0f} s and {schedule.server_s:.0f} s of runs per server"
    return f"{words}; vLLM measures them, about {left_s / 60:.0f} min more ({how})"


STEPS_SHARE = 1 / 3
"""Of a round's time, what its steps may take: runs come before more exact step times."""


def _step_times(question: ValidationQuestion, folder: Path, number: int, round_s: float, say: Say) -> StepTimes:
    place = steps_folder(folder, number)
    kept = (place / RESULT).exists()
    steps = measure_step_times(question, place, STEPS_SHARE * round_s)
    if not kept:
        say(f"round {number + 1}, step times: {steps.steps} steps in {steps.seconds:.0f} s")
    return steps


def _settings(question: ValidationQuestion, number: int) -> list[PlannedRun]:
    loads, policies = range(len(question.loads)), alternating(question.policies, number)
    return [PlannedRun(policy, load_index, number) for policy in policies for load_index in loads]


def _check_device(cell: RunSpec) -> None:
    """Raise RunError unless the device predicts from the measured step times."""
    device = device_of(cell)
    if not isinstance(device.cost, GridCost):
        raise RunError(f"{cell.device} has no measured step times of {cell.model}; it has {device.provenance}")


@dataclass
class _Rounds:
    """Predictions and measurements of all rounds. ``server_s``: expected seconds from a server's start to the end of
    its runs; ``servers_s``: those of this call's servers. ``steps``: step times of the rounds that have begun."""

    question: ValidationQuestion
    folder: Path
    schedule: MeasuringSchedule
    budget: TimeBudget
    say: Say
    reached: Reached
    server_s: float
    servers_s: list[float] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)
    predicted: RunStore = field(init=False)
    measured: RunStore = field(init=False)

    def __post_init__(self) -> None:
        self.predicted, self.measured = RunStore(self.folder / "predicted"), RunStore(self.folder / "measured")

    def predict(self, steps: StepTimes) -> None:
        """Predict the runs of the next round, which has these step times."""
        self.steps.append(steps)
        cells = [self._cell(predicted_cell, run) for run in _settings(self.question, len(self.steps) - 1)]
        _check_device(cells[0])
        run_missing(cells, self.predicted, whole=True)

    def stored_runs(self) -> int:
        """Number of runs that earlier calls measured."""
        return sum(1 for _ in (self.folder / "measured").glob("*/manifest.json"))

    def measure(self) -> str:
        """Measure the runs that are missing. Returns why it ended early, or an empty string."""
        for _ in range(ATTEMPTS):
            for number in range(self.schedule.rounds):
                if number == len(self.steps):
                    kept = (steps_folder(self.folder, number) / RESULT).exists()
                    if not kept and self._too_late(self.steps[0].seconds + self.server_s):
                        return self._stopped
                    self._now(f"step times of round {number + 1}")
                    round_s = self.budget.left_s / (self.schedule.rounds - number)
                    self.predict(_step_times(self.question, self.folder, number, round_s, self.say))
                for policy in alternating(self.question.policies, number):
                    if not self._measure_policy(policy, number):
                        return self._stopped
        return ""

    def observation(self, setting: PlannedRun) -> Observation | None:
        """The run, predicted and measured; None if it was not measured."""
        expected = self.predicted.get(self._cell(predicted_cell, setting))
        observed = self.measured.get(self._cell(measured_cell, setting))
        if expected is None or observed is None:
            return None
        load = self.question.loads[setting.load_index]
        predicted, measured = ({key: figures.get(key) for key in METRICS} for figures in (expected, observed))
        return Observation(setting.policy, load, setting.round, predicted, measured, observed.valid)

    def _cell(self, kind: Callable[..., RunSpec], setting: PlannedRun) -> RunSpec:
        return kind(self.question, self.steps[setting.round], setting, self.schedule)

    def _too_late(self, needed_s: float) -> bool:
        return self.budget.left_s < (needed_s if self.question.real else 0.0)  # virtual time takes none

    def _now(self, doing: str) -> None:
        runs = self.schedule.rounds * len(self.question.policies) * len(self.question.loads)
        self.reached(doing, self.stored_runs(), runs)

    @property
    def _stopped(self) -> str:
        reached = f"--max-time {self.budget.seconds:g} was reached"
        if self.stored_runs() or self.server_s < self.budget.seconds:
            return reached
        return f"{reached}; a server's start and runs take {self.server_s:.0f} s; smaller --loads take less"

    def _measure_policy(self, policy: str, number: int) -> bool:
        """Measure what is missing of a policy's runs in a round; False if too little time is left."""
        runs = [run for run in _settings(self.question, number) if run.policy == policy]
        missing = self.measured.missing([self._cell(measured_cell, run) for run in runs], whole=True)
        if not missing:
            return True
        if self._too_late(self.server_s):
            return False
        self._now(f"round {number + 1}, {policy}")

        def tell(cell: RunSpec, run: Measured) -> None:
            load, rate = cell.plan.max_concurrency, run.get("output_throughput")
            figures = "no request completed" if rate is None else f"{rate:,.0f} output tokens/s"
            reasons = "; ".join(map(shown_text, run.figures.get("reasons", ())))
            invalid = "" if run.valid else f"; INVALID: {reasons}"
            where = f"round {number + 1}, {cell.policy} at {load} open"
            self.say(f"{where}: {figures} in {run.seconds:.0f} s{invalid}")

        began = time.monotonic()
        _measure_policy(self.question, missing, self.measured, tell)
        if len(missing) == len(runs):
            # Expected was the start that step times took, the first on this machine: vLLM compiles only then.
            self.servers_s.append(time.monotonic() - began)
            self.server_s = max(self.servers_s)
        return True


def _measure_policy(
    question: ValidationQuestion, cells: Sequence[RunSpec], store: RunStore, tell: Callable[[RunSpec, Measured], None]
) -> None:
    """Measure cells that differ only in load; with vLLM, one server serves all of them."""

    def stored(cell: RunSpec, result: Measured | EbbenchError, _outcome: Outcome[Made]) -> None:
        if isinstance(result, EbbenchError):
            raise result
        tell(cell, result)

    first = cells[0]
    engine, _ = make_engine(first)
    if not isinstance(engine, VllmEngine):
        run_cells(cells, store, InProcess(), whole=True, stored=stored)
        return
    with ExitStack() as stack:
        with starting_as_measured(question):
            told = parse_policy(first.policy), device_of(first), first.server
            start = engine.started(*told, lambda _log: lambda _waited_s: None)
            server = stack.enter_context(start)
        move_beside_the_client([process.group for process in server.processes], server_processors(question))
        run_cells(cells, store, InProcess(), whole=True, stored=stored, job=partial(make, engine=server))
