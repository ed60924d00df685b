"""Fidelity: the scores, the protocol of the published runs, and the targets that can be checked quickly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.config.topology import parse_topology
from ebbench.devices.costs import published_calibration
from ebbench.devices.profiles import find_model, find_profile, list_devices, list_models
from ebbench.grouping import by_key
from ebbench.papers.fidelity.case import DEVICES, FIT_ROWS, Case
from ebbench.papers.fidelity.cases import REPETITION_GROUP, WITHOUT, all_cases, real_workloads, table3
from ebbench.papers.fidelity.cases_servers import table17
from ebbench.papers.fidelity.report import all_scores, write_report
from ebbench.papers.fidelity.runs import (
    _gauss_newton,
    calibration_cells,
    case_runs,
    cells_of,
    replay_cells,
    run_cases,
)
from ebbench.papers.fidelity.scores import REPLAY_TARGETS, PublishedFigure, comparisons, replay_scores, scores
from ebbench.papers.published import MODELS, best_sizes, rows
from ebbench.runs.execute import Task, make
from ebbench.runs.prepare import plan_of
from ebbench.spec.run import RunSpec
from tests.devices.fidelity_report import reported
from vllm_eb.calibration import MixedCost


def cell(scheduler: str, published: float, ours: float, **fields: object) -> PublishedFigure:
    values = {"source": "t", "device": "d", "model": "m", "case": "c", "metric": "tokens_per_s", **fields}
    return PublishedFigure(scheduler=scheduler, published=published, ours=ours, **values)  # type: ignore[arg-type]


def test_every_pair_of_a_row_is_compared_and_v1_comes_first() -> None:
    cells = [cell("ebplus", 120, 130), cell("v1", 100, 100), cell("eb", 121, 118), cell("v1", 9, 9, case="other")]
    pairs = comparisons(cells)
    assert [(p.first, p.second) for p in pairs] == [("v1", "eb"), ("v1", "ebplus"), ("eb", "ebplus")]
    assert [p.decided for p in pairs] == [True, True, False]
    assert [p.same_winner for p in pairs] == [True, True, False]
    assert pairs[0].published_gain == pytest.approx(0.21)
    assert pairs[0].our_gain == pytest.approx(0.18)


def test_equal_results_of_ours_have_no_winner() -> None:
    for published in (90, 110):
        (pair,) = comparisons([cell("v1", 100, 100), cell("eb", published, 100.05)])
        assert pair.decided
        assert not pair.same_winner


def test_scores_without_the_api_server_are_apart() -> None:
    found = all_scores([cell("v1", 100, 90, source="table 2"), cell("v1", 100, 80, source=f"table 2{WITHOUT}")])
    assert [score.reached for score in found["predicted rows"]] == pytest.approx([0.1])
    assert [score.reached for score in found["predicted rows, no API server"]] == pytest.approx([0.2])


def test_a_case_that_keeps_the_api_server_busy_is_answered_with_it() -> None:
    few, many = (
        shortened(next(c for c in table17() if (c.device, c.name, c.scheduler) == ("h200", name, "v1")), 400)
        for name in ("LongBench", "ShareGPT")
    )
    answers = run_cases([few, many], 0, lambda _: None)
    (asked,) = run_cases([replace(many, api_server="datacenter")], 0, lambda _: None)
    without = run_cases([replace(case, api_server="off") for case in (few, many)], 0, lambda _: None)
    assert answers[0] == without[0]
    assert answers[1] == replace(asked, caveats=("api-server-simulated", *asked.caveats))
    assert asked.ours < 0.8 * without[1].ours


def test_scores_count_winners_gains_and_errors() -> None:
    cells = [cell("v1", 100, 100), cell("eb", 110, 113), cell("v1", 100, 90, case="b"), cell("eb", 90, 99, case="b")]
    winner, gain, error = scores(cells)
    assert (winner.reached, winner.count, winner.met) == (0.5, 2, False)
    assert (gain.reached, gain.count) == (0.5, 2)
    assert error.reached == pytest.approx(0.0636, abs=1e-3)
    assert error.met


def test_unscored_cells_and_latencies_do_not_enter() -> None:
    cells = [cell("v1", 100, 100), cell("eb", 200, 1, scored=False), cell("eb", 5, 50, metric="tpot_mean_ms")]
    assert comparisons(cells) == []
    assert [score.count for score in scores(cells)] == [1]


def test_the_replayed_run_meets_its_targets_with_nothing_fitted() -> None:
    found = replay_scores(replay_cells())
    assert {score.name.split(", ")[1] for score in found} == set(REPLAY_TARGETS)
    assert all(score.met for score in found), [(score.name, score.reached) for score in found]


def test_fitted_cases_are_those_that_the_notes_name() -> None:
    fitted = [case for case in all_cases() if case.fitted]
    assert {
        (c.group, c.device, c.name)
        for c in fitted
        if c.group not in ("silicon", "table 20", "figure 3", REPETITION_GROUP)
    } == {
        *(("table 3", device, name) for name in FIT_ROWS for device in ("rtx-pro-6000", "h200")),
        ("table 3", "rtx-pro-6000", "c=2048"),
        ("table 2 and figure 5", "h200", "LongBench"),
    }
    assert {c.model for c in fitted if c.group == "table 2 and figure 5"} == {"qwen3-8b"}
    assert {c.name.split(",")[0] for c in fitted if c.group == "figure 3"} == {"prefill_heavy"}
    pools = [case for case in fitted if case.group == "table 20"]
    assert {(c.device, c.name.split(",")[0], c.scheduler) for c in pools} == {
        (device, "prefill-heavy", "1p3d") for device in ("rtx-pro-6000", "h200")
    }
    silicon = [case for case in fitted if case.group == "silicon"]
    assert {(c.device, c.model) for c in silicon} == {("h100", "qwen3-32b")}
    assert {c.protocol.topology for c in silicon} == {parse_topology("tp=4")}
    assert all(case.name.startswith("1024 in") for case in silicon)


@pytest.mark.parametrize("simulated", ["datacenter", None])
def test_a_case_that_set_the_api_server_is_fitted_only_with_it(simulated: str | None) -> None:
    def figures(_: RunSpec) -> dict[str, Any]:
        return {"request_throughput": 1.0, "api_server": simulated}

    (other,) = (c for c in table17() if (c.device, c.name, c.scheduler) == ("h200", "ShareGPT", "v1"))
    chosen = [c for c in real_workloads() if (c.device, c.name, c.model) == ("h200", "ShareGPT", "qwen3-8b")]
    cells = cells_of([*chosen, other], figures, lambda _: None, 0)
    assert {cell.model: cell.fitted for cell in cells} == {"qwen3-8b": simulated is not None, other.model: False}


def test_the_distribution_shift_is_the_published_mixture_in_another_order() -> None:
    case = next(c for c in table3() if c.name == "distribution_shift")
    (run,) = case_runs(case, 0)
    ordered, mixed = (plan_of(replace(run, shuffle=shuffle)).table for shuffle in (False, True))
    assert case.protocol.shuffle
    lengths = [
        list(zip(t["input_tokens"].to_pylist(), t["output_tokens"].to_pylist(), strict=True)) for t in (ordered, mixed)
    ]
    assert sorted(lengths[0]) == sorted(lengths[1])
    assert lengths[0] != lengths[1]
    assert {given for given, _ in lengths[1][:200]} == {1024, 512, 128}
    assert all(0.74 < wanted / {1024: 128, 512: 512, 128: 1024}[given] < 1.26 for given, wanted in lengths[1])
    assert mixed["arrival_ns"] == ordered["arrival_ns"]
    assert mixed["request_id"] == ordered["request_id"]


def test_thresholds_have_a_floor_only_where_sources_say_so() -> None:
    floored = {(case.name, case.scheduler) for case in table3() if "theta_min=0.7" in case.protocol.policy}
    assert floored == {
        ("c=512", "eb"), ("c=2048", "eb"), ("distribution_shift", "eb"), ("distribution_shift", "ebplus"),
    }  # fmt: skip


def test_published_coefficients_have_a_mixed_cost_and_a_margin() -> None:
    rtx = published_calibration(find_profile("rtx-pro-6000"), find_model("qwen3-8b"))
    h200 = published_calibration(find_profile("h200"), find_model("qwen3-8b"))
    assert rtx is not None
    assert h200 is not None
    assert rtx.alpha_p == pytest.approx(0.004691170692443847)
    assert rtx.beta_d == pytest.approx(0.00010388105329650523)
    assert h200.mixed == MixedCost(2.494e-05, 5.193e-05, 1.478e-05)
    assert rtx.margin == h200.margin == 1e-5
    pairs = [(find_profile(device), find_model(model)) for device in list_devices() for model in list_models()]
    assert sum(published_calibration(*pair) is not None for pair in pairs) == 14


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rtx-pro-6000", "h200"])
def test_table_3_at_saturation_is_predicted(device: str) -> None:
    """c = 2048 is in no fit: throughput of v1, EB and EB+ within 10 %, EB and EB+ on their published side of v1."""
    cells = run_cases([c for c in table3() if c.device == device and c.name == "c=2048"], 0, lambda _: None)
    throughput = [c for c in cells if c.metric == "tokens_per_s"]
    assert len(throughput) == 3
    assert all(abs(c.error) < 0.10 for c in throughput)
    if device == "rtx-pro-6000":
        assert all(pair.same_winner for pair in comparisons(throughput) if pair.decided)


def shortened(case: Case, requests: int) -> Case:
    return replace(case, protocol=replace(case.protocol, plan={**case.protocol.plan, "num_prompts": requests}))


def test_warm_up_requests_are_those_of_the_scripts() -> None:
    wanted = {"table 3": {100}, "table 2 and figure 5": {20}, "figure 3": {100}, "table 13": {20}}
    wanted |= {"table 17": {20}, "table 19": {0}, "table 20": {0}, "silicon": {0}, "servers": {0}}
    wanted |= {"gpustack": {0}, "figure 4": {100}, "table 6": {0}}
    wanted |= {REPETITION_GROUP: {0, 20, 100}}  # as the tables that it repeats
    found: dict[str, set[int]] = {}
    for case in all_cases():
        if case.name.endswith("_shift"):
            assert case.protocol.warmup == 0
        else:
            found.setdefault(case.group, set()).add(case.protocol.warmup)
    assert found == wanted


def test_a_run_is_the_same_every_time() -> None:
    case = next(c for c in table3() if c.name == "c=512" and c.scheduler == "v1")
    small = shortened(case, 600)
    assert run_cases([small], 3, lambda _: None) == run_cases([small], 3, lambda _: None)


def test_repeats_are_means_over_seeds() -> None:
    case = next(c for c in table3() if c.name == "c=512" and c.scheduler == "v1")
    small = shortened(case, 300)
    alone = [run_cases([small], seed, lambda _: None) for seed in (5, 6)]
    both = cells_of([small], lambda run: make(Task(run)).figures, lambda _: None, 5, repeats=2)
    assert [c.ours for c in both] == pytest.approx([(a.ours + b.ours) / 2 for a, b in zip(*alone, strict=True)])
    assert alone[0][0].ours != alone[1][0].ours


def test_calibrated_decode_lines_are_met_without_a_fit() -> None:
    errors = [abs(c.error) for c in calibration_cells() if c.case.startswith("decode") and c.scored]
    assert len(errors) > 100
    assert sorted(errors)[len(errors) // 2] < 0.11


def test_gemma_answers_to_numinamath_were_shorter_than_the_scripts_say() -> None:
    """Rate x TPOT x tokens per answer is the number of sequences decoding, which N bounds; read-offs err by 12 %."""
    latency = {
        (r["gpu"], r["model"], r["workload"], r["method"]): float(r["tpot_ms"]) / 1e3
        for r in rows("eb_vllm/figure5_latency")
    }

    def longest(gpu: str, model: str, rate: float, scheduler: str, method: str) -> float:
        key = gpu, model, "NuminaMath"
        sizes = best_sizes(
            DEVICES[gpu], scheduler, "numinamath", {title: name for name, title in MODELS.items()}[model]
        )
        return 1.12 * sizes[0] / (rate * latency[*key, method])

    chosen = {row["gpu"]: row for row in rows("paper_tables/table17_gemma_rps") if row["workload"] == "numinamath"}
    methods = {"v0": "v0", "v1": "v1", "eb": "Ours"}
    gemma = [
        longest(gpu, "Gemma-3-1B-IT", float(row[scheduler]), scheduler, method)
        for gpu, row in chosen.items()
        for scheduler, method in methods.items()
    ]
    qwen = [
        longest(row["gpu"], row["model"], float(row[f"{scheduler}_rps"]), scheduler, method)
        for row in rows("paper_tables/table2_throughput_rps")
        if row["workload"] == "NuminaMath"
        for scheduler, method in methods.items()
    ]
    assert sum(tokens < 4000 for tokens in gemma) == 4
    assert len(qwen) == 12
    assert all(tokens > 4000 for tokens in qwen)


def test_gauss_newton_finds_the_constants_that_made_the_data() -> None:
    import numpy as np

    truth = np.array([2.5, 7.0, 1.3])
    features = np.array([[1.0, 0.1, 0.0], [0.2, 0.5, 0.3], [0.1, 0.2, 2.0], [1.0, 1.0, 1.0]])
    found = _gauss_newton(lambda x: features @ (x - truth), lambda _: None)
    assert found == pytest.approx(truth, rel=1e-6)


def test_report_names_what_is_fitted_and_keeps_every_cell(tmp_path: Path) -> None:
    cells = [cell("v1", 100, 101, source="table 3", fitted=True), cell("eb", 110, 90, source="table 3", fitted=True)]
    cells.append(cell("v1", 3, 4, source="figure 5", metric="ttft_mean_s", scored=False, note="read off a chart"))
    report, table, *_ = write_report(cells, tmp_path / "deep" / "er")
    assert "| host, mixed attention, KV size (2 cells) |" in report.read_text()
    text = (report.parent / "table-3.md").read_text()
    assert "| fitted |" in text
    assert "**other winner**" in text
    assert "unscored: read off a chart" in (report.parent / "table-2-and-figure-5.md").read_text()
    assert pq.read_table(table).num_rows == 3
    assert pq.read_table(table)["error"].to_pylist()[0] == pytest.approx(0.01)
    assert all_scores(cells)["predicted rows"] == []


def test_an_audit_of_figures_that_are_gone_is_removed(tmp_path: Path) -> None:
    write_report([cell("v1", 1, 1.5, source="InferenceX, a model", metric="ttft_mean_s")], tmp_path)
    assert "InferenceX, a model" in (tmp_path / "caveats.md").read_text()
    write_report([cell("v1", 100, 101, source="table 3")], tmp_path)
    assert not (tmp_path / "caveats.md").exists()


REPLAYED = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_ms", "e2el_mean_s")
TARGETS = [
    "same winner where the published gap exceeds 2 %",
    "gain over v1 within 5 points",
    "median error of throughput",
]
WITH_LATER = "predicted rows, figure 4, table 6 and the repetition too"


def test_command_writes_a_report_and_one_json_document(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["fidelity", "--only", "replay", "--out", str(tmp_path), "--runs", str(tmp_path / "runs"), "--json"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    scores_read = json.loads(result.stdout)
    assert all(score["met"] for score in scores_read["replayed run (nothing fitted)"])
    assert (tmp_path / "README.md").exists()


def test_json_has_every_score_with_its_unit(tmp_path: Path) -> None:
    """Scripts read these keys: the report of the committed figures, of which one group is made again."""
    kept = ["fidelity", "--only", "replay", "--keep", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, [*kept, "--json"], catch_exceptions=False)
    scores_read = json.loads(result.stdout)
    assert scores_read.pop("report") == str(tmp_path / "README.md")
    assert {name: [score["name"] for score in group] for name, group in scores_read.items()} == {
        "replayed run (nothing fitted)": [f"replayed run, {metric}" for metric in REPLAYED],
        **dict.fromkeys(
            ("predicted rows", WITH_LATER, "predicted rows, no API server", "fitted rows", "all rows"), TARGETS
        ),
    }
    for score in (score for group in scores_read.values() for score in group):
        assert list(score) == ["name", "target", "reached", "count", "met", "unit"]
        assert (type(score["reached"]), type(score["count"]), type(score["met"])) == (float, int, bool)
        assert score["unit"] == "share"


def test_groups_measured_from_outside_have_figures_without_the_api_server(tmp_path: Path) -> None:
    """Their cases are made a second time; the list of cases once grew by itself until memory ran out."""
    sources = {cell.source for cell in reported("table 13", tmp_path)}
    assert sources == {"table 13", "table 13" + WITHOUT}


def test_single_steps_of_engines_stay_as_near_as_they_were(tmp_path: Path) -> None:
    """vLLM 0.20.1 on B300; no constant was fitted on them."""
    cells = reported("steps", tmp_path)
    errors = by_key(((cell.model.split(",")[0], cell.case.split()[0]), cell.error) for cell in cells)
    assert {kind: (len(each), round(median(each), 2)) for kind, each in errors.items()} == {
        ("qwen3-32b", "decode"): (46, -0.05),
        ("qwen3-32b", "prompt"): (12, -0.12),
        ("qwen3.6-35b-a3b", "decode"): (65, -0.16),
        ("qwen3.6-35b-a3b", "prompt"): (18, -0.59),
        ("deepseek-v4-flash", "decode"): (16, -0.26),
        ("deepseek-v4-flash", "prompt"): (6, -0.3),
    }


def test_command_refuses_unknown_groups_and_devices() -> None:
    from ebbench.errors import UnknownNameError

    for arguments in (["--only", "table3"], ["--fit", "h20"]):
        result = CliRunner().invoke(app, ["fidelity", *arguments], standalone_mode=False)
        assert isinstance(result.exception, UnknownNameError)
