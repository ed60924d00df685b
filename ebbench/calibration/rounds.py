"""The probes of a real vLLM, in rounds: each round measures every point of the grid once, in an order of its own.

A machine does not keep its speed: other work, clock rates and memory make the same step 10 to 30 % slower or faster
for seconds at a time. Measured in one block each, points would absorb such changes; with rounds, drift of the machine
affects all points equally. A run's time is the sum of its steps, so the mean is taken, not the median; only stalls are
left out.

What a request costs beside its steps is measured apart: to be taken in before its prompt's step, and to be forgotten in
the step after its last. In a profile that is ``request_s``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ebbench.calibration.measure import Key, ProbeGrid
from ebbench.calibration.vllm_steps import SteppedVllm

STALL = 2.0  # a step that took so many times the median was held up by something else
SETTLING = 2  # plain decode steps before the first that counts


@dataclass(frozen=True)
class Probed:
    """Seconds of every point; ``request_s`` more for each request; the slowest round's time over the fastest's."""

    seconds: Mapping[Key, float]
    request_s: float
    drift: float


@dataclass
class _Times:
    """What the rounds found so far: by point and round, and what requests took beside their steps."""

    steps: list[tuple[Key, int, float]] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    round: int = 0

    def add(self, key: Key, seconds: float) -> None:
        """One step of this shape."""
        self.steps.append((key, self.round, seconds))


def measure_steps(vllm: SteppedVllm, grid: ProbeGrid, pause: Callable[[], None] | None = None) -> Probed:
    """Measure ``grid.repeats`` rounds. ``pause`` is called after each probe, with the engine empty."""
    _warm_up(vllm, grid)
    times, order = _Times(), random.Random(0)
    probes = [partial(_prefill, vllm, times, x) for x in grid.tokens]
    probes += [partial(_with_decodes, vllm, times, grid, order, n, c) for n in grid.seqs for c in grid.contexts]
    for times.round in range(grid.repeats):
        order.shuffle(probes)
        for probe in probes:
            probe()
            if pause is not None:
                pause()
    return summarise(times.steps, times.requests)


def summarise(steps: list[tuple[Key, int, float]], requests: list[float]) -> Probed:
    """From single steps (point, round, seconds) to a time for each point, one for requests, and the rounds' spread."""
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
    """The mean of what took at most STALL times the median."""
    values = np.asarray(times)
    return float(values[values <= STALL * np.median(values)].mean())


def _middle(values: list[float]) -> float:
    """The mean of the middle half: these are differences, in which a stall may have either sign."""
    ordered = np.sort(values)
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


def _warm_up(vllm: SteppedVllm, grid: ProbeGrid) -> None:
    """Every shape's first step allocates, compiles or captures."""
    nowhere = _Times()
    for x in grid.tokens:
        _prefill(vllm, nowhere, x)
    for n in grid.seqs:
        _with_decodes(vllm, nowhere, grid, random.Random(0), n, grid.contexts[0])


def _prefill(vllm: SteppedVllm, times: _Times, tokens: int) -> None:
    """A lone prompt with one token of answer."""
    start_s = vllm.clock()
    vllm.add(tokens, 1)
    taken_in_s = vllm.clock() - start_s
    times.add((tokens, 0, 0), vllm.step_s()[0])
    times.requests.append(taken_in_s + vllm.settle_s())


def _with_decodes(
    vllm: SteppedVllm, times: _Times, grid: ProbeGrid, order: random.Random, seqs: int, context: int
) -> None:
    """``seqs`` decodes alone, joined by one prompt at a time; the context drifts by a few tokens meanwhile."""
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
        vllm.step_s()  # still slower by some per cent, its caches full of the prompt
        alone_s = vllm.step_s()[0]
        times.add((0, seqs, context), alone_s)
        times.requests.append(taken_in_s + forgetting_s - alone_s)
    vllm.clear(names)
