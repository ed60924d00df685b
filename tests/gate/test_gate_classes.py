"""The gate on classes of requests: a class that got slower is seen although the run as a whole is not slower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gate.gate_data import invoke

MIXED = (
    "run", "chat=sharegpt:0.7 rag=longbench:0.3", "--source", "profile", "--device", "h200", "--policy", "v1",
    "--repeats", "8", "-n", "200", "--request-rate", "8", "--quiet",
)  # fmt: skip


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Small steps delay long prompts, which only one class sends."""
    root = tmp_path_factory.mktemp("classes")
    for name, tokens in (("before", 8192), ("after", 448)):
        done = invoke(*MIXED, "--max-num-batched-tokens", tokens, "--max-num-seqs", 256, "--output-dir", root / name)
        assert done.exit_code == 0, done.output
    return root / "before", root / "after"


def test_a_slower_class_is_noted_and_can_be_gated(sides: tuple[Path, Path]) -> None:
    whole = invoke("gate", *sides, "--allow", "options", "--json")
    assert json.loads(whole.stdout)["outcome"] == "pass"
    [note] = [note for note in json.loads(whole.stdout)["notes"] if note["code"] == "worse_classes"]
    assert list(note["values"]["losses"]) == ["rag:median_ttft_ms"]
    assert "--metric rag:ttft gates" in invoke("gate", *sides, "--allow", "options").stdout.replace("\n", " ")
    gated = invoke("gate", *sides, "--allow", "options", "--metric", "chat:ttft rag:ttft", "--margin", "chat:ttft:5")
    assert gated.exit_code == 1, gated.output
    assert "FAIL: TTFT median of rag is" in gated.stdout
    assert "TTFT median of chat" in gated.stdout


def test_a_stored_baseline_keeps_its_classes(sides: tuple[Path, Path], tmp_path: Path) -> None:
    stored = tmp_path / "base.parquet"
    assert invoke("gate", "--save-baseline", stored, sides[0]).exit_code == 0
    judged = invoke("gate", stored, sides[1], "--allow", "options", "--metric", "rag:ttft", "--json")
    assert judged.exit_code == 1, judged.output
    direct = invoke("gate", *sides, "--allow", "options", "--metric", "rag:ttft", "--json")
    assert json.loads(judged.stdout)["figures"] == json.loads(direct.stdout)["figures"]


def test_a_class_that_no_run_has_is_refused(sides: tuple[Path, Path]) -> None:
    done = invoke("gate", *sides, "--allow", "options", "--metric", "caht:ttft")
    assert done.exit_code == 2
    assert "did you mean 'chat'?" in done.stderr
    assert invoke("gate", *sides, "--metric", "chat:tftt").exit_code == 2


def test_comparisons_and_trends_show_classes(sides: tuple[Path, Path]) -> None:
    compared = invoke("compare", *sides, "--allow", "options")
    assert compared.exit_code == 0, compared.output
    assert "TTFT median of rag" in compared.stdout
    followed = invoke("trend", sides[0], "--metric", "rag:ttft")
    assert "TTFT median of rag" in followed.stdout


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_cell_of_the_verdict_is_cut(sides: tuple[Path, Path], width: int) -> None:
    done = invoke("gate", *sides, "--allow", "options", env={"COLUMNS": str(width)})
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= width
