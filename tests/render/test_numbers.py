"""Durations and other numbers as text."""

from __future__ import annotations

import pytest

from ebbench.render import numbers


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, "–"), (0.0, "0 ms"), (0.1234, "0.123 ms"), (162.4, "162 ms"), (999.4, "999 ms"), (999.6, "1.00 s"),
        (8284, "8.28 s"), (9994, "9.99 s"), (9996, "10.0 s"), (58_840, "58.8 s"), (99_960, "100 s"),
        (1_204_000, "1,204 s"),
    ],
)  # fmt: skip
def test_durations_in_ms_are_shown_in_fitting_units(ms: float | None, shown: str) -> None:
    assert numbers.duration_ms(ms) == shown


def test_rates_changes_and_times_are_rounded_as_documented() -> None:
    assert numbers.rate(0.9333) == "0.933"
    assert numbers.rate(13178.6) == "13,179"
    assert numbers.change(0.364) == "+36.4 %"
    assert numbers.change(-0.05) == "-5.0 %"
    assert numbers.micros(3.14e-5) == "31.4 µs"
    assert numbers.micros(-2e-3) == "-2,000 µs"
    assert numbers.spark((0.0, 0.5, 1.0)) == "▁▅█"
