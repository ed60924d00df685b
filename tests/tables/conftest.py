"""Small runs shared by the tests of tables: made once, kept for the session."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbench.runs.store import Measured, RunStore, run_missing
from ebbench.spec.run import RunSpec, simulated

SHIFT = """
name = "small-shift"
description = "Long prompts, then long answers"
loop = "closed"

[[phases]]
name = "prompts"
requests = 150
max_concurrency = 48
input = { family = "uniform", mean = 400 }
output = { family = "uniform", mean = 30 }

[[phases]]
name = "answers"
requests = 150
max_concurrency = 48
input = { family = "uniform", mean = 40 }
output = { family = "uniform", mean = 200 }
"""


@pytest.fixture(scope="session")
def shift_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario file of the user's own with two phases."""
    path = tmp_path_factory.mktemp("scenario") / "small-shift.toml"
    path.write_text(SHIFT)
    return path


@pytest.fixture(scope="session")
def shift_cell(shift_file: Path) -> RunSpec:
    return simulated("balanced", "eb", "rtx-pro-6000", "qwen3-8b", 64, 2048, str(shift_file))


@pytest.fixture(scope="session")
def small_cell() -> RunSpec:
    return simulated("balanced", "v1", "h200", "qwen3-8b", 64, 2048, num_prompts=40, output_len=20)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, shift_cell: RunSpec, small_cell: RunSpec) -> RunStore:
    """A store that holds both cells."""
    made = RunStore(tmp_path_factory.mktemp("cells"))
    run_missing([shift_cell, small_cell], made, workers=1)
    return made


@pytest.fixture(scope="session")
def shift_run(store: RunStore, shift_cell: RunSpec) -> Measured:
    found = store.get(shift_cell)
    assert found is not None
    return found
