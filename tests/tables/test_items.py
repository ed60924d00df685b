"""The page of all items of the papers: nothing left out, every command exists, and the page is up to date."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.papers.options import PaperOptions
from ebbench.papers.registry import FIGURES, TABLES, find_figure, find_table
from ebbench.papers.table import PAPERS, PaperFigure, PaperItem, PaperTable, PaperTexts, paper_texts

ITEMS = [(paper, item) for paper in PAPERS for item in paper_texts(paper).items]
ROOT = Path(__file__).resolve().parents[2]
LAST = {"eb": (20, 12), "deferred": (1, 7), "staggered": (1, 8)}
"""The last table and figure of each paper."""
CLAIMS = {("eb", f"claims of {section}") for section in ("4.2", "4.3.3", "4.4", "F.4")} | {
    ("eb", "kappa (A.3)"),
    ("eb", "R² of the linear fits"),
    ("deferred", "claims of completion time"),
}


def test_every_table_and_figure_has_one_row() -> None:
    names = [(paper, item.name) for paper, item in ITEMS]
    assert len(set(names)) == len(names)
    expected = {
        (paper, f"{kind} {number}")
        for paper, last in LAST.items()
        for kind, end in zip(("table", "figure"), last, strict=True)
        for number in range(1, end + 1)
    }
    assert expected | CLAIMS <= set(names)
    assert {paper for paper, _ in names} == set(PAPERS)


@pytest.mark.parametrize("item", [item for _, item in ITEMS], ids=lambda item: item.name)
def test_every_row_is_filled(item: PaperItem) -> None:
    assert item.shows
    assert item.remark.endswith(".")
    assert date(2026, 11, 1) <= item.checked
    assert item.command or item.agreement == "no numbers in print", "what is compared has a command"


@pytest.mark.parametrize("item", [item for _, item in ITEMS if item.command], ids=lambda item: item.name)
def test_every_command_opens_what_it_names(item: PaperItem) -> None:
    command, name, *options = item.command.split()
    assert command in ("tables", "figures")
    subject: PaperTable | PaperFigure = find_table(name) if command == "tables" else find_figure(name)
    assert options in ([], ["--run"])
    assert bool(options) == bool(subject.cells(PaperOptions())), "--run stands where there is something to run"


def test_the_committed_page_is_the_generated_one() -> None:
    made = CliRunner().invoke(app, ["tables", "papers", "-f", "markdown"]).output
    kept = (ROOT / "reports/papers.md").read_text(encoding="utf-8")
    told = "make it anew: ebbench tables papers -f markdown -o reports/papers.md"
    assert made.partition("\n## ")[2] == kept.partition("\n## ")[2], told


IN_BRACES = re.compile(r"\{(\w+)")


def long_text(subject: PaperTable | PaperFigure) -> str:
    """What may name constants and shared texts: a table's notes, a figure's caption."""
    texts = subject.texts
    return texts.tables[subject.name].notes if isinstance(subject, PaperTable) else texts.figures[subject.name].caption


def test_texts_and_tables_belong_together() -> None:
    for kind, subjects in (("tables", TABLES), ("figures", FIGURES)):
        names = [name for paper in PAPERS for name in getattr(paper_texts(paper), kind)]
        assert sorted(names) == sorted(subject.name for subject in subjects)


@pytest.mark.parametrize("subject", [*TABLES, *FIGURES], ids=lambda subject: subject.name)
def test_names_in_texts_have_one_meaning(subject: PaperTable | PaperFigure) -> None:
    texts = subject.texts
    for name in IN_BRACES.findall(long_text(subject)):
        known = [place[name] for place in (subject.facts, texts.shared, {"paper": texts.paper}) if name in place]
        assert len(known) == 1, f"{name}: {known}"
    assert not re.search(r"[{}]|<\w+ ", subject.worded(long_text(subject)))
    assert "{" not in subject.title + getattr(texts.tables.get(subject.name), "heading", "")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_shared_text_is_used(paper: str) -> None:
    texts = paper_texts(paper)
    subjects: list[PaperTable | PaperFigure] = [*TABLES, *FIGURES]
    of_paper = [long_text(subject) for subject in subjects if subject.texts is texts]
    used = {name for text in (*of_paper, *texts.shared.values()) for name in IN_BRACES.findall(text)}
    assert set(texts.shared) <= used


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("tables", {"title": "t", "heading": "h", "caption": "c"}),
        ("tables", {"title": "t"}),
        ("figures", {"title": "t", "caption": "c", "notes": "n"}),
        ("figures", {"title": "t"}),
    ],
)
def test_a_text_with_another_key_or_a_hole_is_refused(kind: str, text: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"unknown field|missing required"):
        msgspec.convert({"paper": "p", kind: {"name": text}}, PaperTexts)
