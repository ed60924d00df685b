"""Runs over time as CSV, one row a commit, in the form change-point tools read (Apache Otava).

A series is one environment and policy: only its rows are comparable. Several runs of one commit (seeds, restarts)
are one row, their geometric mean, at the time of the first.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ebbench.analysis.gate_units import FIGURES, HIGHER_IS_BETTER, Unit, unit_of
from ebbench.errors import DataError
from ebbench.records.run import Run, slug

TIME, ATTRIBUTES = "time", ("commit", "policy", "environment", "runs")


@dataclass(frozen=True)
class Series:
    """One CSV: its name (a safe file stem), the figures it has, its text."""

    name: str
    figures: tuple[str, ...]
    csv: str


def series_of(runs: Sequence[Run]) -> list[Series]:
    """One series per environment and policy, rows in order of time. INVALID runs are left out.

    Raises DataError when nothing is left.
    """
    groups: dict[tuple[str, str], list[tuple[str, Unit]]] = {}
    for run in runs:
        if run.manifest.valid:
            unit = unit_of(run)
            groups.setdefault((unit.policy, unit.configuration_hash), []).append((_commit(run), unit))
    if not groups:
        raise DataError("no valid run to make a history of")
    return [_series(policy, environment, members) for (policy, environment), members in sorted(groups.items())]


def _commit(run: Run) -> str:
    return run.manifest.git_commit or f"ebbench-{run.manifest.versions.get('ebbench', '')}"


def _series(policy: str, environment: str, members: Sequence[tuple[str, Unit]]) -> Series:
    rows: dict[str, list[Unit]] = {}
    for commit, unit in sorted(members, key=lambda member: member[1].anchor_unix_ns):
        rows.setdefault(commit, []).append(unit)
    figures = tuple(name for name in FIGURES if all(unit.figures.get(name) for _, unit in members))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([TIME, *ATTRIBUTES, *figures])
    for commit, units in rows.items():
        when = datetime.fromtimestamp(min(unit.anchor_unix_ns for unit in units) / 1e9, UTC)
        values = [f"{_geometric_mean(units, name):.6g}" for name in figures]
        writer.writerow([when.isoformat(timespec="seconds"), commit, policy, environment, len(units), *values])
    return Series(f"{slug(policy)}-{environment}", figures, text.getvalue())


def _geometric_mean(units: Sequence[Unit], name: str) -> float:
    values = [value for unit in units if (value := unit.figures[name])]
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def otava_config(series: Sequence[Series]) -> str:
    """The configuration that tells Otava about the CSV files beside it."""
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
