"""docs/notebook.ipynb: it is what docs/notebook.py makes, its cells run, and each shows something."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALLER = {
    "import ebbench as eb": "import ebbench as eb\nfrom ebbench.sizing import candidates\ncandidates.SESSIONS = 200",
    "num_prompts=1000": "num_prompts=150",
    "request_rate=40": "request_rate=4, max_num_seqs=64",
}
"""In `make test`, the same calls with less to simulate: what they show is of the same kinds."""


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    specification = importlib.util.spec_from_file_location("notebook_maker", ROOT / "docs" / "notebook.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored(maker: ModuleType) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(maker.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return cells


def test_the_stored_cells_are_those_of_the_maker(maker: ModuleType, stored: list[dict[str, Any]]) -> None:
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in stored]
    assert sources == list(maker.CELLS), "run `make notebook`"


@pytest.mark.parametrize("smaller", [SMALLER, pytest.param({}, marks=pytest.mark.nightly)])
def test_every_cell_runs_and_shows_what_is_stored(
    smaller: dict[str, str], maker: ModuleType, stored: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), str(ROOT / "patches"), *sys.path]))
    notebook = maker.blank()
    for words, fewer in smaller.items():
        assert any(words in cell["source"] for cell in notebook.cells)
        for cell in notebook.cells:
            cell["source"] = cell["source"].replace(words, fewer)
    made = maker.execute(notebook)
    for cell, before in zip(made.cells, stored, strict=True):
        kinds = [(one["output_type"], sorted(one.get("data", {}))) for one in cell.get("outputs", [])]
        assert kinds == [(one["output_type"], sorted(one.get("data", {}))) for one in before.get("outputs", [])]
    shown = "".join(json.dumps(cell.get("outputs", [])) for cell in made.cells)
    assert shown.count("data:image/svg+xml") == 3
    assert all(len(cell.get("outputs", [])) <= 1 for cell in made.cells), "a result shows itself once"
    assert "did you mean 'policies'" in shown
