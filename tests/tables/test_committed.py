"""Committed tables are what their commands print today: some of the runs of each are made anew, at full size."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.papers import table as papers
from ebbench.runs.store import RunStore, run_missing
from ebbench.spec.run import RunSpec

REPORTS = Path(__file__).resolve().parents[2] / "reports"
PAGES = [
    path for folder in ("tables", "cluster") for path in sorted((REPORTS / folder).glob("*.md"))
    if re.search("^ebbench tables .* --run", path.read_text(encoding="utf-8"), re.MULTILINE)
    and path.stem != "adaptation"  # its regret is against the best of the runs that are there
]  # fmt: skip
OF_EACH = 4
"""Runs made anew of each table; tables of best settings need all of theirs and show nothing for fewer."""


def _lines(page: str) -> Iterator[list[str]]:
    return (line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| "))


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_some_runs_give_what_is_committed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(_: str, cells: Sequence[RunSpec], store: RunStore, *, whole: bool, **__: Any) -> None:
        run_missing(cells[:: -(-len(cells) // OF_EACH) or 1], store, workers=1, whole=whole)

    monkeypatch.setattr(papers, "with_progress", some)
    committed = page.read_text(encoding="utf-8")
    command = re.findall(r"^ebbench (tables .*)$", committed, re.MULTILINE)[0]
    done = CliRunner().invoke(app, [*shlex.split(command), "--runs", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    lines = list(_lines(committed))
    assert [now for now in _lines(done.stdout) if not any(_same(now, line) for line in lines)] == []


def _same(now: Sequence[str], line: Sequence[str]) -> bool:
    """Whether a committed row has all figures of ours that this one has; rows of too few runs have fewer."""
    ours = [(new, old) for new, old in zip(now, line, strict=False) if "**" in new and "–" not in new]
    return len(now) == len(line) and all(new == old for new, old in ours)
