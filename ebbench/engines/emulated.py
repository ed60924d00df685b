"""The ``emulated`` engine: real vLLM core, scheduler and KV manager; the device is a cost model in virtual time.

Sequence in virtual time, which is vLLM's own (``EngineCore.step`` and ``step_with_batch_queue``); only the waiting is
done by a virtual clock. With asynchronous scheduling the batch queue holds two steps:

    take every request released by now; schedule() and queue the step on the device
    fewer than two in the queue: again, at the same time
    else: the clock moves to the end of the oldest step, update_from_output(), completions release their successors

so at time t0 steps 0 and 1 are scheduled at once, step 2 at the end of step 0, step 3 at the end of step 1, and so on.
The device runs steps one after another: ``start = max(end of the one before, time scheduled)``. An empty schedule()
(everything running is in its last step, nothing can be admitted) never reaches the device: its future is complete
already, it costs no time and gets no row. Without asynchronous scheduling: schedule, wait, update, strictly in turn.
When nothing is scheduled, nothing is in flight and nothing is released by now, the clock jumps to the next release.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ebbench.devices.base import Device
from ebbench.engines.base import EngineResult, check_fits, check_options, num_kv_blocks, plan_notes, refuse_unsimulated
from ebbench.errors import RunError
from ebbench.process.interpreter import collector_paused
from ebbench.process.termination import interruptible
from ebbench.records.plan import Observer, Plan, Progress, optional_ints, token_ids
from ebbench.simulation.drafting import DraftCounts, accepted_drafts
from ebbench.simulation.front_end import FrontEnd
from ebbench.simulation.releases import (
    AtTime,
    Clients,
    plan_requests,
    records_after,
    with_warmup,
)
from ebbench.simulation.state import (
    ARRIVAL,
    DEPARTURE,
    ENTRY,
    FOLLOW,
    HANG_UP,
    RESUME,
    UNSET,
    Ints,
    RequestState,
    table_of_records,
    token_slots,
)
from ebbench.simulation.step import Step, StepLog
from ebbench.spec.server import EngineOptions
from vllm_eb import config as plugin
from vllm_eb.policy import PolicySpec


class VirtualClients(Clients):
    """Clients of the emulated engine.

    ``front_end``: requests go through it to the engine, and end for their clients when the last token has left it.
    """

    def __init__(
        self, plan: Plan, state: RequestState, front_end: FrontEnd, options: EngineOptions, begin: AtTime
    ) -> None:
        super().__init__(plan, [state], options, begin)
        self.lost = 0  # requests of the plan that the engine does not complete: refused, abandoned or given up
        self._left: list[int] = []  # rows in the engine whose clients have hung up since the last call of left()
        self._ready: list[int] = []
        self._front_end = front_end
        self._handlers: dict[int, Callable[[Any], object]] = {
            ARRIVAL: self._arrival, RESUME: self._resume, FOLLOW: self._follow, ENTRY: self._entry,
            DEPARTURE: self._departure, HANG_UP: self._hang_up,
        }  # fmt: skip
        self._start()

    def due(self, now_ns: int) -> list[int]:
        """Rows that enter the engine now, in order."""
        self.catch_up(now_ns)
        rows, self._ready = self._ready, []
        return rows

    def left(self) -> list[int]:
        """Rows in the engine whose clients have hung up since the last call."""
        rows, self._left = self._left, []
        return rows

    def catch_up(self, now_ns: int, *, idle: bool = False) -> None:
        """Process all events outside the engine up to ``now_ns``: arrivals, follow-ups, API server, hang-ups.

        A client that hangs up at this very moment still gets the tokens of a step that ends now, so its hang-up comes
        later, unless the engine is ``idle``.
        """
        limit = (now_ns, HANG_UP + idle)
        while self._events and self._events[0][:2] < limit:
            self.now_ns, kind, _, subject = heapq.heappop(self._events)
            self._handlers[kind](subject)

    def next_event_ns(self) -> int | None:
        """Time (ns) of the next event outside the engine; None if only the engine's completions cause further ones."""
        return self._events[0][0] if self._events else None

    def completed(self, rows: Sequence[int], now_ns: int) -> None:
        """Process the ends of requests in one step of the engine. Sessions that arrived by then come first."""
        self.catch_up(now_ns)
        self.now_ns = now_ns
        at_once: list[int] = []
        for row in rows:
            departed_ns = self._front_end.departed_ns(row)
            if departed_ns <= now_ns:
                at_once.append(row)
            else:
                self.push(departed_ns, DEPARTURE, [row])
        if at_once:
            self._departure(at_once)

    def _departure(self, rows: list[int]) -> None:
        self.gone(self.hang_ups.still_wanted(rows))

    def _bring(self, rows: list[int]) -> None:
        for row in rows:
            entry_ns = self._front_end.enter(row, self.now_ns)
            if entry_ns <= self.now_ns:
                self._ready.append(row)
            else:
                self.push(entry_ns, ENTRY, row)

    def _entry(self, row: int) -> None:
        self._ready += self.hang_ups.still_wanted([row])

    def _withdraw(self, row: int) -> None:
        if row in self._ready:
            self._ready.remove(row)
        else:
            self._left.append(row)

    def _lose(self, row: int, never: list[int]) -> list[int]:
        """See Clients. A request of the warm-up, or one that the engine has completed, is not lost."""
        unfinished = row < len(self._plan) and bool(self._states[0].end_ns[row] == UNSET)
        before = len(never)
        released = super()._lose(row, never)
        self.lost += unfinished + len(never) - before
        return released


PROGRESS_EVERY_S = 0.2
AFTER_ALL_NS = 1 << 62
MAX_FRUITLESS_STEPS = 8  # iterations of vLLM's loop without effect, before the clock jumps to the next arrival


class EmulatedEngine:
    """Engine ``emulated`` in virtual time. ``shortcuts``: see :mod:`ebbench.engines.emulated_skipping`."""

    name = "emulated"

    def __init__(self, *, shortcuts: bool = True) -> None:
        self._shortcuts = shortcuts

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None = None
    ) -> EngineResult:
        """Run to the end of the plan.

        Raises UsageError for a plan that cannot fit, RunError when vLLM is missing or stops making progress.
        """
        check_options(options, [policy])
        check_fits(plan, device, options)
        refuse_unsimulated(plan, self.name, options)
        try:
            import ebbench.engines.emulated_core as emulated_core
        except ImportError as error:
            raise RunError(
                f"engine emulated needs vLLM, and importing it failed ({error}); see: ebbench doctor"
            ) from None
        # The shortcuts skip sequences whose next tokens are certain; those of a client that hangs up are not.
        # They know one block table per request, and one token per step.
        shortcuts = (
            self._shortcuts
            and optional_ints(plan.table, "hang_up_ns") is None
            and device.kv_layout is None
            and options.drafts is None
            and not options.by_priority  # any sequence may be preempted, one that was skipped too
        )
        run = _EmulatedRun(emulated_core, plan, policy, device, options, shortcuts=shortcuts)
        self.prepare(run.core)
        with collector_paused():
            interrupted = run.to_the_end(observer)
        return run.result(interrupted)

    def prepare(self, core: Any) -> None:
        """Called with the engine core before the first step; a hook for measurements and experiments."""


class _Tokens(NamedTuple):
    """The tokens of a step on the device: rows that get some, the slots of the first ones, how many each row gets."""

    end_ns: int
    rows: Ints
    slots: Ints
    tokens: Ints

    def without(self, rows: list[int]) -> _Tokens:
        """The tokens of other rows."""
        kept = ~np.isin(self.rows, rows)
        return _Tokens(self.end_ns, self.rows[kept], self.slots[kept], self.tokens[kept])


class _EmulatedRun:
    """State of one run."""

    def __init__(
        self,
        core_module: Any,
        plan: Plan,
        policy: PolicySpec,
        device: Device,
        options: EngineOptions,
        *,
        shortcuts: bool,
    ) -> None:
        self._make_request, self._vocab = core_module.make_request, core_module.vocabulary(options.block_size)
        self._plan, self._policy = plan, policy
        self._blocks = num_kv_blocks(device, options)
        whole = with_warmup(plan, options.warmup)
        self._state, self._log = RequestState(whole), StepLog()
        self._clock = core_module.VirtualClock()
        self._streams: dict[str, Sequence[int]] = {}
        scheduler, additional = plugin_settings(policy, device)
        self.core = (
            self._core_with_shortcuts(core_module, policy, options, additional)
            if shortcuts
            else core_module.build_core(
                self._blocks, options, scheduler, additional, device.kv_layout, varies_drafts=policy.varies_drafts
            )
        )
        self._scheduler = self.core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        # vLLM's own scheduler, which runs under a native policy, has neither a controller nor decisions.
        self._controller = None if policy.native else self._scheduler.controller
        if not policy.native:
            self._scheduler.use_clock(self._clock.now_s)
        controllers = [] if self._controller is None else [self._controller]
        for controller in controllers:
            controller.keep_records()
        self._drafts = None if options.drafts is None else DraftCounts(options.drafts.tokens)
        self._front_end = FrontEnd.of(options, device.profile, 1, self._state)
        self._on_the_device: deque[_Tokens] = deque()
        self._clients = VirtualClients(
            plan, self._state, self._front_end, options,
            lambda now_ns: self._clients.beginning.begin(now_ns, self._log, controllers),
        )  # fmt: skip
        executor = self.core.model_executor
        executor.attach(self._clock, device.cost, self._reader(options))
        executor.on_step, executor.on_preempted = self._on_step, self._on_preempted
        self._ids: list[str] = whole.table["request_id"].to_pylist()
        self._row_of = {request_id: row for row, request_id in enumerate(self._ids)}
        self._last_ids: list[str] = []
        self._last_rows: Ints = np.zeros(0, np.int64)
        self._ones: Ints = np.ones(options.max_num_seqs, np.int64)
        self._completed = self._output_tokens = self._total_tokens = self._fruitless = self._received = 0
        if self._clients.hang_ups.any:
            self.core._process_aborts_queue = self._abort_in_step

    def _reader(self, options: EngineOptions) -> Any:
        from ebbench.engines.emulated_core import DraftReader, StepReader

        if options.drafts is None:
            return StepReader(self._streams)
        state = self._state
        accepted = accepted_drafts(options.drafts, state, int(self._plan.facts.get("seed", 0)))

        def accepted_at(request_id: str, output_tokens: int) -> int:
            row = self._row_of[request_id]
            return int(accepted[min(state.first_slot[row] + output_tokens, state.end_slot[row] - 1)])

        return DraftReader(self._streams, accepted_at, options.drafts.tokens)

    def _core_with_shortcuts(
        self, core_module: Any, policy: PolicySpec, options: EngineOptions, additional: dict[str, object]
    ) -> Any:
        """A core without calls that have no effect in the emulation."""
        from ebbench.engines.emulated_skipping import (
            PlainRequest,
            begin_skipping,
            skipping_class,
            supported,
            take_shortcuts,
        )

        scheduler: str | type | None = None if policy.native else plugin.SCHEDULER
        if supported():
            scheduler = skipping_class(plugin=not policy.native, async_scheduling=options.async_scheduling)
        core = core_module.build_core(self._blocks, options, scheduler, additional, varies_drafts=policy.varies_drafts)
        take_shortcuts(core)
        if supported():
            begin_skipping(core, self._streams)
        self._make_request = partial(self._make_request, kind=PlainRequest)
        return core

    def to_the_end(self, observer: Observer | None) -> bool:
        """Run the core until every request has ended. Returns whether the user interrupted it."""
        core, clients, clock = self.core, self._clients, self._clock
        next_report = 0.0
        try:
            with interruptible():
                while self._completed + self._clients.lost < len(self._plan):
                    for row in clients.due(clock.now_ns):
                        core.add_request(self._request(row))
                    self._abort(clients.left())
                    if not self._step():
                        self._jump()
                    if observer is not None and time.monotonic() >= next_report:
                        next_report = time.monotonic() + PROGRESS_EVERY_S
                        observer.update(self._progress())
                clients.catch_up(AFTER_ALL_NS)  # clients may still hang up on answers that leave the API server
        except KeyboardInterrupt:
            return True
        finally:
            self._close()
        return False

    def _close(self) -> None:
        """Close the core. ``core.shutdown`` would also collect garbage, which takes longer than a short run."""
        self.core.structured_output_manager.clear_backend()
        self.core.scheduler.shutdown()

    def _step(self) -> bool:
        """One iteration of vLLM's loop.

        Returns False if twice in a row nothing is in flight and nothing was scheduled.
        """
        core = self.core
        if not core.scheduler.has_requests() and not core.batch_queue:
            return False
        outputs, executed = core.step_fn()
        core.post_step(executed)
        if self._front_end.streams:
            self._stream()
        if outputs:
            self._take(outputs)
        if executed or outputs:
            self._fruitless = 0
            return True
        self._fruitless += 1
        return self._fruitless < MAX_FRUITLESS_STEPS

    def _abort_in_step(self) -> None:
        """Called by vLLM when a step has ended, before it uses the step's output."""
        self._clients.catch_up(self._clock.now_ns)
        self._abort(self._clients.left())

    def _abort(self, rows: list[int]) -> None:
        """Abort the requests in the core whose clients have hung up."""
        inside = [row for row in rows if not self._state.done[row]]
        if inside:
            self.core.abort_requests([self._ids[row] for row in inside])
        for row in inside:
            self._state.done[row] = True
            self._streams.pop(self._ids[row], None)
        if inside:  # their tokens in the steps in flight are lost
            self._on_the_device = deque(step.without(inside) for step in self._on_the_device)

    def _stream(self) -> None:
        """Pass the tokens of the steps that have ended on to the front end."""
        while self._on_the_device and self._on_the_device[0].end_ns <= self._clock.now_ns:
            end_ns, rows, slots, tokens = self._on_the_device.popleft()
            self._clients.catch_up(end_ns)
            self._front_end.stream(end_ns, rows, slots, tokens)

    def _jump(self) -> None:
        """Advance the clock to the next event outside the engine."""
        event_ns = self._clients.next_event_ns()
        if event_ns is None:
            unfinished = len(self._plan) - self._completed - self._clients.lost
            raise RunError(
                f"the engine is stuck at {self._clock.now_s():.3f} s of engine time with {unfinished} "
                "requests unfinished: nothing runs and nothing can be admitted"
            )
        self._clock.now_ns = max(self._clock.now_ns, event_ns)
        self._clients.catch_up(self._clock.now_ns, idle=True)
        self._fruitless = 0

    def _request(self, row: int) -> Any:
        state = self._state
        inputs, outputs = int(state.prompt[row]), int(state.max_output[row])
        hash_ids = state.hash_ids[row] if state.hash_ids is not None else None
        # The output continues the prompt's content stream, so that a later turn finds its history in the cache.
        prompt = token_ids(state.content[row], hash_ids, 0, inputs, self._vocab, state.hash_tokens).tolist()
        generated = token_ids(state.content[row], None, inputs, outputs, self._vocab).tolist()
        self._streams[self._ids[row]] = prompt + generated
        # In the order in which the engine gets them, as the times that a real server's requests have.
        self._received += 1
        priority = 0 if state.priority is None else int(state.priority[row])
        return self._make_request(self.core, self._ids[row], prompt, outputs, priority, float(self._received))

    def _on_preempted(self, ids: set[str]) -> None:
        for request_id in ids:
            self._state.preemptions[self._row_of[request_id]] += 1

    def _on_step(self, seen: Any, start_ns: int, end_ns: int) -> None:
        state, shape, scheduled_ns = self._state, seen.shape, self._clock.now_ns
        running, waiting = self._scheduler.get_request_counts()
        decision = None if self._controller is None else self._scheduler.last_decision
        rows = self._rows(seen.ids)
        sampled = self._rows(seen.sampled_ids)
        for request_id, hit in seen.admitted:
            row = self._row_of[request_id]
            if state.scheduled_ns[row] == UNSET:
                state.scheduled_ns[row], state.cached_tokens[row] = scheduled_ns, hit
        slots = state.next_slot[sampled]
        tokens = self._ones[: len(sampled)] if seen.verified is None else seen.verified.tokens
        state.token_ns[token_slots(slots, tokens)] = end_ns
        if self._drafts is not None:
            going_on = tokens > 0  # the others had ended in the step before
            self._drafts.count(seen.verified.drafts[going_on], seen.verified.accepted[going_on])
        state.next_slot[sampled] += tokens
        if self._front_end.streams:
            self._on_the_device.append(_Tokens(end_ns, sampled, slots, tokens))
        step = Step(
            scheduled_ns, start_ns, end_ns, rows,
            self._ones[: len(rows)] if seen.tokens is None else np.array(seen.tokens, np.int64),
            sampled,
            prefill_tokens=sum(count for count, _ in shape.prefill),
            decode_seqs=shape.decode_seqs,
            preempted=sorted(self._row_of[request_id] for request_id in seen.preempted),
            mode=decision.mode if decision else "mb",
            k=decision.k if decision else None,
            n_limit=decision.n_limit if decision else None,
            kv_blocks_used=self._blocks - self._pool.get_num_free_blocks(),
            waiting=waiting,
            running=running,
        )  # fmt: skip
        self._log.step(0, step)
        self._output_tokens += shape.sampled_seqs
        self._total_tokens += step.prefill_tokens + shape.decode_seqs

    def _rows(self, ids: list[str]) -> Ints:
        """Plan rows of request ids; the array is reused while the ids stay the same."""
        if ids != self._last_ids:
            self._last_ids = ids
            self._last_rows = np.fromiter(map(self._row_of.__getitem__, ids), np.int64, len(ids))
        return self._last_rows

    def _take(self, outputs: Any) -> None:
        """Process the completions of one step, in scheduling order."""
        ended: list[int] = []
        for batch in outputs.values():
            for output in batch.outputs:
                if output.finish_reason is not None:
                    row = self._row_of[output.request_id]
                    self._state.end_ns[row] = self._clock.now_ns
                    self._state.done[row] = True
                    self._completed += row < len(self._plan)
                    del self._streams[output.request_id]
                    ended.append(row)
        if ended:
            self._clients.completed(ended, self._clock.now_ns)

    def _progress(self) -> Progress:
        running, waiting = self._scheduler.get_request_counts()
        decision = None if self._controller is None else self._scheduler.last_decision
        return Progress(
            self._policy.name, self._completed, len(self._plan), self._output_tokens, self._total_tokens,
            self._clock.now_s(), decision.mode if decision else "mb", running, waiting,
        )  # fmt: skip

    def result(self, interrupted: bool) -> EngineResult:
        """The tables of the run."""
        records = [] if self._controller is None else self._controller.drain_records()
        ids = pa.array(self._ids, pa.string())
        beginning = self._clients.beginning
        return EngineResult(
            requests=plan_requests(self._plan, self._state, self._clients),
            steps=self._log.parts(ids, self._blocks, beginning.first_step(self._log), beginning.time_ns).table(),
            decisions=table_of_records(records_after([(0, record) for record in records], beginning)),
            interrupted=interrupted,
            warnings=plan_notes(self._plan),
            facts=self._front_end.facts | ({} if self._drafts is None else self._drafts.facts),
        )


def plugin_settings(policy: PolicySpec, device: Device) -> tuple[str | None, dict[str, object]]:
    """Scheduler class and additional_config for a policy; none for v1, which is vLLM unchanged."""
    if policy.native:
        return None, {}
    return plugin.SCHEDULER, plugin.additional_config(policy, device.calibration)
