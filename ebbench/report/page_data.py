"""Runs as what the page shows: its words, and the rows behind its charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import NEEDED, RequestColumns
from ebbench.analysis.compare.policies import Group, baseline_of, group_by_policy
from ebbench.analysis.explain import explain
from ebbench.analysis.slo import Slo
from ebbench.analysis.slo_surface import latencies_ms, run_surfaces
from ebbench.analysis.summary import Summary, summarise, summarise_phases
from ebbench.records.run import Run
from ebbench.render import words
from ebbench.render.timeline import Timeline, timeline_of
from ebbench.report.page_tables import Table, comparison_table, environment_tables, failures_tables, phases_table

MAX_STEPS = 20_000
"""Steps of a run kept for the zoom; of longer runs the first so many, which the page says."""
_QUANTILES = np.unique(np.concatenate([np.linspace(0, 1, 161), 1 - np.geomspace(1e-4, 0.05, 40)]))
_TARGETS = 14
_PANELS = ("modes", "phases", "throughput", "sizes", "sides", "queue", "kv")
Row = dict[str, Any]
Targets = tuple[list[float], list[float]]


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
    policies: tuple[str, ...]
    shared: dict[str, list[Row]]
    runs: tuple[dict[str, Any], ...]


def page_of(runs: Sequence[Run], *, title: str = "", slo: Slo | None = None, extra: Sequence[Table] = (),
            notes: Sequence[str] = ()) -> Page:  # fmt: skip
    """Read everything the page needs. Raises DataError when a file of a run is damaged."""
    summaries = [summarise(run, slo) for run in runs]
    order = _baseline_first(summaries)
    runs, summaries = [runs[place] for place in order], [summaries[place] for place in order]
    stories = [explain(run) for run in runs]
    groups = group_by_policy(summaries, stories)
    labels = _labels(summaries)
    first = summaries[0]
    by_phase = phases_table([summarise_phases(run, slo) for run in runs], labels)
    targets = _targets(runs, first.slo)
    clock = "in virtual time" if runs[0].manifest.clock == "virtual" else "in real time"
    return Page(
        title=title or f"{first.workload} on {first.device}",
        subtitle=f"{first.model} on {first.device}, engine {first.engine} {clock}. {words.lengths(summaries)}",
        verdict=tuple(words.verdict(groups)),
        warnings=(*notes, *words.missing(groups), *words.doubts(groups), *words.caveats(groups)),
        tables=(
            comparison_table(summaries, labels), *failures_tables(summaries, labels), *extra,
            *([by_phase] if by_phase else []),
        ),
        stories=_stories(groups),
        environment=environment_tables(labels, runs),
        labels=labels,
        policies=tuple(group.policy for group in groups),
        shared=_cdfs(labels, summaries, runs),
        runs=tuple(_run_data(run, targets) for run in runs),
    )  # fmt: skip


def _baseline_first(summaries: Sequence[Summary]) -> list[int]:
    """Places of the runs, the baseline's before the others."""
    baseline = baseline_of(group_by_policy(summaries, [])).policy
    return sorted(range(len(summaries)), key=lambda place: summaries[place].policy != baseline)


def _labels(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """The policy, with the seed where it ran several times, with a number where even that repeats."""
    several = len({summary.policy for summary in summaries}) < len(summaries)
    labels: list[str] = []
    for summary in summaries:
        label = f"{summary.policy} seed {summary.seed}" if several else summary.policy
        same = sum(known == label or known.startswith(f"{label} #") for known in labels)
        labels.append(f"{label} #{same + 1}" if same else label)
    return tuple(labels)


def _stories(groups: Sequence[Group]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Where the time went, told of the first run of each policy."""
    found = []
    for group in groups:
        seed = f" (seed {group.summaries[0].seed})" if len(group.summaries) > 1 else ""
        if lines := tuple(words.why(group.stories[0])):
            found.append((f"{group.policy}{seed}", lines))
    return tuple(found)


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


def _run_data(run: Run, targets: Targets | None) -> dict[str, Any]:
    data: dict[str, Any] = {"surface": _surface(run, targets), "steps": {}, "steps_left_out": 0}
    data |= {name: [] for name in _PANELS}
    if run.table("steps", ["step_id"]).num_rows:
        line: Timeline = timeline_of(run)
        data |= {name: getattr(line, name) for name in _PANELS}
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


def _targets(runs: Sequence[Run], slo: Slo) -> Targets | None:
    """TTFT and TPOT limits in ms that span what all runs measured, and those asked for; the same for every run."""
    both = []
    for run in runs:
        columns = RequestColumns.of(run.table("requests", NEEDED))
        both.append(latencies_ms(columns, columns.ok & (columns.output_tokens >= 2)))
    ttft, tpot = (np.concatenate(parts) for parts in zip(*both, strict=True))
    return (_spaced(ttft, slo.ttft), _spaced(tpot, slo.tpot)) if len(ttft) else None


def _spaced(measured: npt.NDArray[np.float64], asked: float | None) -> list[float]:
    low, high = max(float(np.quantile(measured, 0.02)), 1e-3), max(float(measured.max()), 2e-3)
    spaced = np.geomspace(low * 0.9, max(high * 1.05, low * 1.1), _TARGETS)
    return sorted({float(f"{value:.3g}") for value in spaced} | ({asked} if asked else set()))


def _surface(run: Run, targets: Targets | None) -> list[Row]:
    """Attainment over the targets, for the whole run and each phase."""
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
