"""Options of the gate: --metric, --policy, --max-pairs; the files that it writes with exit code 3."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from ebbench.analysis.units import LABELS, MEASURED, NAMES, GateUnit, load_units, parse_figures
from ebbench.analysis.verdict import GATED, Rules, judge, pair_units
from ebbench.errors import UsageError
from ebbench.gate.verdicts import worded_reason
from tests.gate.gate_data import SMALL, invoke, side

NOISE = [0.004, -0.003, 0.002, -0.005, 0.001, -0.002, 0.003, -0.001, 0.002, -0.004]


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine seeds of v1 and of v0, with limits; ``again`` is v1 measured once more."""
    root = tmp_path_factory.mktemp("nine")
    for name, policy in (("v1", "v1"), ("again", "v1"), ("v0", "v0")):
        done = invoke(*SMALL, "-p", policy, "--repeats", 9, "--goodput", "ttft:10000", "-o", root / name)
        assert done.exit_code == 0, done.output
    return root


def copies(source: Path, policy: str, directory: str | None = None) -> str:
    """A measuring command that copies an existing run."""
    return f"cp -r {source / (directory or policy)}/{policy}-seed{{seed}} {{out}}"


def equal_sides(nine: Path) -> tuple[str, ...]:
    """The options that measure v1 twice."""
    return "--baseline-command", copies(nine, "v1"), "--candidate-command", copies(nine, "v1", "again")


def test_measuring_ends_as_soon_as_equal_sides_pass(nine: Path, tmp_path: Path) -> None:
    done = invoke("gate", tmp_path / "a", tmp_path / "b", *equal_sides(nine))
    assert done.exit_code == 0, done.output
    pairs = len(list((tmp_path / "a").glob("pair-*")))
    assert 6 <= pairs <= 8
    assert f"after {pairs} pairs: pass" in done.stderr
    assert "hold at every look" in " ".join(done.stdout.split())


def test_a_regression_ends_the_measuring_too(nine: Path, tmp_path: Path) -> None:
    done = invoke(
        "gate", tmp_path / "a", tmp_path / "b", "--max-pairs", 9, "--baseline-command", copies(nine, "v1"),
        "--candidate-command", copies(nine, "v0"), "--json",
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert found["sequential"] is True
    assert 6 <= len(found["pairs"]) <= 8


def test_without_an_answer_the_measuring_ends_at_the_limit(nine: Path, tmp_path: Path) -> None:
    done = invoke("gate", tmp_path / "a", tmp_path / "b", "--max-pairs", 3, *equal_sides(nine))
    assert done.exit_code == 5
    assert len(list((tmp_path / "b").glob("pair-*"))) == 3


def test_runs_that_are_there_are_judged_by_the_rule_of_many_looks(nine: Path) -> None:
    fixed = json.loads(invoke("gate", nine / "v1", nine / "v0", "--json").stdout)
    looked = json.loads(invoke("gate", nine / "v1", nine / "v0", "--max-pairs", 9, "--json").stdout)
    assert fixed["sequential"] is False
    assert looked["sequential"] is True
    before, after = (document["figures"][0] for document in (fixed, looked))
    assert before["loss"] == after["loss"]
    assert before["p"] < after["p"]


def test_the_sequential_verdict_needs_seven_clear_pairs() -> None:
    rules = Rules(sequential=True)
    clear = [0.08 + x for x in NOISE]
    assert judge(pair_units(side([0.0] * 6), side(clear[:6])), rules).outcome == "inconclusive"
    assert judge(pair_units(side([0.0] * 7), side(clear[:7])), rules).outcome == "fail"
    assert judge(pair_units(side([0.0] * 10), side(NOISE)), rules).outcome == "pass"


def test_every_figure_has_a_name_a_label_and_a_value(nine: Path) -> None:
    (first, *_) = load_units([nine / "v1"])
    assert set(NAMES.values()) == set(MEASURED) == set(LABELS) == set(first.figures)
    assert parse_figures(["ttft-p99, goodput", "e2el"]) == ("p99_ttft_ms", "request_goodput", "median_e2el_ms")
    assert first.figures["mean_ttft_ms"] == pytest.approx(float(first.figures["median_ttft_ms"] or 0), rel=2)
    assert first.figures["request_goodput"] == first.figures["request_throughput"]


def with_tail(units: list[GateUnit], p99: float) -> list[GateUnit]:
    return [replace(u, figures={**u.figures, "p99_ttft_ms": p99}) for u in units]


def test_a_tail_decides_where_it_is_gated_and_only_there() -> None:
    pairs = pair_units(with_tail(side(NOISE), 100.0), with_tail(side(NOISE), 300.0))
    assert judge(pairs).outcome == "pass"
    found = judge(pairs, Rules(gated=("p99_ttft_ms",)))
    assert found.outcome == "fail"
    assert [entry.figure for entry in found.judged if entry.gated] == ["p99_ttft_ms"]
    assert "TTFT p99 is 200" in worded_reason(found)


def test_a_figure_that_was_chosen_and_has_no_value_leaves_the_answer_open() -> None:
    found = judge(pair_units(side(NOISE), side(NOISE)), Rules(gated=(*GATED, "request_goodput")))
    assert found.outcome == "inconclusive"
    assert "goodput cannot be judged" in worded_reason(found)


def test_a_margin_of_a_figure_that_is_not_gated_is_refused() -> None:
    with pytest.raises(UsageError, match="--margin names ttft-p99, not gated here"):
        judge(pair_units(side(NOISE), side(NOISE)), Rules(margin={"p99_ttft_ms": 0.1}))


def test_goodput_and_any_metric_are_gated_by_name(nine: Path) -> None:
    done = invoke("gate", nine / "v1", nine / "v0", "--metric", "goodput", "--metric", "e2el-mean", "--json")
    gated = {entry["figure"] for entry in json.loads(done.stdout)["figures"] if entry["gated"]}
    assert gated == {"request_goodput", "mean_e2el_ms"}


def test_a_policy_is_chosen_among_several(nine: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"  # as `ebbench run -p v1 -p v0 --repeats 9` leaves it
    both.mkdir()
    for run in nine.glob("v?/*-seed*"):
        (both / run.name).symlink_to(run)
    mixed = invoke("gate", both, both)
    assert mixed.exit_code == 3
    assert "choose one with --policy" in mixed.stderr
    assert invoke("gate", both, nine / "again", "--policy", "v1").exit_code == 0
    assert invoke("gate", both, both, "-p", "v1", "-p", "v0").exit_code == 1
    unknown = invoke("gate", both, both, "--policy", "v2")
    assert unknown.exit_code == 2
    assert "unknown policy of the baseline 'v2'" in unknown.stderr.replace("candidate", "baseline")
    stored = tmp_path / "stored.parquet"
    invoke("gate", "--save-baseline", stored, both)
    assert invoke("gate", stored, both, "-p", "v1", "-p", "v0").exit_code == 1
    assert invoke("gate", stored, nine / "again", "-p", "v1").exit_code == 0


@pytest.mark.parametrize("case", ["no baseline", "another environment", "a command that fails"])
def test_a_gate_that_cannot_judge_still_writes_junit_and_summary(case: str, nine: Path, tmp_path: Path) -> None:
    words: list[object] = [tmp_path / "none.parquet", nine / "v1"]
    if case == "another environment":
        invoke(*SMALL, "-p", "v1", "--max-num-seqs", 512, "-o", tmp_path / "other")
        words = [nine / "v1", tmp_path / "other"]
    elif case == "a command that fails":
        words = [tmp_path / "a", tmp_path / "b", "--baseline-command", "ls /nowhere {out}", "--candidate-command",
                 "ls {out}"]  # fmt: skip
    done = invoke("gate", *words, "--junit", tmp_path / "out" / "gate.xml", "--summary", tmp_path / "out" / "s.md")
    assert done.exit_code == (4 if case == "a command that fails" else 3), done.output
    suite = Xml.parse(tmp_path / "out" / "gate.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("1", "1", "0")
    (error,) = suite.iter("error")
    assert error.get("message")
    summary = (tmp_path / "out" / "s.md").read_text(encoding="utf-8")
    assert f"NOT JUDGED (exit code {done.exit_code})" in summary
