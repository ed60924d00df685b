"""Cost and energy of a run, from its facts to its summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbench.analysis.metrics import ECONOMY_FIGURES, cost_and_energy
from ebbench.analysis.summary import summarise
from ebbench.cli.main import app
from ebbench.records.run import Run

POWER = {"mean_w": 350.0, "peak_w": 420.0, "energy_j": 7000.0, "samples": 200, "energy_from": "counter", "gpus": ["H"]}


def run_ebbench(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A simulated run at a price of 7.2 per hour."""
    folder = tmp_path_factory.mktemp("priced") / "run"
    done = run_ebbench(
        "run", "balanced", "--engine", "sim", "--policy", "v1", "--num-prompts", 40, "--max-concurrency", 8,
        "--price-per-hour", 7.2, "--json", "-o", folder,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)[0], folder


def test_costs_are_the_price_of_the_time_it_takes(priced: tuple[dict[str, Any], Path]) -> None:
    found, _ = priced
    per_s = 7.2 / 3600
    assert found["price_per_hour"] == 7.2
    assert found["cost_per_million_output_tokens"] == pytest.approx(per_s * 1e6 / found["output_throughput"])
    assert found["cost_per_million_tokens"] == pytest.approx(per_s * 1e6 / found["total_token_throughput"])
    assert found["cost_per_1000_requests"] == pytest.approx(per_s * 1e3 / found["request_throughput"])
    assert found["cost_per_1000_requests"] * found["completed"] / 1e3 == pytest.approx(per_s * found["duration"])
    assert all(found[name] is None for name in ECONOMY_FIGURES if "gpu" in name or "joules" in name)


def test_costs_are_in_tables_query_and_html(priced: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    found, folder = priced
    shown = run_ebbench("show", folder)
    assert "cost per" in shown.stdout
    assert f"{found['cost_per_million_output_tokens']:.3g}" in shown.stdout
    asked = run_ebbench("query", "select cost_per_1000_requests from runs", "--runs", folder, "--format", "json")
    assert json.loads(asked.stdout)[0]["cost_per_1000_requests"] == pytest.approx(found["cost_per_1000_requests"])
    page = tmp_path / "page.html"
    assert run_ebbench("report", folder, "-o", page).exit_code == 0
    assert "cost per" in page.read_text(encoding="utf-8")


def test_a_run_without_price_or_power_shows_neither(tmp_path: Path) -> None:
    done = run_ebbench(
        "run", "balanced", "--engine", "sim", "--policy", "v1", "--num-prompts", 8, "--max-concurrency", 8, "-o",
        tmp_path / "run", "--quiet",
    )  # fmt: skip
    assert "cost" not in done.stdout
    assert "GPU power" not in done.stdout


def test_energy_is_that_of_the_whole_run(priced: tuple[dict[str, Any], Path]) -> None:
    summary = summarise(Run.load(priced[1]))
    economy = cost_and_energy({"gpu_power": POWER}, summary.metrics)
    assert (economy.gpu_power_mean_w, economy.gpu_power_peak_w, economy.gpu_energy_j) == (350.0, 420.0, 7000.0)
    assert economy.joules_per_output_token == pytest.approx(7000.0 / summary.metrics.total_output_tokens)
    assert economy.joules_per_request == pytest.approx(7000.0 / 40)
    of_a_phase = cost_and_energy({"gpu_power": POWER, "price_per_hour": 1.0}, summary.metrics, whole=False)
    assert of_a_phase.gpu_energy_j is None
    assert of_a_phase.cost_per_1000_requests is not None


def test_power_that_failed_is_absent(priced: tuple[dict[str, Any], Path]) -> None:
    economy = cost_and_energy({"gpu_power": {"gpus": ["H"], "absent": "lost"}}, summarise(Run.load(priced[1])).metrics)
    assert all(value is None for value in vars(economy).values())


@pytest.mark.parametrize("price", ["-1", "0", "inf", "nan"])
def test_a_price_that_is_none_is_refused_in_one_line(price: str) -> None:
    done = run_ebbench("run", "balanced", "--engine", "sim", "--price-per-hour", price)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --price-per-hour")
    assert done.stderr.count("\n") == 1
