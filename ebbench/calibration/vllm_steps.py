"""Step times of a vLLM engine in this process: every step is called and timed directly, without a server.

Over HTTP the composition of a step depends on arrival times; here it is exact. The time of a step is that of
``LLMEngine.step``: scheduling, model, sampling and output. :mod:`ebbench.calibration.rounds` decides what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ebbench.calibration.measure import ProbeGrid
from ebbench.errors import RunError, UsageError

FIRST_TOKEN, TOKENS = 3, 200  # prompt tokens are drawn from this range, which every vocabulary contains
CPU_KV_GIB = "2"


@dataclass
class SteppedVllm:
    """A vLLM engine that runs one step per call. ``clock`` returns seconds; a real GPU needs the wall clock."""

    engine: Any
    sampling: Any
    kv_tokens: int
    clock: Callable[[], float] = time.perf_counter
    _count: int = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> str:
        """Add a request with a unique prompt; returns its id."""
        self._count += 1
        name = f"r{self._count}"
        drawn = np.random.default_rng(self._count).integers(FIRST_TOKEN, FIRST_TOKEN + TOKENS, prompt_tokens)
        prompt = {"prompt_token_ids": drawn.tolist()}
        settings = self.sampling(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        self.engine.add_request(name, prompt, settings)
        return name

    def step_s(self) -> tuple[float, list[str]]:
        """Time (s) of the next step, and the ids of the requests that ended with it."""
        start = self.clock()
        outputs = self.engine.step()
        seconds = self.clock() - start
        return seconds, [output.request_id for output in outputs if output.finished]

    def clear(self, names: Sequence[str]) -> None:
        """Abort all requests and run the step in which the engine removes them."""
        self.engine.abort_request(list(names))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.settle_s()

    def settle_s(self) -> float:
        """Time (s) of a step without requests, in which the engine frees those that have just ended."""
        return self.step_s()[0]


def start(model: str, grid: ProbeGrid) -> SteppedVllm:
    """Load the model. Raises UsageError without vLLM, RunError if vLLM cannot start."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GIB)
    try:
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.platforms import current_platform
    except ImportError:
        raise UsageError("vLLM is not installed: pip install 'ebbench[cpu]', or calibrate --engine sim") from None
    options = grid.options
    try:
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(Path(model).parent) if model.endswith("config.json") else model,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_model_len=options.max_model_len,
                enable_prefix_caching=False,
                async_scheduling=False,
                enforce_eager=current_platform.is_cpu(),
                disable_log_stats=True,
            )
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(f"vLLM could not load {model}: {str(error).splitlines()[0]}") from None
    cache = engine.vllm_config.cache_config
    return SteppedVllm(engine, SamplingParams, int(cache.num_gpu_blocks or 0) * int(cache.block_size))


def run_closed_loop(vllm: SteppedVllm, lengths: Sequence[tuple[int, int]], concurrency: int) -> float:
    """Time (s) to serve requests of these (prompt, output) lengths, ``concurrency`` at a time."""
    waiting = list(reversed(lengths))
    start_s = vllm.clock()
    for _ in range(min(concurrency, len(waiting))):
        vllm.add(*waiting.pop())
    while vllm.engine.has_unfinished_requests():
        _, ended = vllm.step_s()
        for _ in ended:
            if waiting:
                vllm.add(*waiting.pop())
    seconds = vllm.clock() - start_s
    vllm.settle_s()
    return seconds
