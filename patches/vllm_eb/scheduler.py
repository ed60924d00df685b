"""vLLM's scheduler with phases; the only module of the package that imports vLLM's scheduler.

``--scheduler-cls vllm_eb.scheduler.EBScheduler``. Every step is scheduled by vLLM's own ``schedule()``. Before each
step, this class decides with :class:`vllm_eb.controller.Controller` which running requests ``schedule()`` sees and how
many it may admit:

prefill  only requests with prompt tokens left are in ``running``; the limit is lowered by the decodes set aside
decode   only decodes are in ``running``; the limit equals their number, so that nothing is admitted
mixed    nothing is changed

Requests set aside keep their KV blocks and their place. If a prefill step would be empty for lack of KV blocks, a
decode step replaces it. Admission, chunking, prefix caching and preemption follow vLLM's rules, which are not repeated
here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_eb import compat
from vllm_eb.config import PluginConfig, logger, parse_config
from vllm_eb.controller import Controller, WaitingOrder
from vllm_eb.refills import PassCount, longest_period
from vllm_eb.reports import StepReports
from vllm_eb.strategy import LONGEST_PERIOD, Decision, View
from vllm_eb.theory import Drafts

# vLLM's front end finds stop strings and then aborts the request; a client that disconnects frees its slot too.
_ENDS = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
    RequestStatus.FINISHED_ABORTED,
)
_RUNNING = RequestStatus.RUNNING  # members of an Enum take long to look up


class _NothingScheduledError(Exception):
    """The step being scheduled would be empty, and another one can replace it."""


class _PhasedScheduler(Scheduler):  # type: ignore[misc]
    """The plugin, mixed into vLLM's asynchronous or synchronous scheduler."""

    running: list[Request]  # vLLM's; declared because methods here remove requests from it
    max_num_scheduled_tokens: int  # vLLM's; lowered for a step whose policy sets a token budget
    # None without a policy or a reader, and in a scheduler created without __init__ (vLLM's own tests do that).
    controller: Controller | None = None
    _reports: StepReports | None = None
    _waiting_order: WaitingOrder | None = None
    _passes: PassCount | None = None
    _hides = False  # whether vLLM sees only some of the running requests in the step being scheduled
    _hid = False  # the same of the step before
    _resends_tokens = False
    _seldom_drafts = False  # see compat
    _decodes: int | None = None  # sequences that the step decodes, where not all of them have drafts
    _ended: Set[str] = frozenset()  # requests that ended before the last schedule() and after the one before

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        config = parse_config(vllm_config.additional_config)
        ranks = compat.lockstep_ranks(vllm_config) if config.policy.aligns_ranks else 1
        if not (config.policy.native and config.record is None and config.signals is None):
            compat.refuse_unsupported(
                vllm_config,
                only_records=config.policy.native,
                holds_adapters=compat.can_block_admission(Scheduler),
                counts_passes=ranks > 1,
            )
        compat.check_classes(Scheduler, Request, SchedulerOutput, vllm.__version__)
        super().__init__(vllm_config, *args, **kwargs)
        compat.check_scheduler(self, vllm.__version__)
        self._limit_name = compat.limit_name(self)
        self._total_blocks = compat.usable_blocks(self)
        self._resends_tokens = compat.resends_tokens(self)
        self._clock: Callable[[], float] = time.monotonic
        self._prefilling: list[Request] = []  # running requests with prompt tokens left, in running order
        self._set_aside: list[Request] = []  # all running requests, during a step that shows vLLM only some of them
        self._steps = 0
        self._preempted = 0  # in the last step
        self._preempted_now = 0  # in the step being scheduled
        self._may_skip = False  # whether the step being scheduled may be skipped if it is empty
        self.last_decision: Decision | None = None
        interval = compat.pass_interval(vllm_config)
        self._passes = PassCount(interval) if ranks > 1 else None
        self.controller = self._make_controller(config, ranks, interval)
        self._prompt_tokens_wanted = 0 if self.controller is None else self.controller.prompt_tokens_wanted
        self._varies_drafts = self.controller is not None and self.controller.draft_lengths is not None
        if self._varies_drafts:
            compat.refuse_fixed_drafts(self)
        elif self.controller is not None:
            self._seldom_drafts = compat.seldom_drafts(vllm_config)
        if self.controller is not None and self.controller.orders_queue:
            self._waiting_order = WaitingOrder(self.controller)
        compat.refuse_reordering(self, self._waiting_order is not None)
        if compat.by_priority(self):
            self.kv_cache_manager.allocate_slots = partial(self._allocate, self.kv_cache_manager.allocate_slots)
        rank = int(getattr(vllm_config.parallel_config, "data_parallel_rank", 0) or 0)
        reports = StepReports(self, self.controller, config, rank)
        self._reports = reports if reports.wanted else None
        kind = "asynchronous" if isinstance(self, AsyncScheduler) else "synchronous"
        logger.info(
            "vllm_eb schedules: policy %s, %d KV blocks, %s scheduling; settings hold until the server is restarted",
            config.policy.name, self._total_blocks, kind,
        )  # fmt: skip
        if ranks > 1 and longest_period(interval) < LONGEST_PERIOD:
            logger.warning(
                "vllm_eb: %d data-parallel ranks make every pass together; without --prefill-schedule-interval %d they "
                "cannot agree on passes for prompts that are more than %d apart",
                ranks, LONGEST_PERIOD, longest_period(interval),
            )  # fmt: skip

    def _make_controller(self, config: PluginConfig, ranks: int, pass_interval: int) -> Controller | None:
        if config.policy.native:  # vLLM's own rules; only recorded
            return None
        controller = Controller(
            config.policy,
            config.calibration,
            max_num_seqs=getattr(self, self._limit_name),
            block_size=compat.block_tokens(self),
            num_blocks=self._total_blocks,
            max_num_batched_tokens=self.max_num_scheduled_tokens,
            keep_records=config.record is not None,
            ranks=ranks,
            pass_interval=pass_interval,
            drafts=Drafts((0.0,) * self.num_spec_tokens, lookahead_tokens=self.num_lookahead_tokens),
        )
        controller.follow_ages(lambda: [request.num_output_tokens for request in self.running])
        return controller

    def use_clock(self, now_s: Callable[[], float]) -> None:
        """Use another clock (virtual time)."""
        self._clock = now_s

    # Scheduling of one step.

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's ``schedule()`` under the controller's decision."""
        view = self._view()
        if self._passes is not None:
            # vLLM asks to hold prompts back in passes between two multiples; the policy decides that itself.
            throttled = kwargs.pop("throttle_prefills", args[0] if args else False)
            args, view = args[1:], view._replace(pass_number=self._passes.next(multiple=not throttled))
        self._preempted_now = 0
        self._hid, self._hides = self._hides, False
        before = self._prefilling
        if self.controller is None or view.decoding + view.prefilling + view.waiting == 0:
            output = super().schedule(*args, **kwargs)
        else:
            output = self._schedule_as_decided(self.controller.decide(view), view, args, kwargs)
        self._preempted, self._ended = len(output.preempted_req_ids or ()), output.finished_req_ids
        admitted = self._report_admissions(output)
        if self._seldom_drafts:
            scheduled = output.num_scheduled_tokens
            prompts = {*admitted, *(request.request_id for request in before)}.intersection(scheduled)
            self._decodes = len(scheduled) - len(prompts)
        if output.total_num_scheduled_tokens:
            if self._reports is not None:
                self._reports.scheduled(output, self._steps, self.last_decision, before, admitted)
            self._steps += 1
        return output

    def _view(self) -> View:
        if self._prefilling:
            # A preempted, finished or aborted request is no longer running; vLLM sets the flag.
            self._prefilling = [r for r in self._prefilling if r.is_prefill_chunk and r.status == _RUNNING]
        now_s, prefilling = self._clock(), len(self._prefilling)
        # A queue that is empty, as in a call that only tells workers which requests have ended, is not ordered.
        ordering = self._waiting_order if self.waiting else None
        return View(
            now_s=now_s,
            step_id=self._steps,
            decoding=len(self.running) - prefilling,
            prefilling=prefilling,
            waiting=compat.waiting(self),
            free_blocks=compat.free_blocks(self),
            oldest_wait_s=ordering.order(self.waiting, now_s) if ordering else 0.0,
            preempted=self._preempted,
            idle_sessions=self.num_waiting_for_streaming_input,
            last_tokens_out=self._last_tokens_out(),
            prompt_tokens=self._prompt_tokens(self._prompt_tokens_wanted) if self._prompt_tokens_wanted else 0,
        )

    def _prompt_tokens(self, wanted: int) -> int:
        """Prompt tokens that the next step could compute, counted up to ``wanted``."""
        tokens: int = sum(r.num_tokens - r.num_computed_tokens for r in self._prefilling)
        slots = getattr(self, self._limit_name) - len(self.running) - self.num_waiting_for_streaming_input
        blocks = compat.free_blocks(self)
        for request in () if compat.paused(self) else self.waiting:
            if tokens >= wanted or slots <= 0:
                break
            slots -= 1
            blocks -= compat.blocks_of(self, request.num_tokens)
            if blocks < 0:
                break
            tokens += request.num_tokens
        return tokens

    def _last_tokens_out(self) -> bool:
        """Whether no decoding request needs another step; the first one nearly always decides."""
        for request in self.running:
            if not (request.is_prefill_chunk or compat.needs_no_step(request, self.max_model_len)):
                return False
        return True

    def add_request(self, request: Request) -> None:
        """vLLM's method; also keeps the arrival time if the policy orders the queue by it."""
        super().add_request(request)
        if request.request_id not in self.requests:  # otherwise it was the end of a streaming session
            return
        if self._reports is not None:
            self._reports.received()
        if self._waiting_order is not None:
            self._waiting_order.arrived(request, self.waiting, self._clock())

    def _schedule_as_decided(self, decision: Decision, view: View, args: Any, kwargs: Any) -> Any:
        self.last_decision = decision
        if self._varies_drafts:
            assert self.controller is not None
            self.dynamic_sd_lookup = self.controller.draft_lengths  # vLLM's own, by the sequences of the step
        usual = self.max_num_scheduled_tokens
        if decision.token_budget is not None:
            self.max_num_scheduled_tokens = min(decision.token_budget, usual)
        try:
            if decision.phase == "decode":
                visible = self.running
                if self._prefilling:
                    aside = set(self._prefilling)
                    visible = [request for request in visible if request not in aside]
                return self._partial_step(visible, len(visible), args, kwargs)
            if self._waiting_order is not None:
                self._waiting_order.arrange(self.waiting, view.now_s)
            if decision.phase == "prefill":
                return self._prefill_step(decision, view, args, kwargs)
            if decision.running_limit >= getattr(self, self._limit_name):
                return super().schedule(*args, **kwargs)
            return self._partial_step(self.running, decision.running_limit, args, kwargs)
        finally:
            self.max_num_scheduled_tokens = usual

    def _prefill_step(self, decision: Decision, view: View, args: Any, kwargs: Any) -> Any:
        """A prefill step, or a decode step if no request can be scheduled for lack of KV blocks.

        vLLM would take an empty step for one in flight and sleep after it.
        """
        assert self.controller is not None
        output = None
        self._may_skip = view.decodes
        with contextlib.suppress(_NothingScheduledError):
            output = self._partial_step(list(self._prefilling), decision.running_limit - view.decoding, args, kwargs)
        self._may_skip = False
        if output is None:
            self.controller.prefill_blocked(view)
            return self._schedule_as_decided(self.controller.decide(view), view, args, kwargs)
        if not output.total_num_scheduled_tokens:
            self.controller.prefill_blocked(view)
        return output

    def _make_cached_request_data(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's method; ends a step that may be skipped and is empty.

        Of requests that were set aside in the step before, only the output tokens are sent again.
        """
        if self._may_skip:
            self.skip_if_empty(kwargs["num_scheduled_tokens"] if "num_scheduled_tokens" in kwargs else args[2])
        if not (self._hid and self._resends_tokens):
            return super()._make_cached_request_data(*args, **kwargs)
        output_tokens = compat.output_tokens(self, kwargs["running_reqs"] if "running_reqs" in kwargs else args[0])
        data = super()._make_cached_request_data(*args, **kwargs)
        data.all_token_ids.update(output_tokens)
        return data

    def skip_if_empty(self, num_scheduled_tokens: Any) -> None:
        """End an empty step if another one can replace it.

        Call it after ``schedule()`` has chosen the step and before it removes items from event queues: these items then
        go out with the next step.
        """
        if self._may_skip and not num_scheduled_tokens and not self._preempted_now:
            raise _NothingScheduledError

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's method; counts preemptions."""
        self._preempted_now += 1
        return super()._preempt_request(*args, **kwargs)

    def _partial_step(self, visible: list[Request], limit: int, args: Any, kwargs: Any) -> Any:
        """``super().schedule()`` with only ``visible`` running requests, and at most ``limit`` running afterwards."""
        running, shown = self.running, len(visible)
        usual_limit = getattr(self, self._limit_name)
        self.running = visible
        setattr(self, self._limit_name, min(limit + self.num_waiting_for_streaming_input, usual_limit))
        self._hides = visible is not running
        if self._hides:
            self._set_aside = running
        try:
            return super().schedule(*args, **kwargs)
        finally:
            setattr(self, self._limit_name, usual_limit)
            self._set_aside = []
            if visible is not running:
                self.running = _merged(running, self.running, shown)

    def _allocate(self, allocate: Callable[..., Any], request: Request, *args: Any, **kwargs: Any) -> Any:
        """vLLM's ``KVCacheManager.allocate_slots`` under ``--scheduling-policy priority``.

        For a running request vLLM frees blocks by preempting the running request of the lowest priority. If that one is
        set aside, vLLM does not see it: it is preempted here, and as in vLLM nothing is admitted in such a step.
        """
        while (blocks := allocate(request, *args, **kwargs)) is None and request.status == _RUNNING:
            others = [other for other in self._set_aside if other.status == _RUNNING]
            victim = max(others, key=lambda other: (other.priority, other.arrival_time), default=request)
            if victim is request or victim in self.running:
                break
            self._set_aside.remove(victim)
            self._preempt_request(victim, time.monotonic())
            setattr(self, self._limit_name, 0)
        return blocks

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM's method for a request about to be admitted; also checks that its LoRA adapter fits beside those in
        use."""
        ready: bool = super()._handle_blocked_waiting_request(request)
        if not ready or self.lora_config is None or request.lora_request is None or not self._set_aside:
            return ready
        running = {r.lora_request.lora_int_id for r in (*self._set_aside, *self.running) if r.lora_request}
        return request.lora_request.lora_int_id in running or len(running) < self.lora_config.max_loras

    def _report_admissions(self, output: Any) -> list[str]:
        """Report admitted requests to the controller; returns their ids."""
        if not (output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids):
            return []
        cached = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        admitted = list(cached)
        if resumed := output.scheduled_cached_reqs.resumed_req_ids:
            both = resumed.union(admitted)  # a set: the order of admission is that of the scheduled tokens
            admitted = [request_id for request_id in output.num_scheduled_tokens if request_id in both]
        for request_id in admitted:
            request = self.requests[request_id]
            if self._waiting_order is not None:
                self._waiting_order.admitted(request)
            if request.is_prefill_chunk:
                self._prefilling.append(request)
            if self.controller is None:
                continue
            if request.num_preemptions:
                self.controller.on_resume()
            else:
                self.controller.on_prompt(request.num_prompt_tokens, cached.get(request_id, 0))
        return admitted

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.controller is not None and request.status in _ENDS and (tokens := request.num_output_tokens):
            self.controller.on_finish(tokens)
        if self._waiting_order is not None:
            self._waiting_order.left(request)
        return super()._free_request(request, *args, **kwargs)

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's method; also reports the step."""
        if self._reports is not None:
            self._reports.ended(scheduler_output, self.last_decision, self._prefilling)
        if self.controller is not None and (scheduler_output.scheduled_spec_decode_tokens or self._decodes):
            output = kwargs["model_runner_output"] if "model_runner_output" in kwargs else args[0]
            self.controller.on_verified(
                *compat.verified_drafts(self, scheduler_output, output, self._decodes, self._ended)
            )
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def shutdown(self) -> None:
        """Close the reports, then vLLM's method."""
        if self._reports is not None:
            self._reports.close()
        super().shutdown()


def _merged(before: list[Request], after: list[Request], shown: int) -> list[Request]:
    """All running requests in order: those set aside and remaining ones in their places, new ones at the end."""
    if len(after) >= shown:  # vLLM admits nothing in a step in which it preempts
        return before + after[shown:]
    return [request for request in before if request.status == _RUNNING]


class EBSyncScheduler(_PhasedScheduler):
    """The plugin for engines without asynchronous scheduling."""


class EBScheduler(_PhasedScheduler, AsyncScheduler):  # type: ignore[misc]
    """The plugin for asynchronous scheduling; creates EBSyncScheduler if the engine has it switched off."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """The class for the engine's scheduling mode."""
        if vllm_config.scheduler_config.async_scheduling:
            return super().__new__(cls)
        return EBSyncScheduler(vllm_config, *args, **kwargs)
