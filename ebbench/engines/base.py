"""The engine interface: a plan and a policy in, request, step and decision tables out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from ebbench.devices.base import Device
from ebbench.records.plan import Plan
from vllm_eb.policy import PolicySpec


@dataclass(frozen=True)
class EngineOptions:
    """Scheduler settings, named as vLLM names them.

    ``num_kv_blocks`` of None means: from the device's KV capacity. ``long_prefill_token_threshold`` of 0 is off.
    ``enforce_eager``: no CUDA graphs. ``warmup``: requests of the plan's lengths that go first and are not recorded.
    ``quantization`` and ``kv_cache_dtype``: types of weights and KV cache other than the model's own.
    """

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int = 40960
    block_size: int = 16
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    long_prefill_token_threshold: int = 0
    enforce_eager: bool = False
    warmup: int = 0
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


VIRTUAL_TIME = frozenset({"sim", "emulated"})
"""Names of the engines in virtual time: the same plan gives the same run."""


@dataclass(frozen=True)
class Progress:
    """A snapshot for the progress line."""

    policy: str
    completed: int
    planned: int
    output_tokens: int
    total_tokens: int
    time_s: float  # engine time, virtual or real
    mode: str
    running: int
    waiting: int
    # Known while the run goes on only to engines that measure a server; medians in ms, failures by class.
    failures: Mapping[str, int] = field(default_factory=dict)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    # What the engine waits for before the first request, which ``time_s`` is then the time of.
    waiting_for: str = ""


class Observer(Protocol):
    """Receives snapshots now and then; must return quickly."""

    def update(self, progress: Progress) -> None:
        """Show the snapshot."""
        ...


@dataclass(frozen=True)
class EngineResult:
    """Tables in the schemas of :mod:`ebbench.records.schema`, and what the manifest should say.

    ``invalid``: reasons, known to the engine alone, why the run is INVALID. ``facts`` join the plan's in the
    manifest. ``server_metrics``: samples of the server's metrics page, where there is one. ``device``: the
    device of one instance, where that is a unit of several GPUs and not the single GPU that was given.
    """

    requests: pa.Table
    steps: pa.Table
    decisions: pa.Table
    warnings: tuple[str, ...] = ()
    interrupted: bool = False
    invalid: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    server_metrics: pa.Table | None = None
    device: Device | None = None


class Engine(Protocol):
    """Carries out a plan under a policy."""

    @property
    def name(self) -> str:
        """What the engine is called on the command line."""
        ...

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Run to the end of the plan. Raises RunError when it cannot be carried out."""
        ...
