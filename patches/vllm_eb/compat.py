"""Everything that differs between vLLM versions, and what the plugin cannot be combined with.

| | 0.25.1 to 0.29 | 0.31 | 0.32, 0.33 |
|---|---|---|---|
| limit of running requests, read on admission | ``max_num_running_reqs`` | ``max_num_active_reqs`` | as 0.31 |
| requests admitted while paused | none | none | those that hold KV blocks |
| ``long_prefill_token_threshold`` (vLLM's own affair) | holds for everyone | not for a request alone | as 0.31 |
| ``prefill_schedule_interval`` above 1, refused here | data parallel ranks | as 0.29 | 0.33: every engine |
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm_eb.config import ConfigError


def limit_name(scheduler: Any) -> str:
    """Name of the attribute that bounds the running requests on admission."""
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def waiting(scheduler: Any) -> int:
    """Requests that could be admitted, preempted ones included.

    Streaming sessions that wait for their user hold KV blocks and a place in the queue, but ask for nothing.
    """
    queued: int = scheduler.get_request_counts()[1]
    return queued - getattr(scheduler, "num_waiting_for_streaming_input", 0)


def paused(scheduler: Any) -> bool:
    """Whether the operator has paused admissions."""
    state = scheduler.pause_state
    return state is not type(state).UNPAUSED


def usable_blocks(scheduler: Any) -> int:
    """KV blocks that requests can hold: all but the null block."""
    return int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1


def free_blocks(scheduler: Any) -> int:
    """KV blocks without an owner; cached but unreferenced ones count."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def reorder(queue: Any, requests: list[Any]) -> None:
    """Put a first-come-first-served queue into a new order."""
    queue.clear()
    queue.extend(requests)


def refuse_reordering(scheduler: Any, wanted: bool) -> None:
    """Raise ConfigError when a queue with priorities would have to be reordered by age."""
    if wanted and not isinstance(scheduler.waiting, deque):
        raise ConfigError(
            "vllm_eb: a ttft= target orders the queue, and so does --scheduling-policy priority: choose one"
        )


def refuse_unsupported(vllm_config: Any, *, only_records: bool = False) -> None:
    """Raise ConfigError for settings under which exclusive phases would be wrong or meaningless.

    ``only_records``: vLLM's own rules decide, so those may be any.
    """
    interval = getattr(vllm_config.scheduler_config, "prefill_schedule_interval", 1)
    held = (interval > 1 and not only_records, "--prefill-schedule-interval (vLLM, too, would say when prompts come)")
    for found, what in (held, *_problems(vllm_config)):
        if found:
            raise ConfigError(
                f"vllm_eb cannot be combined with {what}: switch that off, or leave --scheduler-cls out (policy v1)"
            )


def _problems(config: Any) -> list[tuple[bool, str]]:
    model, parallel = config.model_config, config.parallel_config
    return [
        (config.speculative_config is not None, "speculative decoding (a decode step would not be one token each)"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism (several steps of one request are in flight)"),
        (config.kv_transfer_config is not None, "a KV connector (loads are admissions the plugin cannot hold back)"),
        (getattr(config, "ec_transfer_config", None) is not None, "an encoder-cache connector"),
        (model.runner_type == "pooling", "pooling models (they have no decode phase)"),
        (bool(getattr(model, "is_diffusion", False)), "diffusion models"),
        (bool(model.is_encoder_decoder), "encoder-decoder models"),
    ]
