"""Runs as tables: one section per load and environment, one row per policy, for every output format.

Pure functions from data to :class:`ebbench.analysis.documents.Document`; no input or output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean, stdev

from rich import box, table
from rich.console import OverflowMethod

from ebbench.analysis.cases import (
    ComparisonCase,
    Figure,
    Group,
    baseline_group,
    by_class,
    by_phase,
    differing,
    gain,
    ranked,
    request_goodput,
    steady_throughput,
    throughput,
    without_tokens,
)
from ebbench.analysis.documents import Column, Document, MeanFigure, Section, Value
from ebbench.analysis.metrics import QUANTILES, Distribution
from ebbench.analysis.sessions import SessionFigures
from ebbench.analysis.summary import named
from ebbench.render import numbers

INVALID, ESTIMATED = " INVALID", " (estimated tokens)"
COMPLETED = "completed"
"""Heading of the column shown if requests did not complete."""


@dataclass(frozen=True)
class _Figure:
    """A column of figures: heading, CSV name, source of the value, format, and the groups for which it is
    unreliable."""

    header: str
    key: str
    of: Figure
    show: Callable[[float | None], str]
    doubtful: Callable[[Sequence[Group]], bool] = lambda _: False

    def column(self) -> Column:
        return Column(self.header, show=self.show, key=self.key)

    def cell(self, group: Group) -> Value:
        value = group.mean(self.of)
        return MeanFigure(value, group.spread(self.of), doubtful=value is not None and self.doubtful([group]))


_OUTPUT = _Figure("out tok/s\nwhole run", "output_throughput", throughput, numbers.rate)
_STEADY = _Figure("out tok/s\nsteady", "steady_output_throughput", steady_throughput, numbers.rate)
_REQUESTS = _Figure("req/s\nwhole run", "request_throughput", lambda m: m.request_throughput, numbers.rate)
_PLANNED = _Figure("requests\nplanned", "planned", lambda m: m.planned, numbers.count)
_INPUT = _Figure("in tok/s\nwhole run", "input_throughput", lambda m: m.input_throughput, numbers.rate)
_USER = _Figure("tok/s\nper user", "tokens_per_s_per_user", lambda m: m.tokens_per_s_per_user, numbers.rate)
_DRAFTED = _Figure("tokens\nper step", "mean_acceptance_length", lambda m: m.mean_acceptance_length, numbers.rate)
_LIMITS = (
    _Figure("goodput\nreq/s", "request_goodput", request_goodput, numbers.rate),
    _Figure("goodput\ntok/s", "token_goodput", lambda m: m.token_goodput, numbers.rate),
    _Figure("SLO\nmet", "slo_attainment", lambda m: m.slo_attainment, numbers.percent),
)
_COSTS = (
    _Figure(
        "cost per 1M\nout tokens", "cost_per_million_output_tokens",
        lambda m: m.economy.cost_per_million_output_tokens, numbers.rate,
    ),
    _Figure(
        "cost per\n1k requests", "cost_per_1000_requests", lambda m: m.economy.cost_per_1000_requests, numbers.rate
    ),
)  # fmt: skip
_ENERGY = (
    _Figure("GPU power\nmean W", "gpu_power_mean_w", lambda m: m.economy.gpu_power_mean_w, numbers.rate),
    _Figure("GPU power\npeak W", "gpu_power_peak_w", lambda m: m.economy.gpu_power_peak_w, numbers.rate),
    _Figure("J per\nout token", "joules_per_output_token", lambda m: m.economy.joules_per_output_token, numbers.rate),
    _Figure("J per\nrequest", "joules_per_request", lambda m: m.economy.joules_per_request, numbers.rate),
)
_PER_TOKEN = (_LIMITS[1], _COSTS[0], _ENERGY[2])
_TAILS = ("ttft", "tpot", "itl", "e2el")


def comparison(cases: Sequence[ComparisonCase], *, all_percentiles: bool = False) -> Document:
    """The comparison of ``cases``, one section each.

    ``all_percentiles`` shows p90, p95 and p99 of every latency instead of the highest sound one, and marks those with
    too few samples.
    """
    sections = tuple(section(case.title, case.groups, all_percentiles=all_percentiles) for case in cases)
    return Document("comparison", "Comparison", sections, notes=(legend(cases, all_percentiles=all_percentiles),))


def section(title: str, groups: Sequence[Group], *, all_percentiles: bool = False) -> Section:
    """One row per policy. Gains are in throughput of the whole run over the baseline."""
    summaries = [summary for group in groups for summary in group.summaries]
    columns, rows = _by_policy(groups, groups, _figures(groups, all_percentiles=all_percentiles))
    if any(summary.metrics.completed < summary.metrics.planned for summary in summaries):
        columns = (*columns, Column(COMPLETED, "label", right=True))
        counts = [[(s.metrics.completed, s.metrics.planned) for s in group.summaries] for group in groups]
        rows = [(*row, _of_all(*of_runs)) for row, of_runs in zip(rows, counts, strict=True)]
    # The most goodput if limits were given, else the most output throughput; none if runs are not comparable.
    order = ranked(groups, request_goodput) or ranked(groups)
    comparable = len(order) > 1 and not differing(summaries) and all(summary.valid for summary in summaries)
    best = list(groups).index(order[0]) if comparable else None
    faulty = frozenset(place for place, group in enumerate(groups) if not group.valid)
    return Section(title, columns, tuple(rows), best, faulty)


def _by_policy(
    groups: Sequence[Group], of_case: Sequence[Group], figures: Sequence[_Figure]
) -> tuple[tuple[Column, ...], list[tuple[Value, ...]]]:
    """Columns and one row per policy: throughput, its gain over the baseline if the case has others, the figures."""
    # Policies are ranked by the throughput of prompts where answers have no tokens.
    baseline, leading = baseline_group(groups), _INPUT if without_tokens(of_case) else _OUTPUT
    several = len(of_case) > 1
    versus = [Column(f"vs\n{baseline_group(of_case).policy}", "change", key="gain")] if several else []
    columns = (Column("policy", "label", fold=True), leading.column(), *versus, *(f.column() for f in figures))
    rows: list[tuple[Value, ...]] = [
        (_marked(group), leading.cell(group), *([_gain(group, baseline, leading)] if several else []),
         *(figure.cell(group) for figure in figures))
        for group in groups
    ]  # fmt: skip
    return columns, rows


def _marked(group: Group) -> str:
    """The policy, with what its row's figures suffer from."""
    return group.policy + (ESTIMATED if group.estimated else "") + ("" if group.valid else INVALID)


def parts(case: ComparisonCase) -> list[Section]:
    """The tables of a case by phase, by class of requests and by session, as far as it has several of them."""
    return [section for section in (phases(case), classes(case), sessions(case)) if section is not None]


def phases(case: ComparisonCase) -> Section | None:
    """One row per phase and policy; None if the plan has one phase. Gains are over the case's baseline."""
    groups_by_phase = by_phase(case)
    if len(groups_by_phase) < 2:
        return None
    everything = [group for _, groups in groups_by_phase for group in groups]
    return _by_part("phase", case, groups_by_phase, {}, _figures(everything, all_percentiles=False))


def classes(case: ComparisonCase) -> Section | None:
    """One row per class of requests and policy; None without classes. Rates are over the whole run's duration."""
    groups_by_class = by_class(case)
    if not groups_by_class:
        return None
    everything = [group for _, groups in groups_by_class for group in groups]
    latencies = [
        figure
        for name in ("ttft", "tpot")
        for figure in (_median(name), *_tails(everything, name, all_percentiles=False))
    ]
    limits = _LIMITS if any(summary.slo for group in everything for summary in group.summaries) else ()
    priorities = case.summaries[0].load.priorities
    shown = [(named(name), groups) for name, groups in groups_by_class]
    return _by_part("class", case, shown, priorities, [_PLANNED, *limits, *latencies, _median("e2el"), _REQUESTS])


def _by_part(
    kind: str,
    case: ComparisonCase,
    groups_by_name: Sequence[tuple[str, Sequence[Group]]],
    priorities: Mapping[str, int],
    figures: Sequence[_Figure],
) -> Section:
    """One row per part and policy; no gains if there is one policy."""
    rows: list[tuple[Value, ...]] = []
    for name, groups in groups_by_name:
        columns, of_part = _by_policy(groups, case.groups, figures)
        rows += [(name, *([str(priorities.get(name, 0))] if priorities else []), *row) for row in of_part]
    priority = [Column("priority", "label", right=True)] if priorities else []
    return Section(_titled(kind, case), (Column(kind, "label", fold=True), *priority, *columns), tuple(rows))


def _titled(kind: str, case: ComparisonCase) -> str:
    return f"By {kind}{f': {case.title}' if case.title else ''}"


_INTERACTIVITY = "interactivity_tokens_per_s"
_OF_SESSIONS: tuple[tuple[Column, Callable[[SessionFigures], float | None]], ...] = (
    (Column("time\nmedian", show=numbers.duration_ms, key="median_completion_ms"), lambda s: s.completion.median),
    (Column("time\np90", show=numbers.duration_ms, key="p90_completion_ms"), lambda s: s.completion.p90),
    (Column("in the\nmodel", show=numbers.percent, key="model_share"), lambda s: s.model_share),
    (Column("with\ntools", show=numbers.percent, key="tool_share"), lambda s: s.tool_share),
    (Column("with\nusers", show=numbers.percent, key="think_share"), lambda s: s.think_share),
    (Column("wait\nmedian", show=numbers.duration_ms, key="median_wait_ms"), lambda s: s.wait.median),
    (Column("turns\nmean", show=numbers.rate, key="mean_turns"), lambda s: s.mean_turns),
    (Column("in tok\nmean", show=numbers.rate, key="mean_input_tokens"), lambda s: s.mean_input_tokens),
    (Column("out tok\nmean", show=numbers.rate, key="mean_output_tokens"), lambda s: s.mean_output_tokens),
    (
        Column("tok/s end\nto end", show=numbers.rate, key=_INTERACTIVITY),
        lambda s: s.interactivity_tokens_per_s,
    ),
)


def sessions(case: ComparisonCase) -> Section | None:
    """One row per policy, and per class and policy if there are classes; None if every session is one request."""
    groups_by_class = [("all", case.groups), *((named(name), groups) for name, groups in by_class(case) if name)]
    told_apart = any(summary.sessions[""].tool.count for summary in case.summaries if summary.sessions)
    shown = [pair for pair in _OF_SESSIONS if told_apart or pair[0].key not in ("tool_share", "think_share")]
    rows: list[tuple[Value, ...]] = [
        (name, _marked(group), _of_all(*((s.sessions[""].complete, s.sessions[""].planned) for s in group.summaries)),
         *(_of_sessions(group, figure) for _, figure in shown))
        for name, groups in groups_by_class
        for group in groups
        if all(summary.sessions for summary in group.summaries)
    ]  # fmt: skip
    if not rows:
        return None
    by_name = len(groups_by_class) > 1
    columns = (*[Column("class", "label", fold=True)] * by_name, Column("policy", "label", fold=True),
               Column("sessions\ncomplete", "label", right=True), *(column for column, _ in shown))  # fmt: skip
    return Section(_titled("session", case), columns, tuple(row if by_name else row[1:] for row in rows))


def _of_sessions(group: Group, of: Callable[[SessionFigures], float | None]) -> MeanFigure:
    known = [value for summary in group.summaries if (value := of(summary.sessions[""])) is not None]
    if len(known) < len(group.summaries):
        return MeanFigure(None)
    return MeanFigure(fmean(known), stdev(known) if len(known) > 1 and not group.copies else None)


def _figures(groups: Sequence[Group], *, all_percentiles: bool) -> list[_Figure]:
    if tokenless := without_tokens(groups):
        figures = [_median("e2el"), *_tails(groups, "e2el", all_percentiles=all_percentiles), _REQUESTS]
    else:
        figures = _figures_of_tokens(groups, all_percentiles=all_percentiles)
    if any(summary.slo for group in groups for summary in group.summaries):
        figures += _LIMITS
    for shown, known in ((_COSTS, "price_per_hour"), (_ENERGY, "gpu_energy_j")):
        economies = [summary.metrics.economy for group in groups for summary in group.summaries]
        if any(getattr(economy, known) is not None for economy in economies):
            figures += shown
    return [figure for figure in figures if not (tokenless and figure in _PER_TOKEN)]


def _figures_of_tokens(groups: Sequence[Group], *, all_percentiles: bool) -> list[_Figure]:
    figures = [_STEADY]
    for name in ("ttft", "tpot"):
        figures += [_median(name), *_tails(groups, name, all_percentiles=all_percentiles)]
    if any(summary.metrics.ttfat.count for group in groups for summary in group.summaries):
        figures += [_median("ttfat"), *_tails(groups, "ttfat", all_percentiles=all_percentiles)]
    figures += _tails(groups, "itl", all_percentiles=all_percentiles)
    figures.append(_median("e2el"))
    if all_percentiles:
        figures += _tails(groups, "e2el", all_percentiles=True)
    if any(summary.drafted for group in groups for summary in group.summaries):
        figures.append(_DRAFTED)
    return [*figures, _USER, _INPUT, _REQUESTS]


def _median(latency: str) -> _Figure:
    median = attrgetter(f"{latency}.median")
    return _Figure(f"{latency.upper()}\nmedian", f"median_{latency}_ms", median, numbers.duration_ms)


def _tails(groups: Sequence[Group], latency: str, *, all_percentiles: bool) -> list[_Figure]:
    """The highest percentile that every run has enough samples for; if there is none, p99 as a dash."""
    names = QUANTILES if all_percentiles else (sound_percentile(groups, latency) or "p99",)

    def of(name: str) -> Figure:
        whole = attrgetter(latency)
        return (lambda metrics: whole(metrics).estimate(name)) if all_percentiles else attrgetter(f"{latency}.{name}")

    return [
        _Figure(f"{latency.upper()}\n{name}", f"{name}_{latency}_ms", of(name), numbers.duration_ms,
                partial(_too_few, latency=latency, name=name))
        for name in names
    ]  # fmt: skip


def sound_percentile(groups: Sequence[Group], latency: str) -> str | None:
    """The highest of p90, p95 and p99 that all runs have enough samples for, ignoring runs without samples."""
    names = [name for name in QUANTILES if not _too_few(groups, latency, name)]
    return names[-1] if names else None


def _too_few(groups: Sequence[Group], latency: str, name: str) -> bool:
    all_of_it = [getattr(summary.metrics, latency) for group in groups for summary in group.summaries]
    sampled: list[Distribution] = [distribution for distribution in all_of_it if distribution.count]
    return not sampled or any(getattr(distribution, name) is None for distribution in sampled)


def _gain(group: Group, baseline: Group, figure: _Figure) -> Value:
    gain_over = None if group is baseline else gain(group, baseline, figure.of)
    return None if gain_over is None else MeanFigure(gain_over.mean, gain_over.spread)


def _of_all(*runs: tuple[int, int]) -> str:
    done, planned = map(sum, zip(*runs, strict=True))
    return f"{done:,} of {planned:,}"


def legend(cases: Sequence[ComparisonCase], *, all_percentiles: bool = False) -> str:
    """The meaning of the columns in one paragraph."""
    parts = []
    several = [group for case in cases for group in case.groups if len(group.summaries) > 1]
    if several:  # what the means cover: seeds, since runs of one seed are measurements of their own
        runs = sorted({len(group.summaries) for group in several})
        counted = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
        copies = all(group.copies for group in several)
        agree = f"{counted} repeats that agree in every figure: no spread"
        parts.append(agree if copies else f"mean ± standard deviation over {counted} seeds")
    parts.append("whole run: first intended start to last completion")
    tokenless = all(without_tokens(case.groups) for case in cases)
    if tokenless:
        parts.append("E2EL counts from the intended start")
    else:
        parts += ["steady: only while the load is at its target", "TTFT and E2EL count from the intended start"]
        parts.append("per user: 1 / median TPOT")
    if any(summary.sessions for case in cases for summary in case.summaries):
        parts.append(
            "session time: intended start to its last token; in the model: while a request of it is open, wait: the "
            "rest, of tools and users, where the plan says which; tok/s end to end: output tokens / sum of E2EL"
        )
    if any(summary.drafted for case in cases for group in case.groups for summary in group.summaries):
        parts.append(
            "per step: tokens that a decode step with drafts yields per sequence, the accepted ones and one more"
        )
    groups = [group for case in cases for group in case.groups]
    tails = _TAILS[3:] if tokenless else _TAILS[:3]
    lowered = [latency.upper() for latency in tails if sound_percentile(groups, latency) in ("p90", "p95")]
    if all_percentiles:
        parts.append("?: too few samples for this percentile, do not rely on it")
    elif lowered:
        parts.append(
            f"{', '.join(lowered)}: the highest percentile that every run has samples enough for "
            "(--all-percentiles shows the others)"
        )
    return f"{'; '.join([*parts, '–: undefined or too few samples'])}."


def framed(*columns: table.Column, right: Iterable[str] = ()) -> table.Table:
    """An empty table in the common style; ``right``: headings of figures, after the other columns."""
    figures = (table.Column(header, justify="right", no_wrap=True) for header in right)
    return table.Table(*columns, *figures, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def plain_table(
    *columns: str, whole: int = 1, right: Collection[str] = (), overflow: OverflowMethod = "ellipsis"
) -> table.Table:
    """An empty table without lines. The first ``whole`` columns are never wrapped; ``right``: headings of figures."""
    headings = (
        table.Column(name, justify="right" if name in right else "left", no_wrap=place < whole, overflow=overflow)
        for place, name in enumerate(columns)
    )
    return table.Table(*headings, box=None, padding=(0, 2, 0, 0), pad_edge=False)
