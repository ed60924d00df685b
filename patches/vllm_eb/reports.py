"""What a scheduler reports of its steps: to a record directory, to vLLM's /metrics, and to the gateway.

Each is optional. With asynchronous scheduling a step is scheduled while an earlier one is computed, so a step is noted
when it is scheduled and reported when its result comes back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import Any

from vllm_eb import compat
from vllm_eb.config import PluginConfig
from vllm_eb.controller import Controller
from vllm_eb.decisions import Decision, Record
from vllm_eb.log import logger
from vllm_eb.metrics import FiguresWriter
from vllm_eb.recorder import Recorder, StepRecord, folder_of_rank
from vllm_eb.signals import PassClock, SignalPublisher


class StepReports:
    """Reports of one scheduler, which is data-parallel rank ``rank`` of its engine.

    ``controller``: None if vLLM's own rules decide. Counts of KV blocks and requests are read from ``scheduler`` when a
    step is scheduled and when its result comes back.
    """

    def __init__(self, scheduler: Any, controller: Controller | None, config: PluginConfig, rank: int) -> None:
        self._scheduler, self._controller = scheduler, controller
        self._total_blocks = compat.usable_blocks(scheduler)
        self._recorder = self._make_recorder(config, rank)
        self._passes: PassClock | None = None
        if config.signals is not None:
            self._passes = PassClock(SignalPublisher(config.signals, rank), rank)
        self._figures = self._make_figures(scheduler.vllm_config.instance_id, rank)
        self._in_flight: deque[tuple[Any, StepRecord]] = deque()
        self._device_free_ns = 0

    def _make_recorder(self, config: PluginConfig, rank: int) -> Recorder | None:
        if config.record is None:
            return None
        folder = folder_of_rank(config.record, rank)
        return Recorder(folder, {"policy": config.policy.name, "kv_blocks_total": self._total_blocks})

    def _make_figures(self, instance: str, rank: int) -> FiguresWriter | None:
        """Writer of the figures for /metrics; None if vLLM keeps no statistics or the policy has none."""
        if not self._scheduler.log_stats or self._controller is None:
            return None
        try:
            figures = FiguresWriter(instance, rank, self._controller.mode)
        except OSError as error:
            logger.warning("vllm_eb: no policy figures in /metrics: %s", error)
            return None
        self._controller.keep_records()
        return figures

    @property
    def wanted(self) -> bool:
        """Whether anything is reported at all."""
        return any(one is not None for one in (self._recorder, self._figures, self._passes))

    def received(self) -> None:
        """Count a request that arrived."""
        if self._passes is not None:
            self._passes.received += 1

    def scheduled(
        self, output: Any, step_id: int, decision: Decision | None, prefilling: Collection[Any], admitted: list[str]
    ) -> None:
        """Note a step that holds tokens.

        ``prefilling``: requests with prompt tokens left before it; ``admitted``: ids of the requests it admits.
        """
        if self._passes is not None:
            self._passes.scheduled(output)
        if self._recorder is not None:
            self._in_flight.append((output, self._step_record(output, step_id, decision, prefilling, admitted)))

    def _step_record(
        self, output: Any, step_id: int, decision: Decision | None, prefilling: Collection[Any], admitted: list[str]
    ) -> StepRecord:
        tokens = output.num_scheduled_tokens
        prompts = {request.request_id for request in prefilling}.union(admitted) & tokens.keys()
        running, waiting = self._scheduler.get_request_counts()
        return StepRecord(
            step_id=step_id,
            scheduled_ns=time.monotonic_ns(),
            mode=decision.mode if decision else "mb",
            prefill_tokens=sum(tokens[request_id] for request_id in prompts),
            decode_seqs=len(tokens) - len(prompts),
            scheduled=tokens,
            kv_blocks_used=self._total_blocks - compat.free_blocks(self._scheduler),
            waiting=waiting,
            running=running,
            preempted=output.preempted_req_ids or (),
            k=decision.k if decision else None,
            n_limit=decision.n_limit if decision else None,
        )

    def ended(self, output: Any, decision: Decision | None, prefilling: Collection[Any]) -> None:
        """Report the step of ``output``, whose result has come back, and the decisions since the last one.

        ``decision``: the last one; ``prefilling``: running requests with prompt tokens left.
        """
        if self._recorder is not None or self._figures is not None:
            records = self._controller.drain_records() if self._controller is not None else []
            if self._recorder is not None:
                self._finish_record(self._recorder, output, records)
            if self._figures is not None:
                self._figures.update(decision, records)
        if self._passes is not None:
            self._signal(self._passes, output, prefilling)

    def _finish_record(self, recorder: Recorder, output: Any, records: list[Record]) -> None:
        if self._in_flight and self._in_flight[0][0] is output:
            record = self._in_flight.popleft()[1]
            record.start_ns = max(self._device_free_ns, record.scheduled_ns)
            record.end_ns = self._device_free_ns = time.monotonic_ns()
            recorder.step(record)
        recorder.decisions(records)

    def _signal(self, passes: PassClock, output: Any, prefilling: Collection[Any]) -> None:
        """Publish the end of a pass and the remaining work, for the gateway."""
        scheduler = self._scheduler
        unfinished = [request for request in prefilling if request.is_prefill_chunk]
        queued = sum(r.num_tokens - r.num_computed_tokens for r in (*unfinished, *scheduler.waiting))
        used = (self._total_blocks - compat.free_blocks(scheduler)) * scheduler.block_size
        passes.ended(output, queued, used, len(scheduler.running) > len(unfinished))

    def close(self) -> None:
        """Write what is left, and remove what other processes read."""
        for one in (self._passes, self._recorder, self._figures):
            if one is not None:
                one.close()
