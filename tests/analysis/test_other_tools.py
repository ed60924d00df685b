"""The same run by the definitions of other tools: numbers computed by hand from three requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import Slo
from ebbench.analysis.other_tools import TOOLS, chosen_tools, figures_as
from ebbench.errors import UnknownNameError
from tests.analysis.made_runs import MS, request, requests_table
from tests.gate.gate_data import invoke

# Sent 10 ms late. Four tokens: two in the message at 110 ms, one at 130, one at 160; the response ends at 165.
BUNDLED = request(
    0, intended_ns=0, sent_ns=10 * MS, first_token_ns=110 * MS, last_token_ns=160 * MS, end_ns=165 * MS,
    output_tokens=4, itl_ns=[0, 20 * MS, 30 * MS], bundled_tokens=True,
)  # fmt: skip
# Sent in time at 50 ms. One token at 150; the response ends at 155.
SINGLE = request(
    1, intended_ns=50 * MS, sent_ns=50 * MS, first_token_ns=150 * MS, last_token_ns=150 * MS, end_ns=155 * MS,
    output_tokens=1, itl_ns=[],
)  # fmt: skip
# Sent at 60 ms, failed at 400: no tool counts its latency, some count its time.
FAILED = request(
    2, status="failed", intended_ns=60 * MS, sent_ns=60 * MS, first_token_ns=None, last_token_ns=None, end_ns=400 * MS,
    output_tokens=None, itl_ns=None,
)  # fmt: skip
BY_HAND: dict[str, dict[str, float | None]] = {
    "vllm": {
        "mean_ttft_ms": 100, "median_ttft_ms": 100,
        "mean_tpot_ms": 50 / 3, "mean_itl_ms": 25, "mean_e2el_ms": (150 + 100) / 2,
        "duration_s": 0.4, "output_throughput": 5 / 0.4, "request_throughput": 2 / 0.4, "request_goodput": 2 / 0.4,
    },
    "sglang": {
        "mean_ttft_ms": 100, "mean_tpot_ms": 55 / 3, "mean_itl_ms": 25, "mean_e2el_ms": (155 + 105) / 2,
        "duration_s": 0.4, "output_throughput": 5 / 0.4, "request_goodput": 1 / 0.4,
    },
    "guidellm": {
        "mean_ttft_ms": 100, "mean_tpot_ms": (150 + 100) / 5, "median_tpot_ms": 150 / 4, "p99_tpot_ms": 100,
        "mean_itl_ms": 50 / 3, "mean_e2el_ms": (155 + 105) / 2, "median_e2el_ms": 105,
        "duration_s": 0.39, "output_throughput": 5 / 0.39, "request_goodput": 1 / 0.39,
    },
    "aiperf": {
        "mean_ttft_ms": 100, "mean_tpot_ms": None, "mean_itl_ms": 50 / 3, "mean_e2el_ms": (150 + 100) / 2,
        "duration_s": 0.15, "output_throughput": 5 / 0.15, "request_throughput": 2 / 0.15, "request_goodput": 1 / 0.15,
    },
    "inference-perf": {
        "mean_ttft_ms": 100, "mean_tpot_ms": 50 / 3, "mean_itl_ms": 50 / 3, "median_itl_ms": 20,
        "mean_e2el_ms": (155 + 105) / 2, "duration_s": 0.39, "request_goodput": 1 / 0.39,
    },
}  # fmt: skip


def figures(rows: list[dict[str, Any]], slo: Slo, tool: str) -> dict[str, float | None]:
    return dict(figures_as(RequestColumns.of(requests_table(rows)), slo, [TOOLS[tool]])[tool])


@pytest.mark.parametrize("tool", TOOLS)
def test_each_definition_gives_what_was_computed_by_hand(tool: str) -> None:
    found = figures([BUNDLED, SINGLE, FAILED], Slo(ttft=100, tpot=18, e2el=200), tool)
    assert {name: found[name] for name in BY_HAND[tool]} == pytest.approx(BY_HAND[tool])


def test_a_limit_that_the_tools_do_not_have_gives_no_goodput() -> None:
    assert figures([BUNDLED], Slo(ttfat=100), "vllm")["request_goodput"] is None
    assert figures([BUNDLED], Slo(), "vllm")["request_goodput"] is None


def test_a_run_without_tokens_has_no_figures_of_other_tools() -> None:
    assert figures([FAILED], Slo(ttft=100), "guidellm") == {}


def test_tools_are_chosen_by_name() -> None:
    assert [tool.name for tool in chosen_tools("guideLLM, vllm,vllm")] == ["guidellm", "vllm"]
    assert len(chosen_tools("all")) == len(TOOLS)
    with pytest.raises(UnknownNameError, match="aiperf"):
        chosen_tools("vllm,ai-perf")


def test_show_prints_them_side_by_side_with_reasons(tmp_path: Path) -> None:
    made = invoke(
        "run",
        "balanced",
        "--source",
        "profile",
        "-n",
        8,
        "-p",
        "v1",
        "--output-len",
        5,
        "--quiet",
        "-o",
        tmp_path / "r",
    )
    assert made.exit_code == 0, made.output
    text = " ".join(invoke("show", tmp_path / "r", "--as", "vllm,guidellm", "--goodput", "tpot:900").stdout.split())
    assert "guidellm 0.8.1" in text
    assert "TPOT (ebbench:" in text
    assert "guidellm: includes the first token" in text
    assert "goodput, requests/s" in text
    (document,) = json.loads(invoke("show", tmp_path / "r", "--as", "all", "--json").stdout)
    assert list(document["figures"]) == ["ebbench", *TOOLS]
    ours, theirs = (document["figures"][name]["median_e2el_ms"] for name in ("ebbench", "vllm"))
    assert ours == pytest.approx(theirs)
    assert invoke("show", tmp_path / "r", "--as", "vllm", "--format", "csv").stdout.startswith("section")
