"""Limits of classes in a capacity search: a share of each class's requests must meet its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.errors import UsageError
from ebbench.records.schema import REQUESTS_EXTRAS, STEPS
from ebbench.sizing.estimate import MetCounts, Probe, Requirement, SearchSettings
from ebbench.sizing.limits import parse_limits
from ebbench.sizing.probe import ProbeReading, ProbeTables, read_measured
from ebbench.sizing.sentences import as_dict
from tests.analysis.made_runs import MS, request, requests_table
from tests.capacity.test_readings import at, outcome

TEXT = ["ttft:900 chat:ttft:100,tpot:20 rag:ttft:p90:500"]


def reading(limits: list[str], attainment: float = 0.9, *, rag: bool = True) -> ProbeReading:
    """100 requests, one each 20 ms: of four, three of chat (two fast) and one slow of rag or of no class."""
    rows, classes = [], []
    for n in range(100):
        ttft = {0: 50, 1: 50, 2: 150}.get(n % 4, 400) * MS
        start = n * 20 * MS
        times = {"intended_ns": start, "sent_ns": start, "first_token_ns": start + ttft, "itl_ns": [10 * MS]}
        last = start + ttft + 10 * MS
        rows.append(request(n, session=n, **times, last_token_ns=last, end_ns=last, output_tokens=2))
        classes.append("chat" if n % 4 < 3 else "rag" if rag else None)
    table = requests_table(rows).append_column(REQUESTS_EXTRAS.field("class"), pa.array(classes, pa.string()))
    tables = ProbeTables(table, STEPS.empty_table(), (), 0)
    return read_measured(tables, 50.0, parse_limits(limits, attainment), per_open=0)


def test_each_class_with_limits_is_a_requirement_of_its_own() -> None:
    limits = parse_limits(TEXT, 0.95)
    assert limits.requirements() == (
        Requirement("ttft", 0.95, ""),
        Requirement("chat:ttft chat:tpot", 0.95, "chat"),
        Requirement("rag:ttft", 0.9, "rag"),
    )
    limits_ms = [each.slo.limits() for each in limits.requirements()]
    assert limits_ms == [{"ttft": 900}, {"ttft": 100, "tpot": 20}, {"ttft": 500}]
    assert str(limits) == "ttft:900 chat:ttft:100 chat:tpot:20 for 95 % of each class's requests, rag:ttft:p90:500"
    assert parse_limits(["ttft:500"], 0.95).requirements() == (Requirement("ttft", 0.95),)


def test_a_probe_counts_each_class_against_its_own_limits() -> None:
    found = reading(TEXT)
    others, chat, rag = found.probe.counts
    assert others.counted == rag.counted
    assert chat.counted == pytest.approx(3 * rag.counted, abs=3)
    assert others.share == rag.share == 1.0
    assert chat.share == pytest.approx(2 / 3, abs=0.02)
    assert found.attainment == pytest.approx(0.75, abs=0.02)
    assert found.shares["chat:tpot"] == found.shares["rag:ttft:p90:500"] == 1.0
    assert found.shares["chat:ttft"] == chat.share
    assert not found.met


def test_the_class_that_misses_its_limit_is_what_limits() -> None:
    found = reading(["chat:ttft:100,tpot:20 rag:ttft:500"])
    kept = outcome(replace(found, probe=replace(found.probe, load=20.0)), limited_by="chat:ttft chat:tpot")
    assert kept.limited_by == "chat:ttft"
    assert SearchSettings((Requirement("chat:tpot", 0.9, "chat"),), 1.0).waiting_counts is False


def test_a_probe_without_a_request_of_a_limited_class_decides_nothing() -> None:
    assert reading(TEXT).decides
    assert not reading(TEXT, rag=False).decides
    assert reading(["ttft:900 chat:ttft:100"], rag=False).decides


@pytest.mark.parametrize("limit", ["code:ttft:100", "code:ttft:p99:100"])
def test_limits_of_an_unknown_class_are_refused_before_a_probe(limit: str, tmp_path: Path) -> None:
    mixture = "chat=balanced:1 rag=prefill-heavy:1"
    for command in (["capacity", mixture], ["plan", mixture, "--request-rate", "1", "--device", "h200"]):
        done = CliRunner().invoke(app, [*command, "--policy", "v1", "--goodput", limit])
        assert done.exit_code == 2
        assert "its classes are chat, rag" in " ".join(done.output.split())


@pytest.mark.parametrize(
    "text", ["chat:ttft:100 chat:ttft:p99:100", "chat:ttft:p99:50 chat:ttft:100", "chat:ttft:100 chat:ttft:200"]
)
def test_a_limit_that_another_one_of_its_class_implies_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--goodput"):
        parse_limits([text], 0.95)
    parse_limits([text.replace("chat", "rag", 1)], 0.95)


def test_capacity_is_given_per_class_in_json() -> None:
    limits = parse_limits(["chat:ttft:100 rag:ttft:500"], 0.9)
    counts = (MetCounts(95, 100), MetCounts(40, 40))
    near = at(9.0)
    found = outcome(replace(near, probe=Probe(9.0, 0, counts)))
    parts = tuple(zip(limits.requirements(), (found.estimate, replace(found.estimate, high=float("inf"))), strict=True))
    row = as_dict("v1", replace(found, requirements=parts), False, limits, ())
    assert row["limits_ms"] == {"chat:ttft": 100.0, "rag:ttft": 500.0}
    assert {name: (part["attainment"], part["high"]) for name, part in row["classes"].items()} == {
        "chat": (0.95, 11.0), "rag": (1.0, None),
    }  # fmt: skip
    json.dumps(row)


def test_limits_of_a_mixture_file_are_those_of_the_search(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(
        """[classes.chat]\nworkload = "balanced"\nshare = 1\ngoodput = "ttft:0.001"\n"""
        """[classes.rag]\nworkload = "prefill-heavy"\nshare = 1\n"""
    )
    done = CliRunner().invoke(app, ["capacity", str(path), "--policy", "v1", "-q", "-o", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "chat: ttft:0.001" in " ".join(done.output.split())
