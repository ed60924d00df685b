"""`ebbench gate --self-test` with few trials; the published figures come from the same command with more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ebbench.analysis.verdict import MAX_PAIRS, Rules
from ebbench.gate import self_test as gate_trials
from ebbench.gate.self_test import Design, Noise, Trial, trial
from ebbench.gate.verdicts import _share
from tests.gate.gate_data import invoke

REPORT = Path(__file__).resolve().parents[2] / "reports" / "gate.md"


def test_equal_sides_seldom_fail_and_a_tenth_slower_always_does() -> None:
    noise = Noise("restarts")
    equal = [trial(Design(noise, 0.0, 6), seed).outcome for seed in range(25)]
    slowed = [trial(Design(noise, 0.10, 6), seed).outcome for seed in range(10)]
    assert equal.count("fail") <= 4  # P(more | 5 %) < 1 %
    assert slowed == ["fail"] * 10


def test_a_drift_of_the_machine_is_no_regression() -> None:
    """Half a percent a restart is 6 % over a comparison; in ABBA order it falls on both sides."""
    steady = Noise("drift", restart=0.002, step=0.01, drift=0.005)
    assert "fail" not in [trial(Design(steady, 0.0, 6, Rules(default_margin=0.02)), n).outcome for n in range(6)]


def test_a_trial_is_its_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    design = Design(Noise("restarts"), 0.03, 6)
    monkeypatch.setattr(gate_trials, "judge", lambda pairs, *args, **kwargs: pairs and _Kept(pairs))
    first, again, other = (trial(design, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


class _Kept:
    def __init__(self, pairs: list[object]) -> None:
        self.outcome = [(p.baseline.figures, p.candidate.figures) for p in pairs]  # type: ignore[attr-defined]


def test_the_command_writes_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gate_trials, "trial", lambda design, seed: Trial("fail" if design.slowdown > seed % 100 / 1000 else "pass", 7)
    )
    done = invoke("gate", "--self-test", "--trials", 20, "--workers", 1, "--report", tmp_path / "deep" / "gate.md")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "deep" / "gate.md").read_text()
    assert text.count("| 20 |") == len(gate_trials.NOISES)
    assert text.count("| 4 |") == len(gate_trials.SLOWDOWNS)
    assert done.stderr.count(" failed, ") == text.count("%) |\n") + text.count("| 7 (7) |"), "per row"
    assert text.count("| 7 (7) |") == len(gate_trials.NOISES) + len(gate_trials.SLOWDOWNS[2:])


def test_the_trials_of_all_designs_are_one_job_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool per design would start new processes for each; the order of results changes no count."""
    monkeypatch.setattr(gate_trials, "trial", lambda design, seed: Trial("pass" if seed % 3 else "fail", seed % 5))
    jobs = []

    def backwards(tasks: Sequence[gate_trials.Task]) -> list[tuple[int, Trial]]:
        jobs.append(len(tasks))
        return list(map(gate_trials.run_trial, reversed(tasks)))

    found, expected = (gate_trials.run_self_test(trials=8, power_trials=5, tried=tried) for tried in (backwards, None))
    assert jobs == [sum(len(each.trials) for group in vars(found).values() for each in group)]
    assert [len(group) for group in vars(found).values()] == [3, 7, 3, 5]
    assert summary(found) == summary(expected)
    assert {len(each.trials) for each in found.slowed} == {5}


def summary(found: gate_trials.SelfTest) -> list[tuple[str, int, int, list[int]]]:
    """Per design its name, the failed and the passed trials, and the pairs used."""
    tallies = [each for group in vars(found).values() for each in group]
    return [
        (str(each.design), each.count("fail"), each.count("pass"), sorted(one.pairs for one in each.trials))
        for each in tallies
    ]


def test_sequential_trials_stop_when_the_answer_is_known() -> None:
    rules = Rules(sequential=True)
    quiet, loud = Noise("quiet", restart=0.001, step=0.005), Noise("loud", restart=0.08)
    slowed = [trial(Design(quiet, 0.10, 12, rules), seed) for seed in range(3)]
    assert {each.outcome for each in slowed} == {"fail"}
    assert all(each.pairs <= 9 for each in slowed)
    assert trial(Design(loud, 0.0, 7, rules), 1) == Trial("inconclusive", 7)


def test_pairs_grow_with_the_spread_between_them() -> None:
    rows = gate_trials.pairs_by_spread([0.3, 1.0, 2.0], draws=200)
    medians = [median for _, median, _ in rows]
    assert medians == sorted(medians)
    assert medians[0] <= 7 < medians[2]
    assert all(upper >= median for _, median, upper in rows)


def test_the_report_shows_false_alarms_of_at_most_five_per_cent() -> None:
    text = REPORT.read_text(encoding="utf-8")
    alarms = re.findall(r"\| (\d+) \| ([\d.]+)% \(", text.split("## Power")[0])
    assert len(alarms) == len(gate_trials.NOISES)
    assert all(int(trials) >= 1_000 and float(share) <= 5.0 for trials, share in alarms)


def test_shares_have_wilson_bounds() -> None:
    assert _share(0, 10) == "0.0% (0.0%–27.8%)"
    assert _share(5, 10) == "50.0% (23.7%–76.3%)"


def test_the_page_on_the_gate_quotes_the_report() -> None:
    """Shares and pairs of its tables, and the range that six pairs leave open."""
    page = (REPORT.parents[1] / "docs" / "ci-gate.md").read_text(encoding="utf-8")
    report = REPORT.read_text(encoding="utf-8")
    share = r"([\d.]+%)"
    row = rf"^\| (?:equal; )?([^|]+?)(?: slower)? \| {share} \| {share} \| {share} \| (\d+), (\d+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert len(rows) >= len(gate_trials.NOISES) + 3
    sequential = report.split("## Pairs until the answer is known")[1]
    for name, failed, passed, inconclusive, median, upper in rows:
        (line,) = re.findall(rf"^\| {re.escape(name)} \|.*$", sequential, re.MULTILINE)
        assert [part.split(" (")[0] for part in line.split(" | ")[2:5]] == [failed, passed, inconclusive]
        assert line.endswith(f"| {median} ({upper}) |")
    open_share = re.findall(r"([\d.]+)% \([^)]*\) \|$", report.split("## Power")[0], re.MULTILINE)
    low, high = min(map(float, open_share)), max(map(float, open_share))
    assert f"{low:.0f} to {high:.0f} % of" in " ".join(page.split())
    assert f"`--max-pairs` ({MAX_PAIRS})" in page
