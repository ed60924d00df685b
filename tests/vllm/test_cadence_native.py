"""``cadence:every=N`` under the plugin makes the steps that vLLM's own ``--prefill-schedule-interval N`` makes."""

from __future__ import annotations

from functools import partial

import pytest

from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from tests.vllm.emulation import DEVICE, Traffic, make_plan
from vllm_eb.policy import parse_policy

pytestmark = pytest.mark.vllm


def interval_is_local() -> bool:
    """Whether this vLLM keeps the interval outside data parallelism, too (from 0.33 on)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return "local_prefill_interval" in Scheduler.__init__.__code__.co_names


def steps_of(plan: Plan, policy: str, options: EngineOptions) -> list[dict[str, object]]:
    from ebbench.engines.emulated import EmulatedEngine

    columns = ["start_ns", "end_ns", "request_ids", "request_tokens"]
    if not options.async_scheduling:
        # While every answer has its last token in flight, vLLM's rule makes an empty step, and ours schedules the next
        # prompt already: the device runs it at the same time, but the counts when it was scheduled are other ones.
        columns += ["kv_blocks_used", "waiting", "running"]
    # vLLM counts its own calls, which shortcuts spare it.
    result = EmulatedEngine(shortcuts=False).run(plan, parse_policy(policy), DEVICE, options)
    rows: list[dict[str, object]] = result.steps.select(columns).to_pylist()
    return rows


@pytest.mark.parametrize("every", [2, 3, 8])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("kv", "slots"), [(34, 18), (4000, 18), (4000, 40)])
@pytest.mark.parametrize("rate", [None, 25.0, 60.0])
def test_the_steps_are_those_of_vllms_own_interval(
    monkeypatch: pytest.MonkeyPatch, every: int, asynchronous: bool, kv: int, slots: int, rate: float | None
) -> None:
    if not interval_is_local():
        pytest.skip("this vLLM has the interval for data parallel ranks only")
    from ebbench.engines import emulated_core

    options = EngineOptions(
        max_num_seqs=slots, max_num_batched_tokens=200, num_kv_blocks=kv, async_scheduling=asynchronous,
        enable_prefix_caching=False,  # a prompt that is cached whole comes in between under vLLM's rule, not under ours
    )  # fmt: skip
    plan = make_plan(Traffic(sessions=60, concurrency=22, rate_per_s=rate, seed=every))
    ours = steps_of(plan, f"cadence:every={every}", options)
    native = partial(emulated_core.build_core, prefill_schedule_interval=every)
    monkeypatch.setattr(emulated_core, "build_core", native)
    theirs = steps_of(plan, "v1", options)
    monkeypatch.undo()
    assert ours == theirs
    if slots > 22 and rate is None:  # no request waits for a slot, so the interval is kept
        assert ours != steps_of(plan, "v1", options)
