"""An emulated device in real time for a vLLM server, selected by ``--distributed-executor-backend``.

It is configured by the key ``ebbench_emulated`` of ``--additional-config``: ``device`` and ``model`` (names as in
``ebbench devices list``), ``slow_motion`` (factor by which every step is longer, so that a few cores can keep up with a
fast GPU) and ``kv_blocks``. Tokens are pseudo-random and never end a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import msgspec

from ebbench.devices.loader import load_device
from ebbench.engines.emulated_core import StandInExecutor, StepReader, done, nothing, step_ns
from ebbench.engines.vllm_command import EMULATED_KEY, EmulatedSettings
from ebbench.errors import UsageError

_FIRST_TOKEN = 10  # lower ids are special tokens in most vocabularies
_MULTIPLIER = 2654435761  # Knuth's multiplicative hash


class RealTimeFuture(Future[Any]):
    """Completes when its step has ended by the monotonic clock."""

    def __init__(self, end_ns: int, value: Any) -> None:
        super().__init__()
        self._end_ns, self._value = end_ns, value

    def done(self) -> bool:
        """Whether the step has ended."""
        return time.monotonic_ns() >= self._end_ns

    def result(self, timeout: float | None = None) -> Any:
        """Sleep until the end of the step."""
        while (left_ns := self._end_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        return self._value


class _Stream:
    """Tokens of one request by position."""

    __slots__ = ("_seed", "_size")

    def __init__(self, seed: int, size: int) -> None:
        self._seed, self._size = seed, size

    def __getitem__(self, position: int) -> int:
        return _FIRST_TOKEN + (position * _MULTIPLIER + self._seed) % self._size


class _Streams(dict[str, Any]):
    """Creates a stream for every request id."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __missing__(self, request_id: str) -> _Stream:
        stream = self[request_id] = _Stream(hash(request_id), self._size)
        return stream


class EmulatedExecutor(StandInExecutor):
    """Runs steps one after another in real time, with durations from the cost model."""

    def _init_executor(self) -> None:
        settings = read_settings(self.vllm_config.additional_config)
        device = load_device(
            settings.device,
            settings.model,
            cost=settings.cost,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            eager=settings.enforce_eager,  # vLLM's own flag is always set without a GPU
            quantization=settings.quantization,
            kv_cache_dtype=settings.kv_cache_dtype,
            moe_backend=settings.moe_backend,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            vllm_version=settings.vllm_version,
            assume_kernels=settings.assume_kernels,
        )
        self._cost, self._slow_motion = device.cost, settings.slow_motion
        self._blocks = settings.kv_blocks or device.kv_capacity_tokens // self.cache_config.block_size
        size = max(1, min(self.model_config.get_vocab_size(), 30_000) - _FIRST_TOKEN)
        self._streams = _Streams(size)
        self._reader = StepReader(self._streams)
        self._free_ns = 0
        # vLLM's CPU platform has switched asynchronous scheduling off; this device supports it.
        if self.scheduler_config.async_scheduling is not None:
            self.scheduler_config.async_scheduling = settings.async_scheduling

    def determine_available_memory(self) -> list[int]:
        """Bytes of the device's KV blocks and the null block."""
        (spec,) = self.get_kv_cache_specs()[0].values()
        return [(self._blocks + 1) * spec.page_size_bytes]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Queue a step on the device; ``sample_tokens()`` returns its tokens."""
        for request_id in scheduler_output.finished_req_ids:
            self._streams.pop(request_id, None)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return nothing(non_block)
        step = self._reader.read(scheduler_output)
        start_ns = max(self._free_ns, time.monotonic_ns())
        self._free_ns = start_ns + round(step_ns(self._cost, step.shape) * self._slow_motion)
        self._sampled = RealTimeFuture(self._free_ns, step.output)
        return done(None) if non_block else None


def read_settings(additional_config: object) -> EmulatedSettings:
    """The device to emulate. Raises UsageError."""
    settings = additional_config.get(EMULATED_KEY) if isinstance(additional_config, Mapping) else None
    if not isinstance(settings, Mapping) or not {"device", "model"} <= set(settings):
        raise UsageError(
            f'the emulated executor needs --additional-config \'{{"{EMULATED_KEY}": {{"device": "h200", '
            '"model": "qwen3-8b"}}\''
        )
    known = {field.name for field in fields(EmulatedSettings)}
    unknown = set(settings) - known
    if unknown:
        raise UsageError(f"{EMULATED_KEY}: unknown setting {sorted(unknown)[0]!r}; known: {', '.join(sorted(known))}")
    try:
        return msgspec.convert(settings, EmulatedSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"{EMULATED_KEY}: {error}") from None
