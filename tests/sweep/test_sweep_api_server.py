"""Sweeps simulate vLLM's API server in the cells that would keep it busy."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

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


def test_cells_that_would_keep_it_busy_have_the_api_server(tmp_path: Path) -> None:
    expected = dict.fromkeys(((policy, open_) for policy in ("eb:theta=0.9", "v1") for open_ in (8, 28)), "off")
    expected["v1", 28] = "datacenter"
    found, said = swept(tmp_path, GRID)
    assert found == expected
    assert "policy=v1, max_concurrency=28: These requests and answers would keep" in " ".join(said.split())
    assert "4 cells in" in said
    again, said = swept(tmp_path, GRID)
    assert again == found
    assert "no new cell" in said
    done = invoke("sweep", tmp_path / "spec.toml", "--output-dir", tmp_path / "out", "--json", "--quiet")
    assert {name: json.loads(done.stdout)[name] for name in ("cells", "finished", "behind_api_server")} == {
        "cells": 4, "finished": 4, "behind_api_server": 1,
    }  # fmt: skip


@pytest.mark.parametrize("given", ["off", "datacenter"])
def test_an_api_server_in_the_file_is_simulated_as_stated(given: str, tmp_path: Path) -> None:
    found, said = swept(tmp_path, GRID + f'api_server = "{given}"\n')
    assert set(found.values()) == {given}
    assert "so it is simulated" not in said


def test_auto_is_a_value_like_others(tmp_path: Path) -> None:
    for line, cells in (("api_server_count = 2", {"datacenter"}), ('api_server = "auto"', {"auto"}), ("", {"auto"})):
        sweep = load_sweep(spec_file(tmp_path, f"{GRID}{line}\n"))
        assert {cell.server.api_server for cell in sweep.cells} == cells
    varied = load_sweep(spec_file(tmp_path, GRID.replace("[common]", 'api_server = ["auto", "off"]\n[common]')))
    assert sorted({cell.server.api_server for cell in varied.cells}) == ["auto", "off"]
    assert "api_server" in varied.axes
