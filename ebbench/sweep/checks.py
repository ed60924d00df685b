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


def _values(cells: Sequence[Settings], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(cell, name) for cell in cells))
