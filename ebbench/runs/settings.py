"""Cells as flat settings, named like the options of ``ebbench run``: the format of sweep files and their results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from math import inf
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ebbench.client.options import ClientOptions
from ebbench.config.defaults import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.config.topology import TopologySpec
from ebbench.engines.base import VIRTUAL_TIME, EngineOptions
from ebbench.engines.checks import refuse_server_settings
from ebbench.engines.setup import is_server
from ebbench.errors import UsageError
from ebbench.runs.cell import Cell
from ebbench.traffic.choice import scenario_meant
from ebbench.workloads.options import PlanOptions

_FIRST = ("workload", "policy", "engine", "device", "model", "scenario", "seed", "num_prompts", "source")
_NOT_SET = frozenset({"plan", "options", "client", "host", "shuffle", "weight", "with_text"})
# Of the load generator's options: those that the cell itself says, and those that are of no use in a file.
_CLIENT_NOT_SET = frozenset(
    {"model", "warmup", "drop_too_long", "max_model_len", "id_prefix", "keep_text", "slot_spacing_s", "transport",
     "metrics_interval_s"}
)  # fmt: skip


_OF_A_START = frozenset({"cost", "calibration"})
"""Of the cell's own settings: those that take effect where a server is started, or simulated."""


@dataclass(frozen=True)
class CellSetting:
    """One setting: the part of a cell that it belongs to (plan, options, client, cell), its type and its default."""

    name: str
    part: Literal["plan", "options", "client", "cell"]
    kind: Any
    default: Any


@cache
def known_settings() -> Mapping[str, CellSetting]:
    """Every setting of a cell by name, the most important ones first."""
    found: dict[str, CellSetting] = {}
    parts: tuple[tuple[Literal["plan", "options", "client", "cell"], type], ...] = (
        ("plan", PlanOptions), ("cell", Cell), ("options", EngineOptions), ("client", ClientOptions),
    )  # fmt: skip
    for part, kind in parts:
        hints = get_type_hints(kind)
        for one in fields(kind):
            if one.name in _NOT_SET or (part == "client" and one.name in _CLIENT_NOT_SET):
                continue
            found.setdefault(one.name, CellSetting(one.name, part, hints[one.name], _default(one)))
    found["max_model_len"] = CellSetting("max_model_len", "plan", int, EngineOptions.max_model_len)
    found["topology"] = CellSetting("topology", "cell", str | None, None)
    return {name: found[name] for name in (*_FIRST, *(name for name in found if name not in _FIRST))}


def _default(one: Field[Any]) -> Any:
    if one.default is not MISSING:
        return one.default
    return one.default_factory() if one.default_factory is not MISSING else MISSING


def cell_of(settings: Mapping[str, Any]) -> Cell:
    """The cell with these settings; others have their defaults. Raises UsageError for an invalid value.

    A rate without a scenario means Poisson arrivals, as in ``ebbench run``. Plans of simulated engines contain no text.
    A server keeps its own length limit unless ``max_model_len`` is given; settings of its scheduler are refused.
    """
    known = known_settings()
    engine = settings.get("engine", "sim")
    by_part: dict[str, dict[str, Any]] = {"plan": {}, "options": {}, "client": {}, "cell": {}}
    for name, value in settings.items():
        by_part[known[name].part][name] = value
    plan = by_part["plan"]
    if plan.get("request_rate") == inf:
        raise UsageError("request_rate = inf: write scenario = 'saturated' with a max_concurrency of all sessions")
    plan["scenario"] = scenario_meant(
        plan["workload"], plan.get("scenario"), plan.get("request_rate"), plan.get("burstiness")
    )
    if engine in VIRTUAL_TIME:
        by_part["cell"] = {"device": DEFAULT_DEVICE, "model": DEFAULT_MODEL, **by_part["cell"]}
    if is_server(engine):
        given = [name for name in settings if known[name].part == "options" or name in _OF_A_START]
        given = [name for name in given if name != "warmup"]
        refuse_server_settings(engine, given, "leave it out, or set it in [[overrides]] for the engines that take it")
    limit = plan.pop("max_model_len", None)
    plan["max_model_len"] = limit if is_server(engine) else limit or EngineOptions.max_model_len
    options = EngineOptions(max_model_len=limit or EngineOptions.max_model_len, **by_part["options"])
    ClientOptions(**by_part["client"])  # raises for invalid values
    return Cell(
        PlanOptions(**plan, with_text=engine not in VIRTUAL_TIME),
        options=options,
        client=tuple(sorted(by_part["client"].items())),
        **by_part["cell"],
    )


def settings_of(cell: Cell) -> dict[str, Any]:
    """All settings of a cell, in the order of :func:`known_settings`."""
    given = dict(cell.client)
    found = {}
    for name, setting in known_settings().items():
        if setting.part == "client":
            found[name] = given.get(name, setting.default)
        else:
            found[name] = getattr(cell if setting.part == "cell" else getattr(cell, setting.part), name)
    found["max_model_len"] = cell.plan.max_model_len
    if isinstance(cell.topology, TopologySpec):
        found["topology"] = cell.topology.label
    return found


def plain(value: Any) -> Any:
    """A setting's value as a single table value: a mapping becomes JSON, a list of words a command line."""
    if isinstance(value, tuple):
        return shlex.join(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value


def plain_type(kind: Any) -> type:
    """The type of :func:`plain`'s result for a setting of this type: str, bool, float or int."""
    names = [one for one in (get_args(kind) or (kind,)) if one is not type(None)]
    if get_origin(kind) is Literal or any(not isinstance(one, type) for one in names):
        return str
    return next((one for one in (str, bool, float, int) if one in names), str)
