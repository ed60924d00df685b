"""The server that is simulated, emulated or started: scheduler limits, KV cache, data types, API server, host costs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ebbench.config.declare import DEFAULT_VLLM, ENGINE, LOAD, check_ranges, declare
from ebbench.config.server_url import is_server_url
from ebbench.spec.speculative import Speculative, speculative_of

# The free constants of a device and model, which a run may replace.


@dataclass(frozen=True)
class HostCosts:
    """The free constants of a device and model (at most four), with their source and whether they were fitted.

    With several GPUs per unit the engine sends every step to a process per GPU: ``workers_step_s`` and
    ``workers_sequence_s`` are added.

    ``mixed_excess`` scales the part of a mixed attention call that exceeds its pure parts; 1 is as profiled.
    ``request_s`` is not a free constant: `ebbench calibrate` measures it together with a grid of step times.
    ``doubt``: what speaks against the constants, said where the host decides; "" for nothing.
    """

    step_s: float
    sequence_s: float
    mixed_excess: float = 1.0
    source: str = "default, not fitted"
    request_s: float = 0.0
    fitted: bool = True
    doubt: str = ""
    workers_step_s: float = 0.0
    workers_sequence_s: float = 0.0

    def with_workers(self, tp: int) -> HostCosts:
        """The constants of a unit of ``tp`` GPUs, without a part that depends on them."""
        several = tp > 1
        step_s = self.step_s + several * self.workers_step_s
        sequence_s = self.sequence_s + several * self.workers_sequence_s
        doubt = self.doubt if several or not self.workers_sequence_s else ""
        return replace(
            self, step_s=step_s, sequence_s=sequence_s, doubt=doubt, workers_step_s=0.0, workers_sequence_s=0.0
        )


def release_of(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as ``0.32`` or ``0.25.1``; None for another text."""
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\w+)*", version)
    return None if found is None else (int(found[1]), int(found[2]))


_SINCE = {"async_scheduling": (0, 14), "scheduler_reserve_full_isl": (0, 19)}
"""Versions of vLLM since which a setting that is on by default has been so."""


def version_defaults(version: str | None) -> dict[str, bool]:
    """Settings that are off by default in this version of vLLM, unlike here; {} for None and for other texts."""
    release = release_of(version or "")
    return {} if release is None else {name: False for name, since in _SINCE.items() if release < since}


OFF = "off"
"""No API server is simulated."""
AUTO = "auto"
"""Simulate without the API server first, and all again with it if one of the runs would keep it busy."""
DEFAULT_CLASS = "datacenter"
"""The class of machine that commands take unless the user names one."""
VIRTUAL_TIME = frozenset({"sim", "emulated"})
"""Names of the engines in virtual time, in which equal plans give equal runs."""


def is_server(engine: str) -> bool:
    """Whether the engine is a server that ebbench does not start: it is only measured, and policies are labels."""
    return is_server_url(engine)


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the server, named as in vLLM."""

    max_num_seqs: int = declare(
        1024, "N, most sequences in a batch. Simulated: vLLM's default on its GPU.", ENGINE, at_least=1
    )
    max_num_batched_tokens: int = declare(
        8192, "B, token budget per step. Simulated: vLLM's default on its GPU.", ENGINE, at_least=1
    )
    max_num_active_seqs: int | None = declare(None, "Most sequences that run, where fewer than N.", ENGINE, at_least=1)
    max_num_queued_reqs: int | None = declare(
        None, "Open requests from which on further ones are refused (503).", ENGINE, at_least=1
    )
    max_num_queued_tokens: int | None = declare(
        None, "Queued prompt tokens from which on requests are refused.", ENGINE, at_least=1
    )
    long_prefill_token_threshold: int = declare(0, "Most tokens of one prompt per step; 0: no limit.", ENGINE)
    long_prefill_token_threshold_adaptive: bool = declare(
        False, "Raise it to a request's share of B.", ENGINE, names=("--long-prefill-token-threshold-adaptive",)
    )
    scheduler_reserve_full_isl: bool = declare(
        True, "Admit a prompt as soon as its first chunk fits.", ENGINE,
        names=("--no-scheduler-reserve-full-isl/--scheduler-reserve-full-isl",),
        turns_off=True,
    )  # fmt: skip
    max_model_len: int = declare(40960, "Longest prompt plus output in tokens.", ENGINE, at_least=1)
    block_size: int = declare(16, "Tokens per KV block.", at_least=1)
    num_kv_blocks: int | None = declare(
        None, "KV blocks of 16 tokens; default: the device's capacity.", ENGINE, at_least=1
    )
    gpu_memory_utilization: float | None = declare(
        None, "Share of the GPU's memory for vLLM; default: vLLM's own.", ENGINE
    )
    vllm_version: str | None = declare(
        None, f"Version whose defaults and KV cache a simulated server has. Default: {DEFAULT_VLLM}.", ENGINE
    )
    enable_prefix_caching: bool = declare(
        True, "Do not reuse KV of shared prefixes.", ENGINE, names=("--no-prefix-caching",), turns_off=True
    )
    async_scheduling: bool = declare(
        True, "Schedule a step only when the previous one has ended.", ENGINE,
        names=("--no-async-scheduling/--async-scheduling",), turns_off=True,
    )  # fmt: skip
    enforce_eager: bool = declare(
        False, "Do not use CUDA graphs: the host launches every layer.", ENGINE, names=("--enforce-eager",)
    )
    quantization: str | None = declare(None, "Data type of the weights, if not the model's own: fp8.", ENGINE)
    kv_cache_dtype: str = declare("auto", "Data type of the KV cache: auto (the model's own), bfloat16 or fp8.", ENGINE)
    api_server: str = declare(
        OFF, "vLLM's API server, simulated: auto (where it would be busy), datacenter, FILE.toml or off.", ENGINE,
        complete="api_servers_or_auto",
    )  # fmt: skip
    api_server_count: int | None = declare(
        None, "Its processes per engine; default: one per data-parallel unit.", ENGINE
    )
    assume_kernels: bool = declare(
        False, "Estimate kernels that were not measured on the GPU by a roofline; results say so.", ENGINE,
        names=("--assume-kernels",),
    )  # fmt: skip
    front_end_ms: float | None = declare(
        None, "Time per request in front of the engine, simulated; default: as servers with the GPU have it.", ENGINE,
        at_least=0,
    )  # fmt: skip
    speculative: str | None = declare(
        None, "Speculative decoding, simulated: key=value pairs of method, tokens and acceptance.", ENGINE
    )
    warmup: int = declare(
        0, "Requests before the start, of the plan's lengths; not recorded.", LOAD, names=("--warmup", "--num-warmups")
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.speculative is None:
            return
        drafts = speculative_of(self.speculative)
        # A run's settings hold the rates, not the file that they are read from.
        object.__setattr__(self, "speculative", drafts.text)
        if not drafts.rules.asynchronous:
            object.__setattr__(self, "async_scheduling", False)

    @property
    def drafts(self) -> Speculative | None:
        """How the server drafts tokens; None: not at all. Raises UsageError."""
        return None if self.speculative is None else speculative_of(self.speculative)

    @property
    def running_limit(self) -> int:
        """Requests that may run at a time."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs


def only_if_busy(name: str, count: int | None) -> bool:
    """Whether a command with these options simulates without the API server first, and with it where it is busy."""
    return name == AUTO and count is None


def first_choice(name: str, count: int | None) -> str:
    """What a command simulates first: for ``auto`` no API server, or the default class if its processes are given."""
    if name != AUTO:
        return name
    return OFF if only_if_busy(name, count) else DEFAULT_CLASS
