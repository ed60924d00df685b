"""Checks of the cells before the first one runs, and notes about them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ebbench.engines.checks import check_options
from ebbench.engines.setup import make_engine
from ebbench.errors import UnknownNameError, UsageError
from ebbench.spec.run import RunSpec
from ebbench.spec.server import EngineOptions, is_server
from ebbench.workloads.options import is_recorded, recorded_file
from vllm_eb.policy import parse_policy


def check_cells(cells: Sequence[RunSpec]) -> None:
    """Raise UsageError for unknown names, settings that an engine does not support, and a grid without any runnable
    cell."""
    _check_names(cells)
    _check_labels(cells)
    problems = [problem_of(cell) for cell in cells]
    if all(problems):
        raise UsageError(f"no cell of the grid can run: {problems[0]}")
    _check_engines(cells)


def _check_labels(cells: Sequence[RunSpec]) -> None:
    """A running server has the one policy it was started with: raise UsageError if the cells have several."""
    policies: dict[str, str] = {}
    for cell in cells:
        if is_server(cell.engine) and policies.setdefault(cell.engine, cell.policy) != cell.policy:
            raise UsageError(
                f"the server at {cell.engine} runs the one policy it was started with; give one policy, as a label"
            )


def problem_of(cell: RunSpec) -> str:
    """Why no engine can run a cell's scheduler settings; empty if one can."""
    return _problem(cell.server, cell.policy)


@lru_cache(maxsize=4096)
def _problem(options: EngineOptions, policy: str) -> str:
    try:
        check_options(options, [parse_policy(policy)])
    except UsageError as problem:
        return str(problem)
    return ""


def _check_engines(cells: Sequence[RunSpec]) -> None:
    """Create every engine once, which raises UsageError for unsupported settings."""
    for cell in {_of_engine(cell): cell for cell in cells}.values():
        make_engine(cell)
    for cell in cells:
        if cell.ramp_up_s is not None and not cell.real_time and not cell.plan.request_rate:
            raise UsageError("ramp_up_s of a closed loop needs a server; leave it out, or give a request_rate")


def _of_engine(cell: RunSpec) -> str:
    """What :func:`make_engine` reads of a cell."""
    plan = cell.plan
    return repr((
        cell.engine, cell.model, cell.client, cell.cluster, cell.vllm_options, plan.scenario, plan.max_model_len,
        plan.drop_too_long,
    ))  # fmt: skip


def _check_names(cells: Sequence[RunSpec]) -> None:
    from ebbench.analysis.slo import parse_slo
    from ebbench.devices import load_device
    from ebbench.devices.profiles import as_decoder, find_model, find_profile
    from ebbench.engines import ENGINES
    from ebbench.traffic.spec import load_scenario
    from ebbench.workloads.spec import load_workload

    for name in _values([cell.plan for cell in cells], "workload"):
        if is_recorded(name):
            path = recorded_file(name)
            if path is None or not path.exists():
                raise UsageError(f"{name}: no such file")
        else:
            load_workload(name)
    for name in _values([cell.plan for cell in cells], "scenario"):
        load_scenario(name)
    trace_notes(cells)
    for limits in _values(cells, "goodput"):
        parse_slo([limits])
    for engine in _values(cells, "engine"):
        if engine not in ENGINES and not is_server(engine):
            raise UnknownNameError("engine", engine, ENGINES)
    own = [cell for cell in cells if not is_server(cell.engine)]
    for device in _values(own, "device"):
        if device.startswith("linear:"):
            load_device(device, "given")
        else:
            find_profile(device)
    for model, assumed in dict.fromkeys((cell.model, cell.assume_decoder) for cell in own if cell.model is not None):
        find_model(as_decoder(model) if assumed else model)


def trace_notes(cells: Sequence[RunSpec]) -> list[str]:
    """How the times of each replayed trace are read. Raises UsageError if that is ambiguous."""
    from ebbench.traffic.spec import load_scenario

    replayed = dict.fromkeys(
        (plan.workload, plan.time_unit, plan.columns, plan.tokenizer)
        for plan in (cell.plan for cell in cells)
        if is_recorded(plan.workload) and (plan.scenario is None or load_scenario(plan.scenario).loop == "trace")
    )
    return [_trace_note(*each) for each in replayed]


@lru_cache(maxsize=64)
def _trace_note(workload: str, time_unit: str | None, columns: str | None, tokenizer: str | None) -> str:
    from ebbench.workloads.trace import read_trace, time_note

    path = recorded_file(workload)
    assert path is not None  # the caller checked
    return time_note(read_trace(path, columns, tokenizer).timed(time_unit).facts)


def _values(owners: Sequence[Any], name: str) -> list[Any]:
    return list(dict.fromkeys(value for one in owners if (value := getattr(one, name))))
