"""A paired comparison as console text and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ebbench.analysis.compare.paired import ALPHA, Comparison, Contestant, Contrast, pairs_needed
from ebbench.analysis.gate.units import HIGHER_IS_BETTER, LABELS
from ebbench.analysis.gate.verdict import COPIES
from ebbench.render import numbers
from ebbench.report import page_tables

POLICY_WIDTH = 14


def console(comparison: Comparison) -> RenderableType:
    """One row a policy and figure."""
    first = comparison.units[0].environment
    parts: list[RenderableType] = []
    for contestant in comparison.contestants:
        parts += [
            Text(),
            Text(f"{contestant.label} against {comparison.baseline}", style="bold"),
            _console_table(contestant, comparison.baseline),
        ]
    head = f"{first['model']} on {first['device']}, engine {first['engine']}, {first['workload']} ({first['scenario']})"
    return Group(
        Text(head, style="bold"),
        *parts,
        Text(_legend(comparison), style="dim"),
    )


def _console_table(contestant: Contestant, baseline: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("figure", no_wrap=True)
    for policy in (baseline, contestant.label):
        table.add_column(Text(policy), justify="right", max_width=POLICY_WIDTH, overflow="fold")
    for header in ("change", "95 % interval", "p"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for contrast in contestant.contrasts:
        table.add_row(*_cells(contrast))
    return table


def _cells(contrast: Contrast) -> list[str]:
    show = numbers.duration_ms if contrast.figure.endswith("_ms") else numbers.rate
    return [
        LABELS[contrast.figure],
        show(contrast.baseline),
        show(contrast.value),
        numbers.change(contrast.change),
        _interval(contrast),
        numbers.DASH if contrast.p_adjusted is None else f"{contrast.p_adjusted:.3f}",
        verdict(contrast),
    ]


def _interval(contrast: Contrast) -> str:
    if contrast.low is None or contrast.high is None:
        return numbers.DASH
    return f"{numbers.change(contrast.low).removesuffix(' %')} to {numbers.change(contrast.high)}"


def verdict(contrast: Contrast) -> str:
    """``better``, ``worse`` or ``not shown``; nothing without a test."""
    if contrast.p_adjusted is None:
        return ""
    if contrast.p_adjusted > ALPHA or contrast.change == 0:
        return "not shown"
    return "better" if (contrast.change > 0) == (contrast.figure in HIGHER_IS_BETTER) else "worse"


def _legend(comparison: Comparison) -> str:
    pairs = max(len(contestant.pairs) for contestant in comparison.contestants)
    text = f"{pairs} {'pair' if pairs == 1 else 'pairs'} by plan; change: geometric mean over the pairs"
    text += "".join(f"; {line}" for line in _left_out(comparison))
    needed = pairs_needed(comparison)
    if copies := max(sum(pair.copies for pair in contestant.pairs) for contestant in comparison.contestants):
        text += f"; {copies} {COPIES}"
        if pairs < needed:
            return f"{text}. {pairs} {'pair says' if pairs == 1 else 'pairs say'} nothing about chance."
    if pairs < 2:
        return f"{text}. One pair says nothing about chance: use --repeats {needed} or more."
    text += "; p: exact sign-flip, two-sided, Holm over throughput and medians of all policies"
    if pairs < needed:
        return f"{text}. With {pairs} pairs no difference can be shown at all: use --repeats {needed} or more."
    return f"{text}. Minimum detectable change: {'; '.join(_detectable_of(c) for c in comparison.contestants)}."


def _left_out(comparison: Comparison) -> list[str]:
    """Figures that were not compared, and why."""
    return [
        f"{LABELS[figure]} left out for {each.label}: {why}"
        for each in comparison.contestants
        for figure, why in each.skipped.items()
    ]


def _detectable_of(contestant: Contestant) -> str:
    known = [
        f"{LABELS[contrast.figure]} {100 * contrast.detectable:.1f} %"
        for contrast in contestant.contrasts
        if contrast.detectable is not None
    ]
    return f"{contestant.label} {', '.join(known) or 'none'}"


def table(comparison: Comparison) -> page_tables.Table:
    """The comparison as a table of the HTML page."""
    headers = ("policy", "figure", comparison.baseline, "this policy", "change", "95 % interval", "p", "")
    rows = [
        (page_tables.Cell(contestant.label, contestant.label), *_sortable(contrast))
        for contestant in comparison.contestants
        for contrast in contestant.contrasts
    ]
    return page_tables.Table(f"Paired with {comparison.baseline}", headers, tuple(rows), _legend(comparison))


def _sortable(contrast: Contrast) -> list[page_tables.Cell]:
    values = (
        contrast.figure,
        contrast.baseline,
        contrast.value,
        contrast.change,
        contrast.low,
        contrast.p_adjusted,
        "",
    )
    return [page_tables.Cell(text, value) for text, value in zip(_cells(contrast), values, strict=True)]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """One JSON object."""
    return {
        "baseline": comparison.baseline,
        "environment": dict(comparison.units[0].environment),
        "contestants": [
            {
                "policy": contestant.label,
                "pairs": [
                    {"seed": pair.baseline.seed, "baseline": pair.baseline.run, "candidate": pair.candidate.run}
                    for pair in contestant.pairs
                ],
                "figures": [asdict(contrast) | {"verdict": verdict(contrast)} for contrast in contestant.contrasts],
                "skipped": dict(contestant.skipped),
                "copies": sum(pair.copies for pair in contestant.pairs),
            }
            for contestant in comparison.contestants
        ],
    }
