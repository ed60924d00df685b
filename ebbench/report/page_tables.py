"""Tables of the HTML report: comparison, phases, failures, environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbench.analysis.cases import ComparisonCase
from ebbench.analysis.documents import Column, MeanFigure, Section, Value, text
from ebbench.analysis.environment import load_of_run, policy_settings
from ebbench.analysis.summary import Summary
from ebbench.records.run import MANIFEST, Run
from ebbench.render import numbers, tables
from ebbench.sizing import chart
from ebbench.sizing.sentences import end_sentence, load

# Capacity searches on the page: a table, what was stopped or refused, and the curves that `--plot` draws, too.

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


def search_sections(paths: Sequence[Path]) -> tuple[SearchSection, ...]:
    """The searches whose directories are among ``paths``. Raises DataError for a damaged file of results."""
    searches = [rows for path in paths if (rows := load(path))]
    return tuple(SearchSection(_table(rows), _lines(rows), _chart(rows)) for rows in searches)


def shown_runs(path: Path) -> list[Path]:
    """The runs that stand for a search: per policy the probe nearest to its capacity; none for another directory."""
    runs = [Path(str(row["nearest_run_dir"])) for row in load(path)]
    places = [(path / run.name, path / run.parent.name / run.name) for run in runs]
    return [place for both in places for place in both if (place / MANIFEST).is_file()]


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    by_concurrency = any("capacity_concurrency" in row for row in rows)
    unit = "open sessions" if by_concurrency else "requests/s"
    return Table(f"Capacity ({unit})", _HEADERS, tuple(_row(row) for row in rows), f"Limits: {rows[0]['limits']}.")


def _row(row: Mapping[str, Any]) -> tuple[TableCell, ...]:
    capacity, low, high = chart.stored_capacity(row), row["low"], row["high"]
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
    lines = [f"{row['policy']}: {end_sentence(row['refused'])}." for row in rows if row["refused"]]
    lines += [f"{row['policy']}: stopped by {end_sentence(row['stopped'])}." for row in rows if row["stopped"]]
    lines.append(
        "The probe nearest to each capacity, which a diamond marks, stands for the search in the rest of this page; "
        "the others are ordinary runs in the same directory."
    )
    return tuple(lines)


def _chart(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    specification: dict[str, Any] = chart.curves(rows).to_dict(validate=False)
    return specification | {"background": None}


@dataclass(frozen=True)
class TableCell:
    """A table cell: the displayed text, and the value that it is sorted by."""

    text: str
    value: float | str | None = None
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A sortable table."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""


def comparison_tables(cases: Sequence[ComparisonCase], *, all_percentiles: bool = False) -> tuple[Table, ...]:
    """One table per load and environment, with the rows and columns of the terminal output."""
    document = tables.comparison(cases, all_percentiles=all_percentiles)
    notes = " ".join((*document.notes, *_limits_told(cases)))
    sections = [of_section(section, _titled("Comparison", section.title)) for section in document.sections]
    return (*sections[:-1], replace(sections[-1], note=notes))


_PART_NOTES = {
    "phase": "A phase's output tokens/s: its requests' tokens, from its first intended start to its last completion.",
    "class": "Rates of a class are over the whole run, so that those of all classes add up to it.",
    "session": "Of complete sessions. In the model: while a request of the session is open; wait: the rest.",
}


def part_tables(cases: Sequence[ComparisonCase]) -> tuple[Table, ...]:
    """Tables by phase, by class of requests and by session, as far as a case has several of them."""
    sections = [section for case in cases for section in tables.parts(case)]
    return tuple(of_section(part, part.title, _PART_NOTES[part.title.split()[1].rstrip(":")]) for part in sections)


def _titled(what: str, title: str) -> str:
    return f"{what}: {title}" if title else what


def of_section(section: Section, title: str, note: str = "") -> Table:
    """A section of a document as a sortable table."""
    headers = tuple(column.name.replace("\n", " ") for column in section.columns)
    rows = tuple(
        tuple(
            TableCell(
                text(value, column),
                None if column.right else value.value if isinstance(value, MeanFigure) else value,
                strong=_stands_out(value, column, place in section.faulty),
            )
            for value, column in zip(row, section.columns, strict=True)
        )
        for place, row in enumerate(section.rows)
    )
    return Table(title, headers, rows, note)


def _stands_out(value: Value, column: Column, faulty: bool) -> bool:
    """Whether a cell is highlighted: an INVALID policy, requests that did not complete."""
    if column.name == tables.COMPLETED:
        done, _, planned = str(value).partition(" of ")
        return done != planned
    return faulty and column.kind == "label"


def _limits_told(cases: Sequence[ComparisonCase]) -> list[str]:
    given = {summary.slo for case in cases for summary in case.summaries if summary.slo}
    if len(given) > 1:
        return ["Limits differ between the runs, so goodput and SLO met do not compare (--goodput gives all the same)."]
    return [f"Limits: {given.pop()} ms."] if given else []


def failures_tables(summaries: Sequence[Summary], labels: Sequence[str]) -> tuple[Table, ...]:
    """One row per run, error class and cause of requests that did not complete; no table if all completed."""
    rows = [
        (
            TableCell(label, label),
            TableCell(numbers.count(failure.count), failure.count),
            TableCell(failure.error_class, failure.error_class),
            TableCell(failure.example or numbers.DASH, failure.example),
            TableCell(failure.remedy or numbers.DASH, failure.remedy),
        )
        for label, summary in zip(labels, summaries, strict=True)
        for failure in summary.failures
    ]
    headers = ("run", "requests", "error class", "example of the server's message", "what to do")
    return (Table("Requests that did not complete", headers, tuple(rows)),) if rows else ()


def environment_tables(labels: Sequence[str], runs: Sequence[Run]) -> tuple[Table, ...]:
    """What all runs share, and one column per run for what differs."""
    facts = [_facts(run) for run in runs]
    rows = {
        name: [facts_of_run.get(name, "") for facts_of_run in facts] for facts_of_run in facts for name in facts_of_run
    }
    shared = {name: values[:1] for name, values in rows.items() if len(set(values)) == 1}
    own = {name: values for name, values in rows.items() if name not in shared}
    differing = [Table("Environment", ("", "all runs" if len(runs) > 1 else labels[0]), _text_rows(shared))]
    if own:
        differing.append(Table("Where the runs differ", ("", *labels), _text_rows(own)))
    return tuple(differing)


def _text_rows(rows: Mapping[str, Sequence[str]]) -> tuple[tuple[TableCell, ...], ...]:
    return tuple(
        (TableCell(name, name), *(TableCell(value, value) for value in values)) for name, values in rows.items()
    )


def _facts(run: Run) -> dict[str, str]:
    m = run.manifest
    plain = {
        "run directory": str(run.path), "created": m.created, "workload": m.workload, "scenario": m.scenario,
        "source": m.source, "seed": str(m.seed), "policy": m.policy, "engine": f"{m.engine} ({m.clock} time)",
        "device": m.device, "model": m.model, "device provenance": m.device_provenance,
        "KV capacity, tokens": numbers.count(m.kv_capacity_tokens), "plan": m.plan_hash[:16],
        "git commit": m.git_commit or "", "valid": "yes" if m.valid else f"no: {'; '.join(map(str, m.reasons))}",
    }  # fmt: skip
    settings = policy_settings(m.policy)
    plain |= {"load": str(load_of_run(m)), "policy settings": json.dumps(settings) if settings else ""}
    if m.calibration and "source" in m.calibration:
        plain["controller calibration"] = str(m.calibration["source"])
    versions = {f"version of {name}": version for name, version in m.versions.items()}
    options = {f"option {name}": json.dumps(value) for name, value in m.options.items()}
    known = {"workload", "scenario", "seed", "source"}
    more = {
        f"fact {name}": (value if isinstance(value, str) else json.dumps(value, default=str))
        for name, value in m.facts.items()
        if name not in known
    }
    return plain | versions | options | more
