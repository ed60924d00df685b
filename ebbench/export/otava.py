"""Exports runs over time as CSV for change-point detection (Apache Otava), one row per commit.

A series is one policy in one environment, under one load and one set of limits, so that its rows are comparable.
Several runs of one commit (seeds, restarts) form one row with their geometric mean, at the time of the first run. A
cell is empty if one of the runs lacks the figure.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ebbench.analysis.gate.units import FIGURES, HIGHER_IS_BETTER, GateUnit, unit_of
from ebbench.errors import DataError
from ebbench.records.run import Run, slug

TIME, ATTRIBUTES = "time", ("commit", "policy", "environment", "load", "limits", "seeds", "runs")


@dataclass(frozen=True)
class Series:
    """One CSV file: its name (a safe file stem), the figures that every row has, its text."""

    name: str
    figures: tuple[str, ...]
    csv: str


@dataclass(frozen=True, order=True)
class _SeriesKind:
    """The values that all rows of a series share."""

    policy: str
    environment: str
    load: str
    limits: str

    @property
    def name(self) -> str:
        """A unique file stem."""
        shared = "\n".join((self.environment, self.load, self.limits))
        return f"{slug(self.policy)}-{hashlib.sha256(shared.encode()).hexdigest()[:12]}"


def series_of(runs: Sequence[Run]) -> list[Series]:
    """One series per policy, environment, load and set of limits, rows in order of time. INVALID runs are left out.

    Raises DataError if no run is left.
    """
    groups: dict[_SeriesKind, list[tuple[str, GateUnit]]] = {}
    for run in runs:
        if run.manifest.valid:
            unit = unit_of(run)
            kind = _SeriesKind(unit.policy, unit.configuration_hash, unit.load, unit.slo)
            groups.setdefault(kind, []).append((_commit(run), unit))
    if not groups:
        raise DataError("no valid run to make a history of")
    return [_series(kind, groups[kind]) for kind in sorted(groups)]


def _commit(run: Run) -> str:
    return run.manifest.git_commit or f"ebbench-{run.manifest.versions.get('ebbench', '')}"


def _series(kind: _SeriesKind, members: Sequence[tuple[str, GateUnit]]) -> Series:
    rows: dict[str, list[GateUnit]] = {}
    for commit, unit in sorted(members, key=lambda member: member[1].anchor_unix_ns):
        rows.setdefault(commit, []).append(unit)
    means = {name: [_geometric_mean(units, name) for units in rows.values()] for name in FIGURES}
    shown = {name: column for name, column in means.items() if any(value is not None for value in column)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([TIME, *ATTRIBUTES, *shown])
    for place, (commit, units) in enumerate(rows.items()):
        values = [_cell(column[place]) for column in shown.values()]
        writer.writerow([_when(units), commit, *_attributes(kind, units), *values])
    whole = tuple(name for name, column in shown.items() if None not in column)
    return Series(kind.name, whole, text.getvalue())


def _when(units: Sequence[GateUnit]) -> str:
    earliest = min(unit.anchor_unix_ns for unit in units)
    return datetime.fromtimestamp(earliest / 1e9, UTC).isoformat(timespec="seconds")


def _attributes(kind: _SeriesKind, units: Sequence[GateUnit]) -> list[str]:
    """The values of ATTRIBUTES, which follow the commit."""
    seeds = " ".join(str(seed) for seed in sorted({unit.seed for unit in units}))
    return [kind.policy, kind.environment, kind.load, kind.limits, seeds, str(len(units))]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _geometric_mean(units: Sequence[GateUnit], name: str) -> float | None:
    """None if a unit lacks the figure; 0 if it is 0 for a unit."""
    values = [value for unit in units if (value := unit.figures[name]) is not None]
    if len(values) < len(units):
        return None
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if all(values) else 0.0


def otava_config(series: Sequence[Series]) -> str:
    """The Otava configuration for the CSV files, without columns that have empty cells, since Otava accepts only
    numbers."""
    lines = ["tests:"]
    for each in series:
        lines += [
            f"  {each.name}:",
            "    type: csv",
            f"    file: {each.name}.csv",
            f"    time_column: {TIME}",
            f"    attributes: [{', '.join(ATTRIBUTES)}]",
            "    metrics:",
        ]
        for name in each.figures:
            lines += [f"      {name}:", f"        column: {name}", f"        direction: {_direction(name)}"]
        lines += ["    csv_options:", "      delimiter: ','", "      quote_char: '\"'"]
    return "\n".join(lines) + "\n"


def _direction(name: str) -> int:
    return 1 if name in HIGHER_IS_BETTER else -1
