"""A run under the definitions of other tools, side by side, with where they differ and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import convert

from ebbench.analysis.documents import Column, Document, Section
from ebbench.analysis.other_tools import LATENCIES, STATISTICS, TOOLS, RunAs
from ebbench.foreign.documents import read_toml

_RATES = {
    "output_throughput": "output tokens/s", "request_throughput": "requests/s",
    "request_goodput": "goodput, requests/s", "duration_s": "duration, s",
}  # fmt: skip
_UNLIKE = 0.005
"""Share by which a figure must differ before the reason is told."""


def document(runs: Sequence[RunAs]) -> Document:
    """One section per run: ebbench's own figures and those of each tool."""
    sections = tuple(_section(run) for run in runs)
    tools = runs[0].tools
    versions = ", ".join(f"{tool} {TOOLS[tool].version}" for tool in tools)
    notes = [
        f"By the definitions of {versions}; –: no such figure; p99 as the tools print it, however few the answers."
    ]
    if any(TOOLS[tool].steps for tool in tools):
        notes.append("Medians and p99 of guidellm are values that occurred, not interpolated ones.")
    definitions = convert(read_toml(Path(__file__).with_name("other_tools.toml")), dict[str, dict[str, str]])
    for figure, reasons in definitions.items():
        unlike = [tool for tool in tools if any(_differs(figure, run, tool) for run in runs)]
        notes += _difference_line(figure, unlike, reasons, len(tools))
    return Document("as", "The same run by the definitions of other tools", sections, tuple(notes))


def _section(run: RunAs) -> Section:
    own, tools = run.own, run.tools
    others = (Column(tool.replace("-", "-\n"), key=tool) for tool in tools)
    columns = (Column("", "label", key="figure"), Column("ebbench", ours=True), *others)
    named = {
        **{f"{s}_{name}_ms": f"{text} {s}, ms" for name, text in LATENCIES.items() for s in STATISTICS}, **_RATES
    }  # fmt: skip
    rows = tuple(
        (text, own.get(key), *(figures.get(key) for figures in tools.values()))
        for key, text in named.items()
        if key != "request_goodput" or own.get(key) is not None
    )
    return Section(f"{run.policy}, seed {run.seed}: {run.run_dir}", columns, rows)


def _differs(figure: str, run: RunAs, tool: str) -> bool:
    own, theirs = run.own, run.tools[tool]
    keys = [figure] if figure in own else [f"{statistic}_{figure}_ms" for statistic in STATISTICS]
    pairs = [(own.get(key), theirs.get(key)) for key in keys]
    return any(a is not None and b is not None and abs(a - b) > _UNLIKE * max(abs(a), abs(b)) for a, b in pairs)


def _difference_line(figure: str, tools: Sequence[str], reasons: Mapping[str, str], shown: int) -> list[str]:
    """One line: each reason with the tools that have it, of so many ``shown``."""
    by_reason: dict[str, list[str]] = {}
    for tool in tools:
        if tool in reasons:
            by_reason.setdefault(reasons[tool], []).append(tool)
    if not by_reason:
        return []
    name = LATENCIES.get(figure) or _RATES[figure].partition(",")[0]
    explained = "; ".join(
        f"{'all others' if len(names) == shown > 1 else ', '.join(names)}: {reason}"
        for reason, names in by_reason.items()
    )
    return [f"{name} (ebbench: {reasons['ebbench']}). {explained}."]
