"""Early exits for the most frequent calls of the emulated core; they change only the time of a run.

With 2,000 decoding sequences nine tenths of a run are vLLM's own bookkeeping, most of it to find that a sequence that
grows by one token needs no block, completes no block, publishes no block and does not stop. The early exits check
exactly that first and leave everything else to vLLM; data for workers, which the emulated device does not have, is left
out. They are valid for one full-attention KV group and requests of fixed output length without speculative decoding,
which is the configuration of the emulated device; a test compares runs with and without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.request import Request

from vllm_eb.scheduler import EBScheduler, EBSyncScheduler


class PlainRequest(Request):  # type: ignore[misc]
    """A text request that stores its lengths instead of computing them at every call."""

    use_structured_output = False
    num_encoder_inputs = 0
    has_encoder_inputs = False
    num_tokens = num_tokens_with_spec = num_output_tokens = 0
    skipped = False
    skipped_since = 0
    take_events = take_prefill_stats = [].clear  # always empty; called without Python code, returns None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.prefill_stats = None

    def update_block_hashes(self) -> None:
        """vLLM's method; called whenever tokens were added."""
        self.num_tokens = self.num_tokens_with_spec = len(self._all_token_ids)
        self.num_output_tokens = len(self._output_token_ids)
        super().update_block_hashes()


def take_shortcuts(core: Any) -> None:
    """Install the early exits on this core's KV manager and block hasher."""
    manager = core.scheduler.kv_cache_manager
    (group,) = manager.coordinator.single_type_managers
    _shorten_publishing(manager.coordinator, group)
    _shorten_growth(manager, group)
    _shorten_messages(core.scheduler)
    if core.request_block_hasher is not None:
        core.request_block_hasher = _shortened_hasher(core.request_block_hasher, group.block_size)


def _shorten_publishing(coordinator: Any, group: Any) -> None:
    publish, published, block_size = coordinator.cache_blocks, group.num_cached_block, group.block_size

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // block_size > published.get(request.request_id, 0):
            publish(request, num_computed_tokens)

    coordinator.cache_blocks = cache_blocks


def _shorten_growth(manager: Any, group: Any) -> None:
    allocate, block_size, held = manager.allocate_slots, group.block_size, group.req_to_blocks
    nothing = manager.create_kv_cache_blocks(([],))
    publish = manager.coordinator.cache_blocks
    caching = manager.enable_caching

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if num_new_tokens == 1 and not args and "new_computed_blocks" not in kwargs:
            tokens = request.num_computed_tokens + 1
            if tokens <= len(held[request.request_id]) * block_size:
                if caching:
                    publish(request, min(tokens, request.num_tokens))
                return nothing
        return allocate(request, num_new_tokens, *args, **kwargs)

    manager.allocate_slots = allocate_slots


def _shorten_messages(scheduler: Any) -> None:
    """This data tells workers their new blocks and tokens; the emulated device has no workers."""

    # The plugin's scheduler gives up an empty prefill step in this very call.
    skip_if_empty = scheduler.skip_if_empty if isinstance(scheduler, EBScheduler | EBSyncScheduler) else None

    def make_cached_request_data(
        running: list[Any], resumed: list[Any], num_scheduled_tokens: dict[str, int], *_args: Any
    ) -> CachedRequestData:
        if skip_if_empty is not None:
            skip_if_empty(num_scheduled_tokens)
        requests = running + resumed if resumed else running
        return CachedRequestData(
            req_ids=[request.request_id for request in requests],
            resumed_req_ids={request.request_id for request in resumed},
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[],
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[
                len(request._output_token_ids) + request.num_output_placeholders for request in requests
            ],
        )

    scheduler._make_cached_request_data = make_cached_request_data


def _shortened_hasher(hash_blocks: Callable[[Any], list[Any]], block_size: int) -> Callable[[Any], list[Any]]:
    def hasher(request: Any) -> list[Any]:
        if len(request._all_token_ids) < (len(request.block_hashes) + 1) * block_size:
            return []
        return hash_blocks(request)

    return hasher
