"""Writes the results of :mod:`ebbench.papers.fidelity.runs` as Markdown, Parquet and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ebbench.analysis.documents import Section
from ebbench.errors import InputFileError
from ebbench.export.markdown import section_lines
from ebbench.papers.fidelity import scoreboard, tables
from ebbench.papers.fidelity.cases import WITHOUT
from ebbench.papers.fidelity.pages import PAGES, Page, is_variant, page_of
from ebbench.papers.fidelity.pictures import pictures
from ebbench.papers.fidelity.scores import PublishedFigure, Score, decisions, replay_scores, scores
from ebbench.records import files

INTRODUCTION = """# Fidelity: emulated devices against published measurements

Written by `ebbench fidelity`, as are the pages of this folder; `notes/` is written by hand and says why figures miss.
Every number measured by others stands beside ours on the page of its source. *Fitted* cells belong to rows that a
constant was fitted on; everything else is *predicted*. *Unscored* cells carry a note that says why.
{runs}
What a device is made of is in `NOTICE`, what is modelled in `docs/emulator.md`,
how far to trust it in `docs/accuracy.md`.
"""


PAPER = ("table 2", "table 3", "table 13", "figure 3", "figure 5")
LATER = ("figure 4", "table 6", "authors' repetition")
"""Sources that were compared first on 2026-11-25. The targets of this report were set for ``PAPER`` alone."""
BOARD, CELLS, FRONT_PAGE, NOTES = "scoreboard.json", "cells.parquet", "README.md", "notes"
ERRORS = """Median and 90th percentile of the size of the error, over the cells that no constant was fitted on. In
brackets: the median of the last committed table, where it differs. *Direction right*: of the pairs of schedulers that
the source tells apart by more than 2 %, those with the same winner; of tables 19 and 20, the cases in which our
fastest setting is, in print, the fastest or within 2 % of it; one that ran out of memory is the slowest.
"""
API_SERVER = """vLLM's API server is simulated where a run without it would keep it busy, as `run` does with one policy
(`--api-server auto`): decided for each scheduler alone. The pages of the sources have the same cases without it, *no
API server*.
"""
DECISIONS = """Of the pairs of v1, EB and EB+ that differ by more than so much with us, those in which the same one is
faster in print, by whatever margin. Sources: those of the targets, figure 4, table 6 and the repetition.
"""


def write_report(
    cells: Sequence[PublishedFigure], out: Path, repeats: int = 1, before: Mapping[str, scoreboard.Row] | None = None
) -> list[Path]:
    """Write the front page, a page per source, scoreboard.json, cells.parquet and pictures. Returns the files written.

    Pages of sources without cells, which an earlier report left, are removed.
    ``before``: the last committed scoreboard, for comparison. ``repeats``: number of seeds over which our values of
    table 3 are averaged. Raises DataError for a cell whose source has no page.
    """
    out.mkdir(parents=True, exist_ok=True)
    parquet = out / CELLS
    pq.write_table(_table(cells), parquet)
    drawn = pictures(cells, out)
    rows = scoreboard.scoreboard(cells)
    scoreboard.save(rows, out / BOARD)
    front = out / FRONT_PAGE
    _write(front, _front_page(cells, rows, drawn, repeats, before or {}))
    written = [front, parquet, *drawn]
    for page in PAGES:
        path = out / f"{page.slug}.md"
        if chosen := [cell for cell in cells if page_of(cell.source) is page]:
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
    return [PublishedFigure(**row) for row in pq.read_table(parquet, columns=names).to_pylist()]


def merged_cells(kept: Sequence[PublishedFigure], made: Sequence[PublishedFigure]) -> list[PublishedFigure]:
    """The kept cells, with those of every source in ``made`` in the place of its kept ones; new sources at the end."""
    again: dict[str, list[PublishedFigure]] = {}
    for cell in made:
        again.setdefault(cell.source, []).append(cell)
    replaced, merged = set(again), list[PublishedFigure]()
    for cell in kept:
        merged += again.pop(cell.source, []) if cell.source in replaced else [cell]
    return [*merged, *(cell for cells in again.values() for cell in cells)]


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


def _table(cells: Iterable[PublishedFigure]) -> pa.Table:
    rows = [{**asdict(cell), "error": cell.error} for cell in cells]
    names = [*(f.name for f in fields(PublishedFigure)), "error"]
    return pa.table({name: [row[name] for row in rows] for name in names})


def _front_page(
    cells: Sequence[PublishedFigure],
    rows: Sequence[scoreboard.Row],
    drawn: Iterable[Path],
    repeats: int,
    before: Mapping[str, scoreboard.Row],
) -> Iterator[str]:
    ours = f"means over {repeats} seeds" if repeats > 1 else "single runs"
    scatter = "a run of the distribution shift scatters by 1 to 2 %"
    draws = "means over three draws of IOG's and Systalyze's"
    yield INTRODUCTION.format(runs=f"Ours are {ours} in table 3, {draws}, single runs elsewhere ({scatter}).")
    yield "## All sources\n"
    yield ERRORS
    yield API_SERVER
    yield from _lines(tables.front([row for row in rows if not is_variant(row.source)], before))
    yield "\n## Targets\n"
    yield from _lines(tables.targets(all_scores(cells)))
    yield "\n## Decisions\n"
    yield DECISIONS
    compared = [cell for cell in cells if cell.source in (*PAPER, *LATER)]
    predicted = [cell for cell in compared if not cell.fitted]
    yield from _lines(tables.decided({"predicted rows": decisions(predicted), "all rows": decisions(compared)}))
    yield "\n## Constants\n"
    yield "At most three per device, and a factor of matrix products (H100, H200: 1.10, from H200). Models without"
    yield "their own take the device's.\n"
    yield from _lines(tables.constants())
    for file in drawn:
        yield f"\n![{file.stem}]({file.name})"


def _page(
    page: Page,
    cells: Sequence[PublishedFigure],
    rows: Sequence[scoreboard.Row],
    before: Mapping[str, scoreboard.Row],
    out: Path,
) -> Iterator[str]:
    yield f"# {page.title}\n"
    yield f"Written by `ebbench fidelity`; all sources stand on [the front page]({FRONT_PAGE}).\n"
    yield f"- **Measured**: {page.measured}"
    yield f"- **Fitted on it**: {page.fitted}"
    yield f"- **When seen**: {page.seen}"
    notes = f"{NOTES}/{page.notes}.md"
    if page.notes and (out / notes).is_file():
        yield f"- **Why figures miss**: [{page.notes}]({notes}), written by hand."
    yield "\n## Errors\n"
    yield ERRORS
    yield from _lines(tables.errors([row for row in rows if page_of(row.source) is page], before))
    for source in dict.fromkeys(cell.source for cell in cells):
        yield f"\n## {source}\n"
        chosen = [cell for cell in cells if cell.source == source]
        if source == "calibration":
            yield from _lines(tables.step_times(chosen))
        else:
            yield from _lines(tables.published_and_ours(chosen))
        if source in ("table 2", "table 3"):
            yield ""
            yield from _lines(tables.gains(chosen))


def _lines(section: Section) -> list[str]:
    """Markdown lines with every row complete: readers search these tables by device or model."""
    return section_lines(section, repeat_labels=True, markup=True)


def _write(path: Path, lines: Iterable[str]) -> None:
    files.write_text("\n".join(lines) + "\n", path)
