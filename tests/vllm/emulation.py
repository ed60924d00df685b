"""Helpers of the tests around the real vLLM core: plans, a device and the two engines to compare."""

from __future__ import annotations

import gc
import importlib
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pyarrow as pa
import pytest

from ebbench.devices.base import Device, StepShape
from ebbench.devices.costs import cost_grid
from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import PLAN, PLAN_EXTRAS
from ebbench.spec.server import EngineOptions
from vllm_eb.calibration import Calibration, MixedCost
from vllm_eb.policy import PolicySpec, parse_policy


class TestCost:
    """Grows with tokens, context and batch size, so that a step with other contents never takes the same time."""

    __test__ = False

    def step_s(self, shape: StepShape) -> float:
        """Seconds."""
        prefill_tokens = sum(count for count, _ in shape.prefill)
        prefill_context = sum(count * context for count, context in shape.prefill)
        cost = 3e-3 + 17e-6 * prefill_tokens + 1e-9 * prefill_context
        return cost + 31e-6 * shape.decode_seqs + 7e-8 * shape.decode_kv_tokens


CALIBRATION = Calibration(
    alpha_p=5e-3, beta_p=17e-6, alpha_d=3e-3, beta_d=31e-6, mixed=MixedCost(a=2e-5, b=6e-5, c=-3e-5)
)
DEVICE = Device("test", "test", TestCost(), 1 << 20, CALIBRATION, "made for tests")


class DraftingCost(TestCost):
    """Drafted tokens cost as much as others, and each drafting pass a further 0.1 ms."""

    __test__ = False

    def step_s(self, shape: StepShape) -> float:
        """Seconds."""
        return super().step_s(shape) + 31e-6 * shape.draft_tokens + 1e-4 * (shape.next_drafts or 0)


def drafting_device(tokens: int) -> Device:
    """A device on which few sequences gain by drafts and many lose."""
    cost = DraftingCost()
    costs = replace(CALIBRATION, grid=cost_grid(cost, tokens), undrafted=cost_grid(cost))
    return replace(DEVICE, cost=cost, calibration=costs)


@dataclass(frozen=True)
class Traffic:
    """Size and kind of a test plan. ``rate_per_s`` of None means closed loop at ``concurrency``."""

    sessions: int = 40
    turns: int = 1
    concurrency: int = 24
    rate_per_s: float | None = None
    max_input: int = 90
    max_output: int = 40
    seed: int = 0


def seeds(first: int, end: int) -> list[Any]:
    """Seeds of random cases from ``first`` to before ``end``; half of them, odd and even, for `make nightly` only."""
    return [seed if seed % 4 in (0, 3) else pytest.param(seed, marks=pytest.mark.nightly) for seed in range(first, end)]


def make_plan(traffic: Traffic) -> Plan:
    """A plan with random lengths; the turns of a session share their history."""
    rng = random.Random(traffic.seed)
    rows: list[dict[str, Any]] = []
    clock_s = 0.0
    for session in range(traffic.sessions):
        clock_s += rng.expovariate(traffic.rate_per_s) if traffic.rate_per_s else 0.0
        history = 0
        for turn in range(traffic.turns):
            inputs = history + rng.randint(1, traffic.max_input)
            outputs = rng.randint(1, traffic.max_output)
            history = inputs + outputs
            first_by_clock = traffic.rate_per_s is not None and turn == 0
            rows.append(
                {
                    "request_id": f"r{len(rows)}",
                    "session": session,
                    "turn": turn,
                    "phase": "main",
                    "arrival_ns": round(clock_s * 1e9) if first_by_clock else None,
                    "input_tokens": inputs,
                    "output_tokens": outputs,
                    "content": session,
                }
            )
    phases = () if traffic.rate_per_s else (ClosedPhase("main", traffic.sessions, traffic.concurrency),)
    return Plan(pa.Table.from_pylist(rows, schema=PLAN), phases, {})


def random_case(seed: int) -> tuple[Plan, str, EngineOptions]:
    """A plan, a policy and settings drawn at random: block sizes from 1, memory from just enough, caps, two phases."""
    rng = random.Random(seed)
    turns = rng.choice([1, 1, 2, 4])
    traffic = Traffic(
        sessions=rng.randint(3, 40),
        turns=turns,
        concurrency=rng.randint(1, 30),
        rate_per_s=rng.choice([None, None, 5.0, 40.0, 300.0]),
        max_input=rng.choice([8, 40, 120, 300]),
        max_output=rng.choice([1, 2, 5, 30, 80]),
        seed=seed,
    )
    block_size, seqs = rng.choice([1, 2, 4, 16, 16, 32]), rng.randint(1, 24)
    longest = -(-turns * (traffic.max_input + traffic.max_output) // block_size)
    options = EngineOptions(
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, rng.choice([8, 32, 100, 4096])),
        block_size=block_size,
        num_kv_blocks=longest + rng.choice([0, 1, 3, 10, 50, 3000]),
        enable_prefix_caching=rng.random() < 0.75,
        async_scheduling=rng.random() < 0.6,
        long_prefill_token_threshold=rng.choice([0, 0, 0, 7, 30]),
    )
    return _varied(make_plan(traffic), traffic, rng), _random_policy(rng, seqs), options


def with_further_limits(options: EngineOptions, seed: int) -> EngineOptions:
    """``options`` with the limits that vLLM 0.32 has and older versions lack, drawn at random."""
    rng = random.Random(-seed)
    threshold = rng.choice([0, 0, 5, 30])
    return replace(
        options,
        max_num_active_seqs=rng.choice([None, rng.randint(1, options.max_num_seqs)]),
        long_prefill_token_threshold=threshold,
        long_prefill_token_threshold_adaptive=bool(threshold) and rng.random() < 0.7,
        max_num_queued_reqs=rng.choice([None, None, rng.randint(1, 30)]),
        max_num_queued_tokens=rng.choice([None, None, rng.randint(1, 600)]),
        scheduler_reserve_full_isl=rng.random() < 0.4,
    )


def _random_policy(rng: random.Random, seqs: int) -> str:
    online = f"update_every={rng.randint(1, 20)},min_samples={rng.randint(1, 20)},window={rng.randint(10, 60)}"
    seen = f"update_every={rng.randint(1, 20)},window={rng.randint(10, 60)}"
    margin = rng.choice([1e-6, 1e-5, -1e-5, -1])
    return rng.choice(
        [
            "v1", "v0", f"cadence:every={rng.randint(1, 9)}", f"deferred:k={min(rng.randint(1, 24), seqs)}",
            f"eb:k={rng.randint(1, 24)}",
            f"eb:theta={rng.uniform(0.02, 0.95):.2f}", f"eb:{online}", f"eb:estimator=censored,{online}",
            f"eb:memory_form=paper,{online}", f"ebplus:{online}", f"ebplus:margin={margin},{online}",
            f"marginal:{seen}", f"marginal:mix=off,{seen}", f"marginal:ttft={rng.choice([0.05, 0.5])},{seen}",
            f"marginal:tpot={rng.choice([0.004, 0.05])},{seen}",
        ]
    )  # fmt: skip


def _varied(plan: Plan, traffic: Traffic, rng: random.Random) -> Plan:
    """Sometimes with prompts that share hash ids, a cap on open sessions, or a second phase."""
    if traffic.turns == 1 and rng.random() < 0.25:
        rows = plan.table.to_pylist()
        for row in rows:
            row["hash_ids"] = [rng.randint(0, 3)] * -(-row["input_tokens"] // 512)
        plan = replace(plan, table=pa.Table.from_pylist(rows, schema=PLAN))
    if traffic.rate_per_s:
        return replace(plan, max_concurrency=rng.randint(1, 8)) if rng.random() < 0.25 else plan
    if rng.random() < 0.3:
        first = rng.randint(1, traffic.sessions)
        phases = (
            ClosedPhase("a", first, rng.randint(1, 20)),
            ClosedPhase("b", traffic.sessions - first, rng.randint(1, 20)),
        )
        return replace(plan, phases=phases)
    return plan


def run_emulated(plan: Plan, policy: PolicySpec | str, device: Device, options: EngineOptions) -> EngineResult:
    """Run a plan on the emulated engine in virtual time."""
    from ebbench.engines.emulated import EmulatedEngine

    _import_vllm()
    return EmulatedEngine().run(plan, _spec(policy), device, options)


@cache
def _import_vllm() -> None:
    """Import what an emulated engine needs; its million objects are never searched for garbage."""
    gc.disable()
    importlib.import_module("ebbench.engines.emulated_core")
    gc.freeze()
    gc.enable()


def run_sim(plan: Plan, policy: PolicySpec | str, device: Device, options: EngineOptions) -> EngineResult:
    """Run a plan on the simulator."""
    return SimEngine().run(plan, _spec(policy), device, options)


def _spec(policy: PolicySpec | str) -> PolicySpec:
    return parse_policy(policy) if isinstance(policy, str) else policy


def differences(sim: EngineResult, emulated: EngineResult) -> list[str]:
    """Where two results differ, in words: the first differing row of each table, column by column."""
    found = []
    for name in ("steps", "decisions", "requests"):
        ours, theirs = getattr(sim, name), getattr(emulated, name)
        if ours.equals(theirs):
            continue
        if ours.num_rows != theirs.num_rows:
            found.append(f"{name}: {ours.num_rows} rows in sim, {theirs.num_rows} emulated")
        for row in range(min(ours.num_rows, theirs.num_rows)):
            left, right = _row(ours, row), _row(theirs, row)
            if left != right:
                unequal = {key: (left[key], right[key]) for key in left if left[key] != right[key]}
                found.append(f"{name}[{row}] (sim, emulated): {unequal}")
                break
    return found


def _row(table: pa.Table, row: int) -> dict[str, Any]:
    values: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
    if "preempted_ids" in values:
        values["preempted_ids"] = sorted(values["preempted_ids"])
    return values


def with_priorities(plan: Plan, seed: int) -> Plan:
    """The plan with a priority per session, drawn at random; some have none."""
    rng = random.Random(seed)
    values = {session: rng.choice([None, 0, 1, 5, -3]) for session in set(plan.table["session"].to_pylist())}
    column = pa.array([values[session] for session in plan.table["session"].to_pylist()], pa.int32())
    return replace(plan, table=plan.table.append_column("priority", column))


def as_agents(plan: Plan, seed: int, *, hang_ups: bool = True) -> Plan:
    """The plan with pauses, turns that run in parallel and join, and clients that hang up, all drawn at random."""
    rng = random.Random(seed)
    rows = plan.table.to_pylist()
    for place, row in enumerate(rows):
        turn = row["turn"]
        if rng.random() < 0.5:
            row["pause_ns"] = round(rng.expovariate(1 / 0.05) * 1e9)
        if turn and rng.random() < 0.6:
            row["after"] = sorted(rng.sample(range(turn), rng.randint(0, min(turn, 2))))
            row["content"] = 10_000 + place  # requests that run in parallel have contents of their own
        elif turn:
            row["content"] = rows[place - 1]["content"]
        if hang_ups and rng.random() < 0.4:
            row["hang_up_ns"] = round(rng.expovariate(1 / 0.15) * 1e9)
    return replace(plan, table=pa.Table.from_pylist(rows, schema=pa.schema([*PLAN, *PLAN_EXTRAS])))
