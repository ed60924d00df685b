"""Helpers of the tests around the real vLLM core."""

from __future__ import annotations

from ebbench.devices.base import Device
from ebbench.engines.base import EngineOptions, EngineResult
from ebbench.records.plan import Plan
from vllm_eb.policy import PolicySpec, parse_policy


def run_emulated(plan: Plan, policy: PolicySpec | str, device: Device, options: EngineOptions) -> EngineResult:
    """Run a plan on the emulated engine in virtual time."""
    from ebbench.engines.emulated import EmulatedEngine

    spec = parse_policy(policy) if isinstance(policy, str) else policy
    return EmulatedEngine().run(plan, spec, device, options, None)
