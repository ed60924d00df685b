"""Capacity searches on the page: a table, what was stopped or refused, and the curves that ``--plot`` draws, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbench.capacity import chart, result_rows
from ebbench.render import numbers
from ebbench.report.page_tables import Table, TableCell

_HEADERS = (
    "policy", "capacity", "95 % interval", "limited by", "within limits", "TTFT median", "TPOT median",
    "goodput requests/s", "goodput tokens/s", "probes",
)  # fmt: skip


@dataclass(frozen=True)
class SearchSection:
    """A search: its table, its sentences, and the chart of its curves as a Vega-Lite specification."""

    table: Table
    lines: tuple[str, ...]
    chart: dict[str, Any]


def searches_of(paths: Sequence[Path]) -> tuple[SearchSection, ...]:
    """The searches whose directories are among ``paths``. Raises DataError for a damaged file of results."""
    found = [rows for path in paths if (rows := result_rows.load(path))]
    return tuple(SearchSection(_table(rows), _lines(rows), _chart(rows)) for rows in found)


def shown_runs(path: Path) -> list[Path]:
    """The runs that stand for a search: per policy the probe nearest to its capacity; none for another directory."""
    runs = [Path(str(row["nearest_run_dir"])) for row in result_rows.load(path)]
    return [path / run.name for run in runs if (path / run.name).is_dir()]


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    by_concurrency = any("capacity_concurrency" in row for row in rows)
    unit = "open sessions" if by_concurrency else "requests/s"
    return Table(f"Capacity ({unit})", _HEADERS, tuple(_row(row) for row in rows), f"Limits: {rows[0]['limits']}.")


def _row(row: Mapping[str, Any]) -> tuple[TableCell, ...]:
    capacity, low, high = chart.capacity_of(row), row["low"], row["high"]
    interval = numbers.DASH if capacity is None else f"{low:.3g} to {'?' if high is None else f'{high:.3g}'}"
    return (
        TableCell(str(row["policy"]), str(row["policy"])),
        TableCell(numbers.DASH if capacity is None else f"{capacity:.3g}", capacity),
        TableCell(interval, low),
        TableCell(str(row["limited_by"]), str(row["limited_by"])),
        TableCell(numbers.percent(row["attainment"]), row["attainment"]),
        TableCell(numbers.duration_ms(row["median_ttft_ms"]), row["median_ttft_ms"]),
        TableCell(numbers.duration_ms(row["median_tpot_ms"]), row["median_tpot_ms"]),
        TableCell(numbers.rate(row["goodput_requests_per_s"]), row["goodput_requests_per_s"]),
        TableCell(numbers.rate(row["goodput_tokens_per_s"]), row["goodput_tokens_per_s"]),
        TableCell(str(row["probes"]), row["probes"]),
    )


def _lines(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    lines = [f"{row['policy']}: {row['refused']}." for row in rows if row["refused"]]
    lines += [f"{row['policy']}: stopped by {row['stopped']}." for row in rows if row["stopped"]]
    lines.append(
        "The probe nearest to each capacity, which a diamond marks, stands for the search in the rest of this page; "
        "the others are ordinary runs in the same directory."
    )
    return tuple(lines)


def _chart(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = chart.curves(rows).to_dict(validate=False)
    return found | {"background": None}
