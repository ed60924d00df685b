"""Everything that differs between vLLM versions, what the plugin needs of them and cannot be combined with.

| | 0.25.1 to 0.29 | 0.31 | 0.32, 0.33 |
|---|---|---|---|
| limit of running requests, read on admission | ``max_num_running_reqs`` | ``max_num_active_reqs`` | as 0.31 |
| requests admitted while paused | none | none | those that hold KV blocks |
| ``long_prefill_token_threshold`` (handled by vLLM) | for all requests | not for a request alone | as 0.31 |
| ``prefill_schedule_interval`` above 1, refused but by marginal | data parallel ranks | as 0.29 | 0.33: every engine |
| LoRA (a request waits for its adapter) | refused: not visible on admission | as 0.32 | checked on admission |
| requests that cannot be scheduled yet | ``skipped_waiting`` | ``deferred_waiting`` | as 0.31 |
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Sequence, Set
from functools import cache
from itertools import compress, filterfalse
from operator import not_, sub
from typing import Any

from vllm_eb.config import ConfigError


def limit_name(scheduler: Any) -> str:
    """Name of the attribute that limits the running requests on admission."""
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def waiting(scheduler: Any) -> int:
    """Number of requests that could be admitted, including preempted ones; 0 while admissions are paused.

    Streaming sessions between two turns hold KV blocks and a place in the queue, but have no work; neither have
    requests whose grammar is still being compiled.
    """
    if paused(scheduler):
        return 0
    queued: int = scheduler.get_request_counts()[1] - scheduler.num_waiting_for_streaming_input
    put_off = scheduler.deferred_waiting if hasattr(scheduler, "deferred_waiting") else scheduler.skipped_waiting
    return queued - sum(map(_lacks_grammar, put_off)) if put_off else queued


def _lacks_grammar(request: Any) -> bool:
    if request.status.name != "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR":
        return False
    wanted = request.structured_output_request
    return wanted is None or wanted.grammar is None


def needs_no_step(request: Any, max_model_len: int) -> bool:
    """Whether a decoding request is not scheduled in the next step.

    Either its last token is in flight or, if scheduling is synchronous and an earlier step is still being computed, the
    token that it continues with is.
    """
    out: int = request.num_output_placeholders
    if not out:
        return bool(request.num_computed_tokens >= request.num_tokens)
    most: int = min(request.num_prompt_tokens + request.max_tokens, max_model_len + 1)
    return bool(request.num_computed_tokens + 2 - out >= most)


def resends_tokens(scheduler: Any) -> bool:
    """Whether vLLM sends all tokens of a running request to the workers again if the step before did not hold it.

    It does for its first model runner ("V1"), which takes such requests out of its batch. For runners of other
    platforms, which may need these tokens for something else, the plugin changes nothing.
    """
    if getattr(scheduler, "use_v2_model_runner", True) or not hasattr(scheduler, "prev_step_scheduled_req_ids"):
        return False
    from vllm.platforms import current_platform

    return not current_platform.is_out_of_tree()


def output_tokens(scheduler: Any, running: Sequence[Any]) -> dict[str, list[int]]:
    """Output tokens, by request id, of those ``running`` requests of which vLLM is about to send all tokens to workers.

    vLLM then sends none of theirs: they count as scheduled in the step before, which vLLM records anew afterwards. Its
    workers only read the last ``num_output_tokens`` of the tokens sent. With a token in flight these are more than the
    output tokens: such a request is left to vLLM. Without one, vLLM adds no token before the workers have read the
    step, so the lists are not copied: that would take longer than everything else the plugin does.
    """
    known = scheduler.prev_step_scheduled_req_ids
    sent = {
        request.request_id: request._output_token_ids
        for request in running
        if request.request_id not in known and not request.num_output_placeholders
    }
    known.update(sent)
    return sent


def paused(scheduler: Any) -> bool:
    """Whether the operator has paused admissions."""
    state = scheduler.pause_state
    return state is not _unpaused(state.__class__)


@cache
def _unpaused(states: Any) -> Any:
    """A member of an Enum; looking it up takes longer than a scheduler should need in every step."""
    return states.UNPAUSED


def usable_blocks(scheduler: Any) -> int:
    """Number of KV blocks that requests can use: all except the null block."""
    return int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1


def free_blocks(scheduler: Any) -> int:
    """Number of free KV blocks, including cached ones that no request uses."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def blocks_of(scheduler: Any, tokens: int) -> int:
    """KV blocks that a request of so many tokens needs to be admitted, over all groups of layers.

    Groups that keep a window (vLLM's hybrid KV cache manager) need no more than their own cap, those that keep a state
    one block and one per drafted token.
    """
    needed = 0
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if (drafts := getattr(manager, "num_speculative_blocks", None)) is not None:
            needed += 1 + drafts
            continue
        blocks, most = -(-tokens // manager.block_size), getattr(manager, "max_admission_blocks_per_request", None)
        needed += blocks if most is None else min(blocks, most)
    return needed


def block_tokens(scheduler: Any) -> int:
    """Tokens per KV block, without the blocks of states: each of them is as long as the longest sequence, if none are
    kept for prefix caching."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if not any(hasattr(manager, "num_speculative_blocks") for manager in managers):
        return int(scheduler.block_size)
    return math.lcm(*(manager.block_size for manager in managers if not hasattr(manager, "num_speculative_blocks")))


def by_priority(scheduler: Any) -> bool:
    """Whether requests have priorities (``--scheduling-policy priority``)."""
    return not isinstance(scheduler.waiting, deque)


def refuse_reordering(scheduler: Any, wanted: bool) -> None:
    """Raise ConfigError if a priority queue would have to be reordered by age."""
    if wanted and by_priority(scheduler):
        raise ConfigError(
            "vllm_eb: a ttft= target orders the queue, and so does --scheduling-policy priority: choose one"
        )


def can_block_admission(scheduler: type) -> bool:
    """Whether a subclass can make a request wait on admission."""
    return hasattr(scheduler, "_handle_blocked_waiting_request")


def lockstep_ranks(vllm_config: Any) -> int:
    """Data-parallel ranks that make every pass together, this one included; 1: this engine waits for no other.

    Ranks of a dense model are independent of each other: vLLM runs them as engines of one rank.
    """
    if not getattr(vllm_config.model_config, "is_moe", False):
        return 1
    return max(int(getattr(vllm_config.parallel_config, "data_parallel_size", 1)), 1)


def pass_interval(vllm_config: Any) -> int:
    """``--prefill-schedule-interval``: vLLM tells ranks in lockstep in which passes the number is a multiple of it."""
    return int(getattr(vllm_config.scheduler_config, "prefill_schedule_interval", 1))


def refuse_unsupported(
    vllm_config: Any, *, only_records: bool = False, holds_adapters: bool = True, counts_passes: bool = False
) -> None:
    """Raise ConfigError for settings that cannot be combined with exclusive phases.

    ``only_records``: vLLM's own rules decide, so all settings are valid. ``holds_adapters``: see
    :func:`can_block_admission`. ``counts_passes``: the plugin takes vLLM's interval as the number of the pass.
    """
    problems = _problems(vllm_config)
    if not only_records:
        problems += _problems_of_phases(vllm_config, holds_adapters, counts_passes)
    for applies, what in problems:
        if applies:
            raise ConfigError(
                f"vllm_eb cannot be combined with {what}: switch that off, or leave --scheduler-cls out (policy v1)"
            )


def _problems_of_phases(config: Any, holds_adapters: bool, counts_passes: bool) -> list[tuple[bool, str]]:
    throttles, watermark = pass_interval(config) > 1, getattr(config.scheduler_config, "watermark", 0.0)
    return [
        (
            throttles and not counts_passes,
            "--prefill-schedule-interval (vLLM would then also decide when prompts are scheduled)",
        ),
        (watermark > 0, "--watermark (vLLM ignores it while decodes are set aside)"),
        (config.lora_config is not None and not holds_adapters, "LoRA on vLLM before 0.31"),
        (_drafted_tokens(config) > MOST_DRAFTED, f"more than {MOST_DRAFTED} drafted tokens per step"),
    ]


MOST_DRAFTED = 254  # with the token that a step makes without drafts, their number fits into a byte


def _drafted_tokens(vllm_config: Any) -> int:
    return int(getattr(getattr(vllm_config, "speculative_config", None), "num_speculative_tokens", 0) or 0)


def drafting_method(vllm_config: Any) -> str | None:
    """How tokens are drafted, by vLLM's name; None: not at all."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return None if speculative is None else str(speculative.method)


def seldom_drafts(vllm_config: Any) -> bool:
    """Whether a decode may have no draft, or one of fewer tokens, though one was wanted: none was found in its text."""
    return drafting_method(vllm_config) == "ngram"


def verified_drafts(
    scheduler: Any, step: Any, output: Any, wanted: int | None, ended: Set[str]
) -> tuple[list[int], list[int]]:
    """By position, how many drafts of a step were as long, and how many were accepted that far.

    Those of requests that are gone, or that got no token, do not count. Without a draft a request gets one token at
    most, so the numbers of tokens of all requests tell what was accepted. Python code per request would cost as much as
    all else that the plugin does in a step. ``wanted``: decodes of the step that all count as drafts of full length,
    since those without a draft get one token, too; None: those that have drafts. ``ended``: requests that ended between
    this step's ``schedule()`` and the last one's; without pipeline parallelism, which is refused, vLLM has at most one
    later step in flight.
    """
    drafts, sampled, most = step.scheduled_spec_decode_tokens, output.sampled_token_ids, scheduler.num_spec_tokens
    made = bytearray(map(len, sampled))  # bytes are counted fastest
    # A look at those that ended, not at all of the step; an id may have come again.
    gone = set(filterfalse(scheduler.requests.__contains__, drafts.keys() & (ended | scheduler.finished_req_ids)))
    if 0 in made:  # half-computed prompts, too
        gone |= drafts.keys() & compress(output.req_ids, map(not_, made))
    if wanted is not None:
        drafted = [wanted - len(gone)] * most
    elif len(step.num_scheduled_tokens) == len(drafts) and step.total_num_scheduled_tokens == len(drafts) * (1 + most):
        drafted = [len(drafts) - len(gone)] * most  # all of full length
    else:
        kept = [tokens for name, tokens in drafts.items() if name not in gone] if gone else drafts.values()
        drafted = _at_least(bytearray(map(len, kept)), 1, most)
    accepted = _at_least(made, 2, most + 1)
    if gone:
        lost = bytearray(len(sampled[output.req_id_to_index[name]]) for name in gone)
        accepted = list(map(sub, accepted, _at_least(lost, 2, most + 1)))
    return drafted, accepted


def _at_least(sizes: bytearray, first: int, last: int) -> list[int]:
    """How many are as large as ``first`` or larger, and so on up to ``last``."""
    more, counts = 0, []
    for size in range(last, first - 1, -1):
        more += sizes.count(size)
        counts.append(more)
    counts.reverse()
    return counts


def refuse_fixed_drafts(scheduler: Any) -> None:
    """Raise ConfigError unless vLLM is prepared for drafts whose length changes from step to step.

    It then captures graphs and lays out its buffers for that.
    """
    if getattr(scheduler, "dynamic_sd_lookup", None) is None:
        most = scheduler.num_spec_tokens
        raise ConfigError(
            "vllm_eb: draft=adaptive needs vLLM 0.32 with draft lengths by batch size: add "
            f'"num_speculative_tokens_per_batch_size": [[1, 1, {most}]] to --speculative-config'
        )


DRAFTERS = "ngram, MTP, eagle and eagle3"


def drafts_supported(method: str) -> bool:
    """Whether the plugin is tested with what vLLM drafts by this method."""
    return method in ("ngram", "ngram_gpu", "eagle", "eagle3") or method.endswith("mtp")


def _problems(config: Any) -> list[tuple[bool, str]]:
    model, parallel = config.model_config, config.parallel_config
    return [
        (
            (method := drafting_method(config)) is not None and not drafts_supported(method),
            f"speculative decoding by {method} (tested are {DRAFTERS})",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism (several steps of one request are in flight)"),
        (config.kv_transfer_config is not None, "a KV connector (loads are admissions the plugin cannot hold back)"),
        (getattr(config, "ec_transfer_config", None) is not None, "an encoder-cache connector"),
        (model.runner_type == "pooling", "pooling models (they have no decode phase)"),
        (bool(getattr(model, "is_diffusion", False)), "diffusion models"),
        (bool(model.is_encoder_decoder), "encoder-decoder models"),
    ]


TESTED_LAST = "0.32.0"

METHODS = (
    "schedule", "update_from_output", "add_request", "get_request_counts", "shutdown", "_free_request",
    "_preempt_request", "_make_cached_request_data",
)  # fmt: skip
"""Methods of the scheduler class that are called or overridden."""

ATTRIBUTES: tuple[tuple[str, ...], ...] = (
    ("running",), ("waiting",), ("requests",), ("max_num_active_reqs", "max_num_running_reqs"),
    ("deferred_waiting", "skipped_waiting"), ("num_waiting_for_streaming_input",), ("pause_state",), ("block_size",),
    ("max_model_len",), ("max_num_scheduled_tokens",), ("lora_config",), ("finished_req_ids",),
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
    "preempted_req_ids", "finished_req_ids",
)  # fmt: skip
"""Fields of the result of schedule()."""


def check_classes(scheduler: type, request: type, output: type, version: str) -> None:
    """Raise ConfigError for a method or field that these classes lack."""
    missing = [f"Scheduler.{name}" for name in METHODS if not callable(getattr(scheduler, name, None))]
    code = getattr(vars(request).get("__init__"), "__code__", None)
    made = set() if code is None else set(code.co_names)
    missing += [f"Request.{name}" for name in REQUEST if name not in made and not hasattr(request, name)]
    fields = getattr(output, "__dataclass_fields__", {})
    missing += [f"SchedulerOutput.{name}" for name in OUTPUT if name not in fields]
    if not missing:
        names = list(inspect.signature(scheduler._make_cached_request_data).parameters)  # type: ignore[attr-defined]
    if not missing and names[3:4] != ["num_scheduled_tokens"]:
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
