"""vLLM's EngineCore in this process, on a device in virtual time. Importing this module imports vLLM."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from ebbench.devices.base import CostModel, StepShape
from ebbench.devices.geometry import KvLayout
from ebbench.errors import UsageError
from ebbench.simulation.step import Verified
from ebbench.spec.server import EngineOptions

# vLLM executors without computation, whose step times come from a cost model.
#
# `StepReader` is the only code that reads vLLM's data: it converts a SchedulerOutput to the input of a cost model
# (`StepShape`) and to the tokens that the step samples. Importing this module imports vLLM (about 7 s).


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

    def __init__(self, tokens_of: Mapping[str, Sequence[int]]) -> None:
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

    def _known(self, scheduled: Any) -> tuple[dict[str, int], dict[str, int], set[str]]:
        """Per request the tokens computed before the step and its output tokens, and the requests that it admits."""
        cached = scheduled.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        admitted = set(cached.resumed_req_ids)
        for new in scheduled.scheduled_new_reqs:
            before[new.req_id] = new.num_computed_tokens
            # Model runner V2 sends resumed requests as new ones, outputs included in prefill_token_ids.
            prompt = len(new.prompt_token_ids or ())
            outputs[new.req_id] = max(len(new.prefill_token_ids or ()) - prompt, 0)
            self._prompt_tokens[new.req_id] = prompt
            admitted.add(new.req_id)
        return before, outputs, admitted

    def _general_step(self, scheduled: Any) -> DeviceStep:
        counts = scheduled.num_scheduled_tokens
        before, outputs, admitted = self._known(scheduled)
        prefilling = self._partial.union(admitted)
        chunks, sampled_ids, sampled = [], [], []
        decodes = decode_kv = 0
        for request_id, count in counts.items():
            after = before[request_id] + count
            if request_id in prefilling:
                chunks.append((count, before[request_id]))
                if after < self._prompt_tokens[request_id] + outputs[request_id]:
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
        self, tokens_of: Mapping[str, Sequence[int]], accepted_at: Callable[[str, int], int], tokens: int
    ) -> None:
        super().__init__(tokens_of)
        self._accepted_at = accepted_at
        self._made: dict[str, int] = {}  # output tokens, with those of steps in flight
        self._drafting: list[str] = []  # requests of the last step that get drafts for the next one
        self._next_drafts = tokens

    def take_drafts(self) -> DraftTokenIds:
        """The drafts for the next step; what they are does not matter. vLLM shortens lists that a step cannot hold."""
        return DraftTokenIds(self._drafting, [[0] * self._next_drafts for _ in self._drafting])

    def read(self, scheduled: Any) -> DeviceStep:
        """See StepReader."""
        self._forget(scheduled.finished_req_ids)
        for request_id in scheduled.finished_req_ids:
            self._made.pop(request_id, None)
        counts = scheduled.num_scheduled_tokens
        before, outputs, admitted = self._known(scheduled)
        # Tokens in flight at a reset of the prefix cache are dropped.
        self._made |= {request_id: outputs[request_id] for request_id in admitted}
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
            tokens = list(self._tokens_of[request_id][known : known + 1 + accepted])
            self._made[request_id] += len(tokens)
            verified.append((drafts, accepted, len(tokens)))
            sampled[request_id] = tokens + [0] * (1 + accepted - len(tokens))  # vLLM cuts an answer at its end
        partial = [request_id for request_id in counts if request_id in self._partial]
        self._drafting, self._next_drafts = list(sampled), scheduled.num_spec_tokens_to_schedule
        return DeviceStep(
            StepShape(tuple(chunks), decodes, decode_kv, len(sampled), draft_tokens, self._next_drafts),
            list(counts),
            list(counts.values()),
            list(sampled),
            self._output([*sampled, *partial], [*sampled.values(), *([] for _ in partial)]),
            [(request_id, before[request_id]) for request_id in admitted],
            list(scheduled.preempted_req_ids or ()),
            Verified(*np.array(verified, np.int64).reshape(-1, 3).T),
        )


def _specs_of(layout: KvLayout, max_model_len: int) -> Iterator[KVCacheSpec]:
    """One layer per block table, whose blocks have the same bytes. Layers of states come first, as a drafter's, which
    keep all tokens, come last."""
    largest = max(group.block_tokens for group in layout.groups)
    for group in sorted(layout.groups, key=lambda group: not group.per_sequence):
        if group.per_sequence:
            state = MambaSpec(
                block_size=group.block_tokens if group.by_block else max_model_len,
                shapes=((32 * largest,),),
                dtypes=(torch.bfloat16,),
                mamba_cache_mode="align" if group.by_block else "none",
                num_speculative_blocks=group.drafts,
            )
            yield from [state] * group.tables
            continue
        width = {"num_kv_heads": 1, "head_size": 16 * largest // group.block_tokens, "dtype": torch.bfloat16}
        for _ in range(group.tables):
            if group.window:
                yield SlidingWindowSpec(block_size=group.block_tokens, sliding_window=group.window, **width)
            elif group.chunk:
                yield ChunkedLocalAttentionSpec(
                    block_size=group.block_tokens, attention_chunk_size=group.chunk, **width
                )
            else:
                yield FullAttentionSpec(block_size=group.block_tokens, **width)


class StandInExecutor(Executor):  # type: ignore[misc]
    """Base of the emulated devices: no worker, no weights, KV memory for the requested number of blocks."""

    supports_pp = False
    layout: KvLayout | None = None
    """Groups of layers that keep different amounts; None: every layer keeps every token."""
    _sampled: Future[Any]
    """The tokens of the step queued last."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """True: steps end by the clock, not by this process."""
        return True

    def _init_executor(self) -> None:
        return None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the step queued last."""
        return self._sampled if non_block else self._sampled.result()

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

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """One layer per block table: the scheduler uses only block sizes, windows and the number of blocks."""
        if self.layout is not None:
            specs = _specs_of(self.layout, self.vllm_config.model_config.max_model_len)
            return [{f"emulated.{number}": spec for number, spec in enumerate(specs)}]
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


VOCAB = 32000
SMALL_VOCAB = 256  # Python caches integers up to 256, which makes token streams small and fast
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def vocabulary(block_size: int) -> int:
    """Number of token ids in use: few if blocks are so long that they are not equal by chance (64 random bits)."""
    return SMALL_VOCAB if block_size >= 8 else VOCAB


class VirtualFuture(Future[Any]):
    """Completes when its result is requested, and advances the clock to the end of its step."""

    def __init__(self, clock: VirtualClock, end_ns: int, value: Any) -> None:
        super().__init__()
        self._clock, self._end_ns, self._value = clock, end_ns, value

    def result(self, timeout: float | None = None) -> Any:
        """Wait in virtual time."""
        self._clock.now_ns = max(self._clock.now_ns, self._end_ns)
        return self._value


class VirtualClock:
    """Engine time in ns."""

    def __init__(self) -> None:
        self.now_ns = 0

    def now_s(self) -> float:
        """Engine time in seconds."""
        return self.now_ns / 1e9


class VirtualExecutor(StandInExecutor):
    """Runs steps one after another in virtual time. Call ``attach`` before the first step."""

    def attach(self, clock: VirtualClock, cost: CostModel, reader: StepReader) -> None:
        """Set the clock, the cost model and the source of the requests' tokens."""
        self.clock, self.cost, self.free_ns = clock, cost, 0
        self.reader = reader
        self.on_step: Any = None  # called as on_step(step, start_ns, end_ns) for every step with tokens
        self.on_preempted: Any = None  # called with the ids preempted by a schedule(), if any

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Queue a step on the device; :meth:`sample_tokens` returns its tokens."""
        if scheduler_output.preempted_req_ids:
            self.on_preempted(scheduler_output.preempted_req_ids)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return nothing(non_block)
        step = self.reader.read(scheduler_output)
        start_ns = max(self.free_ns, self.clock.now_ns)
        self.free_ns = start_ns + step_ns(self.cost, step.shape)
        self.on_step(step, start_ns, self.free_ns)
        self._sampled = VirtualFuture(self.clock, self.free_ns, step.output)
        return done(None) if non_block else None

    def take_draft_token_ids(self) -> Any:
        """The drafts for the next step, without asynchronous scheduling."""
        return self.reader.take_drafts() if isinstance(self.reader, DraftReader) else None


def build_core(
    blocks: int,
    options: EngineOptions,
    scheduler_cls: str | type | None,
    additional_config: dict[str, Any],
    layout: KvLayout | None = None,
    *,
    varies_drafts: bool = False,
    **further: Any,
) -> EngineCore:
    """A vLLM engine core with ``blocks`` usable KV blocks and the null block; ``further`` are EngineArgs.

    ``layout``: groups of layers that keep different amounts. ``varies_drafts``: of the policy.
    """
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # vLLM refuses to start if one sequence of this length does not fit.
    max_model_len = min(options.max_model_len, blocks * options.block_size)
    executor: type[StandInExecutor] = VirtualExecutor
    if layout is not None:
        max_model_len = layout.longest_within(blocks, options.max_model_len)
        executor = type("LaidOutExecutor", (VirtualExecutor,), {"layout": layout})
    with tempfile.TemporaryDirectory(prefix="ebbench-model-") as folder:
        config = MODEL_CONFIG | {"max_position_embeddings": options.max_model_len}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            distributed_executor_backend=executor,
            num_gpu_blocks_override=blocks + 1,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            enable_prefix_caching=options.enable_prefix_caching,
            prefix_caching_hash_algo="xxhash" if _has_xxhash() else "sha256",
            long_prefill_token_threshold=min(options.long_prefill_token_threshold, max_model_len),
            **_later_options(options),
            async_scheduling=options.async_scheduling and options.drafts is None,  # which n-grams do not allow
            scheduler_cls=scheduler_cls,
            additional_config=additional_config,
            disable_log_stats=True,
            speculative_config=_speculative_config(options, varies_drafts),
            **further,
        ).create_engine_config()
        if options.drafts is not None and options.drafts.rules.own_kv:
            # A drafter with a KV cache of its own would need a checkpoint; the scheduler reads only the method.
            vllm_config.speculative_config.method = "mtp" if options.drafts.method == "mtp" else "eagle"
        # vLLM's CPU platform switches asynchronous scheduling off; the emulated device supports it.
        vllm_config.scheduler_config.async_scheduling = options.async_scheduling
        if layout is not None:  # nor does its hybrid KV cache manager need a GPU
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
            if layout.state_block_tokens:  # as vLLM sets them for such a model
                cache = vllm_config.cache_config
                cache.mamba_cache_mode = "align"
                cache.block_size = cache.mamba_block_size = layout.state_block_tokens
        with _no_heap_freeze():
            return EngineCore(vllm_config, executor, log_stats=False)


def _speculative_config(options: EngineOptions, varies: bool) -> dict[str, Any] | None:
    """Drafts of as many tokens, by the method that needs no model. ``varies``: of lengths that a policy sets."""
    if options.drafts is None:
        return None
    tokens = options.drafts.tokens
    by_batch = {"num_speculative_tokens_per_batch_size": [[1, 1, tokens]]} if varies else {}
    return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 2, **by_batch}


def _later_options(options: EngineOptions) -> dict[str, Any]:
    """EngineArgs that older versions of vLLM lack, only those that differ from vLLM's default.

    Raises UsageError for one that the installed vLLM does not know.
    """
    names = (
        "max_num_active_seqs", "long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl",
        "scheduling_policy",
    )  # fmt: skip
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(EngineOptions, name)}
    for name in chosen:
        if not hasattr(EngineArgs, name):
            raise UsageError(f"{name} is not known to this vLLM ({vllm.__version__}); vLLM 0.32 has it")
    return chosen


@contextmanager
def _no_heap_freeze() -> Iterator[None]:
    """Skip the garbage collection and freeze of a server's start, which a run of a second does not need."""
    freeze = getattr(engine_core, "freeze_gc_heap", None)
    engine_core.freeze_gc_heap = lambda: None
    try:
        yield
    finally:
        if freeze is not None:
            engine_core.freeze_gc_heap = freeze


def make_request(
    core: EngineCore,
    request_id: str,
    prompt: list[int],
    output_tokens: int,
    priority: int = 0,
    arrival_s: float = 0.0,
    kind: type[Request] = Request,
) -> Request:
    """A request with a fixed output length."""
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    return kind(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_s,
        priority=priority,
        block_hasher=core.request_block_hasher,
    )


def _has_xxhash() -> bool:
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return False
    return True


__all__ = ["VirtualClock", "VirtualExecutor", "build_core", "make_request"]
