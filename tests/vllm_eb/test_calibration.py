"""Calibrations: what they refuse, JSON there and back, the authors' tables."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ebbench.devices
from vllm_eb.calibration import (
    Calibration,
    CalibrationError,
    MixedCost,
    calibration_from_json,
    calibration_to_json,
    calibrations_from_csv,
    default_margin,
    device_key,
)

TABLES = Path(ebbench.devices.__file__).parent / "data" / "eb_vllm"
HEADER = "model,device_name,alpha_p_s,beta_p_s_per_token,alpha_d_s,beta_d_s_per_seq,prefill_r2,decode_r2,source_file"
GOOD = "m,NVIDIA H200,0.001,2e-5,0.009,4e-5,0.99,0.98,f.json"
MIXED_HEADER = "model,device_name,a_s_per_token,b_s_per_token,c_s_per_token,source_file"

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
        ({"alhpa_p": 0.1}, "unknown field alhpa_p; did you mean alpha_p"),
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


def test_the_authors_tables_load_with_their_mixed_costs_joined() -> None:
    table = calibrations_from_csv(TABLES / "calibration.csv", TABLES / "beta_mb.csv")
    by_key = {(entry.model, device_key(entry.device_name)): entry for entry in table}
    assert len(by_key) == len(table) == 14
    rtx = by_key["Qwen/Qwen3-8B", "rtxpro6000"]
    assert rtx.calibration.alpha_p == pytest.approx(0.004691170692443847)
    assert rtx.calibration.beta_d == pytest.approx(0.00010388105329650523)
    assert rtx.calibration.mixed is not None
    assert rtx.calibration.margin == 1e-5
    assert rtx.prefill_r2 == pytest.approx(0.99999, abs=1e-5)
    h200 = by_key["Qwen/Qwen3-8B", "h200"]
    assert h200.calibration.mixed == MixedCost(2.494e-05, 5.193e-05, 1.478e-05)
    assert h200.calibration.margin == 1e-5
    assert sum(entry.calibration.mixed is not None for entry in table) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([HEADER.replace("alpha_d_s", "alpha_d"), GOOD], ":1: no column alpha_d_s"),
        ([HEADER, GOOD, GOOD.replace("m,", "n,").replace("2e-5", "-2e-5")], ":3: beta_p must not be negative"),
        ([HEADER, GOOD.replace("0.009", "fast")], ":2: alpha_d_s must be a finite number, not 'fast'"),
        ([HEADER, GOOD.replace("0.009", "nan")], ":2: alpha_d_s must be a finite number"),
        ([HEADER, GOOD.replace("0.009", "")], ":2: no value for alpha_d_s"),
        ([HEADER, "m,NVIDIA H200,0.001"], ":2: no value for beta_p_s_per_token"),
        ([HEADER, GOOD + ",more"], ":2: more values than columns"),
        ([HEADER, GOOD, GOOD], ":3: a second row for m on NVIDIA H200"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, rows: list[str], message: str) -> None:
    path = tmp_path / "calibration.csv"
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(CalibrationError, match=message):
        calibrations_from_csv(path)


def test_a_mixed_cost_must_belong_to_a_calibration_and_be_sound(tmp_path: Path) -> None:
    table, mixed = tmp_path / "calibration.csv", tmp_path / "beta_mb.csv"
    table.write_text(f"{HEADER}\n{GOOD}\n")
    mixed.write_text(f"{MIXED_HEADER}\nother,H200,1e-5,1e-5,1e-5,f\n")
    with pytest.raises(CalibrationError, match="other on h200 has a mixed cost but no row"):
        calibrations_from_csv(table, mixed)
    mixed.write_text(f"{MIXED_HEADER}\nm,H200,-1e-5,1e-5,1e-5,f\n")
    with pytest.raises(CalibrationError, match=r"beta_mb\.csv:2: mixed a, b, c give a negative cost"):
        calibrations_from_csv(table, mixed)
    mixed.write_text(f"{MIXED_HEADER}\nm,H200,1e-5,2e-5,3e-5,f\n")
    (entry,) = calibrations_from_csv(table, mixed)
    assert entry.calibration.mixed == MixedCost(1e-5, 2e-5, 3e-5)


def test_device_names_meet_whatever_their_spelling() -> None:
    names = ["NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000", "rtx-pro-6000"]
    assert {device_key(name) for name in names} == {"rtxpro6000"}
    assert (default_margin("NVIDIA H200"), default_margin("h200"), default_margin("L40S")) == (1e-5, 1e-5, 1e-4)
