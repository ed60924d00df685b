"""The fidelity report's front table, and a small part of it compared with targets, so that a loss of accuracy fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ebbench.papers.eb.disaggregation import FOUR
from ebbench.papers.fidelity import scoreboard
from ebbench.papers.fidelity.case import Case
from ebbench.papers.fidelity.cases import table6
from ebbench.papers.fidelity.cases_servers import FAILED_NOTE, server_cases, silicon, table20
from ebbench.papers.fidelity.cases_steps import SOURCE as STEPS
from ebbench.papers.fidelity.report import AUDIT_PAGE, BOARD, front, read_cells
from ebbench.papers.fidelity.runs import replay_cells, run_cases
from ebbench.papers.fidelity.scores import PublishedFigure
from ebbench.records.warnings import seen_errors, warning

COMMITTED = Path(__file__).parents[2] / "reports" / "fidelity" / BOARD


def gpus(case: Case) -> int:
    return case.protocol.topology.gpus if case.protocol.topology else 1


def made(ours: float, fitted: bool = False, metric: str = "tpot_mean_ms", scheduler: str = "v1") -> PublishedFigure:
    return PublishedFigure("table 3", "gpu", "model", "case", scheduler, metric, 100.0, ours, fitted=fitted)


def test_a_row_has_median_and_90th_percentile_of_what_was_not_fitted() -> None:
    (row,) = scoreboard.scoreboard([made(90.0), made(102.0), made(104.0), made(200.0, fitted=True)])
    assert row.errors["TPOT"] == pytest.approx((0.04, 0.088))
    assert (row.count, row.fitted, row.direction) == (3, 1, None)


def test_direction_is_right_where_the_same_scheduler_wins() -> None:
    cells = [made(100.0, metric="tokens_per_s"), made(90.0, metric="tokens_per_s", scheduler="eb")]
    published = [
        PublishedFigure(**{**vars(cells[0]), "published": 100.0}),
        PublishedFigure(**{**vars(cells[1]), "published": 120.0}),
    ]
    assert scoreboard.scoreboard(published)[0].direction == 0.0


def test_the_fastest_of_several_topologies_is_the_winner() -> None:
    settings = [("v1_dp4", 100.0, 120.0), ("2p2d", 110.0, 115.0), ("1p3d", 90.0, 80.0)]
    cells = [
        PublishedFigure("table 20", "gpu", "model", "case", name, "tokens_per_s", published, ours)
        for name, published, ours in settings
    ]
    assert scoreboard.scoreboard(cells)[0].direction == 0.0
    assert scoreboard.scoreboard(cells[1:])[0].direction == 1.0


def test_a_fitted_setting_can_be_the_fastest_of_its_case() -> None:
    settings = [("v1_dp4", 100.0, 100.0, False), ("2p2d", 90.0, 90.0, False), ("1p3d", 80.0, 120.0, True)]
    cells = [
        PublishedFigure("table 20", "gpu", "model", "case", name, "tokens_per_s", published, ours, fitted=fitted)
        for name, published, ours, fitted in settings
    ]
    assert scoreboard.scoreboard(cells)[0].direction == 0.0


@pytest.mark.parametrize(
    ("published", "ours", "right"),
    [
        ((98.5, 100.0, 80.0), (100.0, 90.0, 80.0), 1.0),  # less than 2 % apart in print
        ((97.0, 100.0, 80.0), (100.0, 100.0, 80.0), 0.5),  # two of ours are equal, one of them is right
        ((100.0, 99.0, 80.0), (100.0, 100.0, 80.0), 1.0),
        ((100.0, nan, 80.0), (100.0, 120.0, 80.0), 0.0),  # out of memory in print, the fastest with us
        ((100.0, 90.0, nan), (100.0, 90.0, nan), 1.0),
    ],
)
def test_a_winner_is_one_that_print_tells_apart(
    published: Sequence[float], ours: Sequence[float], right: float
) -> None:
    cells = [
        PublishedFigure("t", "gpu", "m", "case", name, "tokens_per_s", one, other)
        for name, one, other in zip(("a", "b", "c"), published, ours, strict=True)
    ]
    assert scoreboard.scoreboard([replace(cell, scored=not cell.failed) for cell in cells])[0].direction == right


def test_a_setting_that_ran_out_of_memory_in_print_is_repeated() -> None:
    failed = [case for case in table20() if any(number.note == FAILED_NOTE for number in case.published)]
    assert {(case.protocol.topology, len(case.published)) for case in failed} == {(FOUR["3p1d"].topology, 1)}
    assert len(failed) == 6


def test_losses_list_only_the_cells_whose_error_grew(tmp_path: Path) -> None:
    scoreboard.save(scoreboard.scoreboard([made(102.0)]), tmp_path / BOARD)
    before = scoreboard.load(tmp_path / BOARD)
    assert scoreboard.losses(scoreboard.scoreboard([made(105.0)]), before) == [
        "table 3 on gpu: median error of TPOT 5.0%, was 2.0%"
    ]
    assert not scoreboard.losses(scoreboard.scoreboard([made(101.0)]), before)
    assert "5.0% (was 2.0%)" in str(front(scoreboard.scoreboard([made(105.0)]), before).rows)


def test_every_server_case_can_be_loaded_and_has_its_reference_data() -> None:
    cases = server_cases()
    assert sum(case.group == "silicon" for case in cases) == 90
    assert sum(case.group == "servers" for case in cases) == 251
    assert {case.group for case in cases} == {"servers", "silicon", "table 17", "table 19", "table 20"}
    assert sum(case.fitted for case in cases if case.group == "silicon") == 15


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_part_of_the_silicon_points_stays_within_the_target(tp: int) -> None:
    """Qwen3-32B in 16 bits on H100, 16 and 64 open requests, 512 tokens out: the median TPOT is within 6 %."""
    wanted = ("512 out, c=16", "512 out, c=64")
    chosen = [c for c in silicon() if gpus(c) == tp and c.name.endswith(wanted)]
    cells = [cell for cell in run_cases(chosen, 0, lambda _: None) if cell.scored]
    assert len(cells) == 4
    assert median(abs(cell.error) for cell in cells) < 0.06


def test_a_part_of_table_20_stays_within_the_target() -> None:
    """With 512 open requests on RTX PRO 6000, v1 and EB+ on ranks in lockstep are within 8 %, and EB+ stays mixed."""
    chosen = [c for c in table20() if (c.device, c.scheduler[-3:]) == ("rtx-pro-6000", "dp4") and "c=512" in c.name]
    cells = [cell for cell in run_cases(chosen, 0, lambda _: None) if cell.metric == "tokens_per_s"]
    assert len(cells) == 6
    assert max(abs(cell.error) for cell in cells) < 0.08
    assert [cell.ours for cell in cells if cell.scheduler == "v1_dp4"] == [
        cell.ours for cell in cells if cell.scheduler == "ebplus_dp4"
    ]


def test_prompts_of_128k_tokens_stay_as_near_as_they_are() -> None:
    """Table 6 lies outside the measured kernels; nothing was fitted on it."""
    chosen = [case for case in table6() if case.model in ("qwen3-8b", "qwen3-14b")]
    errors = [cell.error for cell in run_cases(chosen, 0, lambda _: None)]
    assert len(errors) == 4
    assert max(map(abs, errors)) < 0.08


def test_the_replayed_run_is_no_worse_than_committed() -> None:
    rows = scoreboard.scoreboard(replay_cells())
    assert not scoreboard.losses(rows, scoreboard.load(COMMITTED))


def server(
    metric: str, error: float, *caveats: str, scored: bool = True, model: str = "llama-3.1-70b"
) -> PublishedFigure:
    """A figure of a measured server, off by ``error``, with what our run says about itself."""
    return PublishedFigure(
        "InferenceX, a model", "gpu", model, "case", "v1", metric, 1.0, 1.0 + error, scored=scored, caveats=caveats
    )


@pytest.mark.parametrize(
    ("cell", "verdict"),
    [
        (server("ttft_mean_s", -0.2), ""),
        (server("ttft_mean_s", -0.4), "missing"),
        (server("ttft_mean_s", -0.4, "experts-first-tokens", "few-requests"), "said"),
        (server("ttft_mean_s", -0.4, "experts-few-sequences"), "missing"),  # it is about another figure
        (server("ttft_mean_s", 0.4, "experts-first-tokens"), "missing"),  # the other direction
        (server("ttft_mean_s", 0.2, "experts-first-tokens"), "against"),
        (server("tpot_mean_ms", -0.2, "older-vllm"), "said"),
        (server("tpot_mean_ms", -0.5, "older-vllm"), "missing"),  # far beyond what it says
        (server("tpot_mean_ms", 0.2), "missing"),
        (server("tpot_mean_ms", 0.2, model="gpt-oss-120b"), ""),  # less is promised of mixtures
        (server("ttft_mean_s", 3.9, "near-capacity"), "said"),
    ],
)
def test_the_audit_asks_whether_a_caveat_covers_the_error(cell: PublishedFigure, verdict: str) -> None:
    (row,) = scoreboard.audited([cell])
    assert row.verdict == verdict


def test_the_audit_leaves_out_other_sources_and_doubtful_figures() -> None:
    assert not scoreboard.audited([made(10.0), server("ttft_mean_s", -0.5, scored=False)])


def test_silent_rows_of_the_committed_report_are_as_near_as_promised() -> None:
    audit = scoreboard.audited(read_cells(COMMITTED.parent))
    silent = [row for row in audit if not row.caveats]
    assert len(audit) > 600
    assert sum(not row.verdict for row in silent) >= 0.9 * len(silent)
    assert sum(row.verdict == "missing" for row in audit) <= 0.05 * len(audit)
    page = (COMMITTED.parent / AUDIT_PAGE).read_text(encoding="utf-8").partition("## By row")[2]
    assert page.count("\n| ") == len(audit) + 2


TOLD: dict[str, dict[str, Any]] = {
    "front-end-decides": {"front_end_ms": 20.0, "share": 0.9},
    "near-capacity": {"kv_percent": 90.0, "running": 100},
    "older-vllm": {"vllm_version": "0.11"},
}
"""Values of the caveats whose sentence needs them in a certain form."""


KIND_OF_STEP = {"TPOT": "decode", "TTFT": "prompt", "throughput": "decode"}


@pytest.mark.parametrize("code", seen_errors())
def test_a_caveat_says_the_range_in_which_runs_were_off(code: str) -> None:
    """In words and for the audit; the median of the committed figures with it lies within."""
    words = str(warning(code, **TOLD.get(code, {"device": "h200", "gpus": 4})))
    cells = read_cells(COMMITTED.parent)
    audit = [row for row in scoreboard.audited(cells) if code in row.caveats]
    for figure, (low, high) in seen_errors()[code].items():
        for bound in (low, high):
            assert not bound or re.search(rf"\b{abs(100 * bound):.0f}\b", words), f"{bound} is not in: {words}"
        steps = [cell for cell in cells if cell.source == STEPS and code in cell.caveats]
        errors = [row.cell.error for row in audit if row.figure == figure]
        errors += [cell.error for cell in steps if cell.case.startswith(KIND_OF_STEP[figure])]
        assert low <= median(errors) <= high
