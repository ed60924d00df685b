"""No table or figure has a cell that the commands refuse."""

from __future__ import annotations

import pytest

from ebbench.engines.checks import check_options
from ebbench.engines.setup import make_engine
from ebbench.papers.figure import PaperFigure
from ebbench.papers.figures import FIGURES
from ebbench.papers.registry import TABLES
from ebbench.papers.table import PaperOptions, PaperTable
from ebbench.runs.make import device_of, setup_of
from vllm_eb.policy import parse_policy


@pytest.mark.parametrize("subject", [*TABLES, *FIGURES], ids=lambda subject: subject.name)
def test_the_settings_of_all_cells_are_accepted(subject: PaperTable | PaperFigure) -> None:
    cells = subject.cells(PaperOptions())
    unlike = {(repr(setup_of(cell)), cell.device, cell.options, cell.policy): cell for cell in cells}
    for cell in unlike.values():
        make_engine(setup_of(cell))
        check_options(cell.options, [parse_policy(cell.policy)])
        assert device_of(cell).kv_capacity_tokens
