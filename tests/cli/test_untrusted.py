"""Texts of others: what they hold for terminals, CI logs, Markdown and spreadsheets has no effect."""

from __future__ import annotations

import csv
import io
import re

import pytest

from ebbench.analysis.documents import Column, Document, Section
from ebbench.foreign.documents import csv_cell, markdown, visible
from ebbench.records.warnings import RunWarning
from ebbench.render.documents import Console, as_csv, as_markdown, as_rich

HOSTILE = "a\x1b[31mb\x1b]8;;http://x.example\x07c\r\n::error::d\x9b2Je\u202ef\u2028g\u200bh"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, 16 ms – ü 中 😀", "plain text, 16 ms – ü 中 😀"),
        ("a\x1b[0mb", "a\\x1b[0mb"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("a\x9bb\u202ec\u2028d\ud800e", "a\\x9bb\\u202ec\\u2028d\\ud800e"),
        ("::error file=x::y", ":\\:error file=x::y"),
        ("  ::Add-Mask::y", "  :\\:Add-Mask::y"),
        ("##[error]x ##vso[task.x]y", "#\\#[error]x #\\#vso[task.x]y"),
        ("fe80::1 and test_a.py::test_b", "fe80::1 and test_a.py::test_b"),
    ],
)
def test_controls_and_commands_of_logs_are_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_line_ends_stay_where_the_text_is_ours() -> None:
    assert visible("one\ntwo\x1b\n::error::x", lines=True) == "one\ntwo\\x1b\n:\\:error::x"


@pytest.mark.parametrize("text", [HOSTILE, f"[red]{HOSTILE}", "x" * 75 + " ::error::y"])
@pytest.mark.parametrize("colour", [None, "truecolor"])
def test_a_console_writes_no_control_of_a_text(text: str, colour: str | None) -> None:
    document = Document(
        "title " + text, "t", (Section(text, (Column("label " + text, kind="label"),), ((text,),)),), (text,)
    )
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=colour, force_terminal=colour is not None)
    console.print(as_rich(document, 80))
    console.print(text, markup=False)
    written = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())  # the console's own colours
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028\u200b]", written)
    assert not re.search(r"^\s*::", written, re.MULTILINE)
    if "31m" in text:
        assert "\\x1b" in written


@pytest.mark.parametrize(
    "text",
    ["[a](http://x)", "![a](http://x/y.png)", "`c`", "*e*", "_e_", "~~s~~", "<img src=x>", "&lt;", "a|b",
     "https://x.example", "www.x.example", "# head", "---", "===", "- item", "1. item", "> quote", "a\n\n# head",
     "```\nx", "\\[a](b)", "#12"],
)  # fmt: skip
def test_a_text_has_no_effect_in_markdown(text: str) -> None:
    shown = markdown(text)
    assert "\n" not in shown
    # Every special character is behind a backslash or an entity, so that GitHub shows what was given.
    bare = re.sub(r"\\[!-/:-@\[-`{-~]|&(?:amp|lt|gt);", "x", shown)
    assert not re.search(r"[`*\[\]|~#<>&\\]|(?<!\w)_|_(?!\w)|://|www\.|^\s*(?:[-+]\s|\d+[.)]\s|-+$|=+$)", bare)
    plain = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", shown).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert plain == " ".join(text.splitlines())


def test_markdown_mentions_no_one() -> None:
    assert not re.search(r"@\w", markdown("@octocat and team@example.org"))


def test_names_stay_readable_in_markdown() -> None:
    assert markdown("max_num_seqs 16, p99_ttft_ms +3.2 %") == "max_num_seqs 16, p99_ttft_ms +3.2 %"


def test_tables_in_markdown_keep_their_cells() -> None:
    columns = (Column("a|b", kind="label"), Column("own", ours=True))
    section = Section("s", columns, (("c|d\ne", "@f"),))
    text = as_markdown(Document("x", "t\n# y", (section,), ("- n",), command="a ``` b"))
    assert "| c\\|d\\\\ne | **@<!-- -->f** |" in text
    assert "\n# y" not in text
    assert "````\na ``` b\n````" in text


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "=HYPERLINK(1)", "\r=1"])
def test_a_spreadsheet_computes_no_cell(text: str) -> None:
    assert str(csv_cell(text)).startswith("'")


@pytest.mark.parametrize("value", [-1.5, 3, None, "-1.5", "+3e-4", "-", "–", "v1", "1=2"])
def test_values_of_csv_files_stay(value: object) -> None:
    assert csv_cell(value) == value


def test_csv_tables_and_queries_are_safe() -> None:
    section = Section("=s", (Column("l", kind="label", key="=key"), Column("v")), (("=1+1", -2.5), ("a\x1b", 1.0)))
    rows = list(csv.reader(io.StringIO(as_csv(Document("t", "t", (section,), ())))))
    assert rows == [["section", "'=key", "v"], ["'=s", "'=1+1", "-2.5"], ["'=s", "a\\x1b", "1.0"]]


def test_names_in_a_manifest_are_one_visible_line() -> None:
    from ebbench.records.manifest import Manifest

    manifest = Manifest(
        versions={}, anchor_unix_ns=0, workload="w\n::error::x", scenario="s", seed=0, source="profile", plan_hash="",
        policy="v1", engine="http", device="d\x1b[2J", model="m\x1b[31m\n@x", facts={"gpu": ["a\x1b"]},
        reasons=(RunWarning("", message="r\x07"),),
    )  # fmt: skip
    assert (manifest.workload, manifest.device, manifest.model) == ("w\\n:\\:error::x", "d\\x1b[2J", "m\\x1b[31m\\n@x")
    assert manifest.facts == {"gpu": ["a\\x1b"]}
    assert [str(reason) for reason in manifest.reasons] == ["r\\x07"]
