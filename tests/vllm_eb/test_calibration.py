"""Calibrations: invalid values, and a round trip through JSON."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.calibration import (
    Calibration,
    CalibrationError,
    MixedCost,
    calibration_from_json,
    calibration_to_json,
    device_key,
)

costs = st.floats(0.0, 10.0)
mixed_costs = st.builds(MixedCost, costs, costs, costs)
calibrations = st.builds(
    Calibration,
    costs,
    costs,
    st.floats(0.0, 10.0, exclude_min=True),
    costs,
    mixed=st.none() | mixed_costs,
    alpha_mb=st.none() | costs,
    margin=st.floats(-1.0, 1.0),
    source=st.text(),
)


@given(calibrations)
def test_json_round_trip(calibration: Calibration) -> None:
    assert calibration_from_json(calibration_to_json(calibration)) == calibration


def test_a_decode_step_costs_something_whatever_is_in_it() -> None:
    """Thresholds are ratios to it."""
    with pytest.raises(CalibrationError, match="alpha_d must be above 0"):
        Calibration(alpha_p=0.1, beta_p=0.1, alpha_d=0.0, beta_d=0.1)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, "0.1", None, True])
@pytest.mark.parametrize("name", ["alpha_p", "beta_p", "alpha_d", "beta_d"])
def test_a_cost_that_is_no_cost_is_named(name: str, bad: object) -> None:
    raw = {"alpha_p": 0.1, "beta_p": 0.1, "alpha_d": 0.1, "beta_d": 0.1} | {name: bad}
    with pytest.raises(CalibrationError, match=name):
        calibration_from_json(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alhpa_p": 0.1}, "unknown field alhpa_p; did you mean 'alpha_p'"),
        ({"mixed": {"a": 1.0, "b": 0.0, "cc": 0.0}}, r"unknown field mixed\.cc"),
        ({"mixed": {"a": 1.0, "b": 0.0}}, r"mixed\.c is missing"),
        ({"mixed": [1, 2, 3]}, "mixed must be a JSON object"),
        ({"mixed": {"a": 1.0, "b": "x", "c": 0.0}}, r"mixed\.b"),
        ({"alpha_mb": -1.0}, "alpha_mb"),
        ({"margin": "wide"}, "margin"),
        ({"source": 3}, "source"),
    ],
)
def test_json_with_a_mistake_says_where(change: dict[str, object], message: str) -> None:
    raw = json.loads(calibration_to_json(Calibration(0.1, 0.1, 0.1, 0.1))) | change
    with pytest.raises(CalibrationError, match=message):
        calibration_from_json(json.dumps(raw))


GRID = {
    "tokens": [64, 256], "seqs": [1, 8], "contexts": [32, 64], "prefill": [1e-3, 2e-3],
    "decode": [[1e-3, 2e-3], [2e-3, 3e-3]], "mixed": [[[1e-3, 2e-3], [2e-3, 3e-3]], [[2e-3, 3e-3], [3e-3, 4e-3]]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [None, 256]}, r"grid\.tokens must hold at least two increasing numbers"),
        ({"seqs": [1.5, 8]}, r"grid\.seqs must hold"),
        ({"contexts": [0, 64]}, r"grid\.contexts must hold"),
        ({"tokens": [256, 64]}, r"grid\.tokens must hold"),
        ({"prefill": [-1e-3, 2e-3]}, r"grid\.prefill holds -0\.001, not a positive time"),
        ({"prefill": [1e-3]}, r"grid\.prefill does not have the 2 entries"),
        ({"decode": [[1e-3, None], [2e-3, 3e-3]]}, r"grid\.decode holds None"),
    ],
)
def test_a_grid_with_a_hole_or_an_impossible_entry_is_refused(change: dict[str, object], message: str) -> None:
    plain = json.loads(calibration_to_json(Calibration(0.1, 0.1, 0.1, 0.1)))
    assert calibration_from_json(json.dumps(plain | {"grid": GRID})).grid is not None
    with pytest.raises(CalibrationError, match=message):
        calibration_from_json(json.dumps(plain | {"grid": GRID | change}))


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "object"), ("{}", "alpha_p is missing")])
def test_text_that_is_no_calibration(text: str, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibration_from_json(text)


def test_a_mixed_cost_may_curve_down_but_not_below_zero() -> None:
    assert MixedCost(1.0, 0.5, -0.4).at(1.0) == pytest.approx(1.1)
    with pytest.raises(CalibrationError, match=r"r = 0\.5"):
        MixedCost(0.1, -1.0, 1.0)


def test_device_names_meet_whatever_their_spelling() -> None:
    names = ["NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000", "rtx-pro-6000"]
    assert {device_key(name) for name in names} == {"rtxpro6000"}
