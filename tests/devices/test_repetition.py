"""The EB paper's authors' repetition of their H200 runs: settings of the cases, and what no constant was fitted on."""

from __future__ import annotations

import pytest

from ebbench.papers.fidelity.case import Case
from ebbench.papers.fidelity.cases import repetition
from ebbench.papers.fidelity.runs import run_cases
from vllm_eb.policies.ebplus import EbPlus
from vllm_eb.policy import parse_policy

CASES = {(case.name, case.model, case.scheduler): case for case in repetition()}


def case(name: str, scheduler: str) -> Case:
    return CASES[name, "qwen3-8b", scheduler]


@pytest.mark.parametrize(
    ("name", "scheduler", "margin"),
    [
        ("table 3, c=2048", "ebplus", None),
        ("distribution shift", "ebplus", None),
        ("distribution shift, two days earlier", "ebplus", 1e-4),
        ("table 19, c=64", "ebplus_dp2", 1e-4),
        ("32,768 tokens", "ebplus", 1e-4),
    ],
)
def test_ebplus_knows_the_cost_of_mixed_batches_from_the_later_date_on(
    name: str, scheduler: str, margin: float | None
) -> None:
    policy = parse_policy(case(name, scheduler).protocol.policy)
    assert isinstance(policy, EbPlus)
    assert policy.margin == margin


def test_phases_of_the_concurrency_shift_are_runs_of_their_own() -> None:
    sizes = {name: case(name, "v1").protocol.plan for name in (f"concurrency shift, c={c}" for c in (32, 2048, 500))}
    assert [(plan["max_concurrency"], plan["num_prompts"]) for plan in sizes.values()] == [
        (32, 500), (2048, 4000), (500, 2000)
    ]  # fmt: skip
    assert not any(case(name, "v1").protocol.concurrencies for name in sizes)


def test_rows_whose_printed_counterpart_set_a_constant_count_as_fitted() -> None:
    fitted = {name for (name, _, _), each in CASES.items() if each.fitted}
    assert fitted == {"table 3, c=32", "table 3, c=512", "figure 3, prefill-heavy"}


def test_prompts_of_32768_tokens_stay_as_near_as_they_are() -> None:
    """Nothing was fitted on lengths like these: throughput within 5 %, TPOT within 10 %."""
    chosen = [case("32,768 tokens", scheduler) for scheduler in ("v1", "eb", "ebplus")]
    errors = {(cell.scheduler, cell.metric): abs(cell.error) for cell in run_cases(chosen, 0, lambda _: None)}
    assert max(value for (_, metric), value in errors.items() if metric == "tokens_per_s") < 0.05
    assert max(value for (_, metric), value in errors.items() if metric == "tpot_mean_ms") < 0.10
