"""The controller's linear view of a device, fitted to any cost model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from ebbench.devices.costs import LEAST_FIXED_S, fixed_and_each

TIMES = st.lists(st.floats(1e-4, 10.0), min_size=3, max_size=9)


@given(st.lists(st.floats(1e-4, 10.0), min_size=3, max_size=9))
def test_no_other_costs_that_are_not_negative_fit_better(times_s: list[float]) -> None:
    """Held against a bounded least-squares solver."""
    counts = [2.0**i for i in range(len(times_s))]

    def error(fixed: float, each: float) -> float:
        return sum((fixed + each * n - t) ** 2 for n, t in zip(counts, times_s, strict=True))

    best = lsq_linear([[1.0, n] for n in counts], times_s, bounds=(0.0, float("inf")))
    fixed, each = fixed_and_each(counts, times_s)
    assert fixed >= LEAST_FIXED_S
    assert each >= 0.0
    slack = len(counts) * LEAST_FIXED_S**2  # what raising the fixed cost to its least can add
    assert error(fixed, each) <= 2.0 * best.cost + slack + 2.0 * (2.0 * best.cost * slack) ** 0.5 + 1e-9


def test_a_decode_step_always_has_a_fixed_cost() -> None:
    """However noisy the measurement: no threshold is defined without."""
    assert fixed_and_each((1.0, 2.0, 4.0), (1e-3, 3e-3, 9e-3)) == (LEAST_FIXED_S, pytest.approx(43e-3 / 21))
