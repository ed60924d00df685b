"""Writes the results of :mod:`ebbench.papers.fidelity.runs` as Markdown, Parquet and pictures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ebbench.analysis.documents import Column, Section, Value, labels
from ebbench.devices.profiles import find_profile, list_devices
from ebbench.errors import InputFileError
from ebbench.grouping import by_key
from ebbench.papers.fidelity import scoreboard
from ebbench.papers.fidelity.cases import WITHOUT, all_cases, engine_alone
from ebbench.papers.fidelity.cases_capacity import capacity_cells
from ebbench.papers.fidelity.cases_iog import iog_cells
from ebbench.papers.fidelity.cases_kv import kv_cells
from ebbench.papers.fidelity.cases_steps import step_cells
from ebbench.papers.fidelity.pages import PAGES, TEXTS, Page, is_variant, pictures, source_page
from ebbench.papers.fidelity.runs import calibration_cells, cells_of, replay_cells, runs_of_cases
from ebbench.papers.fidelity.scoreboard import FIGURES, Audited, Row
from ebbench.papers.fidelity.scores import (
    Decisions,
    PublishedFigure,
    Score,
    comparisons,
    decisions,
    replay_scores,
    scores,
)
from ebbench.papers.table import one_line
from ebbench.records import files
from ebbench.render.documents import section_lines
from ebbench.runs.store import RunStore, with_progress
from ebbench.spec.run import RunSpec

REPEATED = "table 3"  # single runs vary more than its differences, and its runs are short
# The tables of the fidelity report as sections of a document.


_SHARE, _SIGNED, _DIGITS = "{:.1%}".format, "{:+.1%}".format, "{:.4g}".format


def _or_none(value: float) -> float | None:
    """None for NaN: a run that ended without the figure."""
    return None if isnan(value) else value


def front(rows: Iterable[Row], before: Mapping[str, Row]) -> Section:
    """One row per source and device, with a link to the source's page and what was fitted on it."""
    columns = (*labels("source", "device", "fitted on it"), *_figures())
    lines = tuple(
        (
            f"[{row.source}]({source_page(row.source).slug}.md)",
            row.device,
            f"{source_page(row.source).constants} ({row.fitted} cells)" if row.fitted else "nothing",
            *_values(row, before),
        )
        for row in rows
    )
    return Section("", columns, lines)


def errors(rows: Iterable[Row], before: Mapping[str, Row]) -> Section:
    """One row per source and device of a page."""
    columns = (*labels("source", "device"), Column("fitted"), *_figures())
    return Section("", columns, tuple((row.source, row.device, row.fitted, *_values(row, before)) for row in rows))


def _figures() -> tuple[Column, ...]:
    return tuple(Column(name) for name in ("cells", *FIGURES, "direction right"))


def _values(row: Row, before: Mapping[str, Row]) -> tuple[Value, ...]:
    """A median that differs from ``before`` is followed by the old one in brackets."""
    old = before.get(row.key)
    figures = (_errors(row.errors.get(name), old.errors.get(name) if old else None) for name in FIGURES)
    return (row.count, *figures, "" if row.direction is None else f"{row.direction:.0%}")


def _errors(now: tuple[float, float] | None, before: tuple[float, float] | None) -> str:
    if now is None:
        return ""
    changed = before is not None and abs(now[0] - before[0]) >= 0.0005
    was = f" (was {before[0]:.1%})" if changed and before is not None else ""
    return f"{now[0]:.1%}{was}, {now[1]:.1%}"


def targets(groups: Mapping[str, Sequence[Score]]) -> Section:
    """The targets and whether they are met, per group of cells."""
    columns = (*labels("cells", "score", "target"), Column("reached", show=_SHARE), Column("count"), *labels("met"))
    rows = tuple(
        (name, score.name, score.target, score.reached, score.count, "yes" if score.met else "no")
        for name, reached in groups.items()
        for score in reached
    )
    return Section("", columns, rows)


def decided(groups: Mapping[str, Sequence[Decisions]]) -> Section:
    """How often a difference that we predict has the sign of the published one, per group of cells."""
    columns = (*labels("cells", "ours differ by more than"), Column("pairs"), Column("same direction in print"))
    rows = tuple(
        (name, f"{decision.gap:.0%}", decision.count, decision.right)
        for name, by_gap in groups.items()
        for decision in by_gap
        if decision.count
    )
    return Section("", columns, rows)


def constants() -> Section:
    """The constants of each device, with their source."""
    columns = (
        *labels("device"),
        Column("host per step", show=lambda value: f"{value * 1e3:.2f} ms"),
        Column("host per sequence", show=lambda value: f"{value * 1e6:.1f} us"),
        *labels("more with several GPUs"),
        Column("mixed excess x", show=lambda value: f"{value:.2f}"),
        *labels("source"),
    )
    rows = tuple(
        (
            f"{name} ({model})", host.step_s, host.sequence_s,
            f"{host.workers_step_s * 1e3:.2f} ms, {host.workers_sequence_s * 1e6:.1f} us"
            if host.workers_step_s or host.workers_sequence_s else "",
            host.mixed_excess, host.source,
        )
        for name in list_devices()
        for model, host in find_profile(name).host.items()
    )  # fmt: skip
    return Section("", columns, rows)


def published_and_ours(cells: Iterable[PublishedFigure]) -> Section:
    """One row per published figure, with ours."""
    columns = (
        *labels("device", "model", "case", "scheduler", "metric"),
        Column("published", show=_DIGITS),
        Column("ours", show=_DIGITS, ours=True),
        Column("error", show=_SIGNED),
        *labels(""),
    )
    rows = tuple(
        (
            cell.device, cell.model, cell.case, cell.scheduler, cell.metric,
            _or_none(cell.published), _or_none(cell.ours), _or_none(cell.error),
            "fitted" if cell.fitted else "" if cell.scored else f"unscored: {cell.note}",
        )
        for cell in cells
    )  # fmt: skip
    return Section("", columns, rows)


def gains(cells: Iterable[PublishedFigure]) -> Section:
    """One row per pair of schedulers: published gain, our gain, and whether the winner is the same."""
    columns = (
        *labels("device", "model", "case", "pair"),
        Column("published gain", show=_SIGNED),
        Column("our gain", show=_SIGNED, ours=True),
        *labels(""),
    )
    rows = []
    for pair in comparisons(cells):
        _, device, model, case = pair.row
        verdict = "too close" if not pair.decided else "same winner" if pair.same_winner else "**other winner**"
        name = f"{pair.second} over {pair.first}"
        rows.append((device, model, case, name, pair.published_gain, pair.our_gain, verdict))
    return Section("", columns, tuple(rows))


def step_times(cells: Iterable[PublishedFigure]) -> Section:
    """One row per device, model and kind of step; the Parquet file has the single cells."""
    errors = by_key(((cell.device, cell.model, cell.case.split()[0], cell.note), cell.error) for cell in cells)
    columns = (
        *labels("device", "model", "step"),
        *(Column(name, show=_SIGNED) for name in ("median error", "from", "to")),
        *labels(""),
    )
    rows = tuple(
        (device, model, kind, median(signed_errors), min(signed_errors), max(signed_errors), note)
        for (device, model, kind, note), signed_errors in errors.items()
    )
    return Section("", columns, rows)


def by_caveat(audit: Sequence[Audited]) -> Section:
    """One row per caveat, figure, source and device: errors of the figures that carry it; those without any last."""
    kinds = by_key(
        ((code, row.figure, row.cell.source.split(",")[0], row.cell.device), row)
        for row in audit
        for code in row.caveats or ("none",)
    )
    columns = (
        *labels("caveat", "figure", "source", "device"),
        Column("figures"),
        *(Column(name, show=_SIGNED) for name in ("median error", "from", "to")),
        *(Column(name) for name in ("said", "missing", "against")),
    )
    rows: list[tuple[Value, ...]] = []
    for kind, chosen in sorted(kinds.items(), key=lambda item: (item[0][0] == "none", item[0])):
        signed_errors = [row.cell.error for row in chosen]
        verdicts = [row.verdict for row in chosen]
        counts = (verdicts.count(name) for name in ("said", "missing", "against"))
        rows.append(
            (*kind, len(chosen), median(signed_errors), min(signed_errors), max(signed_errors), *counts)
        )  # fmt: skip
    return Section("", columns, tuple(rows))


def by_row(audit: Iterable[Audited]) -> Section:
    """One row per figure: error, caveats about it, verdict."""
    columns = (
        *labels("source", "device", "case", "figure"),
        Column("error", show=_SIGNED),
        *labels("caveats", "verdict"),
    )
    rows = tuple(
        (
            row.cell.source, row.cell.device, row.cell.case, row.figure, row.cell.error, ", ".join(row.caveats),
            row.verdict,
        )
        for row in audit
    )  # fmt: skip
    return Section("", columns, rows)


PAPER = ("table 2", "table 3", "table 13", "figure 3", "figure 5")
LATER = ("figure 4", "table 6", "authors' repetition")
"""Sources that were compared first on 2026-11-25. The targets of this report were set for ``PAPER`` alone."""
BOARD, CELLS, FRONT_PAGE, AUDIT_PAGE, NOTES = "scoreboard.json", "cells.parquet", "README.md", "caveats.md", "notes"


def write_report(
    cells: Sequence[PublishedFigure], out: Path, repeats: int = 1, before: Mapping[str, Row] | None = None
) -> list[Path]:
    """Write the front page, a page per source, scoreboard.json, cells.parquet and pictures. Returns the files written.

    Pages without cells, which an earlier report left, are removed.
    ``before``: the last committed scoreboard, for comparison. ``repeats``: number of seeds over which our values of
    table 3 are averaged. Raises DataError for a cell whose source has no page.
    """
    out.mkdir(parents=True, exist_ok=True)
    parquet = out / CELLS
    pq.write_table(pa.Table.from_pylist([{**asdict(cell), "error": cell.error} for cell in cells]), parquet)
    drawn = pictures(cells, out)
    rows = scoreboard.scoreboard(cells)
    scoreboard.save(rows, out / BOARD)
    front = out / FRONT_PAGE
    _write(front, _front_page(cells, rows, drawn, repeats, before or {}))
    written = [front, parquet, *drawn]
    if audit := scoreboard.audited(cells):
        _write(out / AUDIT_PAGE, _audit_page(audit))
        written.append(out / AUDIT_PAGE)
    else:
        (out / AUDIT_PAGE).unlink(missing_ok=True)
    for page in PAGES:
        path = out / f"{page.slug}.md"
        if chosen := [cell for cell in cells if source_page(cell.source) is page]:
            _write(path, _page(page, chosen, rows, before or {}, out))
            written.append(path)
        else:
            path.unlink(missing_ok=True)  # of an earlier report; its figures are no longer in cells.parquet
    return written


def read_cells(report: Path) -> list[PublishedFigure]:
    """The cells of a written report. Raises InputFileError if it does not exist."""
    parquet = report / CELLS
    if not parquet.is_file():
        raise InputFileError(parquet, "does not exist; write it with `ebbench fidelity`")
    names = [f.name for f in fields(PublishedFigure)]
    rows = pq.read_table(parquet).to_pylist()
    kept = ({name: row[name] for name in names if name in row} for row in rows)
    return [PublishedFigure(**{**row, "caveats": tuple(row.get("caveats") or ())}) for row in kept]


def merged_cells(kept: Sequence[PublishedFigure], made: Sequence[PublishedFigure]) -> list[PublishedFigure]:
    """The kept cells, with those of every source in ``made`` in the place of its kept ones; new sources at the end."""
    cells_by_source = by_key((cell.source, cell) for cell in made)
    replaced, merged = set(cells_by_source), list[PublishedFigure]()
    for cell in kept:
        merged += cells_by_source.pop(cell.source, []) if cell.source in replaced else [cell]
    return [*merged, *(cell for cells in cells_by_source.values() for cell in cells)]


def all_scores(cells: Sequence[PublishedFigure]) -> dict[str, list[Score]]:
    """Scores of the replayed run, and of the predicted cells, the fitted ones and both; without the API server too."""
    published = [cell for cell in cells if cell.source in PAPER]
    without = [cell for cell in cells if cell.source.endswith(WITHOUT) and cell.source.removesuffix(WITHOUT) in PAPER]
    return {
        "replayed run (nothing fitted)": replay_scores(cell for cell in cells if cell.source == "RTX 4090 run"),
        "predicted rows": scores([cell for cell in published if not cell.fitted]),
        "predicted rows, figure 4, table 6 and the repetition too": scores(
            [cell for cell in cells if cell.source in (*PAPER, *LATER) and not cell.fitted]
        ),
        "predicted rows, no API server": scores([cell for cell in without if not cell.fitted]),
        "fitted rows": scores([cell for cell in published if cell.fitted]),
        "all rows": scores(published),
    }


def _audit_page(audit: Sequence[Audited]) -> Iterator[str]:
    promised = ", ".join(f"{name} {100 * share:.0f} %" for name, share in scoreboard.PROMISED.items())
    verdicts = [row.verdict for row in audit]
    named = ", ".join(f"{verdicts.count(name)} {name}" for name in ("said", "missing", "against"))
    silent = [row for row in audit if not row.caveats]
    within = sum(not row.verdict for row in silent)
    counts = (
        f"{len(audit)} figures: {named}. Of the {len(silent)} without a caveat about them {within} are within what is "
        f"promised ({within / max(len(silent), 1):.0%})."
    )
    yield TEXTS.audit.format(promised=promised, counts=counts)
    yield from _lines(by_caveat(audit))
    yield "\n## By row\n"
    yield from _lines(by_row(audit))


def _front_page(
    cells: Sequence[PublishedFigure],
    rows: Sequence[Row],
    drawn: Iterable[Path],
    repeats: int,
    before: Mapping[str, Row],
) -> Iterator[str]:
    ours = f"means over {repeats} seeds" if repeats > 1 else "single runs"
    scatter = "a run of the distribution shift scatters by 1 to 2 %"
    draws = "means over three draws of IOG's and Systalyze's"
    yield TEXTS.introduction.format(runs=f"Ours are {ours} in table 3, {draws}, single runs elsewhere ({scatter}).")
    yield "## All sources\n"
    yield TEXTS.errors
    yield TEXTS.front_end
    yield from _lines(front([row for row in rows if not is_variant(row.source)], before))
    yield "\n## Targets\n"
    yield from _lines(targets(all_scores(cells)))
    yield "\n## Decisions\n"
    yield TEXTS.decisions
    compared = [cell for cell in cells if cell.source in (*PAPER, *LATER)]
    predicted = [cell for cell in compared if not cell.fitted]
    yield from _lines(decided({"predicted rows": decisions(predicted), "all rows": decisions(compared)}))
    yield "\n## Constants\n"
    yield TEXTS.constants
    yield from _lines(constants())
    for file in drawn:
        yield f"\n![{file.stem}]({file.name})"


def _page(
    page: Page, cells: Sequence[PublishedFigure], rows: Sequence[Row], before: Mapping[str, Row], out: Path
) -> Iterator[str]:
    yield f"# {page.title}\n"
    yield f"Written by `ebbench fidelity`; all sources stand on [the front page]({FRONT_PAGE}).\n"
    for label, text in (("Measured", page.measured), ("Fitted on it", page.fitted), ("When seen", page.seen)):
        yield f"- **{label}**: {one_line(text)}"
    notes = f"{NOTES}/{page.notes}.md"
    if page.notes and (out / notes).is_file():
        yield f"- **Why figures miss**: [{page.notes}]({notes}), written by hand."
    yield "\n## Errors\n"
    yield TEXTS.errors
    yield from _lines(errors([row for row in rows if source_page(row.source) is page], before))
    for source in dict.fromkeys(cell.source for cell in cells):
        yield f"\n## {source}\n"
        chosen = [cell for cell in cells if cell.source == source]
        yield from _lines((step_times if chosen[0].metric == "step_ms" else published_and_ours)(chosen))
        if source in ("table 2", "table 3"):
            yield ""
            yield from _lines(gains(chosen))


def _lines(section: Section) -> list[str]:
    """Markdown lines with every row complete: readers search these tables by device or model."""
    return section_lines(section, repeat_labels=True, markup=True)


def _write(path: Path, lines: Iterable[str]) -> None:
    files.write_text("\n".join(lines) + "\n", path)


def collect(
    groups: tuple[str, ...], seed: int, repeats: int, runs: Path, workers: int | None, tell: Callable[[str], None]
) -> list[PublishedFigure]:
    """Make the runs of these groups, and compare every published figure with ours; ``tell`` gets a line per case."""
    others = {
        "replay": replay_cells, "kv cache": kv_cells, "iog": iog_cells, "capacity": capacity_cells, "steps": step_cells,
    }  # fmt: skip
    cells = [cell for group, make in others.items() if group in groups for cell in make()]
    cases = [case for case in all_cases() if case.group in groups]
    cases = [*cases, *engine_alone(cases)]
    store, done = RunStore(runs), itertools.count(1)

    def say(text: str) -> None:
        tell(f"[{next(done)}/{len(cases)}] {text}")

    def figures(run: RunSpec) -> Mapping[str, Any]:
        measured = store.get(run)
        assert measured is not None  # it has just been made
        return measured.figures

    for repeated, count in ((True, repeats), (False, 1)):
        chosen = [case for case in cases if (case.group == REPEATED) is repeated]
        wanted = runs_of_cases(chosen, seed, count)
        with_progress("published runs", wanted, store, whole=False, workers=workers, quiet=False)
        cells += cells_of(chosen, figures, say, seed, count)
    if "calibration" in groups:
        cells += calibration_cells()
    return cells
