"""Baselines kept as Parquet: one row a unit, found by the hash of its environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ebbench.analysis.gate_units import ENVIRONMENT, FIGURES, Unit, differences
from ebbench.errors import DataError
from ebbench.records import files

BASELINES = pa.schema(
    [
        pa.field("configuration_hash", pa.string(), nullable=False),
        *(pa.field(name, pa.string(), nullable=False) for name in ENVIRONMENT),
        pa.field("policy", pa.string(), nullable=False),
        pa.field("plan_hash", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("virtual", pa.bool_(), nullable=False),
        pa.field("anchor_unix_ns", pa.int64(), nullable=False),
        pa.field("run", pa.string(), nullable=False),
        pa.field("slo", pa.string(), nullable=False),
        *(pa.field(name, pa.float64()) for name in FIGURES),
    ]
)


def save_baseline(units: Sequence[Unit], path: Path) -> int:
    """Store units as the baseline of their environments and policies; returns the number of rows now kept.

    Rows of the same environment and policy are replaced, all others stay.
    """
    replaced = {(unit.configuration_hash, unit.policy) for unit in units}
    kept = (
        [unit for unit in _read(path) if (unit.configuration_hash, unit.policy) not in replaced]
        if path.exists()
        else []
    )
    rows = [_row(unit) for unit in [*kept, *units]]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(pa.Table.from_pylist(rows, schema=BASELINES), path)
    return len(rows)


def stored_units(path: Path, candidate: Unit, allowed: Sequence[str] = ()) -> list[Unit]:
    """The baseline for a candidate's environment; its own policy's, or the only one there is.

    Raises DataError when there is none, naming the keys in which the nearest one differs: a missing baseline never
    passes.
    """
    stored = _read(path)
    fitting = [unit for unit in stored if not differences(unit.environment, candidate.environment, allowed)]
    if not fitting:
        raise DataError(f"{path}: no baseline for this environment{_nearest(stored, candidate, allowed)}")
    policies = dict.fromkeys(unit.policy for unit in fitting)
    if candidate.policy in policies:
        return [unit for unit in fitting if unit.policy == candidate.policy]
    if len(policies) > 1:
        raise DataError(f"{path}: no baseline of policy {candidate.policy}, only of {', '.join(policies)}")
    return fitting


def _nearest(stored: Sequence[Unit], candidate: Unit, allowed: Sequence[str]) -> str:
    found = sorted((differences(unit.environment, candidate.environment, allowed) for unit in stored), key=len)
    return f"; the nearest differs in {'; '.join(found[0])}" if found else "; the file is empty"


def _read(path: Path) -> list[Unit]:
    if not path.exists():
        raise DataError(f"{path}: no such baseline; store one with: ebbench gate --save-baseline {path} RUN...")
    table = files.read_table(path)
    lacking = [name for name in BASELINES.names if name not in table.column_names]
    if lacking:
        raise DataError(f"{path}: lacks {files.some_columns(lacking)}; not a baseline of ebbench?")
    return [_unit(row) for row in table.to_pylist()]


def _row(unit: Unit) -> dict[str, Any]:
    return {
        "configuration_hash": unit.configuration_hash,
        **{name: unit.environment.get(name, "") for name in ENVIRONMENT},
        **{name: getattr(unit, name) for name in _PLAIN},
        **unit.figures,
    }


_PLAIN = ("policy", "plan_hash", "seed", "virtual", "anchor_unix_ns", "run", "slo")


def _unit(row: dict[str, Any]) -> Unit:
    unit = Unit(
        environment={name: row[name] for name in ENVIRONMENT},
        figures={name: row[name] for name in FIGURES},
        **{name: row[name] for name in _PLAIN},
    )
    if unit.configuration_hash != row["configuration_hash"]:
        raise DataError(f"baseline of {json.dumps(row['run'])}: its configuration hash does not fit its keys")
    return unit
