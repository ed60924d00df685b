"""Runs that accept unlike shares of their drafts: what comes of it is said to be no gain of the scheduler."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ebbench.analysis.paired import compare, compare_cases
from ebbench.analysis.units import DRAFTS, GateUnit
from ebbench.analysis.verdict import drafts_apart, judge, pair_units
from ebbench.gate.baselines import save_baseline, stored_units
from ebbench.gate.verdicts import notes
from ebbench.report.comparison import document, verdict_sentence
from tests.gate.gate_data import SMALL, invoke, unit


def drafting(per_step: float | None, count: int = 7, **changes: object) -> list[GateUnit]:
    """Runs whose steps yield so many tokens; None: without drafts."""
    found = [unit(seed, **changes) for seed in range(count)]
    for one in found:
        one.figures[DRAFTS] = per_step  # type: ignore[index]
    return found


def sentence(before: list[GateUnit], after: list[GateUnit]) -> str:
    compared = compare({"v1": before, "eb": after})
    return verdict_sentence(compared, compared.others[0])


def test_a_gain_that_drafts_explain_has_no_winner() -> None:
    said = sentence(drafting(2.0), drafting(2.5, policy="eb", tokens=1_200.0))
    assert said == (
        "No winner among the policies: +20.0 % output tokens/s of eb against v1. Drafts: 2.50 tokens per step against "
        "2.00; up to +25.0 % in tokens/s comes from what was accepted, not from the policy."
    )


@pytest.mark.parametrize(("tokens", "per_step"), [(1_300.0, 2.5), (1_200.0, 1.5), (800.0, 2.5)])
def test_a_change_beyond_or_against_the_drafts_is_the_policys(tokens: float, per_step: float) -> None:
    said = sentence(drafting(2.0), drafting(per_step, policy="eb", tokens=tokens))
    assert "wins" in said
    assert "comes from what was accepted" in said


def test_alike_drafts_are_not_spoken_of() -> None:
    assert "Drafts" not in sentence(drafting(2.0), drafting(2.02, policy="eb", tokens=1_200.0))
    assert "Drafts" not in sentence(drafting(None), drafting(None, policy="eb", tokens=1_200.0))


def test_a_side_without_drafts_makes_one_token_per_step() -> None:
    assert "2.50 tokens per step against 1.00" in sentence(drafting(None), drafting(2.5, policy="eb", tokens=1_200.0))


def test_a_policy_that_sets_the_drafts_answers_for_them() -> None:
    after = drafting(1.5, policy="marginal:draft=adaptive", tokens=1_200.0)
    assert drafts_apart(pair_units(drafting(2.0), after)) == 0.0


def test_the_comparison_shows_tokens_per_step() -> None:
    [section] = document(compare_cases({"v1": drafting(2.0), "eb": drafting(2.5, policy="eb")})).sections
    [row] = [row for row in section.rows if row[0] == "tokens/step"]
    assert row[1:3] == ("2", "2.5")
    [plain] = document(compare_cases({"v1": drafting(None), "eb": drafting(None, policy="eb")})).sections
    assert "tokens/step" not in [row[0] for row in plain.rows]


def test_the_gate_says_what_drafts_changed_and_can_gate_them(tmp_path: Path) -> None:
    verdict = judge(pair_units(drafting(2.5), drafting(2.0)))
    assert verdict.outcome == "pass"
    assert any("decode steps yield -20.0% tokens" in note for note in notes(verdict))
    assert not any("accepted" in note for note in notes(judge(pair_units(drafting(2.0), drafting(2.0)))))
    save_baseline(drafting(2.5), tmp_path / "base.parquet")
    stored = stored_units(tmp_path / "base.parquet", drafting(2.0))
    assert drafts_apart(pair_units(stored, drafting(2.0))) == pytest.approx(math.log(0.8))


def test_two_simulations_with_other_acceptance_are_compared_where_allowed(tmp_path: Path) -> None:
    for name, rate, policy in (("a", "0.5", "v1"), ("b", "0.9", "eb")):
        drafts = f"method=eagle3,tokens=2,acceptance={rate}"
        done = invoke(*SMALL, "--speculative", drafts, "-p", policy, "-o", tmp_path / name)
        assert done.exit_code == 0, done.output
    compared = invoke("compare", tmp_path / "a", tmp_path / "b", "--allow", "options", "--json")
    [policy_found] = json.loads(compared.stdout)["policies"]
    assert policy_found["tokens_per_step_change"] > 0.3
    assert "tokens_per_step" in [figure["figure"] for figure in policy_found["figures"]]
    gated = invoke("gate", tmp_path / "a", tmp_path / "b", "--allow", "options", "--metric", "tokens-per-step")
    assert "tokens/step" in gated.output
