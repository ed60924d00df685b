"""How much a validation measures: rounds, and requests per run, within the time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ebbench.errors import DataError, RunError
from ebbench.records import files
from ebbench.runs.execute import Task, make
from ebbench.validation.question import MeasuringSchedule, PlannedRun, StepTimes, ValidationQuestion, predicted_cell

SCHEDULE = "schedule.json"
SERVING_S = 6.0
"""Seconds that starting a server takes beyond loading the model in one process."""
FEWEST_TURNS = 3
"""Fewest requests of a run, per open request."""
SHORTEST_RUN_S = 8.0
MOST_REQUESTS = 4000


@dataclass
class TimeBudget:
    """Time limit of one call of the command, in seconds."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.begun)


def server_start_s(question: ValidationQuestion, steps: StepTimes) -> float:
    """Seconds that a server is expected to take to start; 0 for an engine in virtual time."""
    return steps.start_s + SERVING_S if question.engine == "vllm" else 0.0


def find_schedule(
    question: ValidationQuestion, steps: StepTimes, folder: Path, budget: TimeBudget
) -> MeasuringSchedule:
    """The schedule of an earlier call, with more rounds if the question has more now; else one that fits the remaining
    time. ``steps``: of the first round."""
    path = folder / SCHEDULE
    found = _stored(path)
    if found is not None:
        longer = found.with_rounds(question.rounds)
        if longer != found:
            _store(longer, path)
        return longer
    rates = [_pilot_rate(question, steps, index) for index in range(len(question.loads))]
    real = question.engine == "vllm"  # runs in virtual time need no limit
    left_s, steps_s = (budget.left_s, steps.seconds) if real else (math.inf, 0.0)
    found = fitted_schedule(question, rates, server_start_s(question, steps), left_s, steps_s)
    _store(found, path)
    return found


def _stored(path: Path) -> MeasuringSchedule | None:
    if not path.exists():
        return None
    try:
        return msgspec.convert(files.read_stored_json(path), MeasuringSchedule)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: damaged ({error}); delete it to begin anew") from None


def _store(schedule: MeasuringSchedule, path: Path) -> None:
    files.write_bytes(msgspec.json.format(msgspec.json.encode(schedule), indent=1) + b"\n", path)


def _pilot_rate(question: ValidationQuestion, steps: StepTimes, load_index: int) -> float:
    """Requests/s that the simulator predicts for the first policy at a load."""
    setting = PlannedRun(question.policies[0], load_index, 0)
    shortest = MeasuringSchedule(1, tuple(FEWEST_TURNS * load for load in question.loads), ())
    rate = make(Task(predicted_cell(question, steps, setting, shortest))).figures["request_throughput"]
    if not rate:
        raise RunError("the simulator completed no request on the measured step times")
    return float(rate)


def fitted_schedule(
    question: ValidationQuestion, rates: Sequence[float], start_s: float, left_s: float, steps_s: float
) -> MeasuringSchedule:
    """The longest runs that fit the time; fewer rounds, at least two, if even the shortest runs do not fit.

    ``rates``: requests/s per load. ``start_s``: seconds that a server takes to start. ``steps_s``: seconds of a round's
    step times, of which the first round's are measured already. ``left_s``: time limit.
    """
    rounds = question.rounds
    while True:
        runs_s = left_s - (rounds - 1) * steps_s
        per_server_s = runs_s / (rounds * len(question.policies)) - start_s
        warmups_s = sum(question.options.warmup / rate for rate in rates)
        aim_s = min(max((per_server_s - warmups_s) / len(rates), SHORTEST_RUN_S), question.longest_run_s)
        requests = tuple(
            min(max(round(rate * aim_s), FEWEST_TURNS * load), max(MOST_REQUESTS, FEWEST_TURNS * load))
            for rate, load in zip(rates, question.loads, strict=True)
        )
        run_s = tuple((count + question.options.warmup) / rate for count, rate in zip(requests, rates, strict=True))
        found = MeasuringSchedule(rounds, requests, run_s, question.rounds)
        if rounds <= 2 or rounds * len(question.policies) * (start_s + found.server_s) <= runs_s:
            return found
        rounds -= 1
