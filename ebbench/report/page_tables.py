"""The page's tables: comparison, phases, environment. A cell has what is shown and what it sorts by."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ebbench.analysis.compare.policies import (
    baseline_of,
    group_by_policy,
    output_throughput,
    request_goodput,
    steady_throughput,
)
from ebbench.analysis.metrics import Metrics
from ebbench.analysis.summary import Summary
from ebbench.records.run import Run
from ebbench.render import numbers


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
class _Figure:
    header: str
    of: Callable[[Metrics], float | None]
    show: Callable[[float | None], str]

    def cell(self, metrics: Metrics) -> Cell:
        value = self.of(metrics)
        return Cell(self.show(value), value)


_OUTPUT = _Figure("output tokens/s", output_throughput, numbers.rate)
_WHOLE = (
    _Figure("steady tokens/s", steady_throughput, numbers.rate),
    _Figure("requests/s", lambda m: m.request_throughput, numbers.rate),
    _Figure("TTFT median", lambda m: m.ttft.median, numbers.duration_ms),
    _Figure("TTFT p99", lambda m: m.ttft.p99, numbers.duration_ms),
    _Figure("TPOT median", lambda m: m.tpot.median, numbers.duration_ms),
    _Figure("TPOT p99", lambda m: m.tpot.p99, numbers.duration_ms),
    _Figure("ITL p99", lambda m: m.itl.p99, numbers.duration_ms),
    _Figure("E2EL median", lambda m: m.e2el.median, numbers.duration_ms),
)
_IN_PHASE = ("TTFT median", "TTFT p99", "TPOT median", "TPOT p99")
_LIMITS = (
    _Figure("goodput, requests/s", request_goodput, numbers.rate),
    _Figure("SLO met", lambda m: m.slo_attainment, numbers.percent),
)


def comparison_table(summaries: Sequence[Summary], labels: Sequence[str]) -> Table:
    """One row a run; the difference is to the baseline's run of the same seed."""
    limits = _limits(summaries)
    figures = (*_WHOLE, *limits)
    baseline = baseline_of(group_by_policy(summaries, [])).policy
    rows = [
        (
            Cell(label if summary.valid else f"{label} INVALID", label, strong=not summary.valid),
            _completed(summary.metrics),
            _OUTPUT.cell(summary.metrics),
            _against(summary, summaries, baseline),
            *(figure.cell(summary.metrics) for figure in figures),
        )
        for label, summary in zip(labels, summaries, strict=True)
    ]
    headers = ("run", "completed", _OUTPUT.header, f"vs {baseline}", *(figure.header for figure in figures))
    note = (
        "Output tokens/s: first intended start to last completion; steady: while the load is at its target. TTFT and "
        "E2EL count from the intended start; – is undefined or too few samples"
    )
    note += f"{_limits_told(summaries)}."
    return Table("Comparison", headers, tuple(rows), note)


def phases_table(phases: Sequence[Sequence[Summary]], labels: Sequence[str]) -> Table | None:
    """One row a phase and run; ``phases`` are those of each run. None where no run has several."""
    if max(map(len, phases)) < 2:
        return None
    everything = [summary for of_run in phases for summary in of_run]
    limits = _limits(everything)
    figures = (*(figure for figure in _WHOLE if figure.header in _IN_PHASE), *limits)
    baseline = baseline_of(group_by_policy(everything, [])).policy
    order = {name: place for place, name in enumerate(dict.fromkeys(summary.phase for summary in everything))}
    rows = [
        (
            Cell(summary.phase, order[summary.phase]),
            Cell(label, label),
            _completed(summary.metrics),
            _OUTPUT.cell(summary.metrics),
            _against(summary, [other for other in everything if other.phase == summary.phase], baseline),
            *(figure.cell(summary.metrics) for figure in figures),
        )
        for label, of_run in zip(labels, phases, strict=True)
        for summary in of_run
    ]
    rows.sort(key=lambda row: float(row[0].value or 0))
    headers = ("phase", "run", "completed", _OUTPUT.header, f"vs {baseline}", *(figure.header for figure in figures))
    note = "A phase's output tokens/s: its requests' tokens, from its first intended start to its last completion."
    return Table("By phase", headers, tuple(rows), note)


def _limits(summaries: Sequence[Summary]) -> tuple[_Figure, ...]:
    return _LIMITS if any(summary.slo for summary in summaries) else ()


def _limits_told(summaries: Sequence[Summary]) -> str:
    given = {summary.slo for summary in summaries if summary.slo}
    if len(given) > 1:
        return "; limits differ between the runs, so goodput and SLO met do not compare (--goodput gives all the same)"
    return f"; limits {given.pop()} ms" if given else ""


def _completed(metrics: Metrics) -> Cell:
    text = numbers.count(metrics.completed)
    if metrics.completed < metrics.planned:
        text += f" of {numbers.count(metrics.planned)}"
    return Cell(text, metrics.completed, strong=metrics.completed < metrics.planned)


def _against(summary: Summary, others: Sequence[Summary], baseline: str) -> Cell:
    """Change of output throughput to the baseline's run of the same seed; a dash where there is none."""
    same = (other for other in others if (other.policy, other.seed) == (baseline, summary.seed))
    reference = next((output_throughput(other.metrics) for other in same), None)
    ours = output_throughput(summary.metrics)
    if summary.policy == baseline or not ours or not reference:
        return Cell(numbers.DASH)
    return Cell(numbers.change(ours / reference - 1), ours / reference - 1)


def failures_tables(summaries: Sequence[Summary], labels: Sequence[str]) -> tuple[Table, ...]:
    """One row per run, error class and cause of requests that did not complete; no table where all did."""
    rows = [
        (
            Cell(label, label),
            Cell(numbers.count(failure.count), failure.count),
            Cell(failure.error_class, failure.error_class),
            Cell(failure.example or numbers.DASH, failure.example),
            Cell(failure.remedy or numbers.DASH, failure.remedy),
        )
        for label, summary in zip(labels, summaries, strict=True)
        for failure in summary.failures
    ]
    headers = ("run", "requests", "error class", "example, in the server's words", "what to do")
    return (Table("Requests that did not complete", headers, tuple(rows)),) if rows else ()


def environment_tables(labels: Sequence[str], runs: Sequence[Run]) -> tuple[Table, ...]:
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
    if m.calibration and "source" in m.calibration:
        plain["controller calibration"] = str(m.calibration["source"])
    versions = {f"version of {name}": version for name, version in m.versions.items()}
    options = {f"option {name}": json.dumps(value) for name, value in m.options.items()}
    known = {"workload", "scenario", "seed", "source"}
    more = {f"fact {name}": _plain(value) for name, value in m.facts.items() if name not in known}
    return plain | versions | options | more


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
