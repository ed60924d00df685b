"""``ebbench theory``: values, JSON keys, and one line for an invalid value."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.theory import app
from ebbench.devices.loader import load_device
from ebbench.errors import InputFileError, UsageError
from vllm_eb.calibration import Calibration, MixedCost, calibration_to_json
from vllm_eb.theory import base_threshold

COSTS = "--alpha-p 0.0047 --beta-p 5e-5 --alpha-d 0.0104 --beta-d 1e-4"
CROSSOVER = "crossover --mu-l 105 --mu-o 280 --n-obs 512"


def output(command: str) -> str:
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def values(command: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(output(f"{command} --json"))
    return found


def error(command: str) -> BaseException | None:
    return CliRunner().invoke(app, command.split()).exception


def test_threshold_gives_the_closed_form() -> None:
    found = values("threshold --p0 0.0036 --alpha-p 0.0047 --alpha-d 0.0104")
    assert found["theta0"] == base_threshold(0.0036, 0.0047, 0.0104)
    assert found["theta_star"] == found["theta0"]
    assert found["delta_theta"] == 0


def test_threshold_with_an_increasing_hazard_and_a_batch() -> None:
    command = "threshold --p0 0.0036 --alpha-p 0.0047 --alpha-d 0.0104 --eta 1e-4 --beta-d 1e-4 --batch-size 512"
    found = values(command)
    assert found["delta_theta"] == pytest.approx(5 * found["theta0"])
    assert found["theta_star"] == pytest.approx(6 * found["theta0"])
    assert found["k_star"] == int(found["theta_star"] * 512)
    assert values(f"{command} --uncapped")["delta_theta"] > found["delta_theta"]


def test_the_table_shows_every_symbol_with_its_meaning() -> None:
    shown = output("threshold --p0 0.0036 --alpha-p 0.0047 --alpha-d 0.0104")
    for text in ("theta0", "zeta", "delta_theta", "theta_star", "share of N", "0.0549385"):
        assert text in shown


def test_memory_gives_all_bounds_in_order() -> None:
    command = "memory --capacity 400000 --mu-l 105 --p0 0.0036 --theta 0.2 --epsilon 0.01"
    found = values(command)
    assert found["n_paper"] <= found["n_peak"] <= found["n_static"]
    assert found["n_star"] == found["n_code"]
    assert values(f"{command} --form paper")["n_star"] == found["n_paper"]
    assert found["slot_tokens"] == pytest.approx(352.94, abs=0.01)
    assert "memory-safe" in output(command)


def test_crossover_from_costs_given_one_by_one() -> None:
    found = values(f"{CROSSOVER} {COSTS} --beta-mb 2.1e-4 --margin 1e-5")
    assert found["lhs"] == pytest.approx(2.1e-4 - found["beta_eb"])
    assert found["eb_wins"] is True
    assert found["eb_throughput"] > found["mb_throughput"]
    assert found["r"] == pytest.approx(280 / 385)


def test_crossover_without_a_mixed_cost_says_so() -> None:
    found = values(f"{CROSSOVER} {COSTS}")
    assert (found["lhs"], found["beta_mb"], found["mb_throughput"]) == (0, None, None)
    assert "not measured" in output(f"{CROSSOVER} {COSTS}")


def test_crossover_from_a_calibration_file_with_one_cost_replaced(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(calibration_to_json(Calibration(0.0047, 5e-5, 0.0104, 1e-4, mixed=MixedCost(6e-5, 2e-4, 1e-5))))
    stored = values(f"{CROSSOVER} --calibration {path}")
    assert stored == values(f"{CROSSOVER} --calibration {path} --alpha-p 0.0047")
    assert values(f"{CROSSOVER} --calibration {path} --alpha-p 0.02")["theta0"] > stored["theta0"]


def test_crossover_of_a_known_device() -> None:
    found = values(f"{CROSSOVER} --device rtx-pro-6000 --model qwen3-8b")
    assert found["eb_wins"] is True
    assert found["margin"] == load_device("rtx-pro-6000", "qwen3-8b").calibration.margin


def test_deferred_finds_the_best_threshold_of_table_1() -> None:
    found = values("deferred --batch-limit 331 --alpha 0.004975 --c-p 0.0288 --c-d 0.04 --k 32")
    assert 26 <= found["k_star"] <= 32
    assert found["throughput_k1"] < found["throughput_k"] <= found["throughput"]
    assert found["gain"] == pytest.approx(found["throughput"] / found["throughput_k1"] - 1)
    dear = values("deferred --batch-limit 331 --alpha 0.004975 --c-p 0.0288 --c-d 0.04 --t-p 1 --d0 285 --n 10000")
    assert dear["k_star"] == found["k_star"]
    assert 1 / dear["throughput"] - 1 / found["throughput"] == pytest.approx(0.0285)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("threshold --p0 2 --alpha-p 1 --alpha-d 1", "p0 must lie in (0, 1], not 2.0"),
        ("threshold --p0 0.1 --alpha-p 1 --alpha-d 0", "alpha_d must be a positive number, not 0.0"),
        ("threshold --p0 0.1 --alpha-p 1 --alpha-d 1 --eta 1e-3", "add --beta-d and --batch-size"),
        ("threshold --p0 0.1 --alpha-p 1 --alpha-d 1 --batch-size 0", "--batch-size must be at least 1"),
        ("memory --capacity 1000 --mu-l 10 --p0 0.1 --theta 1", "theta must lie in [0, 1), not 1.0"),
        ("memory --capacity 1000 --mu-l 10 --p0 0.1 --theta 0.5 --form best", "--form is code or paper"),
        (f"{CROSSOVER} --alpha-p 0.1", "give --beta-p, --alpha-d, --beta-d, or --device"),
        (f"{CROSSOVER} --device h200", "--device and --model go together"),
        (f"{CROSSOVER} --device h200 --model qwen3-8b --calibration x", "not both"),
        (f"{CROSSOVER} {COSTS} --beta-mb -1", "negative cost"),
        (f"{CROSSOVER} {COSTS} --theta0 1", "theta0 must lie in [0, 1)"),
        ("deferred --batch-limit 0 --alpha 0.1 --c-p 1 --c-d 1", "batch_limit must be at least 1"),
        ("deferred --batch-limit 9 --alpha 0.1 --c-p 1 --c-d 1 --k 10", "--k must lie between 1 and the batch limit 9"),
        ("deferred --batch-limit 9 --alpha 0.1 --c-p 1 --c-d 1 --n 0", "--n must be positive"),
        ("deferred --batch-limit 99999 --alpha 0.1 --c-p 1 --c-d 1", "at most 16384"),
    ],
)
def test_a_bad_value_is_one_clear_line(command: str, message: str) -> None:
    found = error(command)
    assert isinstance(found, UsageError)
    assert found.exit_code == 2
    assert message in str(found)
    assert "\n" not in str(found)


def test_a_calibration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    missing = error(f"{CROSSOVER} --calibration {path}")
    assert isinstance(missing, InputFileError)
    assert str(missing) == f"{path}: cannot be read: No such file or directory"
    path.write_text('{"alpha_p": -1, "beta_p": 0, "alpha_d": 1, "beta_d": 0}')
    negative = error(f"{CROSSOVER} --calibration {path}")
    assert str(negative) == f"{path}: alpha_p must not be negative, but is -1"


@pytest.mark.parametrize("command", ["threshold", "memory", "crossover", "deferred"])
def test_help_shows_an_example(command: str) -> None:
    assert f"ebbench theory {command}" in " ".join(output(f"{command} --help").split())


def test_theory_leaves_out_values_that_are_not_finite() -> None:
    """With alpha = 1 and c_p = 0 the approximation has no cost and an infinite throughput."""
    command = "deferred --batch-limit 10 --alpha 1 --c-p 0 --c-d 0.04"
    found = values(command)
    assert (found["k_star_approximation"], found["throughput_approximation"]) == (None, None)
    assert found["throughput"] == pytest.approx(250)
    assert "inf" not in output(command)


def test_a_missing_option_is_bad_usage() -> None:
    assert CliRunner().invoke(app, ["threshold", "--p0", "0.1"]).exit_code == 2
