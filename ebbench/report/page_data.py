"""Runs as what the page shows: tables of numbers, and the rows behind its charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import NEEDED, RequestColumns
from ebbench.analysis.compare import Group, baseline_of, gain, group_by_policy, steady_throughput
from ebbench.analysis.explain import explain
from ebbench.analysis.slo import Slo
from ebbench.analysis.slo_surface import run_surfaces
from ebbench.analysis.summary import Summary, summarise, summarise_phases
from ebbench.records.run import Run
from ebbench.render import numbers, words
from ebbench.render.timeline import Timeline, timeline_of

MAX_STEPS = 20_000
"""Steps of a run kept for the zoom; of longer runs the first so many, which the page says."""
_QUANTILES = np.unique(np.concatenate([np.linspace(0, 1, 161), 1 - np.geomspace(1e-4, 0.05, 40)]))
_TARGETS = 14
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A table cell: what is shown, and the number or text it sorts by."""

    text: str
    value: float | str | None = None
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A sortable table."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """Everything on the page. ``shared`` feeds the charts of all runs, ``runs`` those of one run each."""

    title: str
    subtitle: str
    verdict: tuple[str, ...]
    warnings: tuple[str, ...]
    tables: tuple[Table, ...]
    stories: tuple[tuple[str, tuple[str, ...]], ...]
    environment: tuple[Table, ...]
    labels: tuple[str, ...]
    shared: dict[str, list[Row]]
    runs: tuple[dict[str, Any], ...]


def page_of(runs: Sequence[Run], *, title: str = "", slo: Slo | None = None, extra: Sequence[Table] = (),
            notes: Sequence[str] = ()) -> Page:  # fmt: skip
    """Read everything the page needs. Raises DataError when a file of a run is damaged."""
    summaries = [summarise(run, slo) for run in runs]
    stories = [explain(run) for run in runs]
    groups = group_by_policy(summaries, stories)
    labels = _labels(summaries)
    first = summaries[0]
    phases = [_phase_rows(label, run, slo) for label, run in zip(labels, runs, strict=True)]
    tables = [_comparison(groups, summaries, labels), *extra]
    if any(phases):
        tables.append(_phases([row for rows in phases for row in rows]))
    return Page(
        title=title or f"{first.workload} on {first.device}",
        subtitle=f"{first.model} on {first.device}, engine {first.engine}; {words.lengths(first)}",
        verdict=tuple(words.verdict(groups)),
        warnings=(*notes, *words.caveats(groups)),
        tables=tuple(tables),
        stories=tuple((label, lines) for label, story in zip(labels, stories, strict=True)
                      if (lines := tuple(words.why(story)))),
        environment=_environment(labels, runs),
        labels=labels,
        shared=_cdfs(labels, summaries, runs),
        runs=tuple(_run_data(run) for run in runs),
    )  # fmt: skip


def _labels(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """The policy, with the seed where it ran several times, with a number where even that repeats."""
    several = len({summary.policy for summary in summaries}) < len(summaries)
    labels: list[str] = []
    for summary in summaries:
        label = f"{summary.policy} seed {summary.seed}" if several else summary.policy
        same = sum(known == label or known.startswith(f"{label} #") for known in labels)
        labels.append(f"{label} #{same + 1}" if same else label)
    return tuple(labels)


def _comparison(groups: Sequence[Group], summaries: Sequence[Summary], labels: Sequence[str]) -> Table:
    baseline = baseline_of(groups)
    gains = {group.policy: gain(group, baseline) for group in groups if group is not baseline}
    with_slo = any(summary.slo for summary in summaries)
    headers = ["run", "completed", "output tokens/s", f"vs {baseline.policy}", "steady tokens/s", "requests/s",
               "TTFT median", "TTFT p99", "TPOT median", "TPOT p99", "ITL p99", "E2EL median"]  # fmt: skip
    rows = []
    for label, summary in zip(labels, summaries, strict=True):
        found = gains.get(summary.policy)
        m = summary.metrics
        cells = [
            Cell(label if summary.valid else f"{label} INVALID", label, strong=not summary.valid),
            Cell(f"{numbers.count(m.completed)} of {numbers.count(m.planned)}", m.completed),
            Cell(numbers.rate(m.output_throughput), m.output_throughput),
            Cell(numbers.change(found.mean) if found else numbers.DASH, found.mean if found else None),
            Cell(numbers.rate(steady_throughput(m)), steady_throughput(m)),
            Cell(numbers.rate(m.request_throughput), m.request_throughput),
            *(Cell(numbers.duration_ms(value), value) for value in
              (m.ttft.median, m.ttft.p99, m.tpot.median, m.tpot.p99, m.itl.p99, m.e2el.median)),
        ]  # fmt: skip
        if with_slo:
            cells += [Cell(numbers.rate(m.request_goodput), m.request_goodput),
                      Cell(numbers.percent(m.slo_attainment), m.slo_attainment)]  # fmt: skip
        rows.append(tuple(cells))
    headers += ["goodput, requests/s", "SLO met"] if with_slo else []
    limits = f"; limits {summaries[0].slo} ms" if with_slo else ""
    note = f"Latencies count from the intended start; – is undefined or too few samples{limits}."
    return Table("Comparison", tuple(headers), tuple(rows), note)


def _phase_rows(label: str, run: Run, slo: Slo | None) -> list[tuple[Cell, ...]]:
    phases = summarise_phases(run, slo)
    if len(phases) < 2:
        return []
    return [
        (
            Cell(summary.phase, place),
            Cell(label, label),
            Cell(numbers.count(summary.metrics.completed), summary.metrics.completed),
            Cell(numbers.rate(summary.metrics.output_throughput), summary.metrics.output_throughput),
            Cell(numbers.duration_ms(summary.metrics.ttft.median), summary.metrics.ttft.median),
            Cell(numbers.duration_ms(summary.metrics.tpot.median), summary.metrics.tpot.median),
            Cell(numbers.percent(summary.metrics.slo_attainment), summary.metrics.slo_attainment),
        )
        for place, summary in enumerate(phases)
    ]


def _phases(rows: Sequence[tuple[Cell, ...]]) -> Table:
    headers = ("phase", "run", "completed", "output tokens/s", "TTFT median", "TPOT median", "SLO met")
    ordered = sorted(rows, key=lambda row: float(row[0].value or 0))
    return Table("By phase", headers, tuple(ordered))


def _environment(labels: Sequence[str], runs: Sequence[Run]) -> tuple[Table, ...]:
    """What all runs share, and one column a run for what they do not."""
    facts = [_facts(run) for run in runs]
    rows = {name: [each.get(name, "") for each in facts] for each in facts for name in each}
    shared = {name: values[:1] for name, values in rows.items() if len(set(values)) == 1}
    own = {name: values for name, values in rows.items() if name not in shared}
    tables = [Table("Environment", ("", "all runs" if len(runs) > 1 else labels[0]), _text_rows(shared))]
    if own:
        tables.append(Table("Where the runs differ", ("", *labels), _text_rows(own)))
    return tuple(tables)


def _text_rows(rows: Mapping[str, Sequence[str]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple((Cell(name, name), *(Cell(value, value) for value in values)) for name, values in rows.items())


def _facts(run: Run) -> dict[str, str]:
    m = run.manifest
    plain = {
        "run directory": str(run.path), "created": m.created, "workload": m.workload, "scenario": m.scenario,
        "source": m.source, "seed": str(m.seed), "policy": m.policy, "engine": f"{m.engine} ({m.clock} time)",
        "device": m.device, "model": m.model, "device provenance": m.device_provenance,
        "KV capacity, tokens": numbers.count(m.kv_capacity_tokens), "plan": m.plan_hash[:16],
        "git commit": m.git_commit or "", "valid": "yes" if m.valid else f"no: {'; '.join(m.reasons)}",
    }  # fmt: skip
    versions = {f"version of {name}": version for name, version in m.versions.items()}
    options = {f"option {name}": json.dumps(value) for name, value in m.options.items()}
    return plain | versions | options


def _cdfs(labels: Sequence[str], summaries: Sequence[Summary], runs: Sequence[Run]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {f"cdf_{name}": [] for name in ("ttft", "tpot", "itl", "e2el")}
    for label, summary, run in zip(labels, summaries, runs, strict=True):
        columns = RequestColumns.of(run.table("requests", NEEDED))
        ok = columns.ok
        several = ok & (columns.output_tokens >= 2)
        samples = {
            "ttft": (columns.first_token - columns.intended)[ok],
            "tpot": (columns.last_token - columns.first_token)[several] / (columns.output_tokens - 1)[several],
            "itl": columns.gaps_of(ok),
            "e2el": (columns.last_token - columns.intended)[ok],
        }
        for name, values in samples.items():
            found[f"cdf_{name}"] += _cdf(label, summary.policy, values)
    return found


def _cdf(label: str, policy: str, ns: npt.NDArray[Any]) -> list[Row]:
    if not len(ns):
        return []
    points = np.quantile(ns, _QUANTILES) / 1e6
    return [
        {"run": label, "policy": policy, "ms": _short(x), "share": _short(q)}
        for x, q in zip(points, _QUANTILES, strict=True)
        if x > 0  # the axis is logarithmic; tokens that came in one message have gaps of zero
    ]


def _run_data(run: Run) -> dict[str, Any]:
    data: dict[str, Any] = {"surface": _surface(run), "steps": [], "steps_left_out": 0}
    empty: list[Row] = []
    data |= dict.fromkeys(("modes", "phases", "throughput", "sizes", "sides", "queue", "kv"), empty)
    if run.table("steps", ["step_id"]).num_rows:
        line: Timeline = timeline_of(run)
        data |= {
            name: getattr(line, name) for name in ("modes", "phases", "throughput", "sizes", "sides", "queue", "kv")
        }
        data["steps"], data["steps_left_out"] = _steps(run)
    return data


def _steps(run: Run) -> tuple[dict[str, list[Any]], int]:
    """Columns, which are half the size of rows; the page turns them into rows."""
    names = ["start_ns", "end_ns", "phase", "prefill_tokens", "decode_seqs", "waiting"]
    table = run.table("steps", names)
    kept = table.slice(0, MAX_STEPS)
    start, end = kept["start_ns"].to_numpy() / 1e9, kept["end_ns"].to_numpy() / 1e9
    columns: dict[str, list[Any]] = {
        "t": np.round(start, 6).tolist(),
        "t2": np.round(end, 6).tolist(),
        "ms": np.round((end - start) * 1e3, 3).tolist(),
    }
    for name in names[2:]:
        columns[name] = kept[name].to_pylist()
    return columns, table.num_rows - kept.num_rows


def _surface(run: Run) -> list[Row]:
    """Attainment over targets that span what the run measured, for the whole run and each phase."""
    columns = RequestColumns.of(run.table("requests", NEEDED))
    several = columns.ok & (columns.output_tokens >= 2)
    if not several.any():
        return []
    ttft = (columns.first_token - columns.intended)[several] / 1e6
    tpot = (columns.last_token - columns.first_token)[several] / (columns.output_tokens - 1)[several] / 1e6
    surfaces = run_surfaces(run, _targets(ttft), _targets(tpot), by_phase=True)
    return [
        {"phase": surface.phase or "all", "ttft": ttft_ms, "tpot": tpot_ms, "met": _short(share)}
        for surface in surfaces
        for ttft_ms, shares in zip(surface.ttft_ms, surface.attainment, strict=True)
        for tpot_ms, share in zip(surface.tpot_ms, shares, strict=True)
    ]


def _targets(measured: npt.NDArray[np.float64]) -> list[float]:
    low, high = max(float(np.quantile(measured, 0.02)), 1e-3), max(float(measured.max()), 2e-3)
    spaced = np.geomspace(low * 0.9, max(high * 1.05, low * 1.1), _TARGETS)
    return sorted({float(f"{value:.3g}") for value in spaced})


def _short(value: float) -> float:
    return float(f"{value:.5g}")
