"""``ebbench trend``: over named runs, as a table, JSON, Markdown, a picture and a page; its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from ebbench.records import files
from ebbench.records.manifest import RunLabels
from ebbench.records.run import MANIFEST, read_manifest
from tests.gate.gate_data import invoke

COMMITS, CHANGE = 24, 14
START_S = 1_760_000_000


def night(source: Path, target: Path, place: int, name: str = "nightly", **facts: str) -> None:
    """The run under policy v1, of another commit and day."""
    shutil.copytree(source, target)
    manifest = read_manifest(target)
    changed = msgspec.structs.replace(
        manifest, policy="v1", anchor_unix_ns=(START_S + 86_400 * place) * 10**9,
        labels=RunLabels(name=name, commit=f"{place:02d}c0ffee", label="main"), facts={**manifest.facts, **facts},
    )  # fmt: skip
    files.write_bytes(msgspec.json.encode(changed), target / MANIFEST)


@pytest.fixture(scope="module")
def history(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run a night under six seeds in turns; from the 15th on the scheduler is the slower one."""
    root = tmp_path_factory.mktemp("history")
    for place in range(COMMITS):
        name = "v1" if place < CHANGE else "v0"
        night(measured / name / f"{name}-seed{place % 6}", root / f"{place:02d}", place)
    return root


def test_a_regression_is_found_at_its_commit(history: Path) -> None:
    done = invoke("trend", history, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    [series] = found["series"]
    assert len(series["points"]) == COMMITS
    [change] = [one for one in series["changes"] if one["figure"] == "output_throughput"]
    assert (change["commit"], change["direction"]) == (f"{CHANGE}c0ffee", "worse")
    assert change["low"] < change["change"] < change["high"]
    assert found["alert"] == "worse"


def test_an_alert_is_an_exit_code_until_the_past_is_left_out(history: Path) -> None:
    assert invoke("trend", history).exit_code == 0
    assert invoke("trend", history, "--alert").exit_code == 1
    accepted = invoke("trend", history, "--alert", "--since", "2025-10-24")
    assert accepted.exit_code == 0, accepted.output


def test_a_table_names_commits_and_changes(history: Path) -> None:
    done = invoke("trend", history, "--last", "12", env={"COLUMNS": "200"})
    assert f"{CHANGE}c0ffee" in done.stdout
    assert "00c0ffee" not in done.stdout
    assert "(worse) from 14c0ffee" in done.stdout
    narrow = invoke("trend", history, env={"COLUMNS": "80"})
    assert max(map(len, narrow.stdout.splitlines())) <= 80


def test_a_trend_is_written_as_picture_page_and_comment(history: Path, tmp_path: Path) -> None:
    picture, page, comment = (tmp_path / name for name in ("t.png", "t.html", "c.md"))
    done = invoke("trend", history, "--plot", picture, "--html", page, "--summary", comment)
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "search0" in page.read_text()
    assert "| begun (UTC) |" in comment.read_text()
    assert "(worse) from 14c0ffee" in comment.read_text()
    assert invoke("trend", history, "--plot", tmp_path / "t.gif").exit_code == 2


def test_only_named_runs_are_in_the_trend(history: Path, measured: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    night(measured / "v1" / "v1-seed0", root / "a", 0, name="other")
    night(measured / "v1" / "v1-seed1", root / "b", 1)
    [series] = json.loads(invoke("trend", root, "--name", "nightly", "--json").stdout)["series"]
    assert [point["commit"] for point in series["points"]] == ["01c0ffee"]
    nothing = invoke("trend", root, "--tag", "unknown")
    assert (nothing.exit_code, "no run matches" in nothing.stderr) == (3, True)


def test_runs_of_two_machines_are_two_series(measured: Path, tmp_path: Path) -> None:
    for place, host in enumerate(("rack-1", "rack-2")):
        night(measured / "v1" / f"v1-seed{place}", tmp_path / str(place), place, host_label=host)
    done = invoke("trend", tmp_path)
    text = " ".join(done.stdout.split())
    assert "host: rack-1 against rack-2" in text
    assert "--host-label" in text


def test_figures_and_margins_are_those_of_the_gate(history: Path) -> None:
    done = invoke("trend", history, "--metric", "ttft-p90", "--margin", "ttft-p90:400", "--json")
    assert done.exit_code == 2
    assert invoke("trend", history, "--metric", "speed").exit_code == 2
    wide = json.loads(invoke("trend", history, "--metric", "tpot", "--margin", "50", "--json").stdout)
    assert wide["series"][0]["changes"] == []
