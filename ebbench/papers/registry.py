"""All tables and figures by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbench.analysis.documents import Column, Document, Section, labels
from ebbench.errors import UnknownNameError, UsageError
from ebbench.papers.composition import COMPOSITION
from ebbench.papers.deferred_prefill import DEFERRED, DEFERRED_COSTS, DEFERRED_LIMITS, DEFERRED_OVER_K
from ebbench.papers.eb.disaggregation import TABLE19, TABLE20
from ebbench.papers.eb.fluid import TABLE8
from ebbench.papers.eb.lengths import FIGURE11, TABLE9, TABLE12
from ebbench.papers.eb.prefill_costs import FIGURE7, LONG_CONTEXT, TABLE5, TABLE6, TABLE7
from ebbench.papers.eb.shifts import ADAPTATION, TABLE3, TABLE18, TPOT_MS, TTFT_S
from ebbench.papers.eb.step_times import FIGURE1, FIGURE2, FIGURE8, FIGURE9, FIGURE10, KAPPA, TABLE1
from ebbench.papers.eb.thresholds import CORRECTION, E3, E5, FIGURE3, FIGURE12, TABLE10, TABLE11, TABLE13
from ebbench.papers.eb.workloads import FIGURE4, FIGURE5, FIGURE6, TABLE2, TABLE4, TABLE14, TABLE15, TABLE16, TABLE17
from ebbench.papers.options import PaperOptions
from ebbench.papers.staggered import ABLATION, POOLS, SBS_FIGURE6, SBS_FIGURE7, SBS_TABLE1, WAITING
from ebbench.papers.table import PAPERS, PaperFigure, PaperTable, PaperTexts, no_runs, one_line, paper_texts
from ebbench.runs.stored import runs_meant

# Every numbered table and figure of the papers, and what they claim in numbers: where it is in ebbench.
#
# What we saw is written by hand, from the committed reports; the tests check that no number is left out and that every
# command exists.


def _items(texts: PaperTexts) -> Section:
    columns = (*labels("item"), *(Column(name, "label", fold=True) for name in ("shows", "command")),
               *labels("agreement"), Column("what we saw", "label", fold=True), *labels("checked"))  # fmt: skip
    rows = tuple(
        (item.name, item.shows, f"ebbench {item.command}" if item.command else "–", item.agreement,
         one_line(item.remark), item.checked.isoformat())
        for item in texts.items
    )  # fmt: skip
    return Section(texts.paper, columns, rows)


INDEX = PaperTable(
    "papers", (), lambda _options, _store: [_items(paper_texts(paper)) for paper in PAPERS], runs=no_runs
)

FIGURES: tuple[PaperFigure, ...] = (
    FIGURE1, FIGURE2, FIGURE3, FIGURE4, FIGURE5, FIGURE6, FIGURE7, FIGURE8, FIGURE9, FIGURE10, FIGURE11, FIGURE12,
)  # fmt: skip


FIGURES_OF_RUNS = ("timeline", "slo")
"""Figures of the user's own runs."""


def listed_tables() -> dict[str, str]:
    """What ``ebbench tables list`` shows, by name."""
    return {table.name: table.title for table in TABLES} | {
        "phases": "your own runs by phase, with recovery times (--from RUN)",
        "slo": "attainment of your own runs over TTFT and TPOT targets (--from RUN)",
    }


def listed_figures() -> dict[str, str]:
    """What ``ebbench figures list`` shows, by name."""
    return {figure.name: figure.title for figure in FIGURES} | {
        "timeline": "any run with recorded steps: ebbench figures timeline RUN",
        "slo": "attainment of any run over TTFT and TPOT targets: ebbench figures slo RUN",
    }


def document_of_runs(name: str, runs: Sequence[Path], options: PaperOptions, *, by_phase: bool) -> Document:
    """A table of the user's own runs. Raises UsageError without runs."""
    from ebbench.analysis.phases import attainment_document, load_runs, phases_document

    if not runs:
        raise UsageError(f"`ebbench tables {name}` needs runs: give one or more with --from")
    loaded = load_runs(runs_meant(runs))
    if name == "phases":
        return phases_document(loaded)
    limits_ms = [1e3 * limit_s for limit_s in options.ttft_s or TTFT_S]
    return attainment_document(loaded, limits_ms, options.tpot_ms or TPOT_MS, by_phase=by_phase)


def charts_of_runs(name: str, runs: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Figures of the user's own runs: name of the file without its suffix, and chart. Raises UsageError for no runs."""
    from ebbench.analysis.phases import load_runs
    from ebbench.records.run import slug
    from ebbench.render.figures import surface_chart
    from ebbench.render.timeline import make_timeline, timeline_chart

    if not runs:
        raise UsageError(f"`ebbench figures {name}` needs a run: ebbench figures {name} RUN")
    for loaded in load_runs(runs_meant(runs)):
        chart = timeline_chart(make_timeline(loaded)) if name == "timeline" else surface_chart(loaded)
        yield f"{name}-{slug(loaded.path.name)}", chart


def find_figure(name: str) -> PaperFigure:
    """A figure by name: ``figure3``, ``figure-3``, ``fig3`` or ``3``. Raises UnknownNameError."""
    wanted = name.lower().replace("-", "").replace("_", "").removeprefix("figure").removeprefix("fig")
    for figure in FIGURES:
        if figure.name.removeprefix("figure") == wanted:
            return figure
    raise UnknownNameError("figure", name, [*(figure.name for figure in FIGURES), *FIGURES_OF_RUNS])


TABLES: tuple[PaperTable, ...] = (
    TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8, TABLE9, TABLE10, TABLE11, TABLE12, TABLE13,
    TABLE14, TABLE15, TABLE16, TABLE17, TABLE18, TABLE19, TABLE20, KAPPA, ADAPTATION, CORRECTION, LONG_CONTEXT,
    DEFERRED, DEFERRED_COSTS, DEFERRED_LIMITS, DEFERRED_OVER_K, E3, E5, WAITING, SBS_FIGURE6, SBS_TABLE1, ABLATION,
    POOLS, SBS_FIGURE7, COMPOSITION, INDEX,
)  # fmt: skip


OF_RUNS: Mapping[str, tuple[str, ...]] = {"phases": (), "slo": ("ttft", "tpot", "by_phase")}
"""Tables of the user's own runs, and the options that they read."""


def find_table(name: str) -> PaperTable:
    """A table by name: ``table3``, ``table-3`` or ``3``. Raises UnknownNameError, and UsageError for a number that
    several papers have."""
    wanted, meant = name.lower().replace("-", "").replace("_", "").replace(" ", ""), []
    for table in TABLES:
        names = (table.name, table.name.removeprefix("table"), *table.aliases)
        meant += [table] if wanted in {known.replace("-", "") for known in names} else []
    if len(meant) > 1:
        raise UsageError(f"{name} is a table of several papers; name one: {', '.join(table.name for table in meant)}")
    if meant:
        return meant[0]
    raise UnknownNameError("table", name, [*(table.name for table in TABLES), *OF_RUNS])
