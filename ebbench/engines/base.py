"""The engine interface: from plan and policy to tables of requests, steps and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from ebbench.devices.apiserver import OFF
from ebbench.devices.base import Device
from ebbench.records.files import TableParts
from ebbench.records.manifest import RunWarning
from ebbench.records.plan import Plan
from vllm_eb.policy import PolicySpec


@dataclass(frozen=True)
class EngineOptions:
    """Scheduler settings, named as in vLLM.

    ``max_num_active_seqs``: requests that may run at most, where fewer than ``max_num_seqs``; None: as many.
    ``num_kv_blocks``: None uses the device's KV capacity. ``long_prefill_token_threshold``: 0 is off; with
    ``_adaptive`` it is raised to each request's share of the budget. ``max_num_queued_reqs``,
    ``max_num_queued_tokens``: open requests, and tokens of prompts without a first token, from which on the API server
    refuses requests; None: no limit.
    ``scheduler_reserve_full_isl``: admit a prompt only if all of it fits into the KV cache, not just its first chunk.
    ``enforce_eager``: no CUDA graphs. ``warmup``: number of requests with the plan's lengths that are sent first and
    not recorded. ``quantization`` and ``kv_cache_dtype``: data types of weights and KV cache that differ from the
    model's. ``api_server``: class of the machine whose API server is simulated, or ``off``; ``api_server_count``:
    its processes per engine instance, None is one per data-parallel unit. ``gpu_memory_utilization``: the share of the
    GPU's memory for the server, None: vLLM's default. ``vllm_version``: the version by whose rules a simulated server
    sizes its KV cache, None: ``config.defaults.DEFAULT_VLLM``.
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
    api_server: str = OFF
    api_server_count: int | None = None
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold_adaptive: bool = False
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    scheduler_reserve_full_isl: bool = True
    gpu_memory_utilization: float | None = None
    vllm_version: str | None = None

    @property
    def running_limit(self) -> int:
        """Requests that may run at a time."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs


VIRTUAL_TIME = frozenset({"sim", "emulated"})
"""Names of the engines in virtual time, in which equal plans give equal runs."""


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
    # Known during the run only for engines that measure a server; medians in ms, failures by class.
    failures: Mapping[str, int] = field(default_factory=dict)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    # What the engine waits for before the first request; ``time_s`` is then the time of the wait.
    waiting_for: str = ""


class Observer(Protocol):
    """Receives snapshots during a run; must return quickly."""

    def update(self, progress: Progress) -> None:
        """Process a snapshot."""
        ...


class StepTableParts(TableParts, Protocol):
    """The table of steps in parts."""

    @property
    def last_mode(self) -> str:
        """The mode of the last step; "" if there is none."""
        ...

    def table(self) -> pa.Table:
        """All parts as one table."""
        ...


@dataclass(frozen=True)
class EngineResult:
    """Tables in the schemas of :mod:`ebbench.records.schema`, and entries for the manifest.

    ``steps`` of an engine that was asked for figures only lacks columns that no figure needs.

    ``invalid``: reasons that make the run INVALID and that only the engine knows. ``facts`` are added to the plan's.
    ``server_metrics``: samples of the server's metrics page, if it has one. ``device``: the device of one instance, if
    that is a unit of several GPUs instead of the given single GPU. ``step_parts``: the steps of a long run in parts, to
    be stored one after the other; ``steps`` is then empty. ``about_server``: warnings that figures measured on a server
    are not of what was asked for.
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
    step_parts: StepTableParts | None = None
    about_server: tuple[RunWarning, ...] = ()

    @property
    def last_mode(self) -> str:
        """The mode of the last step, eb or mb; "" if no modes are known."""
        if self.step_parts is not None:
            return self.step_parts.last_mode
        known = self.steps.num_rows and "mode" in self.steps.column_names
        return str(self.steps["mode"][-1].as_py()) if known else ""


class Engine(Protocol):
    """Runs a plan under a policy."""

    @property
    def name(self) -> str:
        """The engine's name on the command line."""
        ...

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Run to the end of the plan. Raises RunError if that fails."""
        ...
