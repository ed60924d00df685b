"""The data of the HTML report: its tables and sentences, and the rows of its charts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.analysis.cases import ComparisonCase, Group, cases_of_results, result_of
from ebbench.analysis.columns import NEEDED, RequestColumns
from ebbench.analysis.documents import Column, MeanFigure, Section, Value, text
from ebbench.analysis.documents import labels as own_labels
from ebbench.analysis.environment import UNKNOWN_DEVICE, load_of_run, policy_settings
from ebbench.analysis.metrics import Slo, itl_ns, tpot_ns
from ebbench.analysis.phases import latencies_ms, run_surfaces
from ebbench.analysis.summary import Summary, metric_columns
from ebbench.records.run import MANIFEST, Run
from ebbench.render import numbers, sentences, tables
from ebbench.render.report import load_and_limits, machine
from ebbench.render.timeline import Timeline, make_timeline
from ebbench.sizing import chart
from ebbench.sizing.sentences import end_sentence, load, load_number

# Capacity searches on the page: a table, what was stopped or refused, and the curves that `--plot` draws, too.


@dataclass(frozen=True)
class SearchSection:
    """A search: its table, its sentences, and the chart of its curves as a Vega-Lite specification."""

    table: Table
    lines: tuple[str, ...]
    chart: dict[str, Any]


def search_sections(paths: Sequence[Path]) -> tuple[SearchSection, ...]:
    """The searches whose directories are among ``paths``. Raises DataError for a damaged file of results."""
    searches = [rows for path in paths if (rows := load(path))]
    return tuple(
        SearchSection(_table(rows), _lines(rows), chart.curves(rows).to_dict(validate=False) | {"background": None})
        for rows in searches
    )


def shown_runs(path: Path) -> list[Path]:
    """The runs that stand for a search: per policy the probe nearest to its capacity; none for another directory."""
    runs = [Path(str(row["nearest_run_dir"])) for row in load(path)]
    places = [(path / run.name, path / run.parent.name / run.name) for run in runs]
    return [place for both in places for place in both if (place / MANIFEST).is_file()]


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    by_concurrency = any("capacity_concurrency" in row for row in rows)
    unit, shown = (
        "open sessions" if by_concurrency else "requests/s",
        partial(load_number, by_concurrency=by_concurrency),
    )
    columns = (
        Column("policy", "label"), Column("capacity", show=shown), Column("95 % interval", "label", right=True),
        Column("limited by", "label"), Column("within limits", show=numbers.percent),
        Column("TTFT median", show=numbers.duration_ms), Column("TPOT median", show=numbers.duration_ms),
        Column("goodput requests/s", show=numbers.rate), Column("goodput tokens/s", show=numbers.rate),
        Column("probes", show=str),
    )  # fmt: skip
    section = Section(f"Capacity ({unit})", columns, tuple(_row(row, shown) for row in rows))
    return of_section(section, note=f"Limits: {rows[0]['limits']}.")


def _row(row: Mapping[str, Any], shown: Callable[[float], str]) -> tuple[Value, ...]:
    capacity, high = chart.stored_capacity(row), row["high"]
    interval = f"{shown(row['low'])} to {'?' if high is None else shown(high)}"
    figures = ("attainment", "median_ttft_ms", "median_tpot_ms", "goodput_requests_per_s", "goodput_tokens_per_s")
    return (
        str(row["policy"]), capacity, None if capacity is None else interval, str(row["limited_by"]),
        *(row[name] for name in (*figures, "probes")),
    )  # fmt: skip


def _lines(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    lines = [
        f"{row['policy']}: {load_number(rate / each, False)} sessions/s, {each:.3g} requests in each."
        for row in rows
        if (rate := row.get("capacity_requests_per_s")) and (each := row.get("requests_per_session", 1.0)) != 1.0
    ]
    lines += [f"{row['policy']}: {end_sentence(row['refused'])}." for row in rows if row["refused"]]
    lines += [f"{row['policy']}: stopped by {end_sentence(row['stopped'])}." for row in rows if row["stopped"]]
    return (
        *lines,
        "The probe nearest to each capacity, which a diamond marks, stands for the search in the rest of this page; "
        "the others are ordinary runs in the same directory.",
    )


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
    notes = list(document.notes)
    given = {summary.slo for case in cases for summary in case.summaries if summary.slo}
    if len(given) > 1:
        notes.append(
            "Limits differ between the runs, so goodput and SLO met do not compare (--goodput gives all the same)."
        )
    elif given:
        notes.append(f"Limits: {given.pop()} ms.")
    sections = [
        of_section(section, f"Comparison: {section.title}" if section.title else "Comparison")
        for section in document.sections
    ]
    return (*sections[:-1], replace(sections[-1], note=" ".join(notes)))


_PART_NOTES = {
    "phase": "A phase's output tokens/s: its requests' tokens, from its first intended start to its last completion.",
    "class": "Rates of a class are over the whole run, so that those of all classes add up to it.",
    "session": "Of complete sessions. In the model: while a request of the session is open; wait: the rest, of "
    "tools and users, where the plan says which.",
}


def of_section(section: Section, title: str = "", note: str = "") -> Table:
    """A section of a document as a sortable table."""
    headers = tuple(f"{column.group} {column.name}".strip().replace("\n", " ") for column in section.columns)
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
    return Table(title or section.title, headers, rows, note)


def _stands_out(value: Value, column: Column, faulty: bool) -> bool:
    """Whether a cell is highlighted: an INVALID policy, requests that did not complete."""
    if column.name == tables.COMPLETED:
        done, _, planned = str(value).partition(" of ")
        return done != planned
    return faulty and column.kind == "label"


def failures_tables(summaries: Sequence[Summary], labels: Sequence[str]) -> tuple[Table, ...]:
    """One row per run, error class and cause of requests that did not complete; no table if all completed."""
    rows = tuple(
        (label, failure.count, failure.error_class, failure.example or None, failure.remedy or None)
        for label, summary in zip(labels, summaries, strict=True)
        for failure in summary.failures
    )
    names = own_labels("error class", "example of the server's message", "what to do")
    columns = (*own_labels("run"), Column("requests"), *names)
    return (of_section(Section("Requests that did not complete", columns, rows)),) if rows else ()


def environment_tables(labels: Sequence[str], runs: Sequence[Run]) -> tuple[Table, ...]:
    """What all runs share, and one column per run for what differs."""
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    rows = [(name, *(of_run.get(name, "") for of_run in facts)) for name in names]
    alike, own = ([row for row in rows if (len(set(row[1:])) == 1) is same] for same in (True, False))
    shared = [row[:2] for row in alike]
    sections = [Section("Environment", own_labels("", "all runs" if len(runs) > 1 else labels[0]), tuple(shared))]
    sections += [Section("Where the runs differ", own_labels("", *labels), tuple(own))] if own else []
    return tuple(map(of_section, sections))


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
    plain |= {f"version of {name}": version for name, version in m.versions.items()}
    plain |= {f"option {name}": json.dumps(value) for name, value in m.options.items()}
    facts = {name: value for name, value in m.facts.items() if name not in ("workload", "scenario", "seed", "source")}
    return plain | {
        f"fact {name}": value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in facts.items()
    }


MAX_STEPS = 20_000
"""Steps kept per run for the zoomed chart; of longer runs the first ones, which the page says."""
_QUANTILES = np.unique(np.concatenate([np.linspace(0, 1, 161), 1 - np.geomspace(1e-4, 0.05, 40)]))
_TARGETS = 14
_PANELS = ("modes", "phases", "throughput", "sizes", "sides", "queue", "kv", "open", "rate", "ttft")
_MOST_SESSIONS = 3000
"""Sessions drawn of a run, evenly chosen."""
Row = dict[str, Any]
Targets = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Page:
    """Content of the page. ``shared`` feeds the charts of all runs, ``runs`` those of single runs.

    ``verdicts``: per case its title, its sentences and whether the difference is significant. ``policies``: names of
    the curves. ``cases``: titles of the cases that a reader can select. ``searches``: capacity searches.
    """

    title: str
    subtitle: tuple[str, ...]
    verdicts: tuple[tuple[str, tuple[str, ...], bool], ...]
    warnings: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    explanations: tuple[tuple[str, tuple[str, ...]], ...] = ()
    environment: tuple[Table, ...] = ()
    labels: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    shared: Mapping[str, list[Row]] = field(default_factory=dict)
    runs: tuple[dict[str, Any], ...] = ()
    searches: tuple[SearchSection, ...] = ()


def report_page(runs: Sequence[Run], *, title: str = "", slo: Slo | None = None, extra: Sequence[Table] = (),
            notes: Sequence[str] = (), all_percentiles: bool = False,
            searches: Sequence[SearchSection] = ()) -> Page:  # fmt: skip
    """Read everything the page needs. Raises DataError if a file of a run is damaged.

    Runs are grouped by :func:`cases_of_results`: one table, one verdict and one set of curves per load and environment.
    """
    cases = cases_of_results([result_of(run, slo) for run in runs])
    summaries = [summary for case in cases for summary in case.summaries]
    runs = _in_order(cases, runs)
    groups = [group for case in cases for group in case.groups]
    labels, curves = latency_curves(cases, runs)
    targets = _targets(runs, summaries[0].slo)
    parts = [section for case in cases for section in tables.parts(case)]
    explanations = []  # how the time of the first run of each policy divides
    for case, group in [(own, group) for own in cases for group in own.groups]:
        seed = f" (seed {group.summaries[0].seed})" if len(group.summaries) > 1 else ""
        if lines := tuple(sentences.why(group.explanations[0])):
            explanations.append((f"{_series(case, group)}{seed}", lines))
    return Page(
        title=title or _title(summaries),
        subtitle=(machine(summaries), *load_and_limits(summaries)),
        verdicts=tuple((title, tuple(lines), shown) for title, lines, shown in sentences.verdicts(cases)),
        warnings=(*notes, *sentences.keep_in_mind(cases)),
        tables=(
            *comparison_tables(cases, all_percentiles=all_percentiles), *failures_tables(summaries, labels), *extra,
            *(of_section(part, note=_PART_NOTES[part.title.split()[1].rstrip(":")]) for part in parts),
        ),
        explanations=tuple(explanations),
        environment=environment_tables(labels, runs),
        labels=labels,
        policies=tuple(dict.fromkeys(group.policy for group in groups)),
        cases=tuple(case.title for case in cases),
        shared=curves,
        runs=tuple(_run_data(run, targets) for run in runs),
        searches=tuple(searches),
    )  # fmt: skip


def latency_curves(
    cases: Sequence[ComparisonCase], runs: Sequence[Run]
) -> tuple[tuple[str, ...], dict[str, list[Row]]]:
    """A label per run in the order of the cases, and the points of the distributions by chart: cdf_ttft and so on.

    A label is the series, with the seed or a number if a series has several runs, so that it is unique.
    """
    placed = [
        (place, group, summary)
        for place, case in enumerate(cases)
        for group in case.groups
        for summary in group.summaries
    ]
    series = [_series(cases[place], group) for place, group, _ in placed]
    several = len(set(series)) < len(series)
    labels: list[str] = []
    for name, (_, _, summary) in zip(series, placed, strict=True):
        label = f"{name} seed {summary.seed}" if several else name
        same = sum(known == label or known.startswith(f"{label} #") for known in labels)
        labels.append(f"{label} #{same + 1}" if same else label)
    curves = [(place, group.policy) for place, group, _ in placed]
    return tuple(labels), _cdfs(labels, curves, _in_order(cases, runs))


def _in_order(cases: Sequence[ComparisonCase], runs: Sequence[Run]) -> list[Run]:
    by_directory = {str(run.path): run for run in runs}
    return [by_directory[summary.run_dir] for case in cases for summary in case.summaries]


def _title(summaries: Sequence[Summary]) -> str:
    workloads = dict.fromkeys(summary.workload for summary in summaries)
    devices = dict.fromkeys("a server" if summary.device == UNKNOWN_DEVICE else summary.device for summary in summaries)
    return f"{', '.join(workloads)} on {', '.join(devices)}"


def _series(case: ComparisonCase, group: Group) -> str:
    """Name of a policy's runs, with load and environment if there are several cases."""
    return f"{group.policy} ({case.title})" if case.title else group.policy


def _cdfs(labels: Sequence[str], curves: Sequence[tuple[int, str]], runs: Sequence[Run]) -> dict[str, list[Row]]:
    """Points of the curves by chart; ``curves`` has the case index and the policy of each run."""
    rows_by_chart: dict[str, list[Row]] = {f"cdf_{name}": [] for name in ("ttft", "tpot", "itl", "e2el")}
    for label, (case, policy), run in zip(labels, curves, runs, strict=True):
        columns = RequestColumns.of(run.table("requests", NEEDED))
        ok = columns.ok
        samples = {
            "ttft": (columns.first_token - columns.intended)[columns.generated],
            "tpot": tpot_ns(columns, ok),
            "itl": itl_ns(columns, ok),
            "e2el": (columns.last_token - columns.intended)[ok],
        }
        for name, values in samples.items():
            rows_by_chart[f"cdf_{name}"] += _cdf(values, {"run": label, "case": case, "policy": policy})
    return rows_by_chart


def _cdf(ns: npt.NDArray[Any], of: Row) -> list[Row]:
    points = np.quantile(ns, _QUANTILES) / 1e6 if len(ns) else ()
    return [
        {**of, "ms": _short(x), "share": _short(q)}
        for x, q in zip(points, _QUANTILES, strict=False)
        if x > 0  # the axis is logarithmic; tokens of one message have gaps of zero
    ]


def _run_data(run: Run, targets: Targets | None) -> dict[str, Any]:
    data: dict[str, Any] = {"surface": _surface(run, targets), "classes": _classes(run), "sessions": _sessions(run)}
    sent = run.table("requests", ["sent_ns"])["sent_ns"]
    line = make_timeline(run) if sent.null_count < len(sent) else Timeline("", [], [])
    data |= {name: getattr(line, name) for name in _PANELS}
    data["steps"], data["steps_left_out"] = _steps(run)
    return data


def _classes(run: Run) -> list[Row]:
    columns = RequestColumns.of(metric_columns(run))
    rows_by_class = []
    for name in columns.classes:
        rows = columns.ok & (columns.request_class == name)
        ttft_ns = (columns.first_token - columns.intended)[rows & columns.generated]
        for latency, ns in (("TTFT", ttft_ns), ("TPOT", tpot_ns(columns, rows))):
            rows_by_class += _cdf(ns, {"class": name or "no class", "latency": latency})
    return rows_by_class


def _sessions(run: Run) -> list[Row]:
    """Start and duration of completed sessions; empty where each has one request."""
    if "sessions" not in run.manifest.rows:
        return []
    table = run.table("sessions")
    table = table.filter(table["completion_ms"].is_valid())
    stride = -(-table.num_rows // _MOST_SESSIONS) or 1
    return [
        {
            "session": str(session["session"]), "class": session["class"] or "", "turns": session["turns"],
            "t": _short(session["start_ns"] / 1e9), "s": _short(session["completion_ms"] / 1e3),
            "model": _short(session["model_ms"] / session["completion_ms"]) if session["completion_ms"] else 0.0,
            "tools": session.get("tool_ms") and _short(session["tool_ms"] / session["completion_ms"]),
        }
        for session in table.to_pylist()[::stride]
    ]  # fmt: skip


def _steps(run: Run) -> tuple[dict[str, list[Any]], int]:
    """Columns instead of rows: half the size; the page converts them. Also the number of all steps."""
    names = ["start_ns", "end_ns", "phase", "prefill_tokens", "decode_seqs", "waiting"]
    table = run.table("steps", names)
    kept = table.slice(0, MAX_STEPS)
    start, end = kept["start_ns"].to_numpy() / 1e9, kept["end_ns"].to_numpy() / 1e9
    rounded = {"t": np.round(start, 6), "t2": np.round(end, 6), "ms": np.round((end - start) * 1e3, 3)}
    columns = {name: values.tolist() for name, values in rounded.items()} | kept.select(names[2:]).to_pydict()
    return columns if table.num_rows else {}, table.num_rows - kept.num_rows


def _targets(runs: Sequence[Run], slo: Slo) -> Targets | None:
    """TTFT and TPOT limits in ms, spanning all measured values and the given limits; the same for every run."""
    tables = (RequestColumns.of(run.table("requests", NEEDED)) for run in runs)
    both = [latencies_ms(columns, columns.ok & (columns.tokens_after_first > 0)) for columns in tables]
    ttft, tpot = (np.concatenate(parts) for parts in zip(*both, strict=True))
    return (_spaced(ttft, slo.ttft), _spaced(tpot, slo.tpot)) if len(ttft) else None


def _spaced(measured: npt.NDArray[np.float64], asked: float | None) -> list[float]:
    low, high = max(float(np.quantile(measured, 0.02)), 1e-3), max(float(measured.max()), 2e-3)
    spaced = np.geomspace(low * 0.9, max(high * 1.05, low * 1.1), _TARGETS)
    return sorted({float(f"{value:.3g}") for value in spaced} | ({asked} if asked else set()))


def _surface(run: Run, targets: Targets | None) -> list[Row]:
    if targets is None:
        return []
    return [
        {"phase": surface.phase or "all", "ttft": ttft_ms, "tpot": tpot_ms, "met": _short(share)}
        for surface in run_surfaces(run, *targets, by_phase=True)
        for ttft_ms, shares in zip(surface.ttft_ms, surface.attainment, strict=True)
        for tpot_ms, share in zip(surface.tpot_ms, shares, strict=True)
    ]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
