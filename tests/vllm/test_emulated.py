"""The emulated engine: its shortcuts do not change results, and impossible settings are errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from ebbench.engines.emulated import EmulatedEngine
from ebbench.errors import UsageError
from ebbench.spec.server import EngineOptions
from tests.vllm.emulation import DEVICE, Traffic, differences, make_plan, run_emulated
from vllm_eb.policy import parse_policy

pytestmark = pytest.mark.vllm

OPTIONS = EngineOptions(max_num_seqs=18, max_num_batched_tokens=64, num_kv_blocks=40)


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["v1", "eb:k=4"])
def test_shortcuts_change_nothing(policy: str, turns: int, caching: bool) -> None:
    plan = make_plan(Traffic(sessions=24 // turns, turns=turns, seed=3))
    options = replace(OPTIONS, enable_prefix_caching=caching)
    fast = EmulatedEngine(shortcuts=True).run(plan, parse_policy(policy), DEVICE, options)
    plain = EmulatedEngine(shortcuts=False).run(plan, parse_policy(policy), DEVICE, options)
    assert differences(fast, plain) == []
    assert sum(fast.steps["preemptions"].to_pylist()) > 0


class _Watched(EmulatedEngine):
    """Counts the steps that skipped decodes, and of these the ones that preempted others."""

    skipping = preempting = 0

    def prepare(self, core: Any) -> None:
        schedule = core.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if hasattr(output, "skipped"):
                self.skipping += 1
                self.preempting += bool(output.preempted_req_ids)
            return output

        core.scheduler.schedule = counted


def skipping_policies() -> list[Any]:
    """Policies, asynchronous scheduling, blocks: of each two all pairs in `make test`, the rest in `make nightly`."""
    policies = ("v1", "eb:k=6", "ebplus", "ebplus:estimator=censored", "marginal", "deferred:k=5")
    found = []
    for number, asynchronous, ample in itertools.product(range(len(policies)), (True, False), (True, False)):
        marks = () if (number + asynchronous + ample) % 2 else (pytest.mark.nightly,)
        found.append(pytest.param(policies[number], asynchronous, 4000 if ample else 130, marks=marks))
    return found


@pytest.mark.parametrize(("policy", "async_scheduling", "blocks"), skipping_policies())
def test_skipped_decodes_change_no_row(policy: str, async_scheduling: bool, blocks: int) -> None:
    plan = make_plan(Traffic(sessions=60, concurrency=40, max_input=90, max_output=150, seed=5))
    options = EngineOptions(
        max_num_seqs=24, max_num_batched_tokens=128, num_kv_blocks=blocks, async_scheduling=async_scheduling
    )
    from ebbench.engines import emulated_skipping  # imports vLLM

    engine = _Watched(shortcuts=True)
    skipping = engine.run(plan, parse_policy(policy), DEVICE, options)
    plain = EmulatedEngine(shortcuts=False).run(plan, parse_policy(policy), DEVICE, options)
    assert differences(skipping, plain) == []
    assert not emulated_skipping.supported() or engine.skipping > skipping.steps.num_rows // 4


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("policy", ["v1", "marginal"])
def test_preemption_spares_skipped_decodes(policy: str, async_scheduling: bool) -> None:
    """All prompts begin alike, so that a preempted request frees fewer blocks than it holds."""
    plan = make_plan(Traffic(sessions=60, concurrency=50, max_input=60, max_output=150, seed=5))
    rows = [row | {"hash_ids": [0] * -(-row["input_tokens"] // 512)} for row in plan.table.to_pylist()]
    plan = replace(plan, table=pa.Table.from_pylist(rows, schema=plan.table.schema))
    options = EngineOptions(
        max_num_seqs=48, max_num_batched_tokens=512, num_kv_blocks=60, async_scheduling=async_scheduling
    )
    engine = _Watched(shortcuts=True)
    skipping = engine.run(plan, parse_policy(policy), DEVICE, options)
    plain = EmulatedEngine(shortcuts=False).run(plan, parse_policy(policy), DEVICE, options)
    assert differences(skipping, plain) == []
    from ebbench.engines import emulated_skipping  # imports vLLM

    assert not emulated_skipping.supported() or engine.preempting > 20


def test_a_follow_up_turn_finds_its_history_in_the_cache() -> None:
    plan = make_plan(Traffic(sessions=2, turns=3, max_input=200, max_output=60, seed=1))
    result = run_emulated(plan, "v1", DEVICE, replace(OPTIONS, num_kv_blocks=4000))
    rows = result.requests.to_pylist()
    for before, after in itertools.pairwise(rows):
        if before["session"] == after["session"]:
            history = before["input_tokens"] + before["output_tokens"] - 1  # the last token is never computed
            assert after["cached_tokens"] == history // 16 * 16


def test_the_clock_is_virtual_and_causal() -> None:
    result = run_emulated(make_plan(Traffic(rate_per_s=30.0)), "eb:k=3", DEVICE, OPTIONS)
    previous_end = 0
    for step in result.steps.to_pylist():
        assert step["scheduled_ns"] <= step["start_ns"] < step["end_ns"]
        assert step["start_ns"] == max(previous_end, step["scheduled_ns"])
        previous_end = step["end_ns"]
    for request in result.requests.to_pylist():
        assert request["intended_ns"] <= request["scheduled_ns"] < request["first_token_ns"] <= request["end_ns"]


def test_a_request_that_can_never_fit_is_refused_before_anything_runs() -> None:
    plan = make_plan(Traffic(max_input=2000, seed=2))
    with pytest.raises(UsageError, match="--max-model-len"):
        run_emulated(plan, "v1", DEVICE, OPTIONS)


def test_settings_vllm_refuses_are_refused_in_our_words() -> None:
    with pytest.raises(UsageError, match="--max-num-batched-tokens 8 is below --max-num-seqs 18"):
        run_emulated(make_plan(Traffic()), "v1", DEVICE, replace(OPTIONS, max_num_batched_tokens=8))
