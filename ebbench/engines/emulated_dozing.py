"""Decodes sleep through the steps in which they need nothing but a token.

Between two block boundaries a decoding sequence takes one token per step: no block, nothing to publish, no decision.
vLLM's loops still visit it twice per step, which is most of an emulated run. Here such sequences are taken out of the
loops, counted into their limits, and brought up to date at once before anything can happen to them: a block to
allocate or to publish, the end, memory too short for the step (a preemption may hit anyone), a policy that shows
only some of them. Every decision is still vLLM's own, over the same state; a test compares runs with and without.

Passes in which sleepers take part are numbered. A sleeper knows the pass before its sleep; ``_dozed`` less that is
what it has been scheduled for, ``_delivered`` less that the tokens it has received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from ebbench.engines.emulated_device import Sleepers
from ebbench.errors import RunError
from vllm_eb import compat

_COUNTERS = {"num_in_flight_tokens", "num_stale_output_tokens"}
SHORTEST_SLEEP = 3  # passes; below that, falling asleep costs more than it saves


class DozingMixin:
    """Comes before vLLM's scheduler class and after the plugin's, so that both see what they always see."""

    running: list[Any]
    max_num_scheduled_tokens: int
    max_model_len: int

    def begin_dozing(self, tokens_of: Mapping[str, Sequence[int]], block_size: int, caching: bool, group: Any) -> None:
        """``tokens_of``: the token stream of each request; ``group``: the manager of the only KV group."""
        self._tokens_of, self._span, self._caching = tokens_of, block_size, caching
        self._held, self._published = group.req_to_blocks, group.num_cached_block
        self._placeholders = isinstance(self, AsyncScheduler)
        self._doze_limit = compat.limit_name(self)
        self._asleep = self._hidden = self._dozed = self._delivered = self._kv_base = 0
        self._wake_at: defaultdict[int, list[Any]] = defaultdict(list)
        self._late: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        if controller := getattr(self, "controller", None):
            controller.follow_ages(self._ages)

    def _ages(self) -> list[int]:
        """Output tokens of everyone running."""
        return [
            request.num_output_tokens + (max(self._delivered - request.asleep_since, 0) if request.asleep else 0)
            for request in self.running
        ]

    def get_request_counts(self) -> tuple[int, int]:
        """vLLM's own, sleepers included."""
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running + self._hidden, waiting

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own over those awake."""
        for request in self._wake_at.pop(self._dozed, ()):
            if request.asleep:
                self._wake(request)
        visible = self.running
        awake = self._those_awake(visible) if self._asleep else visible
        if len(awake) == len(visible):
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        else:
            output = self._without_sleepers(visible, awake, args, kwargs)
        if output.total_num_scheduled_tokens:
            self._lay_down(awake)
        return output

    def _those_awake(self, visible: list[Any]) -> list[Any]:
        """Everyone, woken, when something could happen to sleepers in this step."""
        awake, blocks, chunks = [], 0, False
        for request in visible:
            if not request.asleep:
                awake.append(request)
                if request.is_prefill_chunk:
                    chunks = True
                    blocks += (request.num_tokens - request.num_computed_tokens) // self._span + 2
                elif not request.num_computed_tokens % self._span:
                    blocks += 1
            elif chunks:  # a prompt in front of a decode may leave it no budget
                return self._wake_all(visible)
        sleepers = len(visible) - len(awake)
        if sleepers and (sleepers < self._asleep or blocks > compat.free_blocks(self)):
            return self._wake_all(visible)
        if sleepers and not awake:  # vLLM treats an empty engine differently
            self._wake(visible[0])
            return visible[:1]
        return awake

    def _wake_all(self, visible: list[Any]) -> list[Any]:
        for requests in self._wake_at.values():
            for request in requests:
                if request.asleep:
                    self._wake(request)
        self._wake_at.clear()
        return visible

    def _without_sleepers(self, visible: list[Any], awake: list[Any], args: Any, kwargs: Any) -> Any:
        hidden = self._hidden = len(visible) - len(awake)
        limit, budget = getattr(self, self._doze_limit), self.max_num_scheduled_tokens
        self.running = awake.copy()
        setattr(self, self._doze_limit, limit - hidden)
        self.max_num_scheduled_tokens = budget - hidden
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            setattr(self, self._doze_limit, limit)
            self.max_num_scheduled_tokens = budget
            self._hidden = 0
            admitted = self.running[len(awake) :]
            self.running = visible + admitted
        if output.preempted_req_ids:
            raise RunError("the emulated engine preempted while decodes slept; please report this")
        self._dozed += 1
        scheduled = output.num_scheduled_tokens
        ids = [r.request_id for r in visible if r.asleep or r.request_id in scheduled]
        ids += [r.request_id for r in admitted]
        output.total_num_scheduled_tokens += hidden
        output.sleepers = Sleepers(self._dozed, hidden, self._kv_base + hidden * self._dozed, ids)
        return output

    def _lay_down(self, awake: list[Any]) -> None:
        """Put to sleep whoever needs nothing for a while. Called with those awake, after their step was scheduled."""
        span, published, caching, now = self._span, self._published, self._caching, self._dozed
        for request in awake:
            computed = request.num_computed_tokens
            steps = span - computed % span - 2
            if steps < SHORTEST_SLEEP or request.is_prefill_chunk or request.num_stale_output_tokens:
                continue
            end = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            steps = min(steps, end - computed - 3)
            blocks = computed // span
            if steps < SHORTEST_SLEEP or len(self._held[request.request_id]) <= blocks:
                continue
            if caching and (published.get(request.request_id, 0) != blocks or len(request.block_hashes) != blocks):
                continue
            request.asleep, request.asleep_since = True, now
            self._asleep += 1
            self._kv_base += computed - now
            self._wake_at[now + steps].append(request)

    def _wake(self, request: Any) -> None:
        """Bring a sleeper up to date. Its passes still on the device will be updated like anyone's."""
        since, computed = request.asleep_since, request.num_computed_tokens
        scheduled = self._dozed - since
        delivered = max(self._delivered - since, 0)
        pending = scheduled - delivered
        stream, tokens = self._tokens_of[request.request_id], request._all_token_ids
        if delivered:
            new = stream[len(tokens) : len(tokens) + delivered]
            tokens += new
            request._output_token_ids += new
            request.num_tokens = request.num_tokens_with_spec = len(tokens)
            request.num_output_tokens = len(request._output_token_ids)
        request.num_computed_tokens += scheduled
        request.num_in_flight_tokens += pending
        if self._placeholders:
            request.num_output_placeholders += pending
        for number in range(self._dozed - pending + 1, self._dozed + 1):
            self._late[number].append((request.request_id, stream[computed + number - since]))
        request.asleep = False
        self._asleep -= 1
        self._kv_base -= computed - since

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own over those who were awake then or are now."""
        sleepers: Sleepers | None = getattr(scheduler_output, "sleepers", None)
        if sleepers is not None:
            self._delivered = sleepers.number
            if late := dict(self._late.pop(sleepers.number, ())):
                scheduled = scheduler_output.num_scheduled_tokens
                scheduler_output.num_scheduled_tokens = {
                    name: scheduled.get(name, 1) for name in sleepers.ids if name in scheduled or name in late
                }
                model_runner_output = _with_late(model_runner_output, late)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


def _with_late(output: Any, late: dict[str, int]) -> Any:
    ids = [*output.req_ids, *late]
    return replace(
        output,
        req_ids=ids,
        req_id_to_index=dict(zip(ids, range(len(ids)), strict=True)),
        sampled_token_ids=[*output.sampled_token_ids, *([token] for token in late.values())],
    )


def supported() -> bool:
    """Whether this vLLM keeps the counters that sleepers are brought up to date with."""
    return set(Request.__init__.__code__.co_names) >= _COUNTERS


def dozing_class(*, plugin: bool, async_scheduling: bool) -> type:
    """The scheduler class to make the core with: the plugin's or vLLM's own, in which decodes can sleep.

    The mixin must stand between the plugin and vLLM: the plugin's ``super().schedule()`` has to reach it.
    """
    vllms = AsyncScheduler if async_scheduling else Scheduler
    dozing = type("DozingScheduler", (DozingMixin, vllms), {})
    if not plugin:
        return dozing
    from vllm_eb.scheduler import EBScheduler, EBSyncScheduler

    own = EBScheduler if async_scheduling else EBSyncScheduler
    return type(own.__name__, (own, dozing), {})


def begin_dozing(core: Any, tokens_of: Mapping[str, Sequence[int]]) -> None:
    """Let decodes sleep on a core made with :func:`dozing_class`, whose requests are PlainRequests."""
    manager = core.scheduler.kv_cache_manager
    (group,) = manager.coordinator.single_type_managers
    core.scheduler.begin_dozing(tokens_of, group.block_size, manager.enable_caching, group)
