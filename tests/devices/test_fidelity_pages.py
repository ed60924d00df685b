"""The pages of the fidelity report and of accuracy: every source has one, and they show the committed figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbench.errors import DataError
from ebbench.papers.fidelity import scoreboard
from ebbench.papers.fidelity.cases import WITHOUT, all_cases
from ebbench.papers.fidelity.pages import PAGES, source_page
from ebbench.papers.fidelity.report import BOARD, FRONT_PAGE, NOTES, merged_cells, read_cells, write_report
from ebbench.papers.fidelity.scores import Decisions, PublishedFigure, decisions

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "reports" / "fidelity"


def cell(scheduler: str, published: float, ours: float, source: str = "table 3", case: str = "c=32") -> PublishedFigure:
    return PublishedFigure(source, "gpu", "model", case, scheduler, "tokens_per_s", published, ours)


def test_every_source_has_a_page_and_no_page_is_left_over() -> None:
    sources = {number.source for case in all_cases() for number in case.published}
    sources |= {cell.source for cell in read_cells(REPORT)}
    assert {source_page(source).slug for source in sources} == {page.slug for page in PAGES}


def test_a_source_without_a_page_is_refused() -> None:
    with pytest.raises(DataError, match=r"table 99, no API server: .*pages\.toml"):
        source_page("table 99, no API server")


def test_the_committed_pages_and_their_notes_are_there() -> None:
    front = (REPORT / FRONT_PAGE).read_text(encoding="utf-8")
    for page in PAGES:
        text = (REPORT / f"{page.slug}.md").read_text(encoding="utf-8")
        assert f"# {page.title}\n" in text
        assert f"]({page.slug}.md)" in front
        if page.notes:
            assert f"]({NOTES}/{page.notes}.md)" in text
            assert (REPORT / NOTES / f"{page.notes}.md").is_file()


def test_every_cell_stands_on_one_page() -> None:
    cells = [cell for cell in read_cells(REPORT) if cell.metric != "step_ms"]  # ranges, not cells
    lines = [
        line
        for page in PAGES
        for line in (REPORT / f"{page.slug}.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| [^|]+ \| [^|]+ \| [^|]+ \| [^|]+ \| \w+_\w+ \|", line)
    ]
    assert len(lines) == len(cells)


def test_sources_made_again_stay_in_their_place() -> None:
    kept = [cell("v1", 1.0, 1.0, source="table 13"), cell("eb", 1.0, 1.0), cell("v1", 1.0, 1.0, source="table 13")]
    made = [cell("v1", 1.0, 2.0, source="table 13"), cell("v1", 1.0, 2.0, source="table 6")]
    assert merged_cells(kept, made) == [made[0], kept[1], made[1]]


def test_variants_stand_on_the_page_of_their_source_alone(tmp_path: Path) -> None:
    cells = [cell("v1", 100.0, 90.0), cell("v1", 100.0, 80.0, source=f"table 3{WITHOUT}")]
    files = write_report(cells, tmp_path)
    front, page = ((tmp_path / name).read_text(encoding="utf-8") for name in (FRONT_PAGE, "table-3.md"))
    assert tmp_path / "table-3.md" in files
    assert re.findall(r"^\| \[(.*)\]\(table-3.md\)", front, re.MULTILINE) == ["table 3"]
    assert f"| table 3{WITHOUT} | gpu | 0 | 1 |" in page
    assert "written by hand" not in page  # a folder without notes


def test_pages_of_an_earlier_report_are_removed_and_other_files_are_not(tmp_path: Path) -> None:
    write_report([cell("v1", 100.0, 90.0), cell("v1", 100.0, 90.0, source="table 6")], tmp_path)
    (tmp_path / "my-notes.md").write_text("kept", encoding="utf-8")
    write_report([cell("v1", 100.0, 90.0)], tmp_path)
    assert {path.name for path in tmp_path.glob("*.md")} == {FRONT_PAGE, "table-3.md", "my-notes.md"}


def test_decisions_count_what_ours_tell_apart() -> None:
    cells = [
        *(cell(name, published, 100.0, case="tie") for name, published in (("v1", 100.0), ("eb", 150.0))),
        *(cell(name, 100.0, ours, case="print ties") for name, ours in (("v1", 100.0), ("eb", 104.0))),
        *(cell(name, published, published, case="right") for name, published in (("v1", 100.0), ("eb", 101.0))),
        *(cell(name, *both, case="both slower") for name, both in (("v1", (100.0, 100.0)), ("eb", (90.0, 92.0)))),
        *(cell(name, *both, case="slower in print") for name, both in (("v1", (100.0, 100.0)), ("eb", (90.0, 108.0)))),
        *(cell(name, *both, case="small in print") for name, both in (("v1", (100.0, 100.0)), ("eb", (101.0, 107.0)))),
    ]
    assert decisions(cells, (0.005, 0.02, 0.05)) == [
        Decisions(0.005, 5, 3), Decisions(0.02, 4, 2), Decisions(0.05, 3, 2),
    ]  # fmt: skip


def quoted() -> Iterator[tuple[str, str, str, str, str]]:
    """Figure, source, device, median and 90th percentile of the first table of docs/accuracy.md."""
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    table = text.split("| question |")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        _, _, *values, _ = (value.strip() for value in line.split("|"))
        yield tuple(values)  # type: ignore[misc]


def test_the_accuracy_page_quotes_the_committed_scoreboard() -> None:
    rows, found = scoreboard.load(REPORT / BOARD), list(quoted())
    assert len(found) >= 20
    for figure, source, device, median, high in found:
        error = rows[f"{source} | {device}"].errors[figure]
        assert (median, high) == tuple(f"{100 * value:.1f} %" for value in error), (figure, source, device)
