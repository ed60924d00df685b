"""What ``ebbench advise`` predicts by theory: crossovers, gains, the batch that fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ebbench.advice import sentences
from ebbench.advice.choice import ExpectedLoad, GainCurve, predict, sign_changes
from vllm_eb.calibration import Calibration, MixedCost
from vllm_eb.theory import Drafts

COSTS = Calibration(5e-3, 5e-5, 1e-2, 1e-4, mixed=MixedCost(6e-5, 2e-4, 1e-5))
LOAD = ExpectedLoad(mu_l=512, mu_o=256, p0=1 / 256, eta=0.0, concurrency=2048)


def test_the_predicted_crossover_is_where_the_sides_meet() -> None:
    """At the batch size named, exclusive and mixed batches are equal; a little above, exclusive ones win."""
    found = predict(LOAD, COSTS, 10_000_000, 1024)
    crossing = found.concurrency_crossover
    assert crossing is not None
    assert 1 < crossing < 1024
    for factor, exclusive in ((0.8, False), (1.25, True)):
        load = ExpectedLoad(512, 256, 1 / 256, 0.0, round(factor * crossing))
        assert predict(load, COSTS, 10_000_000, 1024).exclusive is exclusive


@pytest.mark.parametrize(("factor", "least", "most"), [(0.5, -0.3, -0.1), (1.0, -0.02, 0.02), (2.0, 0.1, 0.3)])
def test_the_predicted_gain_changes_sign_at_the_predicted_crossover(factor: float, least: float, most: float) -> None:
    """Throughputs of two closed forms, and the batch size at which a third says that they are equal."""
    crossing = predict(LOAD, COSTS, 10_000_000, 1024).concurrency_crossover
    assert crossing is not None
    found = predict(replace(LOAD, concurrency=round(factor * crossing)), COSTS, 10_000_000, 1024)
    assert found.gain is not None
    assert least < found.gain < most


def test_the_gain_curves_show_percentages() -> None:
    curve = GainCurve((8.0, 64.0, 512.0), (-0.104, 0.0, 0.236), (64.0,))
    [(table, _)] = sentences.probes(SimpleNamespace(concurrency=curve, mix=None))  # type: ignore[arg-type]
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells == [["EB over v1"], ["-10 %"], ["+0 %"], ["+24 %"]]
    assert [str(column.header) for column in table.columns] == ["requests open", "8", "64", "512"]


def with_mix(load: ExpectedLoad, r: float) -> ExpectedLoad:
    """The same tokens per request at another decode share."""
    total = load.mu_l + load.mu_o
    return replace(load, mu_l=(1 - r) * total, mu_o=r * total, p0=1 / (r * total))


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


def test_drafts_shorten_the_answers_by_which_it_predicts() -> None:
    """All drafts accepted at no cost: half the decode steps, so exclusive batches have half the fixed cost of them."""
    plain = predict(LOAD, COSTS, 10_000_000, 1024)
    rejected = predict(LOAD, COSTS, 10_000_000, 1024, Drafts((0.0,)))
    accepted = predict(LOAD, COSTS, 10_000_000, 1024, Drafts((1.0,)))
    assert rejected.eb_rps < plain.eb_rps < accepted.eb_rps
    assert rejected.threshold.theta0 == plain.threshold.theta0 < accepted.threshold.theta0
    assert rejected.n_star == accepted.n_star < plain.n_star or plain.n_star == 1024
    assert predict(LOAD, COSTS, 10_000_000, 1024, Drafts(())) == plain
