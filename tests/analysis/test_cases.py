"""Grouping of runs: no average or gain spans two loads or environments."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ebbench.analysis.cases import (
    ALPHA,
    comparison_cases,
    gain,
    group_by_policy,
    log_ratios,
    p_value,
    pairs_needed,
    partition,
    throughput,
)
from ebbench.analysis.environment import load_of_run
from ebbench.analysis.summary import Summary, summarise
from ebbench.cli.main import app
from ebbench.records.run import RunWriter
from ebbench.runs.conclude import RunContext, conclude
from ebbench.spec.server import EngineOptions
from tests.analysis.made_runs import MadeEngine, device_of, plan_of
from vllm_eb.policy import parse_policy


def made(path: Path, policy: str, *, seed: int = 0, concurrency: int = 8, **facts: Any) -> Summary:
    plan, spec, options = plan_of(40, seed=seed, concurrency=concurrency), parse_policy(policy), EngineOptions()
    plan = replace(plan, facts={**plan.facts, **facts})
    result = MadeEngine().run(plan, spec, device_of(), options, None)
    with RunWriter.create(path) as writer:
        return summarise(conclude(writer, RunContext(plan, spec, "sim", device_of(), options, 1), result)[0])


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return made(tmp_path_factory.mktemp("runs") / "r", "v1", request_rate=5.0)


def other(summary: Summary, **environment: str) -> Summary:
    return replace(summary, environment=dict(summary.environment) | environment)


def test_runs_of_another_load_or_environment_are_another_case(tmp_path: Path) -> None:
    one = made(tmp_path / "a", "v1", request_rate=5.0)
    options = json.dumps(json.loads(one.environment["options"]) | {"max_num_seqs": 7})
    unlike = [
        made(tmp_path / "b", "v1", request_rate=10.0),
        made(tmp_path / "c", "v1", request_rate=5.0, concurrency=4),
        other(one, device="another"),
        other(one, workload="another"),
        other(one, options=json.dumps(json.loads(one.environment["options"]) | {"topology": "dp=2"})),
        other(one, options=options),
    ]
    for each in unlike:
        cases = comparison_cases([one, each])
        assert [case.summaries for case in cases] == [(one,), (each,)]
        assert cases[0].title != cases[1].title
    titles = [case.title for case in comparison_cases([one, unlike[0], other(one, options=options)])]
    assert titles == ["rate 5/s, N = 1,024", "rate 10/s, N = 1,024", "rate 5/s, N = 7"]
    hosts = [case.title for case in comparison_cases([other(one, host="2024"), other(one, host="2025")])]
    assert [title.rpartition(" ")[2] for title in hosts] == ["2024", "2025"], "names of machines, no numbers"


def test_runs_that_differ_in_seed_are_one_row_and_their_policies_one_case(summary: Summary) -> None:
    rows = [replace(summary, policy=p, seed=s, plan_hash=str(s)) for p in ("ebplus", "v1") for s in (1, 0)]
    [case] = comparison_cases(rows)
    assert case.title == ""
    assert [(group.policy, group.seeds) for group in case.groups] == [("v1", (0, 1)), ("ebplus", (0, 1))]


def test_runs_of_one_seed_with_different_plans_are_not_averaged(summary: Summary) -> None:
    cases = comparison_cases([summary, replace(summary, plan_hash="another plan")])
    assert [len(case.summaries) for case in cases] == [1, 1]
    assert all("plan " in case.title for case in cases)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 2), st.sampled_from("pq"))))
def test_every_run_is_in_exactly_one_case(
    runs: list[tuple[str, str, int, str]],
) -> None:
    conditions = [{"device": device, "rate": rate} for device, rate, _, _ in runs]
    parts = partition(range(len(runs)), conditions, [(seed, plan) for _, _, seed, plan in runs])
    assert sorted(place for _, places in parts for place in places) == list(range(len(runs)))
    for _, places in parts:
        assert len({runs[place][:2] for place in places}) == 1
        plans = {runs[place][2:] for place in places}
        assert len({plan for _, plan in plans}) == 1 or len({seed for seed, _ in plans}) == len(plans)
    assert len({title for title, _ in parts}) == len(parts)


def faster(summary: Summary, times: float) -> Summary:
    value = (summary.metrics.output_throughput or 0) * times
    return replace(summary, policy="ebplus", metrics=replace(summary.metrics, output_throughput=value))


def test_an_invalid_run_gets_no_gain_and_gives_none(summary: Summary) -> None:
    for broken in (summary, faster(summary, 2)):
        rows = [replace(one, valid=one.policy != broken.policy) for one in (summary, faster(summary, 2))]
        v1, ebplus = group_by_policy(rows)
        assert gain(ebplus, v1) is None
    v1, ebplus = group_by_policy([summary, faster(summary, 2)])
    found = gain(ebplus, v1)
    assert found is not None
    assert found.mean == pytest.approx(1)


def test_runs_of_other_plans_are_no_pair(summary: Summary) -> None:
    v1, ebplus = group_by_policy([summary, replace(faster(summary, 2), plan_hash="another")])
    assert gain(ebplus, v1) is None


def seeds(summary: Summary, factors: list[float], *, virtual: bool = True) -> tuple[Any, ...]:
    own = [replace(summary, seed=s, plan_hash=str(s), virtual=virtual) for s in range(len(factors))]
    return group_by_policy([*own, *(faster(one, factor) for one, factor in zip(own, factors, strict=True))])


def test_a_gain_is_shown_from_the_fewest_pairs_that_can_show_it_on(summary: Summary) -> None:
    assert pairs_needed(3) == 7
    factors = [1.1 + place / 1000 for place in range(7)]
    for count, shown in ((7, True), (6, False)):
        p = p_value(seeds(summary, factors[:count]), "ebplus", throughput)
        assert p is not None
        assert (p <= ALPHA) == shown
    assert p_value(seeds(summary, factors[:1]), "ebplus", throughput) is None


def test_gains_of_plans_are_averaged_as_ratios(summary: Summary) -> None:
    """Twice as fast on one plan and half as fast on the other is no gain, either way round."""
    v1, ebplus = seeds(summary, [2.0, 0.5])
    for lead in (gain(ebplus, v1), gain(v1, ebplus)):
        assert lead is not None
        assert lead.mean == pytest.approx(0)
    v1, ebplus = seeds(summary, [1.0, 0.0])
    nothing = gain(ebplus, v1)
    assert nothing is not None
    assert nothing.mean == -1


def test_copies_in_virtual_time_count_once_and_real_repeats_each(summary: Summary) -> None:
    v1, ebplus = seeds(summary, [1.1] * 8)
    assert len(log_ratios(ebplus, v1, throughput) or ()) == 1
    v1, ebplus = seeds(summary, [1.1] * 8, virtual=False)
    assert len(log_ratios(ebplus, v1, throughput) or ()) == 8


def test_the_load_is_recorded_in_json(summary: Summary) -> None:
    told = summary.to_dict()
    assert told["request_rate"] == 5
    assert told["max_concurrency"] == 8
    assert (told["gpus"], told["topology"]) == (1, None)
    assert (told["max_num_batched_tokens"], told["max_num_seqs"]) == (8192, 1024)
    assert told["policy_settings"] == asdict(parse_policy("v1"))
    assert replace(summary, policy="eb:k=7").to_dict()["policy_settings"]["k"] == 7
    assert replace(summary, policy="my server").to_dict()["policy_settings"] is None


def test_a_topology_run_shows_its_gpus(tmp_path: Path) -> None:
    from ebbench.analysis.environment import machine_of_run
    from ebbench.records.run import Run

    made(tmp_path / "r", "v1", topology="dp=2,tp=4", gpus=8, dispatch="round-robin")
    manifest = Run.load(tmp_path / "r").manifest
    assert str(machine_of_run(manifest)) == "8 GPUs, dp=2,tp=4, round-robin"
    assert load_of_run(manifest).parts() == {"sessions": "40 sessions", "concurrency": "concurrency 8"}


@pytest.mark.parametrize(
    ("workload", "words"), [("balanced", "3 requests"), ("wildchat", "3 sessions")], ids=("single", "turns")
)
def test_the_load_counts_requests_unless_they_are_turns(tmp_path: Path, workload: str, words: str) -> None:
    result = CliRunner().invoke(
        app, ["run", workload, "--source", "profile", "-n", "3", "-p", "v1", "-q", "-o", str(tmp_path / "r")]
    )
    assert f"Load: {words}, concurrency" in result.output, result.output
