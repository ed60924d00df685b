"""Small clusters for tests: plans, a unit with known step times, runs and columns of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ebbench.config.topology import PoolSpec, TopologySpec, TransferSpec, parse_topology
from ebbench.devices.base import Device, StepShape
from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import PLAN
from ebbench.spec.server import EngineOptions
from vllm_eb.calibration import Calibration
from vllm_eb.policy import parse_policy


@dataclass(frozen=True)
class FixedAndToken:
    """``fixed_s`` a step, ``token_s`` a prompt token, ``seq_s`` a decoding sequence."""

    fixed_s: float = 0.1
    token_s: float = 0.0
    seq_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        """Seconds."""
        tokens = sum(count for count, _ in shape.prefill)
        return self.fixed_s + self.token_s * tokens + self.seq_s * shape.decode_seqs


def device(cost: FixedAndToken | None = None, kv_tokens: int = 1 << 20) -> Device:
    """A synthetic device; as a unit of a group it represents all GPUs of the unit."""
    calibration = Calibration(alpha_p=0.1, beta_p=1e-4, alpha_d=0.05, beta_d=1e-4)
    return Device("made", "made", cost or FixedAndToken(), kv_tokens, calibration, "made for tests")


def plan(lengths: Sequence[tuple[int, int]], arrivals_s: Sequence[float] | None = None, concurrency: int = 8) -> Plan:
    """One-turn requests of (input, output) tokens; arrivals in seconds, or a closed loop."""
    rows: list[dict[str, Any]] = [
        {
            "request_id": f"r{i}", "session": i, "turn": 0, "phase": "main",
            "arrival_ns": None if arrivals_s is None else round(arrivals_s[i] * 1e9),
            "input_tokens": inputs, "output_tokens": outputs, "content": i,
        }
        for i, (inputs, outputs) in enumerate(lengths)
    ]  # fmt: skip
    phases = () if arrivals_s is not None else (ClosedPhase("main", len(rows), concurrency),)
    return Plan(pa.Table.from_pylist(rows, schema=PLAN), phases, {})


def pools(prefill: int, decode: int, **transfer: Any) -> TopologySpec:
    """Prefill and decode instances of one unit each, KV of 1,000 bytes per token."""
    settings = {"bandwidth_gb_per_s": 1.0, "latency_ms": 0.0, "kv_bytes_per_token": 1000} | transfer
    return TopologySpec(
        prefill=PoolSpec(instances=prefill), decode=PoolSpec(instances=decode), transfer=TransferSpec(**settings)
    )


def run(
    topology: TopologySpec | str,
    requests: Plan,
    dispatch: str = "round-robin",
    *,
    on: Device | None = None,
    policy: str = "v1",
    decode_dispatch: str = "round-robin",
    **options: Any,
) -> EngineResult:
    """Run a plan on a cluster."""
    spec = parse_topology(topology) if isinstance(topology, str) else topology
    engine = SimEngine(spec, dispatch, decode_dispatch)
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "async_scheduling": False} | options
    return engine.run(requests, parse_policy(policy), on or device(), EngineOptions(**settings))


def ns(result: EngineResult, column: str) -> np.ndarray:
    """A time column of the requests."""
    return np.asarray(result.requests[column].to_pylist(), dtype=np.int64)
