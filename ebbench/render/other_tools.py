"""A run under the definitions of other tools, side by side, with where they differ and why."""

from __future__ import annotations

from collections.abc import Sequence

from ebbench.analysis.documents import Column, Document, Section
from ebbench.analysis.other_tools import LATENCIES, RATES, STATISTICS, TOOLS, RunAs
from ebbench.foreign.documents import texts_beside
from ebbench.grouping import by_key

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
    for figure, reasons in texts_beside(__file__).items():
        unlike = (tool for tool in tools if tool in reasons and any(_differs(figure, run, tool) for run in runs))
        by_reason = by_key((reasons[tool], tool) for tool in unlike)
        explained = "; ".join(
            f"{'all others' if len(names) == len(tools) > 1 else ', '.join(names)}: {reason}"
            for reason, names in by_reason.items()
        )
        name = LATENCIES.get(figure) or RATES[figure].partition(",")[0]
        notes += [f"{name} (ebbench: {reasons['ebbench']}). {explained}."] if explained else []
    return Document("as", "The same run by the definitions of other tools", sections, tuple(notes))


def _section(run: RunAs) -> Section:
    own, tools = run.own, run.tools
    others = (Column(tool.replace("-", "-\n"), key=tool) for tool in tools)
    columns = (Column("", "label", key="figure"), Column("ebbench", ours=True), *others)
    named = {
        **{f"{s}_{name}_ms": f"{text} {s}, ms" for name, text in LATENCIES.items() for s in STATISTICS}, **RATES
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
