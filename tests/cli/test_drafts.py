"""`ebbench run --speculative`: what the table, the JSON and the stored run say of drafted tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.records.run import Run

SETTING = "method=eagle3,tokens=3,acceptance=0.8,0.6,0.4"
COMMAND = ("run", "balanced", "--num-prompts", "120", "--max-concurrency", "32", "--max-num-seqs", "16", "--quiet")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, [*COMMAND, *args], env={"COLUMNS": "160"})


def test_a_run_with_drafts_shows_tokens_per_step_and_acceptance(tmp_path: Path) -> None:
    done = invoke("--speculative", SETTING, "-p", "v1", "-p", "eb", "--json", "-o", str(tmp_path / "runs"))
    assert done.exit_code == 0, done.output
    for summary in json.loads(done.stdout):
        assert summary["mean_acceptance_length"] == pytest.approx(2.8, abs=0.1)
        assert summary["acceptance"] == pytest.approx([0.8, 0.6, 0.4], abs=0.05)
        assert summary["accepted_tokens"] < summary["drafted_tokens"]
    run = Run.load(tmp_path / "runs" / "v1")
    assert run.manifest.options["speculative"] == SETTING
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps(json.loads(done.stdout)[0]))
    again = invoke("--speculative", f"method=eagle3,acceptance={measured}", "-p", "v1", "-o", str(tmp_path / "again"))
    assert again.exit_code == 0, again.output
    assert "tokens per step (accepted by position: 0." in again.output
    assert "steps with drafts are modelled, not measured" in " ".join(again.output.split())


def test_runs_with_other_drafts_are_not_compared(tmp_path: Path) -> None:
    for name, rate in (("a", "0.8"), ("b", "0.5")):
        drafts = f"method=eagle3,tokens=2,acceptance={rate}"
        done = invoke("--speculative", drafts, "-p", "v1", "-o", str(tmp_path / name))
        assert done.exit_code == 0, done.output
    compared = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")], env={"COLUMNS": "160"})
    said = " ".join(compared.output.split())
    assert compared.exit_code == 3
    assert "not comparable" in said
    assert "acceptance=0.8,0.64 against" in said
