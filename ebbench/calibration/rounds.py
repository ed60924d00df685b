"""Measures a real vLLM in rounds: each round measures every point of the grid once, in a different order.

Other load, clock rates and memory make the same step 10 to 30 % slower or faster for seconds at a time. If every point
were measured in one block, it would absorb such changes; with rounds, machine drift affects all points equally. The
time of a run is the sum of its steps, so means are used instead of medians; only stalls are left out.

The cost of a request outside its steps is measured separately: adding it before its prompt's step, and freeing it in
the step after its last one. It is ``request_s`` in a profile.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ebbench.calibration.measure import Key, ProbeGrid
from ebbench.calibration.vllm_steps import SteppedVllm

STALL = 2.0  # a step that took this many times the median was stalled
SETTLING = 2  # decode steps skipped before the first measured one


@dataclass(frozen=True)
class Probed:
    """Time (s) of every point; ``request_s`` per request; time of the slowest round over that of the fastest."""

    seconds: Mapping[Key, float]
    request_s: float
    drift: float


@dataclass
class _Times:
    """Measured times: steps by point and round, and the cost of requests outside their steps."""

    steps: list[tuple[Key, int, float]] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    round: int = 0

    def add(self, key: Key, seconds: float) -> None:
        """Record a step of this shape."""
        self.steps.append((key, self.round, seconds))


def measure_steps(
    vllm: SteppedVllm,
    grid: ProbeGrid,
    pause: Callable[[], None] | None = None,
    reached: Callable[[str, int, int], None] = lambda *_counts: None,
) -> Probed:
    """Measure ``grid.repeats`` rounds. ``pause`` is called after each probe, while the engine is empty.

    ``reached`` is called before each probe with what is under way, the probes so far and all probes.
    """
    reached("warm-up", 0, 0)
    _warm_up(vllm, grid)
    times, order = _Times(), random.Random(0)
    probes = [partial(_prefill, vllm, times, x) for x in grid.tokens]
    probes += [partial(_with_decodes, vllm, times, grid, order, n, c) for n in grid.seqs for c in grid.contexts]
    for times.round in range(grid.repeats):
        order.shuffle(probes)
        for place, probe in enumerate(probes):
            reached("probes", times.round * len(probes) + place, grid.repeats * len(probes))
            probe()
            if pause is not None:
                pause()
    return summarise(times.steps, times.requests)


def summarise(steps: list[tuple[Key, int, float]], requests: list[float]) -> Probed:
    """From single steps (point, round, seconds) to a time per point, a time per request, and the drift between
    rounds."""
    by_key: dict[Key, list[float]] = {}
    for key, _, seconds in steps:
        by_key.setdefault(key, []).append(seconds)
    typical = {key: without_stalls(times) for key, times in by_key.items()}
    by_round: dict[int, list[float]] = {}
    for key, number, seconds in steps:
        by_round.setdefault(number, []).append(seconds / typical[key])
    speeds = [float(np.median(ratios)) for ratios in by_round.values()]
    return Probed(typical, max(_middle(requests), 0.0), max(speeds) / min(speeds))


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
    times.add((tokens, 0, 0), vllm.step_s()[0])
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
        times.add((tokens, seqs, context), vllm.step_s()[0])
        forgetting_s = vllm.step_s()[0]
        vllm.step_s()  # some per cent slower than usual: the caches hold the prompt
        alone_s = vllm.step_s()[0]
        times.add((0, seqs, context), alone_s)
        times.requests.append(taken_in_s + forgetting_s - alone_s)
    vllm.clear(names)
