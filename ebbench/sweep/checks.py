"""What is refused, or said, before a cell runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ebbench.engines.base import EngineOptions
from ebbench.engines.checks import check_options
from ebbench.errors import UnknownNameError, UsageError
from ebbench.sweep.settings import Settings
from vllm_eb.policy import parse_policy


def check_cells(cells: Sequence[Settings]) -> None:
    """Refuse names that do not exist, and a grid none of whose cells can run. Raises UsageError."""
    _check_names(cells)
    problems = [problem_of(cell) for cell in cells]
    if all(problems):
        raise UsageError(f"no cell of the grid can run: {problems[0]}")


def problem_of(cell: Settings) -> str:
    """Why no engine can work with a cell's scheduler settings; empty where one can."""
    return _problem(cell.options, cell.policy)


@lru_cache(maxsize=4096)
def _problem(options: EngineOptions, policy: str) -> str:
    try:
        check_options(options, [parse_policy(policy)])
    except UsageError as problem:
        return str(problem)
    return ""


def _check_names(cells: Sequence[Settings]) -> None:
    from ebbench.analysis.slo import parse_slo
    from ebbench.devices.profiles import find_model, find_profile
    from ebbench.engines import ENGINES
    from ebbench.traffic.spec import load_scenario
    from ebbench.workloads.spec import load_workload

    for value in _values(cells, "workload"):
        if value.startswith("trace:"):
            if not Path(value.removeprefix("trace:")).expanduser().is_file():
                raise UsageError(f"{value}: no such file")
        else:
            load_workload(value)
    for value in _values(cells, "scenario"):
        if value is not None:
            load_scenario(value)
    trace_notes(cells)
    for value in _values(cells, "goodput"):
        parse_slo([value])
    for value in _values(cells, "engine"):
        if value not in ENGINES and not value.startswith(("http://", "https://")):
            raise UnknownNameError("engine", value, ENGINES)
    if not all(value.startswith("http") for value in _values(cells, "engine")):
        for value in _values(cells, "device"):
            find_profile(value)
        for value in _values(cells, "model"):
            find_model(value)


def trace_notes(cells: Sequence[Settings]) -> list[str]:
    """How the times of each replayed trace are read. Raises UsageError where that cannot be told."""
    from ebbench.traffic.spec import load_scenario

    replayed = dict.fromkeys(
        (cell.workload, cell.time_unit)
        for cell in cells
        if cell.workload.startswith("trace:")
        and (cell.scenario is None or load_scenario(cell.scenario).loop == "trace")
    )
    return [_trace_note(workload.removeprefix("trace:"), unit) for workload, unit in replayed]


@lru_cache(maxsize=64)
def _trace_note(path: str, time_unit: str | None) -> str:
    from ebbench.workloads.trace import read_trace, time_note

    return time_note(read_trace(Path(path).expanduser()).timed(time_unit).facts)


def _values(cells: Sequence[Settings], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(cell, name) for cell in cells))
