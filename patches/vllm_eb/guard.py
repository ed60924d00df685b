"""Checks at start-up that the installed vLLM has everything that the plugin uses, and raises an error if not.

Most of it is private to vLLM and may change in any version; docs/vllm-internals.md lists it with its tests.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm_eb.config import ConfigError

TESTED_LAST = "0.32.0"

METHODS = (
    "schedule", "update_from_output", "add_request", "get_request_counts", "shutdown", "_free_request",
    "_preempt_request", "_make_cached_request_data",
)  # fmt: skip
"""Methods of the scheduler class that are called or overridden."""

ATTRIBUTES: tuple[tuple[str, ...], ...] = (
    ("running",), ("waiting",), ("requests",), ("max_num_active_reqs", "max_num_running_reqs"),
    ("deferred_waiting", "skipped_waiting"), ("num_waiting_for_streaming_input",), ("pause_state",), ("block_size",),
    ("max_model_len",), ("max_num_scheduled_tokens",), ("lora_config",),
    ("log_stats",), ("vllm_config",),
    ("kv_cache_manager.block_pool.num_gpu_blocks",),
    ("kv_cache_manager.block_pool.get_num_free_blocks",),
    ("kv_cache_manager.allocate_slots",),
)  # fmt: skip
"""Attributes of a scheduler: one of each group, depending on the version."""

REQUEST = (
    "is_prefill_chunk", "status", "num_output_placeholders", "num_computed_tokens", "num_prompt_tokens", "max_tokens",
    "num_output_tokens", "num_preemptions", "num_tokens", "lora_request", "structured_output_request",
    "_output_token_ids", "priority", "arrival_time",
)  # fmt: skip
"""Attributes of a request."""

OUTPUT = (
    "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
    "preempted_req_ids",
)  # fmt: skip
"""Fields of the result of schedule()."""


def check_classes(scheduler: type, request: type, output: type, version: str) -> None:
    """Raise ConfigError for a method or field that these classes lack."""
    missing = [f"Scheduler.{name}" for name in METHODS if not callable(getattr(scheduler, name, None))]
    made = _set_by_init(request)
    missing += [f"Request.{name}" for name in REQUEST if name not in made and not hasattr(request, name)]
    fields = getattr(output, "__dataclass_fields__", {})
    missing += [f"SchedulerOutput.{name}" for name in OUTPUT if name not in fields]
    if not missing and not _takes_tokens_third(scheduler):
        missing.append("Scheduler._make_cached_request_data(.., .., num_scheduled_tokens, ..)")
    _refuse(missing, version)


def check_scheduler(scheduler: Any, version: str) -> None:
    """Raise ConfigError for an attribute that this scheduler lacks."""
    missing = [
        "Scheduler." + " or ".join(group) for group in ATTRIBUTES if not any(_has(scheduler, path) for path in group)
    ]
    _refuse(missing, version)


def _refuse(missing: list[str], version: str) -> None:
    if missing:
        raise ConfigError(
            f"vllm_eb was last tested with vLLM {TESTED_LAST}, and vLLM {version} lacks what it needs "
            f"({', '.join(missing)}): install vLLM {TESTED_LAST}, or leave --scheduler-cls out"
        )


def _has(thing: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def _set_by_init(kind: type) -> set[str]:
    code = getattr(vars(kind).get("__init__"), "__code__", None)
    return set(code.co_names) if code is not None else set()


def _takes_tokens_third(scheduler: type) -> bool:
    names = list(inspect.signature(scheduler._make_cached_request_data).parameters)  # type: ignore[attr-defined]
    return len(names) > 3 and names[3] == "num_scheduled_tokens"
