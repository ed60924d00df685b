"""Step times of a vLLM engine in this process: every step is called and timed directly, without a server.

Over HTTP the composition of a step depends on arrival times; here it is exact. The time of a step is that of
``LLMEngine.step``: scheduling, model, sampling and output. :mod:`ebbench.calibration.rounds` decides what is measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ebbench.calibration.measure import ProbeGrid
from ebbench.engines.server_log import reason_of
from ebbench.engines.vllm_command import hub_name
from ebbench.errors import RunError, UsageError
from ebbench.spec.server import EngineOptions

FIRST_TOKEN, TOKENS = 3, 200  # prompt tokens are drawn from this range, which every vocabulary contains
CPU_KV_GIB = "2"


@dataclass
class SteppedVllm:
    """A vLLM engine that runs one step per call. ``clock`` returns seconds; a real GPU needs the wall clock.

    ``eager``: without torch.compile and CUDA graphs, as vLLM's CPU build is measured.
    """

    engine: Any
    sampling: Any
    kv_tokens: int
    clock: Callable[[], float] = time.perf_counter
    eager: bool = False
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


def start(model: str, grid: ProbeGrid, vllm_options: Sequence[str] = ()) -> SteppedVllm:
    """Load the model; ``vllm_options`` are words as for ``vllm serve``, of which those for the engine count.

    Raises UsageError without vLLM and for options it refuses, RunError when vLLM cannot start.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GIB)
    try:
        from vllm import LLMEngine, SamplingParams
        from vllm.platforms import current_platform
    except ImportError:
        raise UsageError("vLLM is not installed: pip install 'ebbench[cpu]', or calibrate --engine sim") from None
    eager = current_platform.is_cpu()
    words = engine_words(model, grid.options, eager=eager)
    try:
        engine = LLMEngine.from_engine_args(_engine_args([*words, *vllm_options]))
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(f"vLLM could not load {model}: {reason_of(error)}") from None
    cache = engine.vllm_config.cache_config
    return SteppedVllm(engine, SamplingParams, int(cache.num_gpu_blocks or 0) * int(cache.block_size), eager=eager)


def engine_words(model: str, options: EngineOptions, *, eager: bool) -> list[str]:
    """Options of vLLM's engine under which every probe is one step, as words of ``vllm serve``."""
    folder = Path(model).parent if Path(model).name == "config.json" else Path(model)
    return [
        "--model", str(folder) if folder.is_dir() else hub_name(model),
        "--max-num-seqs", str(options.max_num_seqs),
        "--max-num-batched-tokens", str(options.max_num_batched_tokens),
        "--max-model-len", str(options.max_model_len),
        "--no-enable-prefix-caching",
        "--no-async-scheduling",
        *(["--enforce-eager"] if eager else []),
        "--disable-log-stats",
    ]  # fmt: skip


def _engine_args(words: Sequence[str]) -> Any:
    """vLLM's own reading of the words; options of the API server are no matter to a step and are left out."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    try:
        found, unknown = parser.parse_known_args(list(words))
    except SystemExit:
        raise UsageError(f"vLLM refuses the options {' '.join(words)} (its reason is above)") from None
    if unknown:
        print(f"left out of the calibration, not an option of the engine: {' '.join(unknown)}", file=sys.stderr)
    return EngineArgs.from_cli_args(found)


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
