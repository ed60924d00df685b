"""The gate tried on itself: how often it fails two equal sides, and how often it finds a slow-down put in.

A trial is a whole comparison: pairs of simulated server restarts in ABBA order, on the simulator, whose step times
are disturbed as a real machine's are:

- every restart has a speed of its own (clocks, memory layout): log-normal, ``restart`` standard deviation
- every step jitters: log-normal, ``step``
- the machine drifts over the session: ``drift`` per restart, linearly
- now and then a step stalls: probability ``stall_share``, ten times its length

A slow-down multiplies the candidate's step times. The plan is new in every pair, the same on both sides.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context

import numpy as np

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.gate.units import Unit, figures_of
from ebbench.analysis.gate.verdict import DEFAULT_RULES, Outcome, Pair, Rules, judge
from ebbench.analysis.metrics import measure
from ebbench.child import begin_pool_worker
from ebbench.devices import load_device
from ebbench.devices.base import CostModel, Device, StepShape
from ebbench.engines.base import EngineOptions
from ebbench.engines.sim import SimEngine
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

OPTIONS = EngineOptions(max_num_seqs=32, max_num_batched_tokens=2048)
REQUESTS, CONCURRENCY, INPUT_TOKENS, OUTPUT_TOKENS = 96, 32, 256, 16  # small: a trial is twelve runs


@dataclass(frozen=True)
class Noise:
    """Disturbances of step times; all shares of the undisturbed time."""

    name: str
    restart: float = 0.01
    step: float = 0.05
    drift: float = 0.0
    stall_share: float = 0.0


NOISES = (
    Noise("restarts differ by 1 %, steps by 5 %"),
    Noise("and the machine slows by 0.3 % a restart", drift=0.003),
    Noise("and one step in 200 stalls tenfold", stall_share=0.005),
)
SLOWDOWNS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.10)


@dataclass(frozen=True)
class Design:
    """One kind of trial."""

    noise: Noise
    slowdown: float
    pairs: int
    rules: Rules = DEFAULT_RULES


@dataclass(frozen=True)
class Tally:
    """Outcomes of many trials of one design."""

    design: Design
    failed: int
    passed: int
    inconclusive: int

    @property
    def trials(self) -> int:
        """How many were made."""
        return self.failed + self.passed + self.inconclusive

    def share(self, outcome: Outcome) -> float:
        """Share of an outcome."""
        return {"fail": self.failed, "pass": self.passed, "inconclusive": self.inconclusive}[outcome] / self.trials


@dataclass(frozen=True)
class SelfTest:
    """Equal sides under each noise, and slow-downs under the first."""

    equal: tuple[Tally, ...]
    slowed: tuple[Tally, ...]


def run_self_test(
    *,
    trials: int = 1_000,
    power_trials: int = 200,
    pairs: int = 6,
    rules: Rules = DEFAULT_RULES,
    workers: int = 1,
    seed: int = 0,
) -> SelfTest:
    """Try the gate ``trials`` times per noise on equal sides, ``power_trials`` times per slow-down."""
    equal = [Design(noise, 0.0, pairs, rules) for noise in NOISES]
    slowed = [Design(NOISES[0], slowdown, pairs, rules) for slowdown in SLOWDOWNS]
    with _pool(workers) as pool:
        tallies = [
            _tally(pool, design, count, seed + 1_000_000 * index)
            for index, (design, count) in enumerate(
                [(design, trials) for design in equal] + [(design, power_trials) for design in slowed]
            )
        ]
    return SelfTest(tuple(tallies[: len(equal)]), tuple(tallies[len(equal) :]))


def trial(design: Design, seed: int) -> Outcome:
    """One comparison from its seed."""
    drawn = np.random.default_rng(seed)
    pairs = []
    for index in range(design.pairs):
        order = (0.0, design.slowdown) if index % 2 == 0 else (design.slowdown, 0.0)
        sides = [
            _restart(design.noise, slowdown, 2 * index + place, seed * 100 + index, drawn)
            for place, slowdown in enumerate(order)
        ]
        pairs.append(Pair(*sides) if index % 2 == 0 else Pair(sides[1], sides[0]))
    return judge(pairs, design.rules, with_detectable=False).outcome


def _restart(noise: Noise, slowdown: float, number: int, plan_seed: int, drawn: np.random.Generator) -> Unit:
    speed = math.exp(drawn.normal(0.0, noise.restart)) * (1 + noise.drift * number) * (1 + slowdown)
    device = _device()
    disturbed = replace(
        device, cost=_Disturbed(device.cost, speed, noise, np.random.default_rng(drawn.integers(2**63)))
    )
    plan = build_plan(
        "balanced",
        num_prompts=REQUESTS,
        seed=plan_seed,
        max_concurrency=CONCURRENCY,
        input_len=INPUT_TOKENS,
        output_len=OUTPUT_TOKENS,
    )
    result = SimEngine().run(plan, parse_policy("v1"), disturbed, OPTIONS)
    figures = figures_of(measure(RequestColumns.of(result.requests)))
    return Unit({}, "v1", str(plan_seed), plan_seed, False, number, "", figures)


class _Disturbed:
    """A cost model with noise; a new one for every restart."""

    def __init__(self, cost: CostModel, speed: float, noise: Noise, drawn: np.random.Generator) -> None:
        self._cost, self._speed, self._noise, self._drawn = cost, speed, noise, drawn
        self._factors: list[float] = []

    def step_s(self, shape: StepShape) -> float:
        """The model's time, disturbed."""
        if not self._factors:
            factors = self._speed * np.exp(self._drawn.normal(0.0, self._noise.step, 512))
            if self._noise.stall_share:
                factors *= np.where(self._drawn.random(512) < self._noise.stall_share, 10.0, 1.0)
            self._factors = factors.tolist()
        return self._cost.step_s(shape) * self._factors.pop()


@cache
def _device() -> Device:
    return load_device("rtx-pro-6000", "qwen3-8b", max_num_seqs=32, max_num_batched_tokens=2048)


def _tally(pool: ProcessPoolExecutor | None, design: Design, count: int, seed: int) -> Tally:
    seeds = range(seed, seed + count)
    if pool is None:
        outcomes = [trial(design, each) for each in seeds]
    else:
        outcomes = list(pool.map(_trial_of, [(design, each) for each in seeds]))
    return Tally(design, outcomes.count("fail"), outcomes.count("pass"), outcomes.count("inconclusive"))


def _trial_of(task: tuple[Design, int]) -> Outcome:
    return trial(*task)


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    if workers < 2:
        yield None
        return
    spawn = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=begin_pool_worker) as pool:
        _begin(pool, workers)
        try:
            yield pool
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(pool: ProcessPoolExecutor, workers: int) -> None:
    """Start the workers deaf to Ctrl-C, which is the parent's business: they inherit it before they import anything."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are the main thread's
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(workers):
            pool.submit(int)
    finally:
        signal.signal(signal.SIGINT, before)


def false_alarms(tallies: Sequence[Tally]) -> float:
    """The highest share of failures among trials of equal sides."""
    return max(tally.share("fail") for tally in tallies)
