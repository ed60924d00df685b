"""Specs and commands shared by the sweep's tests."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from ebbench.cli.main import app

TINY = """
name = "tiny"
repeats = 2
[grid]
policy = ["v1", "eb"]
[common]
workload = "balanced"
source = "profile"
num_prompts = 40
input_len = 32
output_len = 8
max_concurrency = 16
max_num_seqs = 16
"""


def invoke(*args: object) -> Result:
    """One command, in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "120"})


def spec_file(folder: Path, text: str, name: str = "spec.toml") -> Path:
    """Write a spec."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
