"""Inputs of the simulator's tests: plans of chosen lengths, a device, engine options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from hypothesis import strategies as st

from ebbench.devices.base import Device
from ebbench.devices.costs import LinearCost
from ebbench.devices.geometry import KvLayout
from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import PLAN
from ebbench.spec.server import EngineOptions
from vllm_eb.calibration import Calibration, MixedCost
from vllm_eb.policy import parse_policy

CALIBRATION = Calibration(
    alpha_p=5e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4, mixed=MixedCost(6e-5, 2e-4, 1e-5), margin=1e-5
)
EAGER = "ebplus:margin=-1,sticky=-1,update_every=4,min_samples=3,window=20"
SHY = "ebplus:update_every=4,min_samples=3,window=20,margin=1e-5"
MARGINAL = ("marginal", "marginal:mix=off", "marginal:ttft=1,tpot=0.02,update_every=4")
POLICIES = (
    *MARGINAL,
    "v1",
    "v0",
    "v1:budget=40",
    "v1:order=shortest",
    "cadence:every=3",
    "cadence:every=3,escape=off",
    "delayer",
    "delayer:passes=0,watermark=decay,ratio=0.5,wait=0.3",
    "ppas:cap=20",
    "batchwait:iters=4,ratio=0.5",
    "slochunk:tpot=0.02,least=8",
    "eb:theta=0.5,order=shortest",
    "deferred:k=3",
    "eb:theta=0.5",
    "eb:k=2",
    "eb:update_every=4,min_samples=3",
    EAGER,
    SHY,
)


def device() -> Device:
    """A synthetic device with linear step times."""
    return Device("test", "test", LinearCost(CALIBRATION), 10_000, CALIBRATION, "made for tests")


def plan(
    lengths: Sequence[tuple[int, int]],
    *,
    concurrency: int | None = None,
    gap_ns: int = 0,
    turns: int = 1,
    phases: Sequence[ClosedPhase] = (),
) -> Plan:
    """``lengths`` are (input, output). Closed loop when ``concurrency`` or ``phases`` is given, else arrivals.

    With ``turns`` above 1, consecutive rows form sessions whose prompts contain all of the history.
    """
    rows = []
    history = 0
    for index, (new_tokens, output_tokens) in enumerate(lengths):
        session, turn = divmod(index, turns)
        history = history if turn else 0
        rows.append(
            {
                "request_id": f"r{index:04d}",
                "session": session,
                "turn": turn,
                "phase": "all",
                "arrival_ns": None if concurrency or phases or turn else session * gap_ns,
                "input_tokens": history + new_tokens,
                "output_tokens": output_tokens,
                "content": session,
            }
        )
        history += new_tokens + output_tokens
    sessions = -(-len(lengths) // turns)
    closed = tuple(phases) or ((ClosedPhase("all", sessions, concurrency),) if concurrency else ())
    return Plan(pa.Table.from_pylist(rows, schema=PLAN), closed, {"seed": 0})


@dataclass(frozen=True)
class World:
    """All inputs of a simulated run: plan, policy, options and device; ``layout``: of its KV cache."""

    plan: Plan
    policy: str
    options: EngineOptions
    layout: KvLayout | None = None

    def run(self) -> EngineResult:
        """The result of the simulation."""
        return self.on(SimEngine())

    def on(self, engine: SimEngine) -> EngineResult:
        """The result of an engine with other settings."""
        return engine.run(
            self.plan, parse_policy(self.policy), replace(device(), kv_layout=self.layout), self.options, None
        )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Adversarial mixes: tight and loose memory, small and large budgets, one and many turns, both loops."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=40))
    turns = draw(st.sampled_from((1, 1, 3)))
    closed = draw(st.booleans())
    made = plan(
        lengths,
        turns=turns,
        concurrency=draw(st.integers(1, 20)) if closed else None,
        gap_ns=draw(st.sampled_from((0, 10_000_000, 200_000_000))),
    )
    longest = max(
        a + b
        for a, b in zip(made.table["input_tokens"].to_pylist(), made.table["output_tokens"].to_pylist(), strict=True)
    )
    seqs = draw(st.integers(1, 16))
    options = EngineOptions(
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(seqs, 200)),
        num_kv_blocks=-(-longest // 16) + draw(st.sampled_from((0, 1, 3, 10, 1000))),
        enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from((0, 0, 7))),
    )
    return World(made, draw(st.sampled_from(POLICIES)), options)
