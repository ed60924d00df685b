"""The adaptation table: the best fixed policy of each phase, regret against it, and the time to adapt."""

from __future__ import annotations

import pytest

from ebbench.analysis.phases import Recovery
from ebbench.errors import UsageError
from ebbench.papers.eb.shifts import ADAPTATION, COMPARED, Phase, _row
from ebbench.papers.options import PaperOptions
from ebbench.workloads import build_plan


def phase(tokens_per_s: float, e2el_s: float = 1.0, **controller: float) -> Phase:
    return Phase(Recovery("high", 0.0, 60.0, tokens_per_s, **controller), 50.0, e2el_s)  # type: ignore[arg-type]


def runs(**phases: Phase) -> dict[str, dict[str, Phase]]:
    return {policy: {"high": own} for policy, own in phases.items()}


def test_regret_is_throughput_lost_against_the_best_fixed_policy() -> None:
    measured = runs(v1=phase(80), v0=phase(100), eb=phase(90), ebplus=phase(95), marginal=phase(110))
    row = _row(measured, COMPARED, "load-falls", "high")
    assert row[1:7] == (80, 90, 95, 110, "v0", 100)
    assert row[7:11] == pytest.approx((0.2, 0.1, 0.05, -0.1))
    assert row[11] == pytest.approx(95 / 90 - 1)


def test_in_an_open_loop_regret_is_time_added() -> None:
    measured = runs(v1=phase(99, 2.0), v0=phase(100, 5.0), eb=phase(99, 4.0), ebplus=phase(99, 3.0))
    row = _row(measured, COMPARED, "day-and-night", "high")
    assert row[5:7] == ("v1", 2.0)
    assert row[7:10] == pytest.approx((0.0, 1.0, 0.5))
    assert row[10] is None, "marginal was not run"
    assert row[11] == pytest.approx(0.5)


def test_the_time_to_adapt_names_answers_and_changes() -> None:
    settled = phase(95, controller_s=12.34, controller_requests=1_204, switches=3)
    assert _row(runs(v1=phase(80), ebplus=settled), COMPARED, "load-falls", "high")[-1] == "12.3 s (1,204; 3)"
    assert _row(runs(v1=phase(80), ebplus=phase(95)), COMPARED, "load-falls", "high")[-1] == "–"


def test_a_device_without_the_load_of_a_day_is_refused() -> None:
    with pytest.raises(UsageError, match="a100"):
        ADAPTATION.cells(PaperOptions(devices=("a100",)))


@pytest.mark.parametrize("name", ["load-falls", "load-rises", "prompts-to-answers"])
def test_the_closed_scenarios_change_inside_one_run(name: str) -> None:
    plan = build_plan("balanced", scenario=name, source="profile", with_text=False)
    assert len(set(plan.table["phase"].to_pylist())) >= 2
