"""Sweep specifications (TOML): a grid of settings, common settings, number of repeats."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import GenericAlias
from typing import Any

import msgspec

from ebbench.config.declare import DEFAULT_MODEL
from ebbench.engines.base import check_options
from ebbench.engines.setup import ENGINES, make_engine
from ebbench.errors import InputFileError, UnknownNameError, UsageError
from ebbench.foreign.documents import load_toml
from ebbench.runs.file import settings_table, spec_of_file
from ebbench.spec.run import RunSpec, known_settings
from ebbench.spec.server import EngineOptions, is_server, parse_speculative
from ebbench.workloads.options import is_recorded, recorded_file
from vllm_eb.policy import PolicyError, UnknownPolicyError, descriptions, parse_policy

MAX_CELLS = 1_000_000
_SETTINGS = known_settings()

# The file's two tables accept exactly the settings of a run: single values, and lists of them.
_Common = settings_table("Common")
_Grid: Any = msgspec.defstruct(
    "Grid",
    [
        (name, GenericAlias(list, (declared.kind,)) | msgspec.UnsetType, msgspec.UNSET)
        for name, declared in _SETTINGS.items()
    ],
    forbid_unknown_fields=True,
)
_Override: Any = msgspec.defstruct("Override", [("when", _Common), ("set", _Common)], forbid_unknown_fields=True)
_File: Any = msgspec.defstruct(
    "File",
    [
        ("name", str),
        ("description", str, ""),
        ("repeats", int, 1),
        ("keep_runs", bool, False),
        ("grid", _Grid, msgspec.field(default_factory=_Grid)),
        ("common", _Common, msgspec.field(default_factory=_Common)),
        ("overrides", list[_Override], msgspec.field(default_factory=list)),
    ],
    forbid_unknown_fields=True,
)


@dataclass(frozen=True)
class Sweep:
    """An expanded grid. ``axes``: the settings that vary; the seed only if it is listed or repeated."""

    name: str
    description: str
    axes: tuple[str, ...]
    cells: tuple[RunSpec, ...]
    keep_runs: bool

    def labelled(self, labels: Mapping[str, Any]) -> Sweep:
        """The same with these labels, by name, for every cell; cells without a name have the sweep's."""
        cells = [cell.changed(**{"name": cell.labels.name or self.name, **labels}) for cell in self.cells]
        return replace(self, cells=tuple(cells))


def load_sweep(path: Path) -> Sweep:
    """Read and expand a specification.

    Raises InputFileError, UsageError or UnknownNameError that says what to write.
    """
    file = load_toml(path, _File)
    lists = {f.name: values for f in _SETTINGS.values() if (values := getattr(file.grid, f.name)) is not msgspec.UNSET}
    common = _given_settings(path, file.common)
    _check_file(path, file, lists, common)
    if file.repeats > 1:
        seeds = lists.get("seed", [common.pop("seed", 0)])
        lists["seed"] = [seed + offset for seed in seeds for offset in range(file.repeats)]
    lists["policy"] = [_policy(path, name) for name in lists.get("policy", [common.pop("policy", "v1")])]
    cells = _cells(path, lists, common, _overrides(path, file, lists))
    check_cells(cells)
    axes = tuple(name for name, values in lists.items() if len(values) > 1)
    return Sweep(file.name, file.description, axes, cells, file.keep_runs)


def _check_file(path: Path, file: Any, lists: dict[str, list[Any]], common: dict[str, Any]) -> None:
    both = [name for name in lists if name in common]
    if both:
        raise InputFileError(path, f"{both[0]} is in both [grid] and [common]; keep one")
    for name, values in lists.items():
        if not values:
            raise InputFileError(path, f"grid.{name} is an empty list; give it a value or leave it out")
        value, times = Counter(map(repr, values)).most_common(1)[0]
        if times > 1:
            raise InputFileError(path, f"grid.{name} lists {value} twice")
    if not 1 <= file.repeats <= MAX_CELLS:
        raise InputFileError(path, f"repeats must be at least 1 and at most {MAX_CELLS:,}, not {file.repeats:,}")
    if not file.name.strip():
        raise InputFileError(path, "name must not be empty")
    if "workload" not in lists and "workload" not in common:
        raise InputFileError(path, "no workload: give one in [common], or several in [grid]")


def _policy(path: Path, name: str) -> str:
    kind = name.strip().partition(":")[0]
    try:
        return parse_policy(name).name
    except UnknownPolicyError:
        raise UnknownNameError("policy", kind, descriptions()) from None
    except PolicyError as error:
        raise InputFileError(path, str(error)) from None


def _given_settings(path: Path, table: Any) -> dict[str, Any]:
    given = {f.name: value for f in _SETTINGS.values() if (value := getattr(table, f.name)) is not msgspec.UNSET}
    return given | ({"policy": _policy(path, given["policy"])} if "policy" in given else {})


_Overrides = list[tuple[dict[str, Any], dict[str, Any]]]


def _overrides(path: Path, file: Any, lists: dict[str, list[Any]]) -> _Overrides:
    """Pairs of conditions on a cell and settings for it. The axes stay as listed in the grid."""
    overrides = [
        (_given_settings(path, override.when), _given_settings(path, override.set)) for override in file.overrides
    ]
    for when, change in overrides:
        if not when or not change:
            raise InputFileError(path, "an override needs both `when` and `set`")
        axis = next((name for name in change if name in lists and len(lists[name]) > 1), None)
        if axis is not None:
            raise InputFileError(path, f"an override sets {axis}, which the grid varies; set something else")
    return overrides


def _overridden(path: Path, grid: list[dict[str, Any]], overrides: _Overrides) -> list[dict[str, Any]]:
    """The settings with each override applied in order. Raises InputFileError for one that matches no cell."""
    for when, change in overrides:
        chosen = [
            all(settings.get(name, _SETTINGS[name].default) == value for name, value in when.items())
            for settings in grid
        ]
        if not any(chosen):
            wanted = ", ".join(f"{name} = {value!r}" for name, value in when.items())
            raise InputFileError(path, f"an override is for {wanted}, which no cell has; write values of the grid")
        grid = [settings | change if hit else settings for settings, hit in zip(grid, chosen, strict=True)]
    return grid


def _cells(
    path: Path, lists: dict[str, list[Any]], common: dict[str, Any], overrides: _Overrides
) -> tuple[RunSpec, ...]:
    """All combinations; the last axes vary fastest, so that cells of one plan are adjacent."""
    order = sorted(lists, key=lambda name: name not in _SLOW)
    if (count := math.prod(map(len, lists.values()))) > MAX_CELLS:
        raise InputFileError(path, f"the grid has {count:,} cells, more than {MAX_CELLS:,}; split it")
    grid = [
        common | dict(zip(order, values, strict=True)) for values in itertools.product(*(lists[name] for name in order))
    ]
    cells = map(spec_of_file, _overridden(path, grid, overrides))
    return tuple(dict.fromkeys(cells))


_SLOW = ("workload", "scenario", "seed", "num_prompts", "source", "max_concurrency", "request_rate", "model", "device")


# Checks of the cells before the first one runs, and notes about them.


def check_cells(cells: Sequence[RunSpec]) -> None:
    """Raise UsageError for unknown names, settings that an engine does not support, and a grid without any runnable
    cell."""
    _check_names(cells)
    _check_labels(cells)
    problems = [cell_problem(cell) for cell in cells]
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


def cell_problem(cell: RunSpec) -> str:
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
    by_engine = {
        repr((cell.engine, cell.model, cell.client, cell.cluster, cell.vllm_options, cell.plan.scenario,
              cell.plan.max_model_len, cell.plan.drop_too_long)): cell
        for cell in cells
    }  # fmt: skip
    for cell in by_engine.values():
        make_engine(cell)
    for cell in cells:
        if cell.ramp_up_s is not None and not cell.real_time and not cell.plan.request_rate:
            raise UsageError("ramp_up_s of a closed loop needs a server; leave it out, or give a request_rate")


def _check_names(cells: Sequence[RunSpec]) -> None:
    from ebbench.analysis.metrics import parse_slo
    from ebbench.devices.loader import check_drafts, load_device
    from ebbench.devices.profiles import as_decoder, find_model, find_profile
    from ebbench.traffic.spec import load_scenario
    from ebbench.workloads.mixture import check_workload

    plans, own = [cell.plan for cell in cells], [cell for cell in cells if not is_server(cell.engine)]
    for name in _values(plans, "workload"):
        check_workload(name)
    for name in _values(plans, "scenario"):
        load_scenario(name)
    trace_notes(cells)
    for limits in _values(cells, "goodput"):
        parse_slo([limits])
    for engine in _values(cells, "engine"):
        if engine not in ENGINES and not is_server(engine):
            raise UnknownNameError("engine", engine, ENGINES)
    for device in _values(own, "device"):
        if device.startswith("linear:"):
            load_device(device, "given")
        else:
            find_profile(device)
    served = [(cell.model or DEFAULT_MODEL, cell.assume_decoder, cell.server.speculative) for cell in own]
    for model, assumed, drafts in dict.fromkeys(served):
        geometry = find_model(as_decoder(model) if assumed else model)
        if drafts is not None:
            check_drafts(parse_speculative(drafts), geometry)


def trace_notes(cells: Sequence[RunSpec]) -> list[str]:
    """How the times of each replayed trace are read. Raises UsageError if that is ambiguous."""
    from ebbench.traffic.spec import load_scenario

    replayed = dict.fromkeys(
        (plan.workload, plan.time_unit, plan.columns, plan.tokenizer)
        for plan in (cell.plan for cell in cells)
        if is_recorded(plan.workload) and (plan.scenario is None or load_scenario(plan.scenario).loop == "trace")
    )
    return [_trace_note(*trace) for trace in replayed]


@lru_cache(maxsize=64)
def _trace_note(workload: str, time_unit: str | None, columns: str | None, tokenizer: str | None) -> str:
    from ebbench.analysis.environment import time_note
    from ebbench.workloads.trace import read_trace

    path = recorded_file(workload)
    assert path is not None  # the caller checked
    return time_note(read_trace(path, columns, tokenizer).timed(time_unit).facts)


def _values(owners: Sequence[Any], name: str) -> list[Any]:
    return list(dict.fromkeys(value for owner in owners if (value := getattr(owner, name))))
