"""Console output of a sweep: dry run, progress, findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ebbench.analysis.cases import TIE
from ebbench.analysis.environment import API_SERVER
from ebbench.analysis.sensitivity import Sensitivity, least_difference, sensitivity
from ebbench.analysis.validity import by_settings, told_once
from ebbench.errors import UnknownNameError, UsageError
from ebbench.grouping import by_key
from ebbench.render import numbers
from ebbench.render.report import notes
from ebbench.runs.file import plain
from ebbench.runs.key import result_key
from ebbench.spec.run import RunSpec, settings_of
from ebbench.spec.server import is_server
from ebbench.sweep.drive import Finished, Result, named, summary_lines
from ebbench.sweep.spec import Sweep, cell_problem

# Results of a sweep: per policy and setting of the other axes, the best configuration and the sensitivity.

METRIC, GOODPUT = "request_throughput", "request_goodput"

_BASELINE = "v1"
_CONFIGURATION = ("policy", "max_num_batched_tokens", "max_num_seqs", "seed")
Configuration = tuple[int, int]
"""Token budget B and batch size N."""


@dataclass(frozen=True)
class Finding:
    """One policy in one setting. ``setting``: values of the other axes. Throughputs are means over the seeds.

    ``equal``: other configurations that are not worse than the best one beyond ``noise``, the least relative difference
    that is more than chance; None where no seeds were repeated. ``gain_shown``: the gain goes beyond it.
    """

    setting: tuple[tuple[str, Any], ...]
    policy: str
    sensitivity: Sensitivity
    gain: float | None
    invalid: int
    equal: tuple[Configuration, ...] = ()
    noise: float | None = None
    gain_shown: bool = True


def deciding_metric(cells: Sequence[RunSpec]) -> str:
    """The figure that ranks if none was chosen: goodput if all cells have limits, else requests/s."""
    return GOODPUT if all(cell.goodput for cell in cells) else METRIC


def findings(entries: Sequence[Finished], axes: Sequence[str], metric: str = METRIC) -> list[Finding]:
    """One entry per setting and policy, in grid order. INVALID cells are counted and left out.

    ``gain``: best throughput over the best of :func:`baseline_policy` in the same setting, minus one.
    """
    all_findings = [
        finding
        for setting, members in _by_setting(entries, axes).items()
        for finding in _of_setting(setting, by_key((entry.cell.policy, entry) for entry in members), metric)
    ]
    baseline = baseline_policy(all_findings)
    bests = {found.setting: found.sensitivity.best for found in all_findings if found.policy == baseline}
    return [
        found if found.policy == baseline else _with_gain(found, bests.get(found.setting)) for found in all_findings
    ]


def _by_setting(entries: Sequence[Finished], axes: Sequence[str]) -> dict[tuple[tuple[str, Any], ...], list[Finished]]:
    """The cells by the values of the axes besides policy, token budget, batch size and seed."""
    others = tuple(name for name in axes if name not in _CONFIGURATION)
    own = ((entry, settings_of(entry.cell)) for entry in entries)
    return by_key((tuple((name, plain(settings[name])) for name in others), entry) for entry, settings in own)


def unlike_requests(entries: Sequence[Finished], axes: Sequence[str]) -> list[str]:
    """A sentence per setting in which cells of one seed ran different requests, as an override of some makes them."""
    lines = []
    for setting, members in _by_setting(entries, axes).items():
        plans = by_key((entry.cell.plan.seed, entry.measured.figures.get("plan_hash")) for entry in members)
        if any(len(set(of_seed)) > 1 for of_seed in plans.values()):
            where = ", ".join(f"{name}={value}" for name, value in setting)
            lines.append(
                f"{where or 'All cells'}: not all got the same requests, so what is best, and by how much, may come "
                "from these."
            )
    return lines


def _of_setting(
    setting: tuple[tuple[str, Any], ...], policies: Mapping[str, Sequence[Finished]], metric: str
) -> list[Finding]:
    """The findings of one setting, whose policies and configurations share their noise."""
    values = {policy: _values_by_configuration(members, metric) for policy, members in policies.items()}
    noise = least_difference(
        {(policy, configuration): seeds for policy, own in values.items() for configuration, seeds in own.items()}
    )
    findings_of = []
    for policy, members in policies.items():
        means = {configuration: fmean(seeds.values()) for configuration, seeds in values[policy].items()}
        if not means:
            continue
        best = sensitivity(means)
        equal = _equal(means, noise)
        if any(is_server(entry.cell.engine) for entry in members):
            best, equal = replace(best, best_budget=None, best_size=None), ()
        invalid = len(members) - sum(len(seeds) for seeds in values[policy].values())
        findings_of.append(Finding(setting, policy, best, None, invalid, equal, noise))
    return findings_of


def _values_by_configuration(members: Sequence[Finished], metric: str) -> dict[Configuration, dict[int, float]]:
    """The figure of the valid cells by configuration and seed."""
    values: dict[Configuration, dict[int, float]] = {}
    for entry in members:
        value = entry.measured.figures.get(metric)
        if entry.measured.valid and value is not None:
            limits = entry.cell.server.max_num_batched_tokens, entry.cell.server.max_num_seqs
            values.setdefault(limits, {})[entry.cell.plan.seed] = float(value)
    return values


def _equal(means: Mapping[Configuration, float], noise: float | None) -> tuple[Configuration, ...]:
    """The configurations but the best that do not differ from it beyond noise; within TIE where that is unknown."""
    best, *others = sorted(means, key=lambda pair: (-means[pair], pair))
    reach = TIE if noise is None else noise
    return tuple(pair for pair in others if means[best] <= means[pair] * (1 + reach))


def _with_gain(finding: Finding, baseline: float | None) -> Finding:
    if not baseline:
        return finding
    gain = finding.sensitivity.best / baseline - 1
    reach = TIE if finding.noise is None else finding.noise
    return replace(finding, gain=gain, gain_shown=abs(math.log1p(gain)) > math.log1p(reach) if gain > -1 else True)


def baseline_policy(bests: Sequence[Finding]) -> str:
    """The policy that the others are compared with: v1, else the first one of the grid."""
    policies = [finding.policy for finding in bests]
    return policies[0] if policies and _BASELINE not in policies else _BASELINE


def dry_run(sweep: Sweep, todo: Sequence[RunSpec]) -> RenderableType:
    """The cells that would run, without running them."""
    lines = [f"{sweep.name}: {len(sweep.cells)} cells, {len(todo)} to run, {len(sweep.cells) - len(todo)} finished"]
    for name in sweep.axes:
        values = dict.fromkeys(str(plain(settings_of(cell)[name])) for cell in sweep.cells)
        lines.append(f"  {name}: {', '.join(values)}")
    lines += [f"  {name}: {_values(sweep, name)}" for name in _SHARED if name not in sweep.axes]
    problems = [problem for cell in sweep.cells if (problem := cell_problem(cell))]
    if problems:
        lines += ["these cannot run:", *(f"  {line}" for line in summary_lines(problems))]
    return Stack(*(Text(line) for line in lines))


_SHARED = ("workload", "engine", "device", "model", "scenario", "num_prompts", "source")
"""Settings shown first; also those that the grid does not vary, since overrides may."""


def _values(sweep: Sweep, name: str) -> str:
    counts = Counter(plain(settings_of(cell)[name]) for cell in sweep.cells)
    if len(counts) == 1:
        return str(next(iter(counts)) or "default")
    return ", ".join(f"{value or 'default'} ({count} cells)" for value, count in counts.items())


def console_report(result: Result, bests: Sequence[Finding], metric: str) -> RenderableType:
    """Findings, failures and paths of the results."""
    parts: list[RenderableType] = [
        Text(_heading(result.sweep), style="bold"),
        Text(),
        *findings_parts(bests, metric),
        Text(),
        *_equal_lines(bests),
        Text(_legend(metric, bests), style="dim"),
    ]
    failed = summary_lines(str(entry.error) for entry in result.failed)
    for title, lines in (("Failed", failed), ("INVALID, left out above", _invalid_lines(result))):
        if lines:
            parts += [Text(), Text(title, style="bold red"), *(Text(f"  {line}") for line in lines)]
    parts += notes("Keep in mind", caveats(result))
    finished, speed = result.done - len(result.failed), f"{result.elapsed_s:,.1f} s ({result.cells_per_s:.2f} cells/s)"
    timing = f"{finished} cells in {speed}" if finished else "no new cell"
    kept = f"{result.kept} from before"
    if result.kept_since_unix_s is not None:
        when = datetime.fromtimestamp(result.kept_since_unix_s, UTC)
        again = "; --fresh measures again" if any(cell.real_time for cell in result.sweep.cells) else ""
        kept += f" (the oldest of {when:%Y-%m-%d %H:%M} UTC{again})"
    return Stack(*parts, Text(), Text(f"{timing}, {kept}; table: {result.results}"))


def caveats(result: Result) -> list[str]:
    """Where requests differ, and the caveats of the devices whose figures are shown, each once, with the cells that
    have it unless all do."""
    valid = [entry for entry in result.finished if entry.measured.valid]
    settings = [settings_of(entry.cell) for entry in valid]
    axes = [{name: str(plain(own[name])) for name in result.sweep.axes} for own in settings]
    texts_by_cell = [entry.measured.caveats for entry in valid]
    told = told_once(texts_by_cell, by_settings(axes, lambda name, values: f"{name}={values}", "cells"))
    return [*unlike_requests(valid, result.sweep.axes), *told]


SHOWN_INVALID = 20


def _invalid_lines(result: Result) -> list[str]:
    lines = [f"{where}: {why}" for where, why in named(result.invalid, result.sweep.axes)]
    more = len(lines) - SHOWN_INVALID
    return lines[:SHOWN_INVALID] + ([f"and {more} more, see `valid` in {result.results}"] if more > 0 else [])


def _heading(sweep: Sweep) -> str:
    first = settings_of(sweep.cells[0])
    names = [name for name in ("workload", "model", "device", "engine") if name not in sweep.axes and first[name]]
    shared = [str(first[name]) for name in names]
    return f"{sweep.name}: {', '.join(shared)}" if shared else sweep.name


def findings_parts(bests: Sequence[Finding], metric: str) -> list[RenderableType]:
    """One table per setting, one row per policy; all have the same columns, so only the first has headers."""
    settings = list(dict.fromkeys(finding.setting for finding in bests))
    width = max((len(finding.policy) for finding in bests), default=0)
    headers = _headers(metric, baseline_policy(bests), limits=any(entry.sensitivity.best_budget for entry in bests))
    parts: list[RenderableType] = []
    for place, setting in enumerate(settings):
        if setting:
            parts += [Text(), Text(", ".join(f"{name}={value}" for name, value in setting), style="bold")]
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=not place, header_style="dim")
        table.add_column("policy", min_width=min(max(width, 6), 22), max_width=22, overflow="fold")
        for header, least in headers.items():
            wide = min(max(least, len(header)), 12)  # a longer header is a policy's name
            table.add_column(
                header, justify="right", overflow="fold", no_wrap=len(header) <= wide, min_width=wide, max_width=wide
            )
        for finding in bests:
            if finding.setting == setting:
                table.add_row(finding.policy, *_figures(finding)[-len(headers) :])
        parts.append(table)
    return parts


def _headers(metric: str, baseline: str, *, limits: bool) -> dict[str, int]:
    """The columns of figures with their widths; ``limits``: with the scheduler's limits B and N of the best cell."""
    figures = {"best B": 7, "best N": 7} if limits else {}
    figures |= {_UNITS.get(metric, metric): 7, f"vs {baseline}": 8}
    return figures | {"CV": 7, "range": 5, "B-Sens": 7, "N-Sens": 7}


_UNITS = {
    "request_throughput": "req/s",
    "output_throughput": "out tok/s",
    "total_token_throughput": "tok/s",
    "request_goodput": "goodput",
}
EQUAL = "equal"
"""Shown in place of a best configuration or a gain that noise explains."""


def _figures(finding: Finding) -> list[str]:
    s = finding.sensitivity
    all_equal = finding.equal and len(finding.equal) + 1 == s.cells
    best = (numbers.DASH if limit is None else str(limit) for limit in (s.best_budget, s.best_size))
    limits = [EQUAL] * 2 if all_equal else best
    ratio = numbers.DASH if s.range_ratio is None else f"{s.range_ratio:.2f}"
    return [
        *limits, numbers.rate(s.best), numbers.change(finding.gain) if finding.gain_shown else EQUAL,
        numbers.percent(s.cv), ratio, numbers.percent(s.b_sens), numbers.percent(s.n_sens),
    ]  # fmt: skip


def _equal_lines(bests: Sequence[Finding]) -> list[Text]:
    """Configurations that are as good as the best one, per finding; nothing where all or none are."""
    lines = []
    for finding in bests:
        if finding.equal and len(finding.equal) + 1 < finding.sensitivity.cells:
            where = ", ".join([*(f"{name}={value}" for name, value in finding.setting), finding.policy])
            shown = ", ".join(f"B {budget} N {size}" for budget, size in finding.equal[:SHOWN_EQUAL])
            more = len(finding.equal) - SHOWN_EQUAL
            best = f"B {finding.sensitivity.best_budget} N {finding.sensitivity.best_size}"
            lines.append(Text(f"{where}: equal to {best}: {shown}{f' and {more} more' if more > 0 else ''}"))
    return lines


SHOWN_EQUAL = 6
"""Equal configurations that are named."""


def _legend(metric: str, bests: Sequence[Finding]) -> str:
    known = sorted({numbers.percent(finding.noise) for finding in bests if finding.noise is not None})
    why = "since the noise between runs is not known (it takes two repeats or more, and no figure of 0)"
    noise = f"equal: within {numbers.percent(TIE)}, {why}; "
    if known:
        ends = " to ".join(dict.fromkeys([known[0], known[-1]]))
        noise = f"equal: within the noise between seeds ({ends}; Tukey's test at 5 %); "
    unknown = any(finding.sensitivity.best_budget is None for finding in bests)
    return (
        f"best: configuration with the highest {metric}, mean over seeds; {noise}CV, range, B-Sens and N-Sens over the "
        "whole grid of token budgets B and batch sizes N, – where it has holes or one value."
        + (" B and N of a server at a URL are its own and not known here." if unknown else "")
    )


def to_json(result: Result, bests: Sequence[Finding], metric: str) -> dict[str, Any]:
    """One JSON object."""
    return {
        "name": result.sweep.name,
        "cells": len(result.sweep.cells),
        "behind_api_server": sum(bool(entry.measured.figures.get(API_SERVER)) for entry in result.finished),
        "finished": len(result.finished),
        "from_before": result.kept,
        "kept_since_unix_s": result.kept_since_unix_s,
        "failed": [{"key": result_key(e.cell), "error": str(e.error)} for e in result.failed],
        "invalid": [
            {"key": result_key(entry.cell), "cell": where, "reasons": why}
            for entry, (where, why) in zip(result.invalid, named(result.invalid, result.sweep.axes), strict=True)
        ],
        "warnings": caveats(result),
        "elapsed_s": result.elapsed_s,
        "cells_per_s": result.cells_per_s,
        "interrupted": result.interrupted,
        "results": str(result.results),
        "metric": metric,
        "baseline": baseline_policy(bests),
        "findings": [
            dict(f.setting)
            | {"policy": f.policy, "gain": f.gain, "gain_shown": f.gain_shown, "invalid": f.invalid, "noise": f.noise}
            | {"equal": [{"max_num_batched_tokens": b, "max_num_seqs": n} for b, n in f.equal]}
            | asdict(f.sensitivity)
            for f in bests
        ],
    }


METRICS = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")


def ranking_metric(grid: Sweep, asked: str | None) -> str:
    """The figure that ranks. Raises UnknownNameError, and UsageError for goodput without limits."""
    if asked is not None and asked not in METRICS:
        raise UnknownNameError("metric", asked, METRICS)
    deciding = deciding_metric(grid.cells)
    if asked == GOODPUT != deciding:
        raise UsageError(
            '--metric request_goodput needs limits for all cells: goodput = "ttft:500 tpot:50" in [common]'
        )
    return asked or deciding


def dry_run_json(grid: Sweep, todo: Sequence[RunSpec]) -> dict[str, Any]:
    """The cells with what is left to run, as one JSON object."""
    left = set(todo)
    cells = [
        {"key": result_key(cell), "finished": cell not in left, "problem": cell_problem(cell) or None}
        for cell in grid.cells
    ]
    return {"name": grid.name, "cells": cells, "axes": list(grid.axes)}
