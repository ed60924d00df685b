"""``show`` and ``compare`` decide by the same figure, and state it in the same sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ebbench.analysis.paired import compare
from ebbench.records.run import Run
from ebbench.report import comparison, page, page_data
from ebbench.report.comparison import verdict_sentence
from ebbench.sizing.sentences import load_number
from tests.gate.gate_data import invoke, side

RUN = ("run", "sharegpt", "--source", "profile", "--device", "h200", "--model", "qwen3-8b", "--quiet")


def output_of(*args: object) -> str:
    """What a command prints, in one line."""
    done = invoke(*args)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_show_and_compare_decide_by_latency_where_every_policy_keeps_up(tmp_path: Path) -> None:
    output_of(*RUN, "-n", 150, "--request-rate", 16, "-p", "v1", "-p", "v0", "--repeats", 2, "-o", tmp_path / "runs")
    shown, compared = output_of("show", tmp_path), output_of("compare", tmp_path)
    assert re.search(r"v1 is ahead: a request takes .* latency decides", shown)
    assert re.search(r"v1 is ahead: \+[\d.]+ % time per request .* latency decides", compared)
    assert "E2EL median decides" in compared or "cannot show" in compared


def test_a_page_and_a_terminal_round_a_capacity_alike() -> None:
    row = {"policy": "v1", "capacity_concurrency": 105.2, "low": 98.7, "high": 111.2, "limits": "tpot:20", "probes": 3}
    row |= dict.fromkeys(("limited_by", "attainment", "median_ttft_ms", "median_tpot_ms"))
    row |= dict.fromkeys(("goodput_requests_per_s", "goodput_tokens_per_s"))
    cells = [cell.text for cell in page_data._table([row]).rows[0]]
    assert cells[1:3] == ["105", f"{load_number(98.7, True)} to {load_number(111.2, True)}"] == ["105", "99 to 111"]


def test_a_page_also_has_the_sessions_that_a_terminal_shows() -> None:
    row = {"policy": "v1", "capacity_requests_per_s": 5.885, "requests_per_session": 8.69, "refused": None}
    [line, _] = page_data._lines([row | {"stopped": None}])
    assert line == "v1: 0.677 sessions/s, 8.69 requests in each."


def test_probes_of_a_search_are_not_compared_as_runs_on_one_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a search with two policies said that "the candidate has no run of 1 plan"."""
    output_of(*RUN, "-n", 8, "--max-concurrency", 4, "-p", "v1", "-p", "v0", "-o", tmp_path / "runs")
    nearest = [tmp_path / "runs" / policy for policy in ("v1", "v0")]
    compared: list[int] = []

    def paired(runs: Sequence[Run]) -> tuple[list[page_data.Table], list[str]]:
        compared.append(len(runs))
        return [], []

    monkeypatch.setattr(comparison, "paired_tables", paired)
    monkeypatch.setattr(page, "write", lambda _, target: target.write_text(""))
    for probes, left in (([], 2), (nearest, 0)):
        monkeypatch.setattr(page_data, "shown_runs", lambda _, chosen=probes: chosen)
        output_of("report", tmp_path / "runs", "-o", tmp_path / "page.html")
        assert compared.pop() == left


def test_a_difference_too_small_to_matter_has_no_winner() -> None:
    found = compare({"v1": side([0.0] * 8), "v0": [*side([0.001 + x / 10_000 for x in range(8)], policy="v0")]})
    [other] = found.others
    assert other.contrasts[0].p_adjusted == pytest.approx(0.0234, abs=1e-3)
    assert verdict_sentence(found, other).startswith("No winner: -0.1 %")


def test_no_repeats_are_advised_for_equal_policies(tmp_path: Path) -> None:
    for rate, other in ((16, "v0"), (4, "ebplus")):
        sides = ("-p", "v1", "-p", other)
        output_of(*RUN, "-n", 60, "--request-rate", rate, *sides, "--repeats", 2, "-o", tmp_path / str(rate))
    both = output_of("show", tmp_path)
    assert "rate 4/s: v1 and ebplus have the same figures in every pair" in both
    assert "rate 16/s: v0 against v1: 2 pairs of runs do not tell" in both
    assert "do not tell" not in output_of("show", tmp_path / "4")


def test_every_policy_is_told_from_the_baseline_on_its_own(tmp_path: Path) -> None:
    """One that is shown to be worse and one that does the same: repeats can change neither."""
    sides = ("-p", "v1", "-p", "eb", "-p", "ebplus")
    shown = output_of(*RUN, "-n", 60, "-c", 16, *sides, "--repeats", 8, "-o", tmp_path / "runs")
    assert "v1 and ebplus have the same figures in every pair of runs: under this load they behave" in shown
    assert "do not tell" not in shown
    found = json.loads(output_of("compare", tmp_path / "runs", "--json"))
    words = {
        each["policy"]: {entry["verdict"] for entry in each["figures"] if entry["verdict"]}
        for each in found["policies"]
    }
    assert words == {"eb": {"worse", "better"}, "ebplus": {"identical"}}
    compared = output_of("compare", tmp_path / "runs")
    assert "No winner: ebplus and v1 have the same figures in every pair of runs" in compared
    assert "Minimum detectable change: eb tokens/s" in compared
    assert "ebplus tokens/s 0.0 %" not in compared


def test_equal_and_undecided_policies_are_named_apart(tmp_path: Path) -> None:
    sides = ("-p", "v1", "-p", "v0", "-p", "ebplus")
    shown = output_of(*RUN, "-n", 60, "-c", 16, *sides, "--repeats", 2, "-o", tmp_path / "runs")
    assert "v1 and ebplus have the same figures" in shown
    assert "v0 against v1: 2 pairs of runs do not tell the difference from chance; at its size" in shown
