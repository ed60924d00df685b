"""One document in five formats: the same numbers, every text escaped."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from shutil import which

import pytest
from rich.console import Console

from ebbench.analysis.documents import Column, Document, Section, compared, comparison, labels, number
from ebbench.render.documents import as_csv, as_html, as_latex, as_markdown, as_rich, escaped, section_lines

NASTY = "a_b & 50% </script> | $x$"


def document() -> Document:
    columns = (*labels("workload", "metric"), *compared("eb"), *compared("v1", points=True))
    rows = (
        (NASTY, "rate", *comparison(200.0, 250.0), *comparison(40.0, 43.5, points=True)),
        (NASTY, "other", *comparison(None, 1234.5), *comparison(5.0, None, points=True)),
    )
    return Document("t", f"Title {NASTY}", (Section("GPU", columns, rows),), ("a note",), "ebbench tables t")


def test_differences_are_relative_or_in_points() -> None:
    assert comparison(200.0, 250.0) == (200.0, 250.0, 0.25)
    assert comparison(40.0, 43.5, points=True) == (40.0, 43.5, 3.5)
    assert comparison(None, 1.0)[2] is None


@pytest.mark.parametrize(
    ("value", "shown"), [(13179, "13,179"), (164.21, "164.2"), (19.684, "19.68"), (0.0611, "0.061"), (1234.5, "1,234")]
)
def test_numbers_have_about_four_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_row_must_fit_its_columns() -> None:
    with pytest.raises(ValueError, match="2 values under 1 columns"):
        Section("x", labels("a"), (("b", "c"),))


def test_markdown_is_a_table_github_can_read() -> None:
    text = as_markdown(document())
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.split(r"(?<!\\)\|", line)) for line in table}) == 1, "every row has as many cells"
    assert "ebbench tables t" in text
    assert "</script>" not in text
    assert "**250.0**" in text
    assert "+25.0 %" in text
    assert "+3.5 pp" in text
    assert "| – |" in text


def test_a_section_may_repeat_its_labels() -> None:
    [section] = document().sections
    shown = [line.split("|")[1].strip() for line in section_lines(section)[-2:]]
    repeated = [line.split("|")[1].strip() for line in section_lines(section, repeat_labels=True)[-2:]]
    assert [bool(label) for label in shown] == [True, False]
    assert repeated == [shown[0], shown[0]]


def test_csv_holds_plain_numbers() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(document()))))
    assert float(rows[0]["eb_ours"]) == 250.0
    assert float(rows[0]["eb_diff"]) == 0.25
    assert rows[1]["eb_published"] == ""
    assert rows[0]["workload"] == NASTY


def test_html_is_well_formed_and_escaped() -> None:
    text = as_html(document())
    assert "</script>" not in text

    class Balance(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    parser = Balance()
    parser.feed(text)
    assert not parser.open
    assert '<th colspan="3">eb</th>' in text


def test_latex_uses_booktabs_and_escapes() -> None:
    text = as_latex(document())
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert r"\multicolumn{3}{c}{eb}" in text
    assert r"\cmidrule(lr){3-5}" in text
    assert "a\\_b \\& 50\\%" in text
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0]
    for line in body.strip().splitlines():
        assert len(re.findall(r"(?<!\\)&", line)) == 7, "eight columns"


@pytest.mark.parametrize(
    ("title", "caption"),
    [
        ("Table 9: lengths in tokens", r"\caption{Lengths in tokens: part (table 9 in print)}"),
        ("Deferred prefill, table 1: the best", r"\caption{The best: part (table 1 in print)}"),
        ("Lengths", r"\caption{Lengths: part}"),
    ],
)
def test_latex_numbers_a_table_itself(title: str, caption: str) -> None:
    """``Table 1: Table 9: ...`` would be printed."""
    one = document()
    text = as_latex(replace(one, title=title, sections=tuple(replace(s, title="part") for s in one.sections)))
    assert caption in text


def test_latex_escapes_every_special_character() -> None:
    assert escaped("\\{}") == r"\textbackslash{}\{\}"
    assert escaped("#~^<>") == r"\#\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}"


@pytest.mark.skipif(which("pdflatex") is None, reason="no LaTeX here")
def test_latex_compiles(tmp_path: Path) -> None:
    assert "Overfull" not in latex_log(tmp_path, as_latex(document()))


def latex_log(folder: Path, body: str) -> str:
    source = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}" + body + r"\end{document}"
    (folder / "t.tex").write_text(source)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    assert subprocess.run(command, cwd=folder, capture_output=True, timeout=60).returncode == 0
    return (folder / "t.log").read_text(encoding="latin-1")


def large_document(policies: int, rows: int) -> Document:
    columns = (*labels("name"), *(column for i in range(policies) for column in compared(f"policy-{i}")))
    row = ("row", *(value for i in range(policies) for value in comparison(1000.0 * (i + 1), 1100.0 * (i + 1))))
    return Document("w", "Large", (Section("", columns, (row,) * rows),))


def test_latex_divides_what_is_too_wide_or_too_long_and_loses_nothing() -> None:
    text = as_latex(large_document(9, 100))
    tables = text.split(r"\begin{table}")[1:]
    assert len(tables) > 3
    assert text.count("(continued)") == text.count(r"\addtocounter{table}{-1}") == len(tables) - 1
    assert text.count("Large") == 1, "a caption is said once"
    assert len(re.findall(r"\\label{([^}]*)}", text)) == len(set(re.findall(r"\\label{([^}]*)}", text)))
    for policy in range(9):
        held = sum(table.count(f"{1000 * (policy + 1):,}") for table in tables)
        assert held >= 100
        assert all(f"policy-{policy}" not in table or "row &" in table for table in tables)


@pytest.mark.skipif(which("pdflatex") is None, reason="no LaTeX here")
@pytest.mark.parametrize(("policies", "rows"), [(9, 3), (1, 100), (5, 60)])
def test_latex_tables_fit_a_page(tmp_path: Path, policies: int, rows: int) -> None:
    log = latex_log(tmp_path, as_latex(large_document(policies, rows)))
    assert "Overfull" not in log
    assert "Float too large" not in log


@pytest.mark.parametrize("width", [50, 70, 100, 200])
def test_a_terminal_shows_every_number_whole(width: int) -> None:
    """A table too wide comes in pieces, not with its cells cut off."""
    wide = (*labels("name"), *(column for i in range(6) for column in compared(f"policy-{i}")))
    row = ("row", *(value for i in range(6) for value in comparison(1000.0 * (i + 1), 1100.0 * (i + 1))))
    made = Document("w", "wide", (Section("", wide, (row,)),))
    console = Console(width=width)
    with console.capture() as capture:
        console.print(as_rich(made, width))
    text = capture.get()
    assert "…" not in text
    for i in range(6):
        assert f"{1100 * (i + 1):,}" in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_columns_without_a_group_are_broken_anywhere() -> None:
    columns = (*labels("name"), *(Column(f"quantity {i}") for i in range(9)))
    made = Document("w", "wide", (Section("", columns, (("row", *(float(i) for i in range(9))),)),))
    console = Console(width=60)
    with console.capture() as capture:
        console.print(as_rich(made, 60))
    assert "…" not in capture.get()
    assert all(f"quantity {i}" in capture.get() for i in range(9))


def test_columns_of_our_figures_are_marked() -> None:
    column = Column("ours", ours=True)
    made = Document("m", "marked", (Section("", (*labels("x"), column), (("a", 5.0),)),))
    assert "| a | **5.00** |" in as_markdown(made)
    assert "<b>5.00</b>" in as_html(made)
