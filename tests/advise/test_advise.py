"""Advice: theory's crossovers where they are known, choices with their uncertainty, the command in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ebbench.analysis.advise import Load, predict, sign_changes, with_mix
from ebbench.analysis.advise_answer import Score
from ebbench.analysis.slo import Slo
from ebbench.analysis.statistics import Interval
from ebbench.cli.main import app
from ebbench.papers.advice import choose, default_policies, relative_gain
from ebbench.render import advice as words
from vllm_eb.calibration import Calibration, MixedCost

COSTS = Calibration(5e-3, 5e-5, 1e-2, 1e-4, mixed=MixedCost(6e-5, 2e-4, 1e-5))
LOAD = Load(mu_l=512, mu_o=256, p0=1 / 256, eta=0.0, concurrency=2048)


def score(policy: str, objective: float, low: float, high: float) -> Score:
    behind = Interval((low + high) / 2, low, high)
    return Score(policy, objective, (objective,), None, behind, None, 1.0, 1.0, objective)


def test_the_predicted_crossover_is_where_the_sides_meet() -> None:
    """At the batch size named, exclusive and mixed batches are equal; a little above, exclusive ones win."""
    found = predict(LOAD, COSTS, 10_000_000, 1024)
    crossing = found.concurrency_crossover
    assert crossing is not None
    assert 1 < crossing < 1024
    for factor, exclusive in ((0.8, False), (1.25, True)):
        load = Load(512, 256, 1 / 256, 0.0, round(factor * crossing))
        assert predict(load, COSTS, 10_000_000, 1024).exclusive is exclusive


def test_at_the_mix_crossover_the_better_mode_changes() -> None:
    costs = Calibration(5e-3, 5e-5, 1e-2, 1e-4, mixed=MixedCost(4e-5, 1e-5, 2.5e-4))
    found = predict(LOAD, costs, 10_000_000, 1024)
    assert found.mix_crossovers
    crossing = found.mix_crossovers[0]
    sides = [predict(with_mix(LOAD, crossing + step), costs, 10_000_000, 1024).exclusive for step in (-0.03, 0.03)]
    assert sides[0] is not sides[1]


def test_memory_bounds_the_batch() -> None:
    roomy, tight = (predict(LOAD, COSTS, capacity, 1024) for capacity in (10_000_000, 200_000))
    assert roomy.n == 1024
    assert tight.n == tight.n_star < 400
    assert 1 <= tight.k_star <= tight.n_star


def test_without_a_mixed_cost_mixing_is_taken_to_cost_nothing_more() -> None:
    found = predict(LOAD, Calibration(5e-3, 5e-5, 1e-2, 1e-4), 10_000_000, 1024)
    assert found.mb_rps is None
    assert found.gain is None
    assert not found.exclusive


def test_sign_changes_are_interpolated() -> None:
    assert sign_changes([0, 1, 2, 3], [-1, 1, 1, -3]) == pytest.approx((0.5, 2.25))
    assert sign_changes([0, 1], [1, 2]) == ()


def test_a_clear_winner_is_chosen() -> None:
    chosen, reason = choose([score("eb", 110, 0, 0), score("v1", 100, -0.10, -0.08)])
    assert chosen.policy == "eb"
    assert "ahead of every other" in reason


def test_of_equals_the_simplest_is_chosen() -> None:
    scores = [score("eb", 100.2, 0, 0), score("ebplus", 100.1, -0.01, 0.008), score("v1", 90, -0.12, -0.08)]
    chosen, reason = choose(scores)
    assert chosen.policy == "ebplus"
    assert reason == "eb is equal to it within chance or half a per cent, and it is the simplest"


def test_what_may_be_no_better_than_v1_is_not_advised_where_something_surely_is() -> None:
    sure = replace(score("marginal", 115, 0, 0), gain=Interval(0.15, 0.14, 0.16))
    noisy = replace(score("ebplus", 100, -0.3, 0.1), gain=Interval(0.0, -0.15, 0.16))
    behind = score("v1", 100, -0.14, -0.12)
    chosen, reason = choose([sure, noisy, behind])
    assert chosen.policy == "marginal"
    assert reason == "it is surely ahead of v1; ebplus may be as good, less certainly"
    # As sure and as good: the simpler one.
    also = replace(score("ebplus", 114.8, -0.01, 0.005), gain=Interval(0.148, 0.13, 0.16))
    assert choose([sure, also, behind])[0].policy == "ebplus"


def test_one_seed_gives_no_certainty_but_half_a_per_cent() -> None:
    """Without an interval only a difference within half a per cent counts as none."""
    one = Score("v1", 90, (90,), None, Interval(-0.1, -1.0, math.inf), None, 1, 1, 90)
    chosen, _ = choose([score("eb", 100, 0, 0), one])
    assert chosen.policy == "eb"


def test_gains_are_paired() -> None:
    """Seeds differ by a factor of two, the gain is 10 % in each: the interval must be narrow."""
    found = relative_gain([110, 220, 440.0], [100, 200, 400.0])
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.high - found.low < 1e-9
    assert relative_gain([1.0], None) is None
    assert relative_gain([1.0], [0.0]) is None


def test_targets_are_handed_to_the_policy_that_takes_them() -> None:
    assert default_policies(Slo()) == ("v1", "cadence:every=16", "eb", "ebplus", "marginal")
    assert default_policies(Slo(ttft=10_000, tpot=100))[-1] == "marginal:ttft=10,tpot=0.1"


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "140"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("advice")


SMALL = (
    *("balanced", "--input-len", "200", "--output-len", "60", "-n", "150", "-c", "64", "--seeds", "2"),
    *("--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--no-crossover", "--workers", "1", "-q"),
)


def test_the_command_says_what_to_run_and_why(runs: Path) -> None:
    done = invoke("advise", *SMALL, "--runs", str(runs))
    assert done.exit_code == 0, done.output
    assert done.output.count("Run ") == 1
    for word in ("Parameters", "Theory", "Simulation, which decides", "Keep in mind", "devices show rtx-pro-6000"):
        assert word in done.output
    assert "2 seeds" in done.output
    assert "never hold open" not in done.output


def test_what_vllm_can_do_by_itself_is_told() -> None:
    question = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64)
    for policy, told in (("cadence:every=4", True), ("marginal", False)):
        chosen = SimpleNamespace(policy=policy)
        lines = words.parameters(SimpleNamespace(question=question, theory=None, tuning=None, chosen=chosen))  # type: ignore[arg-type]
        assert any("--prefill-schedule-interval 4" in line for line in lines) == told


def test_too_few_requests_to_fill_the_load_are_said(runs: Path) -> None:
    few = [*SMALL]
    few[few.index("-n") + 1] = "40"
    said = " ".join(invoke("advise", *few, "--runs", str(runs)).output.split())
    assert "40 requests never hold open the 64 that the load allows" in said
    assert "--num-prompts 192" in said


def test_the_tables_fit_80_columns(runs: Path) -> None:
    args = ["advise", *SMALL, "--runs", str(runs), "--goodput", "ttft:300", "tpot:40"]
    done = CliRunner().invoke(app, args, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "…" not in done.output
    assert "marginal:ttft=0.3," in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def advice_of(theory: float | None, eb: float) -> Any:
    """As much of an Advice as its agreement rests on: EB over v1 in theory and in simulation, as shares."""
    scores = [SimpleNamespace(policy=name, tokens_per_s=rate) for name, rate in (("v1", 100.0), ("eb", 100 * (1 + eb)))]
    return SimpleNamespace(scores=scores, theory=SimpleNamespace(gain=theory, exclusive=(theory or 1) > 0))


@pytest.mark.parametrize(
    ("theory", "eb", "verdict", "explained"),
    [
        (0.90, 0.001, "expects exclusive batches to win (+90.0 % for EB over v1 in tokens/s); in simulation", True),
        (0.40, 0.38, "agree that exclusive batches win: EB over v1 in tokens/s is +38.0 %", False),
        (0.90, 0.01, "agree that exclusive batches win: EB over v1 in tokens/s is +1.0 % in simulation", True),
        (-0.20, -0.18, "agree that mixed batches win", False),
        (0.40, -0.10, "disagree, and the simulation", False),
        (None, 0.10, "is +10.0 % in simulation.", False),
    ],
)  # fmt: skip
def test_agreement_says_which_mode_and_why_the_gains_differ(
    theory: float | None, eb: float, verdict: str, explained: bool
) -> None:
    line = words.agreement(advice_of(theory, eb))
    assert verdict in line
    assert ("fills up and drains" in line) == explained


def test_its_json_holds_theory_and_simulation(runs: Path) -> None:
    found = json.loads(invoke("advise", *SMALL, "--runs", str(runs), "--json").stdout)
    assert found["policy"] in {row["policy"] for row in found["scores"]}
    objectives = [row["objective"] for row in found["scores"]]
    assert objectives == sorted(objectives, reverse=True)
    assert found["theory"]["n_star"] <= 64
    v1 = next(row for row in found["scores"] if row["policy"] == "v1")
    assert v1["gain"]["mean"] == pytest.approx(0.0)
    assert found["load"]["concurrency"] == 64


def test_with_targets_goodput_decides(runs: Path) -> None:
    args = ("advise", *SMALL, "--runs", str(runs), "--goodput", "ttft:300", "tpot:40", "--json")
    found = json.loads(invoke(*args).stdout)
    assert found["objective"] == "goodput"
    for row in found["scores"]:
        assert 0 <= row["attainment"] <= 1
        assert row["objective"] <= row["tokens_per_s"]


def test_tuning_tries_other_settings_with_the_chosen_policy(runs: Path) -> None:
    found = json.loads(invoke("advise", *SMALL, "--runs", str(runs), "--tune", "--json").stdout)
    assert found["tuning"]["tried"] == 13
    assert found["tuning"]["gain"] >= 0.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sharegtp",), "did you mean 'sharegpt'"),
        (("balanced", "--seeds", "0"), "--seeds must be at least 1"),
        (("balanced", "--goodput", "ttf:5"), "did you mean ttft"),
        (("balanced", "-p", "ebb"), "did you mean 'eb'"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = invoke("advise", *args, "--runs", str(tmp_path), "-q", "-n", "20", "--no-crossover", "--workers", "1")
    assert done.exit_code != 0
    assert message in " ".join((done.output, str(done.exception)))
