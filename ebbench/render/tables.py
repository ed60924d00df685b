"""Summaries as rich tables. Pure: no reading, no printing; the width decides how much is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from ebbench.analysis.compare.policies import (
    Group,
    baseline_of,
    differing,
    gain,
    group_by_policy,
    output_throughput,
    ranked,
    request_goodput,
    steady_throughput,
)
from ebbench.analysis.metrics import Metrics
from ebbench.analysis.summary import Summary
from ebbench.render import numbers

WIDE = 104
POLICY_WIDTH = 22


@dataclass(frozen=True)
class _Column:
    header: str
    figure: Callable[[Metrics], float | None]
    show: Callable[[float | None], str]
    wide: bool = False


_COLUMNS = (
    _Column("out tok/s\nsteady", steady_throughput, numbers.rate),
    _Column("req/s\nwhole", lambda m: m.request_throughput, numbers.rate, wide=True),
    _Column("TTFT\nmedian", lambda m: m.ttft.median, numbers.duration_ms),
    _Column("TTFT\np99", lambda m: m.ttft.p99, numbers.duration_ms),
    _Column("TPOT\nmedian", lambda m: m.tpot.median, numbers.duration_ms),
    _Column("TPOT\np99", lambda m: m.tpot.p99, numbers.duration_ms),
    _Column("ITL\np99", lambda m: m.itl.p99, numbers.duration_ms, wide=True),
    _Column("E2EL\nmedian", lambda m: m.e2el.median, numbers.duration_ms, wide=True),
)
_PHASE_HEADERS = ("out tok/s\nsteady", "TTFT\nmedian", "TPOT\nmedian")
_SLO_COLUMNS = (
    _Column("goodput\nreq/s", request_goodput, numbers.rate),
    _Column("SLO\nmet", lambda m: m.slo_attainment, numbers.percent),
)


def comparison_table(groups: Sequence[Group], *, width: int, title: str = "") -> Table:
    """One row a policy. Throughput is that of the whole run, compared with the baseline's."""
    baseline = baseline_of(groups)
    table = framed(title)
    table.add_column("policy", max_width=POLICY_WIDTH, overflow="fold")
    table.add_column("out tok/s\nwhole", justify="right", no_wrap=True)
    several = len(groups) > 1
    if several:
        table.add_column(Text(f"vs\n{_short(baseline.policy)}"), justify="right", no_wrap=True)
    columns = _chosen_columns(groups, width)
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    best = _best(groups)
    for group in groups:
        cells: list[Text | str] = [_name(group), _cell(group, output_throughput, numbers.rate)]
        if several:
            cells.append(_gain_cell(group, baseline))
        cells += [_cell(group, column.figure, column.show) for column in columns]
        table.add_row(*cells, style="bold" if group is best else None)
    return table


def phase_table(phases: Sequence[Summary]) -> Table:
    """One row a phase and policy. ``phases`` holds a summary for each phase of each run."""
    table = framed("By phase")
    table.add_column("phase", max_width=POLICY_WIDTH, overflow="fold")
    table.add_column("policy", max_width=POLICY_WIDTH, overflow="fold")
    columns = [_Column("out tok/s\nwhole", output_throughput, numbers.rate)]
    columns += [column for column in _COLUMNS if column.header in _PHASE_HEADERS]
    for header in ("completed", *(column.header for column in columns), "vs\nfirst"):
        table.add_column(header, justify="right", no_wrap=True)
    for name in dict.fromkeys(summary.phase for summary in phases):
        groups = group_by_policy([summary for summary in phases if summary.phase == name], [])
        for group in groups:
            cells = [_cell(group, lambda m: m.completed, numbers.count, spread=False)]
            cells += [_cell(group, column.figure, column.show) for column in columns]
            label = Text(name if group is groups[0] else "")
            table.add_row(label, Text(group.policy), *cells, _gain_cell(group, groups[0]))
        table.add_section()
    return table


def framed(title: str = "") -> Table:
    """An empty table as all of them look."""
    return Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def _chosen_columns(groups: Sequence[Group], width: int) -> list[_Column]:
    slo = any(summary.slo for group in groups for summary in group.summaries)
    shown = [column for column in _COLUMNS if width >= WIDE or not column.wide]
    if slo and width < WIDE:
        shown = [column for column in shown if not column.header.endswith("p99")]
    return shown + (list(_SLO_COLUMNS) if slo else [])


def _best(groups: Sequence[Group]) -> Group | None:
    """The policy with the most goodput where limits were given, else with the most output throughput; none where runs
    do not compare."""
    summaries = [summary for group in groups for summary in group.summaries]
    if differing(summaries) or not all(summary.valid for summary in summaries):
        return None
    order = ranked(groups, request_goodput) or ranked(groups)
    return order[0] if len(order) > 1 else None


def _name(group: Group) -> Text:
    text = Text(group.policy)
    if not group.valid:
        text.append(" INVALID", style="bold red")
    return text


def _cell(
    group: Group,
    figure: Callable[[Metrics], float | None],
    show: Callable[[float | None], str],
    *,
    spread: bool = True,
) -> str:
    deviation = group.spread(figure) if spread else None
    shown = show(group.mean(figure))
    return shown if deviation is None else f"{shown}\n±{show(deviation)}"


def _gain_cell(group: Group, baseline: Group) -> str:
    if group is baseline:
        return numbers.DASH
    found = gain(group, baseline)
    if found is None:
        return numbers.DASH
    shown = numbers.change(found.mean)
    return shown if found.spread is None else f"{shown}\n±{numbers.percent(found.spread)}"


def _short(policy: str) -> str:
    return policy if len(policy) <= 10 else policy[:9] + "…"
