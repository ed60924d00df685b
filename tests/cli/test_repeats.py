"""``--repeats``: the note on what they can show, and ``auto``, which stops early and keeps the error rate at 5 %."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import ebbench.engines.setup
from ebbench.analysis.cases import ALPHA, TESTED, adjusted, pairs_for, pairs_needed
from ebbench.analysis.summary import summarise
from ebbench.cli.main import app
from ebbench.records.plan import Plan
from ebbench.records.run import Run, find_runs
from ebbench.run_policies import beforehand, why_stop
from ebbench.runs import prepare
from ebbench.workloads import planner
from ebbench.workloads.options import PlanOptions
from tests.analysis.made_runs import MadeEngine, device_of, plan_of


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "120"})


class NoisyEngine(MadeEngine):
    """Step times that differ by seed and policy: v1 is about twice as slow, with noise of a given size."""

    noise = 0.05

    def run(self, plan: Plan, policy: Any, *others: Any) -> Any:
        seed = int(plan.facts["seed"])
        draw = np.random.default_rng([seed, policy.kind == "v1"]).normal()
        self.GAP_MS = {policy.kind: max(1, round(self.means[policy.kind] * (1 + self.noise * draw)))}
        return super().run(plan, policy, *others)

    means = {"v1": 2000, "ebplus": 1000}  # noqa: RUF012


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NoisyEngine:
    made = NoisyEngine()

    def build(asked: PlanOptions) -> Plan:
        plan = plan_of(10, seed=asked.seed, output_tokens=20 + asked.seed)
        return replace(plan, facts={**plan.facts, "seed": asked.seed})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ebbench.engines.setup, "select_engine", lambda *_, **__: (made, "engine: made up"))
    # Not build_plan: a module that is first imported in one of these tests would keep the replacement.
    monkeypatch.setattr(planner, "make_plan", build)
    monkeypatch.setattr(prepare, "device_of", lambda *_: device_of())
    return made


def test_a_clear_difference_stops_early_and_is_called_a_win(engine: NoisyEngine) -> None:
    done = invoke("run", "made-up", "-p", "v1", "-p", "ebplus", "--repeats", "auto", "-o", "out")
    assert done.exit_code == 0, done.output
    repeats = len(engine.runs) // 2
    assert pairs_needed(3) <= repeats <= 10
    assert engine.runs[:4] == ["v1", "ebplus", "ebplus", "v1"]
    assert f"Stopped after {repeats} repeats: it is clear." in done.stderr
    assert f"{pairs_needed(3)} repeats are the fewest" in done.stderr
    assert "ebplus wins: " in done.stdout
    runs = [Run.load(path) for path in find_runs([Path("out")])]
    assert all(run.manifest.facts["until_clear"] for run in runs)
    assert all(summarise(run).until_clear for run in runs)
    assert "ebplus wins: " in invoke("show", "out").stdout
    compared = invoke("compare", "out").stdout
    assert "ebplus wins: " in compared
    assert "valid after every pair" in " ".join(compared.split())


def test_repeats_without_an_answer_end_at_max_repeats(engine: NoisyEngine) -> None:
    engine.means, engine.noise = {"v1": 1000, "ebplus": 1000}, 0.2
    args = ("run", "made-up", "-p", "v1", "-p", "ebplus", "--repeats", "auto", "--max-repeats", "9", "--json")
    done = invoke(*args)
    assert len(engine.runs) == 18
    assert "Stopped" not in done.stderr
    assert [entry["seeds"] for entry in json.loads(done.stdout)] == [list(range(9))] * 2


def test_repeats_that_are_copies_stop(engine: NoisyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.noise = 0.0
    same = plan_of(10)
    monkeypatch.setattr(planner, "make_plan", lambda asked: replace(same, facts={**same.facts, "seed": asked.seed}))
    done = invoke("run", "made-up", "-p", "v1", "-p", "ebplus", "--repeats", "auto")
    assert "Stopped after 2 repeats: they give the same figures" in done.stderr
    assert len(engine.runs) == 4


def test_too_few_repeats_to_show_a_difference_are_said_before_the_run(engine: NoisyEngine) -> None:
    assert "3 repeats cannot show" in invoke("run", "made-up", "-p", "v1", "-p", "ebplus", "--repeats", "3").stderr
    assert "cannot show" not in invoke("run", "made-up", "-p", "v1", "-p", "ebplus", "--repeats", "7").stderr
    asked: dict[str, Any] = {"policies": 2, "until_clear": False}
    assert beforehand({}, 1, virtual=True, **asked) == ""
    assert "replayed trace" in beforehand({"loop": "trace"}, 8, virtual=True, **asked)
    assert beforehand({"loop": "trace"}, 8, virtual=False, **asked) == ""  # a real machine has noise of its own


def test_a_replayed_trace_in_virtual_time_is_run_once(engine: NoisyEngine) -> None:
    invoke("run", "made-up", "-p", "v1", "-o", "out")
    summary = summarise(Run.load("out"))
    assert why_stop([summary]) == ""
    replayed = replace(summary, load=replace(summary.load, replayed=True))
    assert "after one repeat" in why_stop([replayed])
    assert why_stop([replace(replayed, virtual=False)]) == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--repeats", "x"), "takes a number or auto"),
        (("--repeats", "0"), "must be at least 1"),
        (("--repeats", "auto", "-p", "v1"), "two --policy or more"),
        (("--repeats", "auto", "--max-repeats", "1"), "must be at least 2"),
        (("--repeats", "1000000000000"), "at most 10,000"),
    ],
)
def test_bad_repeats_are_refused(engine: NoisyEngine, args: tuple[str, ...], message: str) -> None:
    done = invoke("run", "made-up", *args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not engine.runs


def test_looking_after_every_pair_keeps_the_error_rate() -> None:
    """Equal policies, 30 repeats, three tests: at most 5 % ever show a difference; a fixed-n test exceeds that."""
    rng = np.random.default_rng(7)
    trials, sequential, one_look = 200, 0, 0
    for _ in range(trials):
        logs = rng.normal(0, 0.03, (len(TESTED), 30))
        # The p-value of the sequential test never rises, so the last look is sufficient.
        sequential += min(adjusted({k: logs[k].tolist() for k in range(3)}, sequential=True).values()) <= ALPHA
        one_look += any(
            min(adjusted({k: logs[k, :n].tolist() for k in range(3)}).values()) <= ALPHA for n in (7, 8, 9, 10, 11, 12)
        )
    assert sequential <= 0.05 * trials
    assert one_look > 0.05 * trials


def test_pairs_for_a_difference_grow_with_its_spread() -> None:
    rng = np.random.default_rng(3)
    steady, noisy = 0.05 + rng.normal(0, 0.01, 9), 0.05 + rng.normal(0, 0.1, 9)
    assert pairs_for(steady.tolist(), 3) == pairs_needed(3)
    asked = pairs_for(noisy.tolist(), 3)
    assert asked is not None
    assert asked > 20
    assert pairs_for([0.1], 3) is None
    assert pairs_for([0.0, 0.0], 3) is None
    # Simulated: so many pairs do show it about as often as they should.
    spread, mean = 0.05, 0.06
    count = pairs_for((mean + spread * np.array([-1.0, 0.0, 1.0])).tolist(), 1)
    assert count is not None
    found = [adjusted({"x": (mean + spread * rng.normal(size=count)).tolist()})["x"] <= ALPHA for _ in range(300)]
    assert 0.6 < np.mean(found) < 0.95
