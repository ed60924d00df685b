"""vLLM's EngineCore in this process, on a device in virtual time. Importing this module imports vLLM."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from ebbench.devices.base import CostModel
from ebbench.devices.kv_layout import KvLayout
from ebbench.engines.emulated_device import DraftReader, StandInExecutor, StepReader, done, nothing, step_ns
from ebbench.errors import UsageError
from ebbench.spec.server import EngineOptions

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
        """Set the clock, the cost model and what knows the tokens of the requests."""
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

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the step queued last."""
        return self._sampled if non_block else self._sampled.result()

    def take_draft_token_ids(self) -> Any:
        """The drafts for the next step, without asynchronous scheduling."""
        return self.reader.take_drafts() if isinstance(self.reader, DraftReader) else None


def build_core(
    blocks: int,
    options: EngineOptions,
    scheduler_cls: str | type | None,
    additional_config: dict[str, Any],
    layout: KvLayout | None = None,
    **further: Any,
) -> EngineCore:
    """A vLLM engine core with ``blocks`` usable KV blocks and the null block; ``further`` are EngineArgs.

    ``layout``: groups of layers that keep different amounts.
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
            speculative_config=_speculative_config(options),
            **further,
        ).create_engine_config()
        if options.drafts is not None and options.drafts.rules.own_kv:
            # A drafter with a KV cache of its own would need a checkpoint; the scheduler reads only the method.
            vllm_config.speculative_config.method = "eagle"
        # vLLM's CPU platform switches asynchronous scheduling off; the emulated device supports it.
        vllm_config.scheduler_config.async_scheduling = options.async_scheduling
        if layout is not None:  # nor does its hybrid KV cache manager need a GPU
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
        with _no_heap_freeze():
            return EngineCore(vllm_config, executor, log_stats=False)


def _speculative_config(options: EngineOptions) -> dict[str, Any] | None:
    """Drafts of as many tokens, by the method that needs no model."""
    if options.drafts is None:
        return None
    return {"method": "ngram", "num_speculative_tokens": options.drafts.tokens, "prompt_lookup_max": 2}


def _later_options(options: EngineOptions) -> dict[str, Any]:
    """EngineArgs that older versions of vLLM lack, only those that differ from vLLM's default.

    Raises UsageError for one that the installed vLLM does not know.
    """
    names = ("max_num_active_seqs", "long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl")
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
    kind: type[Request] = Request,
) -> Request:
    """A request with a fixed output length."""
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    return kind(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
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
