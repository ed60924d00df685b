"""The exported history, read by the change-point tool it is for. Otava pins its own numpy, so it is a program here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from ebbench.records import files
from ebbench.records.run import MANIFEST, Run
from tests.gate.gate_data import invoke

COMMITS, CHANGE = 24, 14


@pytest.fixture
def history(measured: Path, tmp_path: Path) -> Path:
    """A history of 24 commits, a day apart; from the 15th on the scheduler is the slower one under the same name."""
    start = datetime.now(UTC) - timedelta(days=COMMITS + 1)
    for place in range(COMMITS):
        source = measured / ("v1" if place < CHANGE else "v0")
        seed = place % 6
        run = tmp_path / "runs" / f"{place:02d}"
        shutil.copytree(source / f"{source.name}-seed{seed}", run)
        changed = msgspec.structs.replace(
            Run.load(run).manifest,
            policy="v1",
            git_commit=f"{place:040x}",
            anchor_unix_ns=int((start + timedelta(days=place)).timestamp()) * 10**9,
        )
        files.write_bytes(msgspec.json.encode(changed), run / MANIFEST)
    done = invoke("report", tmp_path / "runs", "--export", "otava", "-o", tmp_path / "history")
    assert done.exit_code == 0, done.output
    return tmp_path / "history"


def test_otava_finds_the_commit_with_the_regression(history: Path) -> None:
    program = os.environ.get("OTAVA") or shutil.which("otava")
    if program is None:
        pytest.skip("no otava on this machine: pip install apache-otava, in an environment of its own; OTAVA names it")
    (series,) = history.glob("*.csv")
    done = subprocess.run(
        [program, "analyze", series.stem], cwd=history, env=os.environ | {"OTAVA_CONFIG": "otava.yaml"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    marks = [place for place, line in enumerate(lines) if re.search(r"[+-]\d+\.\d+%", line)]
    commits = [
        next(line.split()[3] for line in lines[mark + 1 :] if re.search(r"\b[0-9a-f]{40}\b", line)) for mark in marks
    ]
    assert f"{CHANGE:040x}" in commits
    ttft = next(line for line in lines if "median_ttft_ms" in line)
    assert ttft.split()[0] == "time"
