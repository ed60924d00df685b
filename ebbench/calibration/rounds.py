"""Measures a real vLLM in rounds: each round measures every point of the grid once, in a different order.

Other load, clock rates and memory make the same step 10 to 30 % slower or faster for seconds at a time. If every point
were measured in one block, it would absorb such changes; with rounds, machine drift affects all points equally. The
time of a run is the sum of its steps, so means are used instead of medians; only stalls are left out.

The cost of a request outside its steps is measured separately: adding it before its prompt's step, and freeing it in
the step after its last one. It is ``request_s`` in a profile.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ebbench.calibration.measure import Key, ProbeGrid
from ebbench.engines.vllm_command import hub_name
from ebbench.engines.vllm_server import error_reason
from ebbench.errors import RunError, UsageError
from ebbench.grouping import by_key
from ebbench.spec.server import EngineOptions

# Step times of a vLLM engine in this process: every step is called and timed directly, without a server.
#
# Over HTTP the composition of a step depends on arrival times; here it is exact. The time of a step is that of
# `LLMEngine.step`: scheduling, model, sampling and output. `ebbench.calibration.rounds` decides what is measured.

FIRST_TOKEN, TOKENS = 3, 200  # prompt tokens are drawn from this range, which every vocabulary contains

CPU_KV_GIB = "2"


@dataclass
class SteppedVllm:
    """A vLLM engine that runs one step per call. ``clock`` returns seconds; a real GPU needs the wall clock.

    ``eager``: without torch.compile and CUDA graphs, as vLLM's CPU build is measured. ``drafts``: tokens that every
    decode verifies from now on, whatever the server's drafter proposes; None: what it proposes.
    """

    engine: Any
    sampling: Any
    kv_tokens: int
    clock: Callable[[], float] = time.perf_counter
    eager: bool = False
    drafts: int | None = None
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
        self.draft(self.drafts)
        return seconds, [output.request_id for output in outputs if output.finished]

    def draft(self, tokens: int | None) -> None:
        """Let each decode verify so many drafts from the next step on; None: what the drafter proposes."""
        self.drafts = tokens
        if tokens is not None:
            _set_drafts(self.engine.engine_core.engine_core.scheduler, tokens)

    def clear(self, names: Sequence[str]) -> None:
        """Abort all requests and run the step in which the engine removes them."""
        self.engine.abort_request(list(names))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.settle_s()

    def settle_s(self) -> float:
        """Time (s) of a step without requests, in which the engine frees those that have just ended."""
        return self.step_s()[0]


def _set_drafts(scheduler: Any, tokens: int) -> None:
    """Let each decode of the next step verify so many drafts, and the drafter make as many where its number can vary.

    The drafts are of a fixed token, so nearly all are rejected and contexts grow as without drafts.
    """
    for request in scheduler.running:
        if request.num_output_tokens:
            request.spec_token_ids = [FIRST_TOKEN] * tokens
    if scheduler.dynamic_sd_lookup is not None:
        scheduler.dynamic_sd_lookup = [tokens] * len(scheduler.dynamic_sd_lookup)


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
        raise RunError(f"vLLM could not load {model}: {error_reason(error)}") from None
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
        known, unknown = parser.parse_known_args(list(words))
    except SystemExit:
        raise UsageError(f"vLLM refuses the options {' '.join(words)} (its reason is above)") from None
    if unknown:
        print(f"left out of the calibration, not an option of the engine: {' '.join(unknown)}", file=sys.stderr)
    return EngineArgs.from_cli_args(known)


def run_closed_loop(vllm: SteppedVllm, lengths: Sequence[tuple[int, int]], concurrency: int) -> float:
    """Time (s) to serve requests of these (prompt, output) lengths, ``concurrency`` at a time."""
    waiting = iter(lengths)
    start_s = vllm.clock()
    for request in islice(waiting, concurrency):
        vllm.add(*request)
    while vllm.engine.has_unfinished_requests():
        _, ended = vllm.step_s()
        for request in islice(waiting, len(ended)):
            vllm.add(*request)
    seconds = vllm.clock() - start_s
    vllm.settle_s()
    return seconds


STALL = 2.0  # a step that took this many times the median was stalled
SETTLING = 2  # decode steps skipped before the first measured one


@dataclass(frozen=True)
class Probed:
    """Time (s) of every point; ``request_s`` per request; time of the slowest of ``rounds`` over that of the fastest.

    ``undrafted``: the same of steps without drafts, where ``seconds`` are of steps with them and both were measured.
    """

    seconds: Mapping[Key, float]
    request_s: float
    drift: float
    rounds: int
    undrafted: Mapping[Key, float] | None = None


@dataclass
class _Times:
    """Measured times: steps by point and round, and the cost of requests outside their steps."""

    steps: list[tuple[Key, int, float]] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    round: int = 0


def measure_steps(
    vllm: SteppedVllm,
    grid: ProbeGrid,
    pause: Callable[[], None] | None = None,
    reached: Callable[[str, int, int], None] = lambda *_counts: None,
    most_s: float = math.inf,
) -> Probed:
    """Measure ``grid.repeats`` rounds, or as many, at least one, as are expected to end within ``most_s`` seconds.

    ``pause`` is called after each probe, while the engine is empty. ``reached`` is called before each probe with what
    is under way, the probes so far and all probes.
    """
    begun_s = vllm.clock()
    order, by_drafts = random.Random(0), {drafts: _Times() for drafts in _drafts(vllm, grid)}
    probes: list[tuple[int | None, Callable[[], None]]] = []
    for drafts, times in by_drafts.items():
        reached("warm-up", 0, 0)
        vllm.draft(drafts)
        _warm_up(vllm, grid)
        probes += [(drafts, partial(_prefill, vllm, times, x)) for x in grid.tokens]
        decodes = [(n, c) for n in grid.seqs for c in grid.contexts]
        probes += [(drafts, partial(_with_decodes, vllm, times, grid, order, n, c)) for n, c in decodes]
    most, warm_s = grid.drafts or None, vllm.clock()
    for number in range(grid.repeats):
        now_s = vllm.clock()
        if number and now_s - begun_s + (now_s - warm_s) / number > most_s:
            break
        order.shuffle(probes)
        for place, (drafts, probe) in enumerate(probes):
            reached("probes", number * len(probes) + place, grid.repeats * len(probes))
            by_drafts[drafts].round = number
            vllm.draft(drafts)
            probe()
            vllm.draft(most)
            if pause is not None:
                pause()
    measured = {drafts: summarise(times.steps, times.requests) for drafts, times in by_drafts.items()}
    return replace(measured[most], undrafted=measured[0].seconds if 0 in measured else None)


def _drafts(vllm: SteppedVllm, grid: ProbeGrid) -> tuple[int | None, ...]:
    """The drafts per decode to measure: what the grid asks for, and none where the drafter can be switched off."""
    if not grid.drafts:
        return (None,)
    switches = vllm.engine.engine_core.engine_core.scheduler.dynamic_sd_lookup is not None
    return (grid.drafts, 0) if switches else (grid.drafts,)


def summarise(steps: list[tuple[Key, int, float]], requests: list[float]) -> Probed:
    """From single steps (point, round, seconds) to a time per point, a time per request, and the drift between
    rounds."""
    times_by_point = by_key((key, seconds) for key, _, seconds in steps)
    typical = {key: without_stalls(times) for key, times in times_by_point.items()}
    by_round = by_key((number, seconds / typical[key]) for key, number, seconds in steps)
    speeds = [float(np.median(ratios)) for ratios in by_round.values()]
    return Probed(typical, max(_middle(requests), 0.0), max(speeds) / min(speeds), len(by_round))


def without_stalls(times: list[float]) -> float:
    """Mean of the times that are at most STALL times the median."""
    values = np.asarray(times)
    return float(values[values <= STALL * np.median(values)].mean())


def _middle(values: list[float]) -> float:
    """Mean of the middle half of the values, which are differences: a stall may change them in either direction."""
    ordered = np.sort(values)
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


def _warm_up(vllm: SteppedVllm, grid: ProbeGrid) -> None:
    """Run every shape once: the first step of a shape allocates, compiles or captures."""
    nowhere = _Times()
    for x in grid.tokens:
        _prefill(vllm, nowhere, x)
    for n in grid.seqs:
        _with_decodes(vllm, nowhere, grid, random.Random(0), n, grid.contexts[0])


def _prefill(vllm: SteppedVllm, times: _Times, tokens: int) -> None:
    """A single prompt with one output token."""
    start_s = vllm.clock()
    vllm.add(tokens, 1)
    taken_in_s = vllm.clock() - start_s
    times.steps.append(((tokens, 0, 0), times.round, vllm.step_s()[0]))
    times.requests.append(taken_in_s + vllm.settle_s())


def _with_decodes(
    vllm: SteppedVllm, times: _Times, grid: ProbeGrid, order: random.Random, seqs: int, context: int
) -> None:
    """``seqs`` decodes alone, then joined by one prompt at a time; the context grows by a few tokens meanwhile."""
    filling = grid.filling_steps(seqs, context)
    steps = filling + SETTLING + 4 * len(grid.tokens)
    names = [vllm.add(max(context - steps // 2, 1), 2 * steps) for _ in range(seqs)]
    for _ in range(filling + SETTLING):
        vllm.step_s()
    for tokens in order.sample(grid.tokens, len(grid.tokens)):
        start_s = vllm.clock()
        vllm.add(tokens, 1)
        taken_in_s = vllm.clock() - start_s
        times.steps.append(((tokens, seqs, context), times.round, vllm.step_s()[0]))
        forgetting_s = vllm.step_s()[0]
        vllm.step_s()  # some per cent slower than usual: the caches hold the prompt
        alone_s = vllm.step_s()[0]
        times.steps.append(((0, seqs, context), times.round, alone_s))
        times.requests.append(taken_in_s + forgetting_s - alone_s)
    vllm.clear(names)
