"""Sections of documents in terminals of different widths."""

from __future__ import annotations

from rich.console import Console

from ebbench.analysis.documents import Column, Section
from ebbench.render.documents import section_tables
from ebbench.render.numbers import sentence


def test_rows_with_several_sentences_are_paragraphs_in_a_narrow_terminal() -> None:
    """Three columns of sentences had six characters each at 80 columns."""
    sentence = "bandwidth and arithmetic of four GPUs, as they are printed"
    columns = (Column("item", "label"), *(Column(name, "label", fold=True) for name in ("shows", "command", "seen")))
    section = Section("Items", columns, (("table 1", sentence, "ebbench tables eb-table1", sentence),))
    narrow, wide = Console(width=80, record=True), Console(width=200, record=True)
    for console in (narrow, wide):
        for part in section_tables(section, console.width):
            console.print(part)
    lines = [line.rstrip() for line in narrow.export_text().splitlines()]
    assert "table 1" in lines
    assert "  command: ebbench tables eb-table1" in lines
    assert any("command" in line and "shows" in line for line in wide.export_text().splitlines())


def test_a_note_that_begins_with_a_policy_keeps_its_name() -> None:
    assert sentence("eb: KV cache full") == "eb: KV cache full."
    assert sentence("h100 tp1: attention was not measured.") == "h100 tp1: attention was not measured."
    assert sentence("a real server would not start") == "A real server would not start."
