"""The engine interface: a plan and a policy in, request, step and decision tables out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from ebbench.devices.base import Device
from ebbench.records.plan import Plan
from vllm_eb.policy import PolicySpec


@dataclass(frozen=True)
class EngineOptions:
    """Scheduler settings, named as vLLM names them.

    ``num_kv_blocks`` of None means: from the device's KV capacity. ``long_prefill_token_threshold`` of 0 is off.
    """

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int = 40960
    block_size: int = 16
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    long_prefill_token_threshold: int = 0


@dataclass(frozen=True)
class Progress:
    """A snapshot for the live line."""

    policy: str
    completed: int
    planned: int
    output_tokens: int
    total_tokens: int
    time_s: float  # engine time, virtual or real
    mode: str
    running: int
    waiting: int


class Observer(Protocol):
    """Receives snapshots now and then; must return quickly."""

    def update(self, progress: Progress) -> None:
        """Show the snapshot."""
        ...


@dataclass(frozen=True)
class EngineResult:
    """Tables in the schemas of :mod:`ebbench.records.schema`, and what the manifest should say."""

    requests: pa.Table
    steps: pa.Table
    decisions: pa.Table
    warnings: tuple[str, ...] = ()
    interrupted: bool = False


class Engine(Protocol):
    """Carries out a plan under a policy."""

    name: str

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Run to the end of the plan. Raises RunError when it cannot be carried out."""
        ...
