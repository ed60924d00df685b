"""Sensitivity over grids whose answer is known by hand."""

from __future__ import annotations

import math

import pytest

from ebbench.analysis.sensitivity import sensitivity


def test_sensitivity_equals_a_calculation_by_hand() -> None:
    """Throughput 1 and 3 at B = 1, 2 and 2 at B = 2: mean 2, deviations 1, 1, 0, 0."""
    found = sensitivity({(1, 10): 1.0, (1, 20): 3.0, (2, 10): 2.0, (2, 20): 2.0})
    assert (found.best_budget, found.best_size, found.best) == (1, 20, 3.0)
    assert found.cv == pytest.approx(math.sqrt(0.5) / 2)
    assert found.range_ratio == pytest.approx(3)
    assert found.b_sens == pytest.approx((0.5 / 1.5 + 0.5 / 2.5) / 2)  # across B at N = 10 and at N = 20
    assert found.n_sens == pytest.approx((1 / 2 + 0) / 2)  # across N at B = 1 and at B = 2


def test_scale_does_not_matter_and_a_flat_grid_is_zero() -> None:
    grid = {(b, n): 1.0 + b * n for b in (1, 2, 4) for n in (1, 3)}
    one, other = sensitivity(grid), sensitivity({pair: 7 * value for pair, value in grid.items()})
    assert (one.cv, one.b_sens, one.n_sens) == pytest.approx((other.cv, other.b_sens, other.n_sens))
    flat = sensitivity(dict.fromkeys(grid, 5.0))
    assert (flat.cv, flat.range_ratio, flat.b_sens, flat.n_sens) == (0, 1, 0, 0)


def test_the_smaller_configuration_wins_a_tie() -> None:
    found = sensitivity({(2, 5): 1.0, (1, 9): 1.0, (1, 5): 1.0, (2, 9): 1.0})
    assert (found.best_budget, found.best_size) == (1, 5)


def test_a_grid_with_holes_has_a_best_cell_and_no_sensitivity() -> None:
    found = sensitivity({(1, 10): 1.0, (1, 20): 3.0, (2, 10): 2.0})
    assert (found.best, found.cells, found.expected) == (3.0, 3, 4)
    assert (found.cv, found.range_ratio, found.b_sens, found.n_sens) == (None, None, None, None)


def test_an_axis_with_one_value_has_no_sensitivity() -> None:
    found = sensitivity({(1, 10): 1.0, (1, 20): 3.0})
    assert found.b_sens is None
    assert found.n_sens == pytest.approx(0.5)
    assert sensitivity({(1, 1): 1.0}).cv is None
    with pytest.raises(ValueError, match="no cell"):
        sensitivity({})
