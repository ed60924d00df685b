"""A column of a log that names a class: how it is read, and where it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.errors import EbbenchError
from ebbench.records.run import Run
from ebbench.workloads.options import PlanOptions
from ebbench.workloads.planner import make_plan


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def log_of(tmp_path: Path, classes: list[object], name: str = "class") -> Path:
    path = tmp_path / "log.jsonl"
    rows = [{"timestamp": n + 0.5, "input_tokens": 50, "output_tokens": 4, name: one} for n, one in enumerate(classes)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_class_of_each_request_is_in_the_plan_in_order(tmp_path: Path) -> None:
    path = log_of(tmp_path, ["chat", "", None, " batch job ", 7])
    plan = make_plan(PlanOptions(f"log:{path}"))
    assert plan.table["class"].to_pylist() == ["chat", None, None, "batch_job", "7"]


def test_a_repeated_log_repeats_its_classes(tmp_path: Path) -> None:
    path = log_of(tmp_path, ["a", "b", "c"])
    plan = make_plan(PlanOptions(f"log:{path}", scenario="saturated", num_prompts=7, max_concurrency=2))
    assert plan.table["class"].to_pylist() == ["a", "b", "c", "a", "b", "c", "a"]


def test_a_column_of_another_name_is_a_class_if_asked(tmp_path: Path) -> None:
    path = log_of(tmp_path, ["x", "y"], name="team")
    assert "class" not in make_plan(PlanOptions(f"log:{path}")).table.column_names
    assert make_plan(PlanOptions(f"log:{path}", columns="class=team")).table["class"].to_pylist() == ["x", "y"]


@pytest.mark.parametrize("classes", [[f"user {n}" for n in range(150)], [{"a": 1}, {"b": 2}], ["x" * 80, "y"]])
def test_a_column_that_names_no_class_is_refused(tmp_path: Path, classes: list[object]) -> None:
    path = log_of(tmp_path, classes)
    with pytest.raises(EbbenchError, match="class=-"):
        make_plan(PlanOptions(f"log:{path}"))
    make_plan(PlanOptions(f"log:{path}", columns="class=-"))


def test_results_by_class_are_shown_stored_and_in_json(tmp_path: Path) -> None:
    path = log_of(tmp_path, ["chat", "rag", None, "chat"])
    limits = ["--goodput", "chat:ttft:5000,tpot:500", "rag:ttft:0.001"]
    done = invoke("run", f"log:{path}", "--policy", "v1", *limits, "-q", "-o", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert "By class" in done.output
    assert "Worst class, by the share of its requests within limits: rag 0.0 %" in " ".join(done.output.split())
    run = Run.load(tmp_path / "run")
    assert run.requests["class"].to_pylist() == ["chat", "rag", None, "chat"]
    assert run.requests["in_limits"].to_pylist() == [True, False, True, True]
    assert run.manifest.slo == {"chat:ttft": 5000.0, "chat:tpot": 500.0, "rag:ttft": 0.001}
    [summary] = json.loads(invoke("show", str(tmp_path / "run"), "--json").output)
    assert {name: part["completed"] for name, part in summary["classes"].items()} == {
        "chat": 2,
        "rag": 1,
        "no class": 1,
    }
    assert (summary["worst_class"], summary["worst_class_attainment"]) == ("rag", 0.0)
    stored = {row["class"]: row for row in run.table("classes").to_pylist()}
    assert stored["chat"]["slo_attainment"] == 1.0
    assert stored["rag"]["limit_ttft_ms"] == 0.001


def test_other_limits_are_taken_per_class_when_a_run_is_shown(tmp_path: Path) -> None:
    path = log_of(tmp_path, ["chat", "rag"])
    assert invoke("run", f"log:{path}", "--policy", "v1", "-q", "-o", str(tmp_path / "run")).exit_code == 0
    [shown] = json.loads(invoke("show", str(tmp_path / "run"), "--json", "--goodput", "rag:ttft:0.001").output)
    assert [part["slo_attainment"] for part in shown["classes"].values()] == [1.0, 0.0]
    refused = invoke("show", str(tmp_path / "run"), "--goodput", "code:ttft:9")
    assert refused.exit_code == 2
    assert "its classes are chat, rag" in refused.output


def test_answers_of_one_token_are_counted_in_the_class_with_the_limit(tmp_path: Path) -> None:
    rows = [
        {"timestamp": n + 0.5, "input_tokens": 50, "output_tokens": n % 2 * 9 + 1, "class": "ab"[n % 2]}
        for n in range(4)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    for limit, warned in (("a:tpot:10", True), ("b:tpot:10", False)):
        done = invoke("run", f"log:{path}", "--policy", "v1", "-q", "--goodput", limit, "-o", str(tmp_path / limit[0]))
        assert ("2 of 2 answers have one token" in " ".join(done.output.split())) is warned
