"""Skips sequences whose only work in a step is one more token.

Between two block boundaries a decoding sequence takes one token per step: no block, nothing to publish, no decision.
vLLM's loops still visit it twice per step, which is most of an emulated run. Here such sequences are removed from the
loops and counted in their limits. Their state is updated at once before any other event: a block to allocate or to
publish, the last token, too little memory for the step (which preempts sequences from the end of the batch), a policy
that shows only some of them. All decisions are still vLLM's, on the same state; a test compares runs with and without
skipping.

A token of a visited sequence that neither ends it nor publishes a block is appended here too: vLLM's
``update_from_output`` would do the same in ten times the time, and would make an output that no client reads.

Steps with skipped sequences are numbered. A skipped sequence stores the number at which skipping began
(``skipped_since``): ``_skipped_steps`` minus that number is the number of steps it was scheduled in since then,
``_delivered`` minus that number its received tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from ebbench.engines.emulated_core import SkippedDecodes
from ebbench.errors import RunError
from vllm_eb import compat
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
    allocate, block_size, blocks_by_request = manager.allocate_slots, group.block_size, group.req_to_blocks
    nothing = manager.create_kv_cache_blocks(([],))
    publish = manager.coordinator.cache_blocks
    caching = manager.enable_caching

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if num_new_tokens == 1 and not args and "new_computed_blocks" not in kwargs:
            tokens = request.num_computed_tokens + 1
            if tokens <= len(blocks_by_request[request.request_id]) * block_size:
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


_COUNTERS = {"num_in_flight_tokens", "num_stale_output_tokens"}
FEWEST_STEPS = 3  # with fewer steps, skipping costs more than it saves


class SkippingMixin:
    """Mixed in between the plugin's scheduler class and vLLM's, so that both see all running requests."""

    running: list[Any]
    max_num_scheduled_tokens: int
    max_model_len: int
    requests: dict[str, Any]

    def begin_skipping(
        self, tokens_of: Mapping[str, Sequence[int]], block_size: int, caching: bool, group: Any
    ) -> None:
        """``tokens_of``: token stream per request; ``group``: manager of the only KV group."""
        self._tokens_of, self._span, self._caching = tokens_of, block_size, caching
        self._held, self._published = group.req_to_blocks, group.num_cached_block
        self._placeholders = isinstance(self, AsyncScheduler)
        self._skip_limit_name = compat.limit_name(self)
        self._skipped_count = self._hidden = self._skipped_steps = self._delivered = self._kv_base = 0
        self._restore_at: defaultdict[int, list[Any]] = defaultdict(list)
        self._late: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        if controller := getattr(self, "controller", None):
            controller.follow_ages(self._ages)

    def _ages(self) -> list[int]:
        """Output tokens of every running request, including skipped ones."""
        return [
            request.num_output_tokens + (max(self._delivered - request.skipped_since, 0) if request.skipped else 0)
            for request in self.running
        ]

    def get_request_counts(self) -> tuple[int, int]:
        """vLLM's counts, including skipped sequences."""
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running + self._hidden, waiting

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's ``schedule()`` without the skipped sequences."""
        for request in self._restore_at.pop(self._skipped_steps, ()):
            if request.skipped:
                self._restore(request)
        visible = self.running
        visited = self._visited(visible) if self._skipped_count else visible
        if len(visited) == len(visible):
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        else:
            output = self._schedule_visited(visible, visited, args, kwargs)
        if output.total_num_scheduled_tokens:
            self._skip_from_here(visited)
        return output

    def _visited(self, visible: list[Any]) -> list[Any]:
        """The requests that vLLM must visit in this step; all of them, restored, if skipped ones could be affected."""
        visited, blocks, chunks = [], 0, False
        for request in visible:
            if not request.skipped:
                visited.append(request)
                if request.is_prefill_chunk:
                    chunks = True
                    blocks += (request.num_tokens - request.num_computed_tokens) // self._span + 2
                elif not request.num_computed_tokens % self._span:
                    blocks += 1
            elif chunks:  # a prompt before a decode may use up its budget
                return self._restore_all(visible)
        skipped = len(visible) - len(visited)
        if not skipped:
            return visited
        if skipped < self._skipped_count:
            return self._restore_all(visible)
        if (missing := blocks - compat.free_blocks(self)) > 0:
            return self._with_victims(visible, missing)
        if not visited:  # vLLM treats an empty engine differently
            self._restore(visible[0])
            return visible[:1]
        return visited

    def _with_victims(self, visible: list[Any], missing: int) -> list[Any]:
        """The requests to visit, with those that vLLM may preempt for ``missing`` blocks: the last of the batch.

        Blocks that other sequences use as well are not counted, since preemption does not free them.
        """
        for request in reversed(visible):
            if missing <= 0:
                break
            if request.skipped:
                self._restore(request)
            missing -= sum(block.ref_cnt == 1 for block in self._held[request.request_id])
        return [request for request in visible if not request.skipped]

    def _restore_all(self, visible: list[Any]) -> list[Any]:
        for requests in self._restore_at.values():
            for request in requests:
                if request.skipped:
                    self._restore(request)
        self._restore_at.clear()
        return visible

    def _schedule_visited(self, visible: list[Any], visited: list[Any], args: Any, kwargs: Any) -> Any:
        hidden = self._hidden = len(visible) - len(visited)
        limit, budget = getattr(self, self._skip_limit_name), self.max_num_scheduled_tokens
        self.running = visited.copy()
        setattr(self, self._skip_limit_name, limit - hidden)
        self.max_num_scheduled_tokens = budget - hidden
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            setattr(self, self._skip_limit_name, limit)
            self.max_num_scheduled_tokens = budget
            self._hidden = 0
            left, admitted = self._after_preemption(visible, visited)
            self.running = left + admitted
        self._skipped_steps += 1
        scheduled = output.num_scheduled_tokens
        ids = [r.request_id for r in left if r.skipped or r.request_id in scheduled]
        ids += [r.request_id for r in admitted]
        output.total_num_scheduled_tokens += hidden
        output.skipped = SkippedDecodes(self._skipped_steps, hidden, self._kv_base + hidden * self._skipped_steps, ids)
        return output

    def _after_preemption(self, visible: list[Any], visited: list[Any]) -> tuple[list[Any], list[Any]]:
        """What is left of ``visible`` after a step that visited ``visited``, and the requests that it admitted."""
        kept = self.running[: len(visited)]
        if kept == visited:
            return visible, self.running[len(visited) :]
        # vLLM admits nothing in a step that preempts.
        preempted = len(visited) - len(kept)
        if kept != visited[: len(kept)] or visible[-preempted:] != visited[-preempted:]:
            raise RunError("the emulated engine preempted a decode that it skipped; please report this")
        return visible[:-preempted], []

    def _skip_from_here(self, visited: list[Any]) -> None:
        """Start skipping those of ``visited`` that need only tokens for some steps. Called after scheduling them."""
        span, published, caching, now = self._span, self._published, self._caching, self._skipped_steps
        for request in visited:
            computed = request.num_computed_tokens
            steps = span - computed % span - 1
            if steps < FEWEST_STEPS or request.is_prefill_chunk or request.num_stale_output_tokens:
                continue
            end = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            steps = min(steps, end - computed - 3)
            blocks = computed // span
            if steps < FEWEST_STEPS or len(self._held[request.request_id]) <= blocks:
                continue
            if caching and (published.get(request.request_id, 0) != blocks or len(request.block_hashes) != blocks):
                continue
            request.skipped, request.skipped_since = True, now
            self._skipped_count += 1
            self._kv_base += computed - now
            self._restore_at[now + steps].append(request)

    def _restore(self, request: Any) -> None:
        """Update a skipped sequence and stop skipping it; tokens of steps in flight are added later."""
        since, computed = request.skipped_since, request.num_computed_tokens
        scheduled = self._skipped_steps - since
        delivered = max(self._delivered - since, 0)
        pending = scheduled - delivered
        stream, tokens = self._tokens_of[request.request_id], request._all_token_ids
        if delivered:
            new = stream[len(tokens) : len(tokens) + delivered]
            tokens += new
            request._output_token_ids += new
            request.num_tokens = request.num_tokens_with_spec = len(tokens)
            request.num_output_tokens = len(request._output_token_ids)
            if not len(tokens) % self._span:
                request.update_block_hashes()
        request.num_computed_tokens += scheduled
        request.num_in_flight_tokens += pending
        if self._placeholders:
            request.num_output_placeholders += pending
        for number in range(self._skipped_steps - pending + 1, self._skipped_steps + 1):
            self._late[number].append((request.request_id, stream[computed + number - since]))
        request.skipped = False
        self._skipped_count -= 1
        self._kv_base -= computed - since

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's method for the sequences visited when the step was scheduled and those restored since."""
        skipped: SkippedDecodes | None = getattr(scheduler_output, "skipped", None)
        if skipped is not None:
            self._delivered = skipped.number
            if late := dict(self._late.pop(skipped.number, ())):
                scheduled = scheduler_output.num_scheduled_tokens
                scheduler_output.num_scheduled_tokens = {
                    name: scheduled.get(name, 1) for name in skipped.ids if name in scheduled or name in late
                }
                model_runner_output = _with_late(model_runner_output, late)
        scheduler_output.num_scheduled_tokens = self._append_plain_tokens(
            scheduler_output.num_scheduled_tokens, model_runner_output
        )
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _append_plain_tokens(self, scheduled: dict[str, int], output: Any) -> dict[str, int]:
        """Append the tokens that neither end their request nor publish a block; returns what vLLM must process."""
        left: dict[str, int] = {}
        requests, index, sampled = self.requests, output.req_id_to_index, output.sampled_token_ids
        running, span, max_model_len = RequestStatus.RUNNING, self._span, self.max_model_len
        for request_id, count in scheduled.items():
            request = requests.get(request_id)
            if request is None or request.status is not running or count != 1 or request.num_stale_output_tokens:
                left[request_id] = count
                continue
            new, known = sampled[index[request_id]], request.num_tokens + 1
            if (
                len(new) != 1
                or known >= request.num_prompt_tokens + request.max_tokens
                or known >= max_model_len
                or (known % span <= 1 and self._publishes(request))
            ):
                left[request_id] = count
                continue
            request._all_token_ids.append(new[0])
            request._output_token_ids.append(new[0])
            request.num_tokens = request.num_tokens_with_spec = known
            request.num_output_tokens += 1
            request.num_in_flight_tokens -= 1
            if self._placeholders:
                request.num_output_placeholders -= 1
            if not known % span:
                request.update_block_hashes()
        return left

    def _publishes(self, request: Any) -> bool:
        """Whether the next token of a request makes vLLM publish a block; without asynchronous scheduling, the next
        step does that."""
        if not (self._caching and self._placeholders):
            return False
        settled = request.num_computed_tokens - request.num_output_placeholders + 1
        return bool(settled // self._span > self._published.get(request.request_id, 0))


def _with_late(output: Any, late: dict[str, int]) -> Any:
    ids = [*output.req_ids, *late]
    return replace(
        output,
        req_ids=ids,
        req_id_to_index=dict(zip(ids, range(len(ids)), strict=True)),
        sampled_token_ids=[*output.sampled_token_ids, *([token] for token in late.values())],
    )


def supported() -> bool:
    """Whether this vLLM version keeps the counters that restoring a skipped sequence needs."""
    return set(Request.__init__.__code__.co_names) >= _COUNTERS


def skipping_class(*, plugin: bool, async_scheduling: bool) -> type:
    """The scheduler class for the core: the plugin's or vLLM's own, with the ability to skip decodes.

    The mixin must be between the plugin and vLLM: the plugin's ``super().schedule()`` has to reach it.
    """
    vllms = AsyncScheduler if async_scheduling else Scheduler
    skipping = type("SkippingScheduler", (SkippingMixin, vllms), {})
    if not plugin:
        return skipping
    from vllm_eb.scheduler import EBScheduler, EBSyncScheduler

    own = EBScheduler if async_scheduling else EBSyncScheduler
    return type(own.__name__, (own, skipping), {})


def begin_skipping(core: Any, tokens_of: Mapping[str, Sequence[int]]) -> None:
    """Enable skipping on a core made with :func:`skipping_class`, whose requests are PlainRequests."""
    manager = core.scheduler.kv_cache_manager
    (group,) = manager.coordinator.single_type_managers
    core.scheduler.begin_skipping(tokens_of, group.block_size, manager.enable_caching, group)
