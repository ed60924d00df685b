"""What a sweep calls best: by which figure, and only beyond noise. Measured again with --fresh."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbench.analysis.cases import TIE
from ebbench.analysis.sensitivity import least_difference
from ebbench.runs.file import spec_of_file
from ebbench.runs.store import Measured
from ebbench.sweep.drive import Finished
from ebbench.sweep.show import Finding, deciding_metric, findings, unlike_requests
from tests.sweep.sweep_data import TINY, invoke, spec_file

LIMITED = TINY.replace("[common]", '[common]\ngoodput = "ttft:40 tpot:12"').replace(
    "[common]", "max_num_batched_tokens = [64, 256]\n[common]", 1
)


def entry(policy: str, budget: int, seed: int, value: float, metric: str = "request_throughput") -> Finished:
    """A finished cell with one figure."""
    settings: dict[str, Any] = {"policy": policy, "max_num_batched_tokens": budget, "seed": seed}
    cell = spec_of_file({"workload": "balanced", "max_num_seqs": 16} | settings)
    return Finished(cell, Measured({metric: value, "valid": True}, (), Path(), 0.0, ""))


def judged(values: dict[tuple[str, int], list[float]]) -> list[Finding]:
    """Findings of policies and token budgets with a value per seed."""
    entries = [
        entry(policy, budget, seed, value) for (policy, budget), own in values.items() for seed, value in enumerate(own)
    ]
    return findings(entries, ("policy", "max_num_batched_tokens", "seed"))


def test_a_configuration_within_the_noise_of_the_best_is_equal_to_it() -> None:
    (found,) = judged({("v1", 512): [100, 104, 98], ("v1", 2048): [101, 102, 99], ("v1", 8192): [80, 84, 77]})
    assert found.sensitivity.best_budget in (512, 2048)
    assert found.equal in (((512, 16),), ((2048, 16),))
    assert found.noise is not None
    assert 0.02 < found.noise < 0.1


def test_a_configuration_that_leads_on_every_seed_is_best() -> None:
    """The seeds differ by a fifth and the configurations by 3 %: paired, that is no noise."""
    (found,) = judged({("v1", 512): [100, 120, 90], ("v1", 2048): [103.1, 123.5, 92.7]})
    assert (found.sensitivity.best_budget, found.equal) == (2048, ())


def test_a_gain_within_noise_is_called_equal() -> None:
    first, second = judged({("v1", 512): [100, 104, 98], ("eb", 512): [101, 103, 100]})
    assert (first.gain, second.gain_shown) == (None, False)
    _, clear = judged({("v1", 512): [100, 104, 98], ("eb", 512): [121, 125, 118]})
    assert clear.gain_shown
    assert clear.gain == pytest.approx(0.205, abs=0.01)


def test_policies_that_got_other_requests_are_named() -> None:
    """An override gave one of them longer runs, and its gain was shown as any other."""

    def cell(policy: str, seed: int, plan: str) -> Finished:
        made = entry(policy, 512, seed, 1.0)
        return replace(made, measured=replace(made.measured, figures={**made.measured.figures, "plan_hash": plan}))

    alike = [cell("v1", 0, "a"), cell("eb", 0, "a"), cell("v1", 1, "b"), cell("eb", 1, "b")]
    assert unlike_requests(alike, ("policy", "workload", "seed")) == []
    [told] = unlike_requests([*alike[:3], cell("eb", 1, "c")], ("policy", "workload", "seed"))
    assert told.startswith("workload=balanced: not all got the same requests")


def test_one_seed_leaves_the_noise_unknown() -> None:
    first, second = judged({("v1", 512): [100.0], ("v1", 2048): [100.3], ("eb", 512): [100.2]})
    assert (first.noise, first.equal, second.gain_shown) == (None, ((512, 16),), False)


def test_noise_needs_positive_figures_of_common_seeds() -> None:
    assert least_difference({}) is None
    assert least_difference({"a": {0: 1.0, 1: 2.0}}) is None
    assert least_difference({"a": {0: 1.0, 1: 2.0}, "b": {1: 1.0, 2: 2.0}}) is None
    assert least_difference({"a": {0: 1.0, 1: 0.0}, "b": {0: 1.0, 1: 2.0}}) is None
    assert least_difference({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.1, 1: 2.2}}) == TIE, "no noise at all"


def test_equal_configurations_are_seldom_told_apart() -> None:
    """Of grids whose cells differ by noise only, about 5 % name a worst configuration."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        grid = {cell: {seed: math.exp(rng.normal(0, 0.03)) for seed in range(3)} for cell in range(6)}
        means = [float(np.mean(list(own.values()))) for own in grid.values()]
        reach = least_difference(grid)
        assert reach is not None
        wrong += max(means) > min(means) * (1 + reach)
    assert 0.02 < wrong / 400 < 0.09


def test_limits_rank_by_goodput(tmp_path: Path) -> None:
    spec = spec_file(tmp_path, LIMITED)
    done = invoke("sweep", spec, "-o", tmp_path / "out", "-q", "--json", "--workers", 2)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["metric"] == "request_goodput"
    chosen = invoke("sweep", spec, "-o", tmp_path / "out", "-q", "--json", "--metric", "output_throughput")
    assert json.loads(chosen.stdout)["metric"] == "output_throughput"
    shown = invoke("sweep", spec, "-o", tmp_path / "out", "-q").stdout
    assert "goodput" in shown
    assert "no new cell, 8 from before (the oldest of 20" in shown


def test_goodput_needs_limits_everywhere(tmp_path: Path) -> None:
    cells = [spec_of_file({"workload": "balanced", "goodput": limits}) for limits in ("ttft:1", "")]
    assert (deciding_metric(cells[:1]), deciding_metric(cells)) == ("request_goodput", "request_throughput")
    done = invoke("sweep", spec_file(tmp_path, TINY), "--metric", "request_goodput", "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "needs limits for all cells" in done.stderr
    assert not (tmp_path / "out").exists()


def test_fresh_measures_again_and_keeps_the_earlier_results_by_date(tmp_path: Path) -> None:
    spec, out = spec_file(tmp_path, TINY), tmp_path / "out"
    first = invoke("sweep", spec, "-o", out, "-q", "--fresh", "--workers", 1)
    assert first.exit_code == 0, first.output
    (out / "note.txt").write_text("the user's")
    for path in (out / "results.parquet", out / "sweep.toml"):
        os.utime(path, (1e9, 1e9))
    again = invoke("sweep", spec, "-o", out, "-q", "--fresh", "--json", "--workers", 1)
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["from_before"] == 0
    kept = tmp_path / "out-20010909T014640Z"
    assert f"earlier results: {kept}" in again.stderr
    assert {path.name for path in kept.iterdir()} == {"cells", "failed", "results.parquet", "sweep.toml"}
    assert (out / "note.txt").exists()
    assert json.loads(invoke("sweep", spec, "-o", out, "-q", "--json").stdout)["from_before"] == 4
    assert invoke("sweep", spec, "-o", out, "--fresh", "--dry-run").exit_code == 2
