"""Capacity, plans and advice of small models are limited by vLLM's API server, which is simulated where it matters."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ebbench.advice.choice import AdviceQuestion, BudgetedPolicy
from ebbench.advice.simulate import api_server_left_out
from ebbench.analysis.metrics import Slo
from ebbench.cli.main import app
from ebbench.errors import UsageError
from ebbench.runs.store import Measured
from ebbench.spec.run import RunSpec, simulated

LEFT_OUT = "They are left out here"
AGAIN = "Everything is simulated again with --api-server datacenter"
SMALL = ["sharegpt", "--source", "profile", "--device", "h200", "--model", "gemma-3-1b-it", "--goodput", "ttft:500"]


def printed(*arguments: str) -> str:
    """What is printed as the answer, and before it."""
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def capacity(folder: Path, *options: str) -> str:
    limits = ("--num-prompts", "300", "--policy", "v1", "--output-dir", str(folder))
    probes = () if "--max-probes" in options else ("--max-probes", "5")
    return printed("capacity", *SMALL, *limits, *probes, *options)


def plan(*options: str) -> str:
    return printed("plan", *SMALL, "--tp", "1", "--policy", "v1", "--max-num-seqs", "256", *options)


def test_a_capacity_that_the_api_server_limits_is_searched_again(tmp_path: Path) -> None:
    assert AGAIN in capacity(tmp_path / "auto")
    (found,) = json.loads((tmp_path / "auto" / "capacity-answers.json").read_text())
    assert 25 < found["capacity_requests_per_s"] < 60
    assert AGAIN in capacity(tmp_path / "auto"), "a search that goes on comes to the same end"
    without = capacity(tmp_path / "off", "--api-server", "off")
    assert LEFT_OUT in without
    assert AGAIN not in without
    assert LEFT_OUT not in capacity(tmp_path / "simulated", "--api-server", "datacenter")
    assert LEFT_OUT not in capacity(tmp_path / "sixteen", "--topology", "dp=16", "--max-probes", "2")


def test_a_plan_that_the_api_server_limits_takes_more_replicas() -> None:
    without = plan("--request-rate", "100", "--api-server", "off")
    assert LEFT_OUT in without
    assert AGAIN not in without
    assert "Cheapest that carries this rate: 1 x h200" in without
    simulated = plan("--request-rate", "100")
    assert AGAIN in simulated
    assert "behind 1 API server process per replica (datacenter)" in simulated
    assert "Cheapest that carries this rate: 2 x h200" in simulated or "Cheapest: 3 x h200" in simulated
    assert "API server" not in plan("--request-rate", "10")
    more = plan("--request-rate", "100", "--api-server-count", "4")
    assert AGAIN not in more
    assert "behind 4 API server processes per replica" in more
    assert "Cheapest that carries this rate: 1 x h200" in more


def test_a_count_of_processes_that_are_left_out_is_refused() -> None:
    arguments = ["plan", *SMALL, "--request-rate", "10", "--api-server", "off", "--api-server-count", "2"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError) or result.exit_code == 2
    assert "--api-server" in str(result.exception) + result.output


def test_advice_simulates_the_api_server_that_would_be_busy(tmp_path: Path) -> None:
    def advice(*options: str) -> str:
        load = ("--num-prompts", "200", "--seeds", "1", "--no-crossover")
        asked = ("advise", *SMALL[:-2], "--policy", "v1", "--policy", "eb", *load, "--runs", str(tmp_path))
        concurrency = () if "--max-concurrency" in options else ("--max-concurrency", "64")
        return printed(*asked, *concurrency, *options)

    said = advice()
    assert AGAIN in said
    assert "gemma-3-1b-it on h200 --api-server datacenter" in said
    assert "`ebbench devices show h200 --model gemma-3-1b-it`" in said, "which has no such option"
    without = advice("--api-server", "off")
    assert LEFT_OUT in without
    assert AGAIN not in without
    assert AGAIN not in advice("--max-concurrency", "8")


def test_the_candidate_that_keeps_the_api_server_busy_need_not_be_v1() -> None:
    def rates(per_s: float) -> dict[str, float]:
        tokens = {"total_token_throughput": 300 * per_s, "output_throughput": 200 * per_s}
        return {"request_throughput": per_s, **tokens}

    slow, fast = rates(9.0), rates(90.0)
    question = AdviceQuestion(
        simulated("sharegpt", "v1", "h200", "qwen3-8b", 64, 2048, num_prompts=9), 1, Slo(), ("v1", "eb")
    )
    finalists = [BudgetedPolicy(name, 2048) for name in question.policies]

    class Store:
        def __init__(self, figures: dict[str, dict[str, float]]) -> None:
            self.figures = figures

        def get(self, cell: RunSpec) -> Measured:
            return Measured(self.figures[cell.policy], (), Path())

    def left_out(v1: dict[str, float], eb: dict[str, float]) -> bool:
        store: Any = Store({"v1": v1, "eb": eb})
        return api_server_left_out(question, store, finalists) is not None

    assert not left_out(slow, slow)
    assert left_out(slow, fast)
    assert left_out(fast, slow)
