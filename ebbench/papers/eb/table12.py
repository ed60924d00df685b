"""Table 12 of the EB paper (appendix E.4): tests of the hazard's trend on real workloads. It needs no runs."""

from __future__ import annotations

from ebbench.analysis.documents import Column, Document, Section, Value, labels
from ebbench.hazard.trend import analyse_lengths
from ebbench.papers.published import EB_PAPER, WORKLOADS
from ebbench.papers.table import PaperOptions, PaperTable
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

SAMPLES = {"sharegpt": 4000, "numinamath": 4000, "wildchat": 3000}
"""Printed n by workload; WildChat's counts conversations."""


def _cells(options: PaperOptions) -> list[RunSpec]:
    return []


def _probability(value: float) -> str:
    return f"{value:.1e}" if value < 1e-3 else f"{value:.3f}"


def _row(options: PaperOptions, workload: str) -> tuple[Value, ...]:
    from ebbench.workloads import build_plan

    plan = build_plan(workload, source=options.source, num_prompts=options.num_prompts, with_text=False)
    hazard = analyse_lengths(plan.table["output_tokens"].to_numpy())
    head = (WORKLOADS.get(workload, workload), str(plan.facts.get("source", "")), SAMPLES.get(workload), hazard.samples)
    tests = hazard.tests
    if tests is None:
        return (*head, None, None, None, None, None, hazard.untested)
    word = "rising" if tests.rising else tests.verdict.split(" (")[0].split(":")[0]
    figures = (tests.t_max, tests.tau, tests.mann_kendall_p, 1e6 * tests.slope, tests.regression_p)
    return (*head, *figures, word)


def _document(options: PaperOptions, store: RunStore) -> Document:
    columns: tuple[Column, ...] = (
        *labels("workload", "source"), Column("n printed"), Column("answers", ours=True), Column("up to t", ours=True),
        Column("tau", group="Mann-Kendall", ours=True, show=lambda tau: f"{tau:+.2f}"),
        Column("p", group="Mann-Kendall", ours=True, show=_probability),
        Column("slope, 1e-6", group="regression", ours=True, show=lambda slope: f"{slope:+.2f}"),
        Column("p", group="regression", ours=True, show=_probability), Column("hazard", "label", ours=True),
    )  # fmt: skip
    rows = tuple(_row(options, workload) for workload in options.workloads or tuple(SAMPLES))
    notes = (
        f"Published: {EB_PAPER}, table 12: both tests find a rising hazard (IFR) on all three; its p-values are not "
        "legible in our copy.",
        "From length profiles this shows nothing about the data sets: the profiles are gamma distributions whose shape "
        "follows from table 9's mean and deviation, so a rising hazard was put in. --source hub tests the data sets, "
        "--workload NAME --source file:PATH a copy of one.",
        "Up to the 95th percentile, or the limit at which answers were cut if that is lower.",
    )
    return Document("table12", "Table 12: tests of the completion hazard", (Section("", columns, rows),), notes)


TABLE12 = PaperTable("table12", "trend tests of the hazard", _cells, _document, ("workload", "num_prompts", "source"))
