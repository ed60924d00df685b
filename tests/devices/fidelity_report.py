"""The figures of ``ebbench fidelity``, by the command."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.papers.fidelity.report import read_cells
from ebbench.papers.fidelity.scores import PublishedFigure


def reported(group: str, folder: Path) -> list[PublishedFigure]:
    """The figures in the report of one group, written into ``folder``."""
    arguments = ["fidelity", "--only", group, "--out", str(folder), "--against", str(folder)]
    result = CliRunner().invoke(app, [*arguments, "--runs", str(folder / "runs")], catch_exceptions=False)
    assert result.exit_code == 0
    return read_cells(folder)
