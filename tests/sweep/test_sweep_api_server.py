"""Sweeps simulate vLLM's API server in the cells that would keep it busy, and in those compared with them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ebbench.errors import EbbenchError
from ebbench.sweep.spec import load_sweep
from tests.sweep.sweep_data import invoke, spec_file

GRID = """
name = "gemma"
[grid]
policy = ["eb:theta=0.9", "v1"]
max_concurrency = [8, 28]
[common]
workload = "sharegpt"
source = "profile"
num_prompts = 200
device = "h200"
model = "gemma-3-1b-it"
"""
"""With 28 requests open v1 would keep the API server busy; exclusive batches that wait long would not."""


def swept(folder: Path, text: str) -> tuple[dict[tuple[str, int], str], str]:
    """The API server of each finished cell, by policy and concurrency, and what was printed."""
    done = invoke("sweep", spec_file(folder, text), "--output-dir", folder / "out", "--workers", 1, "--quiet")
    assert done.exit_code == 0, done.output
    rows = pq.read_table(folder / "out" / "results.parquet").to_pylist()
    assert len(rows) == 4
    return {(row["policy"], row["max_concurrency"]): row["api_server"] for row in rows}, done.stdout


def test_cells_compared_with_a_busy_one_have_the_api_server_too(tmp_path: Path) -> None:
    found, said = swept(tmp_path, GRID)
    assert found == {
        ("eb:theta=0.9", 8): "off", ("v1", 8): "off",
        ("eb:theta=0.9", 28): "datacenter", ("v1", 28): "datacenter",
    }  # fmt: skip
    assert "2 of 4 cells are simulated with vLLM's API server" in said
    assert "6 cells in" in said
    again, said = swept(tmp_path, GRID)
    assert again == found
    assert "no new cell" in said
    done = invoke("sweep", tmp_path / "spec.toml", "--output-dir", tmp_path / "out", "--json", "--quiet")
    assert {name: json.loads(done.stdout)[name] for name in ("cells", "finished", "behind_api_server")} == {
        "cells": 4, "finished": 4, "behind_api_server": 2,
    }  # fmt: skip


@pytest.mark.parametrize("given", ["off", "datacenter"])
def test_an_api_server_in_the_file_is_simulated_as_stated(given: str, tmp_path: Path) -> None:
    found, said = swept(tmp_path, GRID + f'api_server = "{given}"\n')
    assert set(found.values()) == {given}
    assert "API server" not in said


def test_a_number_of_processes_simulates_them_in_every_cell(tmp_path: Path) -> None:
    for line, busy in (("api_server_count = 2", False), ('api_server = "auto"', True), ("", True)):
        sweep = load_sweep(spec_file(tmp_path, f"{GRID}{line}\n"))
        assert sweep.api_server_if_busy is busy
        assert {cell.server.api_server for cell in sweep.cells} == {"off" if busy else "datacenter"}


def test_auto_for_some_cells_is_refused(tmp_path: Path) -> None:
    for text in (
        GRID.replace("[common]", 'api_server = ["auto", "off"]\n[common]'),
        f'{GRID}[[overrides]]\nwhen = {{ policy = "v1" }}\nset = {{ api_server = "auto" }}\n',
    ):
        with pytest.raises(EbbenchError, match="write it in \\[common\\]"):
            load_sweep(spec_file(tmp_path, text))
