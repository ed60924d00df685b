"""Costs of steps: grids between and beyond their points, at one context, as JSON; grids that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.calibration import (
    Calibration,
    CostGrid,
    CostGridError,
    LinearCosts,
    MixedCost,
    calibration_from_json,
    calibration_to_json,
)

LINEAR = LinearCosts(alpha_p=5e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4, alpha_mb=5e-3)
FLAT_THEN_LINEAR = CostGrid(
    tokens=(1, 1024, 8192),
    seqs=(1, 1001),
    contexts=(1, 1000),
    prefill=(2e-2, 2e-2, 2e-2 + 7168 * 5e-5),
    decode=((1e-2, 1e-2), (2e-2, 2e-2)),
    mixed=(((1.0, 1.0), (1.0, 1.0)),) * 3,
)
GRID = CostGrid(
    tokens=(100, 200),
    seqs=(1, 11),
    contexts=(1, 1001),
    prefill=(1.0, 2.0),
    decode=((1.0, 2.0), (3.0, 4.0)),
    mixed=(((2.0, 3.0), (4.0, 5.0)), ((3.0, 4.0), (5.0, 6.0))),
)


def test_a_grid_is_linear_between_and_beyond_its_points() -> None:
    assert GRID.prefill_s(150) == pytest.approx(1.5)
    assert GRID.prefill_s(400) == pytest.approx(4.0)
    assert GRID.prefill_s(1) == 1.0
    assert GRID.decode_s(6, 501) == pytest.approx(2.5)
    assert GRID.mixed_s(150, 6, 501) == pytest.approx(4.0)


@given(st.sampled_from([GRID, LINEAR, FLAT_THEN_LINEAR]), st.floats(0, 3000), st.lists(st.floats(0, 3000), min_size=1))
def test_costs_at_one_context_are_the_costs_exactly(
    costs: CostGrid | LinearCosts, context: float, seqs: list[float]
) -> None:
    decode_s = costs.decode_at(context)
    assert [decode_s(each) for each in seqs] == [costs.decode_s(each, context) for each in seqs]


def test_a_calibration_with_a_grid_survives_json() -> None:
    made = Calibration(5e-3, 5e-5, 1e-2, 1e-4, mixed=MixedCost(6e-5, 2e-4, 1e-5), grid=GRID)
    assert calibration_from_json(calibration_to_json(made)) == made
    assert made.costs is made.grid


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seqs": (1, 1)}, "grid.seqs"),
        ({"prefill": (1.0,)}, "grid.prefill"),
        ({"prefill": (1.0, -2.0)}, "grid.prefill holds -2.0"),
        ({"decode": ((1.0, 2.0), (3.0, float("nan")))}, "grid.decode"),
        ({"mixed": GRID.mixed[:1]}, "grid.mixed"),
    ],
)
def test_a_grid_with_holes_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(CostGridError, match=says):
        replace(GRID, **change)  # type: ignore[arg-type]
