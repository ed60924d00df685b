"""The ``emulated`` engine: real vLLM core, scheduler and KV manager; the device is a cost model in virtual time.

Sequence in virtual time, which is vLLM's own (``EngineCore.step`` and ``step_with_batch_queue``), only the waiting is
by a virtual clock. With asynchronous scheduling the batch queue holds two steps:

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

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ebbench.devices.base import Device
from ebbench.engines.base import EngineOptions, EngineResult, Observer, Progress
from ebbench.engines.step_log import RequestFacts, StepFacts, StepLog, TokenTimes, decision_table, request_table
from ebbench.engines.virtual_client import VirtualClient
from ebbench.errors import RunError, UsageError
from ebbench.records.content import token_ids
from ebbench.records.plan import Plan
from vllm_eb.policy import PolicySpec

PROGRESS_EVERY_S = 0.2


class EmulatedEngine:
    """Engine ``emulated`` in virtual time."""

    name = "emulated"

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Run to the end of the plan.

        Raises UsageError for a plan that cannot fit, RunError when vLLM is missing or stops making progress.
        """
        try:
            from ebbench.engines import emulated_core
        except ImportError as error:
            raise RunError(f"engine emulated needs vLLM, and importing it failed ({error}); see `ebbench doctor`") from None
        blocks = emulated_core.usable_blocks(device, options)
        check_fits(plan, options, blocks)
        run = _Run(emulated_core, plan, policy, device, options, blocks)
        with _no_garbage_collection():
            interrupted = run.to_the_end(observer)
        return run.result(interrupted)


def check_fits(plan: Plan, options: EngineOptions, blocks: int) -> None:
    """Refuse what vLLM would refuse or never finish. Raises UsageError."""
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise UsageError(
            f"--max-num-batched-tokens {options.max_num_batched_tokens} is below --max-num-seqs "
            f"{options.max_num_seqs}: vLLM refuses that; raise the one or lower the other"
        )
    limit = min(options.max_model_len, blocks * options.block_size)
    total = plan.table["input_tokens"].to_numpy() + plan.table["output_tokens"].to_numpy()
    too_long = int((total > limit).sum())
    if too_long:
        raise UsageError(
            f"{too_long} requests are longer than {limit} tokens (max_model_len {options.max_model_len}, KV capacity "
            f"{blocks * options.block_size}); raise the limit or drop them when planning"
        )


class _Run:
    """State of one run."""

    def __init__(
        self, core_module: Any, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, blocks: int
    ) -> None:
        self._make_request = core_module.make_request
        self._vocab = core_module.VOCAB
        self._plan, self._policy, self._blocks = plan, policy, blocks
        self._client = VirtualClient(plan)
        self._clock = core_module.VirtualClock()
        scheduler_cls, config = plugin_settings(policy, device)
        self._core = core_module.build_core(device, options, scheduler_cls, config)
        self._scheduler = self._core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        if scheduler_cls is not None:
            self._scheduler.use_clock(self._clock.now_s)
        self._streams: dict[str, list[int]] = {}
        executor = self._core.model_executor
        executor.attach(self._clock, device.cost, self._streams)
        executor.on_step = self._on_step
        columns = plan.table.select(["request_id", "input_tokens", "output_tokens", "content", "hash_ids"]).to_pydict()
        self._ids, self._inputs, self._outputs = columns["request_id"], columns["input_tokens"], columns["output_tokens"]
        self._contents, self._hashes = columns["content"], columns["hash_ids"]
        self._row_of = {request_id: row for row, request_id in enumerate(self._ids)}
        self._log = StepLog(self._ids)
        self._tokens = TokenTimes(np.array(self._outputs, dtype=np.int32))
        count = len(plan)
        self._scheduled_ns, self._cached = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        self._preemptions, self._ended = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        self._completed = self._output_tokens = self._total_tokens = 0

    def to_the_end(self, observer: Observer | None) -> bool:
        """Drive the core until every request has ended. Returns whether the user interrupted it."""
        core, scheduler, client, clock = self._core, self._scheduler, self._client, self._clock
        next_report = 0.0
        try:
            while self._completed < len(self._plan):
                for row in client.due(clock.now_ns):
                    core.add_request(self._request(row))
                if not scheduler.has_requests() and not core.batch_queue:
                    self._jump()
                    continue
                outputs, executed = core.step_fn()
                if outputs:
                    self._take(outputs)
                elif not executed and not core.batch_queue:
                    self._jump()
                if observer is not None and time.monotonic() >= next_report:
                    next_report = time.monotonic() + PROGRESS_EVERY_S
                    observer.update(self._progress())
        except KeyboardInterrupt:
            return True
        finally:
            core.model_executor.shutdown()
        return False

    def _jump(self) -> None:
        """Nothing to do now: go to the next release."""
        release_ns = self._client.next_release_ns()
        if release_ns is None or release_ns <= self._clock.now_ns:
            raise RunError(
                f"the engine is stuck at {self._clock.now_s():.3f} s of engine time with "
                f"{len(self._plan) - self._completed} requests unfinished: nothing runs and nothing can be admitted"
            )
        self._clock.now_ns = release_ns

    def _request(self, row: int) -> Any:
        inputs, outputs = self._inputs[row], self._outputs[row]
        # The answer continues the prompt's content stream, so a follow-up turn finds its history in the cache.
        stream = token_ids(self._contents[row], self._hashes[row], 0, inputs + outputs, self._vocab).tolist()
        self._streams[self._ids[row]] = stream
        return self._make_request(self._core, self._ids[row], stream[:inputs], outputs)

    def _on_step(self, step: Any, scheduled: Any, scheduled_ns: int, start_ns: int, end_ns: int) -> None:
        shape = step.shape
        running, waiting = self._scheduler.get_request_counts()
        preempted = list(scheduled.preempted_req_ids or ())
        decision = getattr(self._scheduler, "last_decision", None)
        facts = StepFacts(
            scheduled_ns, start_ns, end_ns,
            mode=decision.mode if decision else "mb",
            prefill_tokens=sum(count for count, _ in shape.prefill),
            decode_seqs=shape.decode_seqs,
            kv_blocks_used=self._blocks - self._pool.get_num_free_blocks(),
            kv_blocks_total=self._blocks,
            waiting=waiting,
            running=running,
            preempted_ids=preempted,
            k=decision.k if decision else None,
            n_limit=decision.n_limit if decision else None,
        )  # fmt: skip
        for request_id, hit in step.admitted:
            row = self._row_of[request_id]
            if self._scheduled_ns[row] < 0:
                self._scheduled_ns[row], self._cached[row] = scheduled_ns, hit
        for request_id in preempted:
            self._preemptions[self._row_of[request_id]] += 1
        self._log.add(facts, step.ids, step.tokens)
        self._tokens.add(self._log.rows_of(step.sampled_ids), end_ns)
        self._output_tokens += shape.sampled_seqs
        self._total_tokens += facts.prefill_tokens + shape.decode_seqs

    def _take(self, outputs: Any) -> None:
        """Completions of one step, in scheduling order."""
        for batch in outputs.values():
            for output in batch.outputs:
                if output.finish_reason is not None:
                    row = self._row_of[output.request_id]
                    self._ended[row] = True
                    self._completed += 1
                    del self._streams[output.request_id]
                    self._client.ended(row, self._clock.now_ns)

    def _progress(self) -> Progress:
        running, waiting = self._scheduler.get_request_counts()
        decision = getattr(self._scheduler, "last_decision", None)
        return Progress(
            self._policy.name, self._completed, len(self._plan), self._output_tokens, self._total_tokens,
            self._clock.now_s(), decision.mode if decision else "mb", running, waiting,
        )  # fmt: skip

    def result(self, interrupted: bool) -> EngineResult:
        """The tables of what was done."""
        facts = RequestFacts(self._client.intended_ns, self._scheduled_ns, self._ended, self._cached, self._preemptions)
        controller = getattr(self._scheduler, "controller", None)
        records = controller.drain_records() if controller else []
        return EngineResult(
            requests=request_table(self._plan, facts, self._tokens),
            steps=self._log.table(),
            decisions=decision_table(records),
            interrupted=interrupted,
        )


def plugin_settings(policy: PolicySpec, device: Device) -> tuple[str | None, dict[str, Any]]:
    """Scheduler class and additional_config for a policy; v1 is vLLM untouched."""
    if policy.kind == "v1":
        return None, {}
    from dataclasses import asdict

    config = {"policy": policy.name, "calibration": asdict(device.calibration)}
    return "vllm_eb.scheduler.EBScheduler", {"vllm_eb": config}


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The core makes millions of short-lived objects without cycles; scanning them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
