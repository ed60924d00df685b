"""vLLM executors without computation, whose step times come from a cost model.

:class:`StepReader` is the only code that reads vLLM's data: it converts a SchedulerOutput to the input of a cost model
(:class:`StepShape`) and to the tokens that the step samples. Importing this module imports vLLM (about 7 s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from ebbench.devices.base import CostModel, StepShape
from ebbench.devices.kv_layout import KvLayout
from ebbench.errors import UsageError
from ebbench.simulation.step import Verified


@dataclass(frozen=True)
class DeviceStep:
    """One non-empty step: what was scheduled, in scheduling order, and what it samples.

    ``tokens`` None means one token per request (a pure decode step, as most steps of long runs). ``verified``: with
    speculative decoding, what became of the drafts of ``sampled_ids``.
    """

    shape: StepShape
    ids: Sequence[str]
    tokens: Sequence[int] | None
    sampled_ids: Sequence[str]
    output: ModelRunnerOutput
    admitted: Sequence[tuple[str, int]]  # (id, tokens found in the prefix cache)
    preempted: Sequence[str]
    verified: Verified | None = None


@dataclass(frozen=True)
class SkippedDecodes:
    """Decodes left out of a SchedulerOutput (see :mod:`ebbench.engines.emulated_skipping`), one token per request.

    ``ids``: all requests in the step, in scheduling order. ``kv_tokens``: context tokens of the skipped requests at the
    end of the step.
    """

    number: int
    count: int
    kv_tokens: int
    ids: Sequence[str]


class StepReader:
    """Reads the sequence of SchedulerOutputs. ``tokens_of`` maps a request to its full token stream."""

    def __init__(self, tokens_of: dict[str, Sequence[int]]) -> None:
        self._tokens_of = tokens_of
        self._prompt_tokens: dict[str, int] = {}
        self._partial: set[str] = set()  # requests with prompt tokens left
        self._index: dict[str, int] = {}
        self._index_ids: list[str] = []

    def read(self, scheduled: Any) -> DeviceStep:
        """Convert one SchedulerOutput that has tokens."""
        self._forget(scheduled.finished_req_ids)
        cached = scheduled.scheduled_cached_reqs
        if not scheduled.scheduled_new_reqs and not self._partial and not cached.resumed_req_ids:
            step = self._decode_step(
                cached.req_ids, cached.num_computed_tokens, list(scheduled.preempted_req_ids or ())
            )
        else:
            step = self._general_step(scheduled)
        skipped: SkippedDecodes | None = getattr(scheduled, "skipped", None)
        return step if skipped is None else self._with_skipped(step, skipped, scheduled.num_scheduled_tokens)

    def _with_skipped(self, step: DeviceStep, skipped: SkippedDecodes, counts: dict[str, int]) -> DeviceStep:
        shape = step.shape._replace(
            decode_seqs=step.shape.decode_seqs + skipped.count,
            decode_kv_tokens=step.shape.decode_kv_tokens + skipped.kv_tokens,
            sampled_seqs=step.shape.sampled_seqs + skipped.count,
        )
        ids = skipped.ids
        return replace(
            step,
            shape=shape,
            ids=ids,
            tokens=None if step.tokens is None else [counts.get(request_id, 1) for request_id in ids],
            sampled_ids=[r for r in ids if r not in self._partial] if self._partial else ids,
        )

    def _forget(self, finished: set[str]) -> None:
        for request_id in finished:
            self._prompt_tokens.pop(request_id, None)
            self._partial.discard(request_id)

    def _decode_step(self, ids: list[str], before: list[int], preempted: list[str]) -> DeviceStep:
        count = len(ids)
        shape = StepShape((), count, sum(before) + count, count)
        streams = map(self._tokens_of.__getitem__, ids)
        sampled = [[stream[position + 1]] for stream, position in zip(streams, before, strict=True)]
        return DeviceStep(shape, ids, None, ids, self._output(ids, sampled), (), preempted)

    def _general_step(self, scheduled: Any) -> DeviceStep:
        cached, counts = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        known = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        admitted = set(cached.resumed_req_ids)
        for new in scheduled.scheduled_new_reqs:
            before[new.req_id] = new.num_computed_tokens
            # Model runner V2 sends resumed requests as new ones, outputs included in prefill_token_ids.
            prompt = len(new.prompt_token_ids or ())
            known[new.req_id] = max(len(new.prefill_token_ids or ()) - prompt, 0)
            self._prompt_tokens[new.req_id] = prompt
            admitted.add(new.req_id)
        prefilling = self._partial.union(admitted)
        chunks, sampled_ids, sampled = [], [], []
        decodes = decode_kv = 0
        for request_id, count in counts.items():
            after = before[request_id] + count
            if request_id in prefilling:
                chunks.append((count, before[request_id]))
                if after < self._prompt_tokens[request_id] + known[request_id]:
                    self._partial.add(request_id)
                    continue
                self._partial.discard(request_id)
            else:
                decodes += 1
                decode_kv += after
            sampled_ids.append(request_id)
            sampled.append([self._tokens_of[request_id][after]])
        shape = StepShape(tuple(chunks), decodes, decode_kv, len(sampled_ids))
        ids = list(counts)
        partial = [request_id for request_id in ids if request_id in self._partial]
        output = self._output(sampled_ids + partial, sampled + [[] for _ in partial])
        hits = [(request_id, before[request_id]) for request_id in admitted]
        preempted = list(scheduled.preempted_req_ids or ())
        return DeviceStep(shape, ids, list(counts.values()), sampled_ids, output, hits, preempted)

    def _output(self, ids: list[str], sampled: list[list[int]]) -> ModelRunnerOutput:
        if ids != self._index_ids:
            self._index_ids, self._index = ids, dict(zip(ids, range(len(ids)), strict=True))
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=self._index, sampled_token_ids=sampled)


class DraftReader(StepReader):
    """A StepReader of a server that decodes speculatively.

    vLLM's counters assume that all drafts in flight are accepted; this one counts what they yield. ``accepted_at``
    returns how many drafts of a request are accepted after so many output tokens, ``tokens`` are drafted at a time.
    """

    def __init__(
        self, tokens_of: dict[str, Sequence[int]], accepted_at: Callable[[str, int], int], tokens: int
    ) -> None:
        super().__init__(tokens_of)
        self._accepted_at, self._drafts = accepted_at, [0] * tokens
        self._made: dict[str, int] = {}  # output tokens, with those of steps in flight
        self._drafting: list[str] = []  # requests of the last step that get drafts for the next one

    def take_drafts(self) -> DraftTokenIds:
        """The drafts for the next step; what they are does not matter."""
        return DraftTokenIds(self._drafting, [self._drafts for _ in self._drafting])

    def read(self, scheduled: Any) -> DeviceStep:
        """See StepReader."""
        self._forget(scheduled.finished_req_ids)
        for request_id in scheduled.finished_req_ids:
            self._made.pop(request_id, None)
        cached, counts, drafted = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens, {}
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        admitted = set(cached.resumed_req_ids)
        for new in scheduled.scheduled_new_reqs:
            before[new.req_id] = new.num_computed_tokens
            self._prompt_tokens[new.req_id] = len(new.prompt_token_ids or ())
            self._made.setdefault(new.req_id, 0)
            admitted.add(new.req_id)
        prefilling = self._partial.union(admitted)
        chunks, sampled, verified = [], {}, []
        decodes = decode_kv = draft_tokens = 0
        for request_id, count in counts.items():
            known = self._prompt_tokens[request_id] + self._made[request_id]
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            if request_id in prefilling:
                chunks.append((count, before[request_id]))
                if before[request_id] + count < known:
                    self._partial.add(request_id)
                    continue
                self._partial.discard(request_id)
                accepted = 0
            else:
                decodes, decode_kv, draft_tokens = decodes + 1, decode_kv + known + drafts, draft_tokens + drafts
                accepted = min(self._accepted_at(request_id, self._made[request_id]), drafts)
            drafted[request_id] = drafts
            tokens = list(self._tokens_of[request_id][known : known + 1 + accepted])
            self._made[request_id] += len(tokens)
            verified.append((drafts, accepted, len(tokens)))
            sampled[request_id] = tokens + [0] * (1 + accepted - len(tokens))  # vLLM cuts an answer at its end
        partial = [request_id for request_id in counts if request_id in self._partial]
        self._drafting = list(sampled)
        return DeviceStep(
            StepShape(tuple(chunks), decodes, decode_kv, len(sampled), draft_tokens),
            list(counts),
            list(counts.values()),
            list(sampled),
            self._output([*sampled, *partial], [*sampled.values(), *([] for _ in partial)]),
            [(request_id, before[request_id]) for request_id in admitted],
            list(scheduled.preempted_req_ids or ()),
            Verified(*np.array(verified, np.int64).reshape(-1, 3).T),
        )


def _specs_of(layout: KvLayout) -> Iterator[FullAttentionSpec | SlidingWindowSpec]:
    """One layer per block table, whose blocks have the same bytes. Raises UsageError for a state per sequence."""
    largest = max(group.block_tokens for group in layout.groups)
    for group in layout.groups:
        if group.per_sequence:
            raise UsageError(
                "the emulated device has no layers with a state per sequence; use --engine sim for this model"
            )
        width = {"num_kv_heads": 1, "head_size": 16 * largest // group.block_tokens, "dtype": torch.bfloat16}
        for _ in range(group.tables):
            if group.window:
                yield SlidingWindowSpec(block_size=group.block_tokens, sliding_window=group.window, **width)
            else:
                yield FullAttentionSpec(block_size=group.block_tokens, **width)


class StandInExecutor(Executor):  # type: ignore[misc]
    """Base of the emulated devices: no worker, no weights, KV memory for the requested number of blocks."""

    supports_pp = False
    layout: KvLayout | None = None
    """Groups of layers that keep different amounts; None: every layer keeps every token."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """True: steps end by the clock, not by this process."""
        return True

    def _init_executor(self) -> None:
        return None

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        """There are no workers; control messages (sleep, profile, cache resets ...) are accepted without effect."""
        if non_block:
            return done([None])
        return [None]

    def determine_available_memory(self) -> list[int]:
        """Bytes; more than enough, since num_gpu_blocks_override sets the number of blocks."""
        return [1 << 44]

    def get_kv_cache_specs(self) -> list[dict[str, FullAttentionSpec | SlidingWindowSpec]]:
        """One layer per block table: the scheduler uses only block sizes, windows and the number of blocks."""
        if self.layout is not None:
            return [{f"emulated.{number}": spec for number, spec in enumerate(_specs_of(self.layout))}]
        return [
            {
                "emulated.0": FullAttentionSpec(
                    block_size=self.cache_config.block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
                )
            }
        ]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Any layout."""
        return [["NHD"]]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """Do nothing: there is no memory to allocate."""

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: there is nothing to compile."""

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Text generation."""
        return ("generate",)

    def check_health(self) -> None:
        """Always healthy."""

    def shutdown(self) -> None:
        """Do nothing: there is nothing to free."""


def done(value: Any) -> Future[Any]:
    """A completed future."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def nothing(non_block: bool) -> Any:
    """The result of an empty step."""
    return done(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT


def step_ns(cost: CostModel, shape: StepShape) -> int:
    """Duration of a step in whole ns."""
    return round(cost.step_s(shape) * 1e9)
