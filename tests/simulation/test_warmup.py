"""Warm-up requests of the simulator: sent first, not recorded, and used by policies that learn."""

from __future__ import annotations

import numpy as np
import pytest

from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import Plan
from ebbench.simulation.releases import Releases, with_warmup
from ebbench.spec.server import EngineOptions
from tests.simulation import worlds
from vllm_eb.policy import parse_policy

LENGTHS = [(20 + 7 * i % 50, 3 + 5 * i % 30) for i in range(60)]
LEARNS = "eb:update_every=4,min_samples=3"


def run(plan: Plan, policy: str, warmup: int) -> EngineResult:
    options = EngineOptions(max_num_seqs=12, max_num_batched_tokens=256, warmup=warmup)
    return SimEngine().run(plan, parse_policy(policy), worlds.device(), options)


@pytest.mark.parametrize("policy", ["v1", LEARNS])
@pytest.mark.parametrize("kind", ["closed", "open"])
def test_only_the_plan_is_recorded_and_its_clock_starts_at_zero(policy: str, kind: str) -> None:
    plan = worlds.plan(LENGTHS, concurrency=20) if kind == "closed" else worlds.plan(LENGTHS, gap_ns=10_000_000)
    result = run(plan, policy, warmup=25)
    assert result.requests["request_id"].to_pylist() == plan.table["request_id"].to_pylist()
    assert set(result.requests["status"].to_pylist()) == {"ok"}
    names = set(plan.table["request_id"].to_pylist())
    assert all(name in names for step in result.steps["request_ids"].to_pylist() for name in step)
    intended_ns = np.array(result.requests["intended_ns"])
    assert intended_ns.min() == 0
    if kind == "open":
        assert intended_ns.tolist() == plan.table["arrival_ns"].to_pylist()
    assert result.steps["step_id"].to_pylist() == list(range(result.steps.num_rows))
    assert min(result.steps["scheduled_ns"].to_pylist()) == 0
    assert all(time_ns >= 0 for time_ns in result.decisions["time_ns"].to_pylist())
    assert all(0 <= step <= result.steps.num_rows for step in result.decisions["step_id"].to_pylist())


def test_a_warmup_changes_nothing_for_a_policy_that_does_not_learn() -> None:
    plan = worlds.plan(LENGTHS, concurrency=20)
    cold, warm = run(plan, "v1", 0), run(plan, "v1", 25)
    assert warm.requests.equals(cold.requests)
    assert warm.steps.equals(cold.steps)


def test_a_policy_knows_its_threshold_when_the_plan_begins() -> None:
    plan = worlds.plan(LENGTHS, concurrency=20)
    cold, warm = run(plan, LEARNS, 0), run(plan, LEARNS, 25)
    assert warm.steps["k"][0].as_py() != cold.steps["k"][0].as_py()
    assert "update" not in cold.decisions["kind"].to_pylist()[:1]
    first = next(row for row in warm.decisions.to_pylist() if row["kind"] == "update")
    assert first["samples"] >= 25


def test_warmup_has_the_lengths_of_the_plan_and_other_content() -> None:
    plan = worlds.plan(LENGTHS, concurrency=20)
    rows = with_warmup(plan, len(plan) + 3).table.to_pylist()
    own, warm = rows[: len(plan)], rows[len(plan) :]
    assert own == plan.table.to_pylist()
    lengths = [(row["input_tokens"], row["output_tokens"]) for row in warm]
    assert lengths == [*LENGTHS, *LENGTHS[:3]]
    assert len({row["content"] for row in rows}) == len(rows)
    assert len({row["session"] for row in warm}) == len(warm)


@pytest.mark.parametrize(("concurrency", "at_once"), [(5, 5), (100, 30)])
def test_as_many_warmup_requests_at_once_as_the_first_phase_allows(concurrency: int, at_once: int) -> None:
    plan = worlds.plan(LENGTHS, concurrency=concurrency)
    releases = Releases(plan, 30)
    sent = releases.start()
    assert sent == [len(plan) + i for i in range(at_once)]
    while not releases.begun:
        following = releases.ended(sent.pop(0))
        if releases.begun:
            assert not sent  # all have ended, and only now the plan begins
            assert following == list(range(min(concurrency, len(plan))))
        sent += following


def test_an_interruption_during_the_warmup_leaves_no_request_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbench.simulation.scheduler import Scheduler

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    plan = worlds.plan(LENGTHS, concurrency=20)
    monkeypatch.setattr(Scheduler, "deliver", interrupted)
    result = run(plan, LEARNS, 25)
    assert result.interrupted
    assert set(result.requests["status"].to_pylist()) == {"never_sent"}
    assert result.steps.num_rows == result.decisions.num_rows == 0
