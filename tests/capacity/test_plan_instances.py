"""``ebbench plan --instance``: replicas whose GPUs share the experts of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.runs.execute import Task, make
from ebbench.sizing import candidates
from ebbench.sizing.choose import Costed, DeploymentChoice, DeploymentPlan
from ebbench.sizing.deployments import Candidate, Deployment, bound, run_of, size
from ebbench.sizing.plan_sentences import parts
from ebbench.spec.run import RunSpec, simulated
from tests.capacity.test_plan import READING, demand, on

LOAD = [
    *("--source", "profile", "--request-rate", "3", "--goodput", "ttft:1500", "tpot:40"),
    *("--device", "h200", "--workers", "1", "-q"),
]
SHARED = Candidate("h200", 1, "v1", 8192, 8, dp=2, ep=2)


def moe(candidate: Candidate) -> RunSpec:
    return run_of(candidate, on("h200").changed(model="qwen3-30b-a3b"))


def test_the_command_sizes_the_instances_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "SESSIONS", 100)  # the least per run; 2,000 take 20 s with all invariants checked
    options = [
        *("--model", "qwen3-30b-a3b", "--policy", "v1", "--max-num-seqs", "8"),
        *("--instance", "dp=2,ep=2", "--price", "h200=3"),
    ]
    done = CliRunner().invoke(app, ["plan", "sharegpt", *LOAD, *options, "--json"])
    assert done.exit_code == 0, done.output
    [found] = json.loads(done.stdout)["deployments"]
    assert (found["tp"], found["dp"], found["ep"]) == (1, 2, 2)
    assert found["cost_per_hour"] == 3 * found["gpus"] == 6 * found["replicas"]


def test_an_instance_is_simulated_as_run_simulates_its_topology() -> None:
    """Saturated: twice the sequences of both ranks are open, three sessions for each."""
    figures = make(
        Task(
            simulated(
                "sharegpt", "v1", "h200", "qwen3-30b-a3b", 8, 8192, source="profile", num_prompts=96,
                max_concurrency=32, max_model_len=8192, topology="dp=2,ep=2",
            )
        )
    ).figures  # fmt: skip
    assert bound(moe(SHARED)).saturated_per_s == pytest.approx(figures["request_throughput"], rel=0.1)


def test_what_the_gpus_share_changes_the_time_per_token() -> None:
    shapes = [(2, 1, 1), (2, 1, 2), (1, 2, 2)]
    found = [size(demand(1.0, sessions=60), moe(replace(SHARED, tp=tp, dp=dp, ep=ep)), 1, 1) for tp, dp, ep in shapes]
    assert {each.gpus for each in found} == {2}
    assert len({each.reading.tpot_ms for each in found if each.reading}) == 3


def printed(*candidates: Candidate, model: str = "qwen3-30b-a3b", width: int = 200) -> str:
    text = StringIO()
    found = tuple(Costed(Deployment(each, 12, READING), 123.45) for each in candidates)
    run = on("h200").changed(model=model)
    for part in parts(DeploymentPlan(DeploymentChoice(found), demand(), run, {"h200": 3.0})):
        Console(file=text, width=width if isinstance(part, Table) else 10_000).print(part)
    return text.getvalue()


@pytest.mark.parametrize(
    ("candidate", "model", "said"),
    [
        (replace(SHARED, dp=1, ep=1), "qwen3-30b-a3b", False),
        (replace(SHARED, tp=2, dp=1, ep=1), "qwen3-30b-a3b", True),
        (replace(SHARED, tp=2, dp=1, ep=2), "qwen3-30b-a3b", False),
        (replace(SHARED, tp=2, dp=1, ep=1), "qwen3-8b", False),
    ],
)
def test_it_says_that_experts_could_be_shared(candidate: Candidate, model: str, said: bool) -> None:
    words = "--instance tp=2,ep=2 and --instance dp=2,ep=2 add such instances"
    assert (words in printed(candidate, model=model)) is said


@pytest.mark.parametrize(
    ("policy", "dp", "said"),
    [("marginal", 2, True), ("marginal:mix=off", 2, True), ("v1", 2, False), ("marginal", 1, False)],
)
def test_it_says_what_ranks_need_to_refill_together(policy: str, dp: int, said: bool) -> None:
    text = printed(Candidate("h200", 2 // dp, policy, 8192, 8, dp=dp, ep=2))
    assert ("2 ranks of an instance compute prompts in the same passes" in text) is said
    assert ("--prefill-schedule-interval" in text) is said


@pytest.mark.parametrize(
    ("instance", "said"),
    [
        ("dp=4", "the number of replicas is what plan finds"),
        ("2p2d", "the number of replicas is what plan finds"),
        ("dp=2,lockstep=on", "gain nothing by lockstep"),
        ("tp=2,ep=4", "ep must be tp x dp"),
        ("pp=2", "pipeline parallelism is not modelled"),
    ],
)
def test_what_is_not_one_instance_is_refused(instance: str, said: str) -> None:
    done = CliRunner().invoke(app, ["plan", "sharegpt", *LOAD, "--instance", instance])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_experts_of_a_dense_model_cannot_be_shared() -> None:
    assert "no experts to spread" in str(bound(moe(SHARED).changed(model="qwen3-8b")).refused)


def test_the_tables_fit_80_columns() -> None:
    text = printed(Candidate("rtx-pro-6000", 2, "marginal", 8192, 64, dp=4, ep=8), width=80)
    for words in ("12 x tp2 dp4 ep8", "marginal", "123.45", "96", "lost"):
        assert words in text


def test_a_shape_is_written_as_it_is_given() -> None:
    shapes = [(1, 1, 1), (2, 1, 1), (8, 1, 8), (1, 8, 8), (2, 4, 8)]
    written = [replace(SHARED, tp=tp, dp=dp, ep=ep).shape for tp, dp, ep in shapes]
    assert written == ["tp=1", "tp=2", "tp=8,ep=8", "dp=8,ep=8", "tp=2,dp=4,ep=8"]
