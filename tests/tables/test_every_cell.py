"""No table or figure has a cell that the commands refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbench.engines.base import check_options
from ebbench.engines.setup import make_engine
from ebbench.papers.options import PaperOptions
from ebbench.papers.registry import FIGURES, TABLES
from ebbench.papers.table import PaperFigure, PaperTable
from ebbench.runs.prepare import device_of
from vllm_eb.policy import parse_policy


@pytest.mark.parametrize("subject", [*TABLES, *FIGURES], ids=lambda subject: subject.name)
def test_the_settings_of_all_cells_are_accepted(subject: PaperTable | PaperFigure) -> None:
    cells = subject.cells(PaperOptions())
    unlike = {repr(replace(cell, plan=replace(cell.plan, seed=0, num_prompts=1), weight=0)): cell for cell in cells}
    for cell in unlike.values():
        make_engine(cell)
        check_options(cell.server, [parse_policy(cell.policy)])
        assert device_of(cell).kv_capacity_tokens
