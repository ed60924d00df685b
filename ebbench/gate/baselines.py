"""Stored baselines: a Parquet file with one row per unit, looked up by the hash of the environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ebbench.analysis.environment import ENVIRONMENT, UNKNOWN, differences, listed, remedy
from ebbench.analysis.environment import LATER as LATER_CONDITIONS
from ebbench.analysis.units import FIGURES, MEASURED, GateUnit, load_units
from ebbench.errors import DataError, UsageError
from ebbench.records import files
from ebbench.records.warnings import counted

_PLAIN = {
    "policy": pa.string(), "plan_hash": pa.string(), "seed": pa.int64(), "virtual": pa.bool_(),
    "anchor_unix_ns": pa.int64(), "run": pa.string(), "slo": pa.string(),
}  # fmt: skip
BASELINES = pa.schema(
    [
        pa.field("configuration_hash", pa.string(), nullable=False),
        *(pa.field(name, pa.string(), nullable=False) for name in ENVIRONMENT if name not in LATER_CONDITIONS),
        *(pa.field(name, kind, nullable=False) for name, kind in _PLAIN.items()),
        *(pa.field(name, pa.float64()) for name in FIGURES),
        pa.field("load", pa.string()),
        *(pa.field(name, pa.float64()) for name in MEASURED if name not in FIGURES),
        pa.field("until_clear", pa.bool_()),
        pa.field("classes", pa.string()),
        *(pa.field(name, pa.string()) for name in ENVIRONMENT if name in LATER_CONDITIONS),
    ]
)
LATER = frozenset({"load", "until_clear", "classes", *MEASURED, *LATER_CONDITIONS}) - frozenset(FIGURES)
"""Columns that older files lack; their rows have no known load, ``until_clear`` or host, and none of these figures."""


def save_runs(runs: Sequence[Path], path: Path) -> str:
    """Store runs as a baseline; returns what was stored, in words. Raises UsageError without runs, DataError."""
    if not runs:
        raise UsageError("--save-baseline needs run directories")
    units = load_units(runs)
    rows = save_baseline(units, path)
    return f"{path}: stored {counted(len(units), 'run')} as baseline, {counted(rows, 'row')} in all"


def save_baseline(units: Sequence[GateUnit], path: Path) -> int:
    """Store units as the baseline of their environments and policies; returns the number of rows in the file.

    Rows of the same environment, policy and load are replaced, all others stay. Rows of an unknown load are replaced if
    their plan is stored now.
    """
    stored = _read(path) if path.exists() else []
    measured = {(*_key(unit)[:2], "", unit.plan_hash) for unit in units}
    replaced = {_key(unit) for unit in units}
    replaced |= {_key(unit) for unit in stored if (*_key(unit), unit.plan_hash) in measured}
    rows = [
        {
            "configuration_hash": unit.configuration_hash,
            **{name: unit.environment.get(name, "") for name in ENVIRONMENT},
            **{name: getattr(unit, name) for name in (*_PLAIN, "load", "until_clear")},
            **{name: value for name, value in unit.figures.items() if ":" not in name},
            "classes": json.dumps({name: value for name, value in unit.figures.items() if ":" in name}),
        }
        for unit in [*(unit for unit in stored if _key(unit) not in replaced), *units]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(pa.Table.from_pylist(rows, schema=BASELINES), path)
    return len(rows)


def _key(unit: GateUnit) -> tuple[str, str, str]:
    return unit.configuration_hash, unit.policy, unit.load


def stored_units(
    path: Path, candidates: Sequence[GateUnit], allowed: Sequence[str] = (), policy: str | None = None
) -> list[GateUnit]:
    """The baseline for the candidates' environment and load: of ``policy``, else of their policy or the only stored
    one.

    If several environments match because of ``allowed``, the candidates' own comes first, then the newest. Raises
    DataError if there is none, naming the keys in which the nearest one differs: a missing baseline never passes.
    """
    stored, candidate = _read(path), candidates[0]
    fitting = [unit for unit in stored if not differences(unit.environment, candidate.environment, allowed)]
    if not fitting:
        raise DataError(f"{path}: no baseline for this environment{_nearest(stored, candidate, allowed)}")
    loads_wanted = {unit.load for unit in candidates}
    # Without a unit of these loads, those of unknown load, which are matched by plan later.
    loaded = [unit for unit in fitting if unit.load in loads_wanted] or [unit for unit in fitting if not unit.load]
    if not loaded:
        loads = "; ".join(dict.fromkeys(unit.load for unit in fitting))
        raise DataError(f"{path}: no baseline of {candidate.load}, only of {loads}; store one with --save-baseline")
    wanted = policy or candidate.policy
    units = [unit for unit in loaded if unit.policy == wanted] or loaded
    own = candidate.configuration_hash
    if all(unit.configuration_hash != own for unit in units):
        own = max(units, key=lambda unit: unit.anchor_unix_ns).configuration_hash
    chosen = [unit for unit in units if unit.configuration_hash == own]
    policies = dict.fromkeys(unit.policy for unit in chosen)
    if len(policies) > 1:
        raise DataError(f"{path}: no baseline of policy {wanted}, only of {', '.join(policies)}")
    return chosen


def _nearest(stored: Sequence[GateUnit], candidate: GateUnit, allowed: Sequence[str]) -> str:
    unlike = sorted((differences(unit.environment, candidate.environment, allowed) for unit in stored), key=len)
    if not unlike:
        return "; the file is empty"
    store = "store one with --save-baseline"
    return f"; the nearest differs in {listed(unlike[0])}: {store}, or compare with {remedy(unlike[0])}"


def _read(path: Path) -> list[GateUnit]:
    if not path.exists():
        raise DataError(f"{path}: no such baseline; store one with: ebbench gate --save-baseline {path} RUN...")
    table = files.read_table(path)
    lacking = [name for name in BASELINES.names if name not in table.column_names and name not in LATER]
    if lacking:
        raise DataError(f"{path}: lacks {files.some_columns(lacking)}; not a baseline of ebbench?")
    return [_unit(row) for row in table.to_pylist()]


def _unit(row: dict[str, Any]) -> GateUnit:
    unit = GateUnit(
        environment={name: row.get(name) or UNKNOWN for name in ENVIRONMENT},
        figures={name: row.get(name) for name in MEASURED} | json.loads(row.get("classes") or "{}"),
        load=row.get("load") or "",
        until_clear=bool(row.get("until_clear")),
        **{name: row[name] for name in _PLAIN},
    )
    if unit.configuration_hash != row["configuration_hash"]:
        raise DataError(f"baseline of {json.dumps(row['run'])}: its configuration hash does not fit its keys")
    return unit
