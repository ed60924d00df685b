"""Runs a validation: step times, predictions, then measured runs, with one server per policy and round.

Predictions are stored before the first measurement. Every measurement is stored as soon as it ends, so a stopped
validation continues there. A server is started only if its runs are expected to end within the time limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from ebbench.devices.gridcost import GridCost
from ebbench.engines.setup import make_engine
from ebbench.engines.vllm import VllmEngine
from ebbench.errors import DataError, EbbenchError, RunError
from ebbench.records import files
from ebbench.runs.cell import Cell
from ebbench.runs.drive import run_cells, run_missing
from ebbench.runs.make import Made, Task, device_of, make, setup_of
from ebbench.runs.pool import InProcess, Outcome
from ebbench.runs.store import Measured, RunStore
from ebbench.validation.cpu_server import move_api_servers, server_processors, starting_as_measured
from ebbench.validation.judge import METRICS, Observation
from ebbench.validation.question import (
    MeasuringSchedule,
    PlannedRun,
    StepTimes,
    ValidationQuestion,
    measured_cell,
    predicted_cell,
)
from ebbench.validation.steps import measure_step_times
from vllm_eb.policy import parse_policy

SCHEDULE = "schedule.json"
SERVING_S = 6.0
"""Seconds that starting a server takes beyond loading the model in one process."""
FEWEST_TURNS = 3
"""Fewest requests of a run, per open request."""
SHORTEST_RUN_S = 8.0
MOST_REQUESTS = 4000
ATTEMPTS = 2
"""Measurements of a run that was INVALID."""
Say = Callable[[str], None]


@dataclass
class TimeBudget:
    """Time limit of one call of the command, in seconds."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.begun)


@dataclass(frozen=True)
class Outcomes:
    """Predictions and measurements. ``stopped``: why measuring ended early; empty if it is complete."""

    steps: StepTimes
    schedule: MeasuringSchedule
    observations: tuple[Observation, ...]
    planned: int
    stopped: str

    @property
    def invalid(self) -> int:
        """Measured runs that are INVALID."""
        return sum(not one.valid for one in self.observations)


def validate(question: ValidationQuestion, folder: Path, budget: TimeBudget, say: Say) -> Outcomes:
    """Measure step times, predict the runs, measure them. Raises UsageError, RunError; stored results stay."""
    steps = measure_step_times(question, folder / "steps")
    say(f"step times: {steps.steps} steps in {steps.seconds:.0f} s")
    schedule = _schedule(question, steps, folder, budget)
    settings = list(_settings(question, schedule))
    predicted, measured = RunStore(folder / "predicted"), RunStore(folder / "measured")
    cells = {setting: predicted_cell(question, steps, setting, schedule) for setting in settings}
    _check_device(next(iter(cells.values())))
    run_missing(list(cells.values()), predicted, whole=True)
    say(announcement(question, schedule, steps))
    stopped = _measure(question, steps, schedule, measured, budget, say)
    observations = []
    for setting in settings:
        found = measured.get(measured_cell(question, steps, setting, schedule))
        expected = predicted.get(cells[setting])
        if found is not None and expected is not None:
            observations.append(_observation(question, setting, expected, found))
    return Outcomes(steps, schedule, tuple(observations), len(settings), stopped)


def _check_device(cell: Cell) -> None:
    """Raise RunError unless the device predicts from the measured step times."""
    device = device_of(cell)
    if not isinstance(device.cost, GridCost):
        raise RunError(f"{cell.device} has no measured step times of {cell.model}; it has {device.provenance}")


def announcement(question: ValidationQuestion, schedule: MeasuringSchedule, steps: StepTimes) -> str:
    """The line printed before measuring: number of runs and expected time."""
    policies, loads = len(question.policies), len(question.loads)
    runs = schedule.rounds * policies * loads
    words = f"predicted {runs} runs: {policies} policies x {loads} loads x {schedule.rounds} rounds"
    if question.engine != "vllm":
        return f"{words}; now engine {question.engine} runs them"
    start_s = steps.start_s + SERVING_S
    total_s = schedule.rounds * policies * (start_s + schedule.server_s)
    starts = f"{schedule.rounds * policies} server starts of about {start_s:.0f} s"
    each = f"{starts} and {schedule.server_s:.0f} s of runs each"
    return f"{words}; now vLLM measures them, about {total_s / 60:.0f} min ({each})"


def _settings(question: ValidationQuestion, schedule: MeasuringSchedule) -> Iterator[PlannedRun]:
    for round_ in range(schedule.rounds):
        for policy in question.order(round_):
            for load_index in range(len(question.loads)):
                yield PlannedRun(policy, load_index, round_)


def _observation(
    question: ValidationQuestion, setting: PlannedRun, predicted: Measured, measured: Measured
) -> Observation:
    load = question.loads[setting.load_index]
    expected, found = ({key: one.get(key) for key in METRICS} for one in (predicted, measured))
    return Observation(setting.policy, load, setting.round, expected, found, measured.valid)


# --- how much to measure -------------------------------------------------------------------------------------------


def _schedule(question: ValidationQuestion, steps: StepTimes, folder: Path, budget: TimeBudget) -> MeasuringSchedule:
    """The schedule of an earlier call, else one that fits the remaining time."""
    path = folder / SCHEDULE
    if path.exists():
        try:
            return msgspec.json.decode(path.read_bytes(), type=MeasuringSchedule)
        except msgspec.MsgspecError as error:
            raise DataError(f"{path}: damaged ({error}); delete it to begin anew") from None
    rates = [_pilot_rate(question, steps, index) for index in range(len(question.loads))]
    real = question.engine == "vllm"  # runs in virtual time need no limit
    start_s, left_s = (steps.start_s + SERVING_S, budget.left_s) if real else (0.0, math.inf)
    found = fitted_schedule(question, rates, start_s, left_s)
    files.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n", path)
    return found


def _pilot_rate(question: ValidationQuestion, steps: StepTimes, load_index: int) -> float:
    """Requests/s that the simulator predicts for the first policy at a load."""
    setting = PlannedRun(question.policies[0], load_index, 0)
    shortest = MeasuringSchedule(1, tuple(FEWEST_TURNS * load for load in question.loads), ())
    rate = make(Task(predicted_cell(question, steps, setting, shortest))).figures["request_throughput"]
    if not rate:
        raise RunError("the simulator completed no request on the measured step times")
    return float(rate)


def fitted_schedule(
    question: ValidationQuestion, rates: Sequence[float], start_s: float, left_s: float
) -> MeasuringSchedule:
    """The longest runs that fit the time; fewer rounds, at least two, if even the shortest runs do not fit.

    ``rates``: requests/s per load. ``start_s``: seconds that a server takes to start. ``left_s``: time limit.
    """
    rounds = question.rounds
    while True:
        per_server_s = left_s / (rounds * len(question.policies)) - start_s
        warmups_s = sum(question.options.warmup / rate for rate in rates)
        aim_s = min(max((per_server_s - warmups_s) / len(rates), SHORTEST_RUN_S), question.longest_run_s)
        requests = tuple(
            min(max(round(rate * aim_s), FEWEST_TURNS * load), max(MOST_REQUESTS, FEWEST_TURNS * load))
            for rate, load in zip(rates, question.loads, strict=True)
        )
        run_s = tuple((count + question.options.warmup) / rate for count, rate in zip(requests, rates, strict=True))
        found = MeasuringSchedule(rounds, requests, run_s)
        if rounds <= 2 or rounds * len(question.policies) * (start_s + found.server_s) <= left_s:
            return found
        rounds -= 1


# --- measuring ---------------------------------------------------------------------------------------------------


def _measure(
    question: ValidationQuestion,
    steps: StepTimes,
    schedule: MeasuringSchedule,
    store: RunStore,
    budget: TimeBudget,
    say: Say,
) -> str:
    """Measure the runs that the store lacks, round by round. Returns why it ended early, or an empty string."""
    server_s = steps.start_s + SERVING_S + schedule.server_s if question.engine == "vllm" else 0.0
    for _ in range(ATTEMPTS):
        for round_ in range(schedule.rounds):
            for policy in question.order(round_):
                settings = [PlannedRun(policy, index, round_) for index in range(len(question.loads))]
                cells = [measured_cell(question, steps, one, schedule) for one in settings]
                todo = store.missing(cells, whole=True)
                if not todo:
                    continue
                if budget.left_s < server_s:
                    return f"--max-time {budget.seconds:g} was reached"
                began = time.monotonic()
                _measure_policy(question, todo, store, partial(_tell, say, f"round {round_ + 1}"))
                server_s = max(server_s, time.monotonic() - began) if question.engine == "vllm" else 0.0
    return ""


def _measure_policy(
    question: ValidationQuestion, cells: Sequence[Cell], store: RunStore, tell: Callable[[Cell, Measured], None]
) -> None:
    """Measure cells that differ only in load; with vLLM, one server serves all of them."""

    def stored(cell: Cell, result: Measured | EbbenchError, _outcome: Outcome[Made]) -> None:
        if isinstance(result, EbbenchError):
            raise result
        tell(cell, result)

    first = cells[0]
    engine, _ = make_engine(setup_of(first))
    if not isinstance(engine, VllmEngine):
        run_cells(cells, store, InProcess(), whole=True, stored=stored)
        return
    with ExitStack() as stack:
        with starting_as_measured(question):
            start = engine.started(parse_policy(first.policy), device_of(first), first.options, _no_progress)
            server = stack.enter_context(start)
        move_api_servers([process.group for process in server.processes], server_processors(question))
        run_cells(cells, store, InProcess(), whole=True, stored=stored, job=partial(make, engine=server))


def _no_progress(_log: Path) -> Callable[[float], None]:
    return lambda _waited_s: None


def _tell(say: Say, where: str, cell: Cell, found: Measured) -> None:
    load, rate = cell.plan.max_concurrency, found.get("output_throughput")
    figures = "no request completed" if rate is None else f"{rate:,.0f} output tokens/s"
    invalid = "" if found.valid else f"; INVALID: {'; '.join(found.figures.get('reasons', ()))}"
    say(f"{where}, {cell.policy} at {load} open: {figures} in {found.seconds:.0f} s{invalid}")
