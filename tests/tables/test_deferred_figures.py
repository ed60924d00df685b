"""The deferred-prefill paper's figures: what they show holds in ours, and what is published stands beside it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.papers.deferred_prefill import COMPLETION_CHANGE, littles_law
from ebbench.papers.options import PaperOptions
from ebbench.papers.published import rows
from ebbench.papers.registry import find_table
from ebbench.runs.store import RunStore


def read(name: str, root: Path, *more: str) -> list[list[dict[str, str]]]:
    """The rows of each part of the table whose columns differ from the one before."""
    done = CliRunner().invoke(app, ["tables", name, "--runs", str(root), "-f", "csv", *more])
    assert done.exit_code == 0, done.output
    return [list(csv.DictReader(io.StringIO(part))) for part in done.output.split("\n\n")]


@pytest.mark.parametrize("name", ["deferred-figure3", "deferred-figure6", "deferred-figure7"])
def test_figures_that_share_a_table_open_it(name: str) -> None:
    assert find_table(name).name in ("deferred-figure2", "deferred-figure5")


def test_step_times_are_affine_in_the_batch(tmp_path: Path) -> None:
    prefill, decode = read("deferred-figure2", tmp_path)[:2]
    for row in (*prefill, *decode):
        times = [float(value) for key, value in row.items() if key.startswith("s_batch") and value]
        assert times == sorted(times)
        assert not row["line_r²"] or float(row["line_r²"]) > 0.98


def test_throughput_rises_with_the_batch_limit(tmp_path: Path) -> None:
    lines = read("deferred-figure4", tmp_path)[0]
    for model in ("Granite", "LLaMA3"):
        chain = [float(line["requests/s_at_the_best_k_exact_chain"]) for line in lines if line["model"] == model]
        assert chain == sorted(chain)
        assert len(chain) >= 6


def test_runs_give_completion_times_beside_the_claims(tmp_path: Path) -> None:
    """With few requests: every cell is filled, and waiting for departures shortens the time in the batch."""
    small = ("--num-prompts", "700", "--run", "--workers", "1", "-q")
    claims, lines = read("deferred-figure5", tmp_path, *small)[:2]
    granite = [line for line in lines if "Granite" in line["section"]]
    assert 0 < len(granite) < len(lines)
    assert all(value for line in (*claims, *lines) for value in line.values())
    times = [float(line["geometric_completion_s"]) for line in granite]
    assert times[-1] < times[0]
    assert not any("published" in name for name in claims[0]), "not the published number of requests"
    section = find_table("deferred-figure5").document(PaperOptions(num_prompts=700), RunStore(tmp_path)).sections[0]
    at = next(i for i, c in enumerate(section.columns) if (c.group, c.name) == ("completion time", "published"))
    assert {row[at] for row in section.rows} == {-0.14, -0.17}


@pytest.mark.parametrize("row", rows("deferred_table1"), ids=lambda row: row["model"])
def test_the_published_claims_agree_with_littles_law(row: dict[str, str]) -> None:
    assert littles_law(row) == pytest.approx(COMPLETION_CHANGE[row["model"]], abs=0.035)
