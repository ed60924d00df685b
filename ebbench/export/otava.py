"""Exports runs over time as CSV for change-point detection (Apache Otava), one row per commit.

A series is one policy in one environment, on one server, under one load and one set of limits, so that its rows are
comparable. Several runs of one commit (seeds, restarts) form one row with their geometric mean, at the time of the
first run. ebbench's commit says nothing of a server that it did not start: there a row is one measurement (runs that
follow each other, no seed twice), and the commit is the version that the server names. A cell is empty if one of the
runs lacks the figure.
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
from ebbench.untrusted import csv_cell

TIME = "time"
ATTRIBUTES = ("commit", "policy", "environment", "server", "load", "limits", "seeds", "runs")
NEXT_MEASUREMENT_S = 6 * 3600
"""A run that begins so long after the one before it belongs to another measurement of a server."""


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
    server: str
    load: str
    limits: str

    @property
    def name(self) -> str:
        """A unique file stem."""
        shared = "\n".join((self.environment, *filter(None, (self.server,)), self.load, self.limits))
        return f"{slug(self.policy)}-{hashlib.sha256(shared.encode()).hexdigest()[:12]}"


def series_of(runs: Sequence[Run]) -> list[Series]:
    """One series per policy, environment, load and set of limits, rows in order of time. INVALID runs are left out.

    Raises DataError if no run is left.
    """
    groups: dict[_SeriesKind, list[tuple[str, GateUnit]]] = {}
    for run in runs:
        if run.manifest.valid:
            unit = unit_of(run)
            kind = _SeriesKind(unit.policy, unit.configuration_hash, unit.server, unit.load, unit.slo)
            groups.setdefault(kind, []).append((_commit(run), unit))
    if not groups:
        raise DataError("no valid run to make a history of")
    return [_series(kind, groups[kind]) for kind in sorted(groups)]


def _commit(run: Run) -> str:
    """The commit of ebbench, which holds simulator and plugin; of a server that runs already, its own version."""
    if run.manifest.engine == "endpoint":
        return str(run.manifest.facts.get("server_version") or "")
    return run.manifest.git_commit or f"ebbench-{run.manifest.versions.get('ebbench', '')}"


def _series(kind: _SeriesKind, members: Sequence[tuple[str, GateUnit]]) -> Series:
    rows = _rows(sorted(members, key=lambda member: member[1].anchor_unix_ns))
    means = {name: [_geometric_mean(units, name) for _, units in rows] for name in FIGURES}
    shown = {name: column for name, column in means.items() if any(value is not None for value in column)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([TIME, *ATTRIBUTES, *shown])
    for place, (commit, units) in enumerate(rows):
        values = [_cell(column[place]) for column in shown.values()]
        writer.writerow(map(csv_cell, (_when(units), commit, *_attributes(kind, units), *values)))
    whole = tuple(name for name, column in shown.items() if None not in column)
    return Series(kind.name, whole, text.getvalue())


def _rows(members: Sequence[tuple[str, GateUnit]]) -> list[tuple[str, list[GateUnit]]]:
    """Commits with their runs, in order of time; of a server, measurements."""
    rows: list[tuple[str, list[GateUnit]]] = []
    for commit, unit in members:
        place = next((place for place, (known, _) in enumerate(rows) if known == commit and not unit.server), None)
        if unit.server and rows and rows[-1][0] == commit and _same_measurement(rows[-1][1], unit):
            place = len(rows) - 1
        if place is None:
            rows.append((commit, []))
        rows[-1 if place is None else place][1].append(unit)
    return rows


def _same_measurement(units: Sequence[GateUnit], unit: GateUnit) -> bool:
    """Whether a run of a server belongs to the same measurement as earlier ones."""
    pause_s = (unit.anchor_unix_ns - units[-1].anchor_unix_ns) / 1e9
    return pause_s < NEXT_MEASUREMENT_S and all(
        (unit.seed, unit.plan_hash) != (one.seed, one.plan_hash) for one in units
    )


def _when(units: Sequence[GateUnit]) -> str:
    earliest = min(unit.anchor_unix_ns for unit in units)
    return datetime.fromtimestamp(earliest / 1e9, UTC).isoformat(timespec="seconds")


def _attributes(kind: _SeriesKind, units: Sequence[GateUnit]) -> list[str]:
    """The values of ATTRIBUTES, which follow the commit."""
    seeds = " ".join(str(seed) for seed in sorted({unit.seed for unit in units}))
    return [kind.policy, kind.environment, kind.server, kind.load, kind.limits, seeds, str(len(units))]


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
