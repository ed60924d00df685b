"""Measures the gate's error rates: how often it fails equal sides, and how often it detects an injected slow-down.

A trial is a whole comparison: pairs of simulated server restarts in ABBA order, on the simulator, with step times
disturbed as on a real machine:

- every restart has its own speed (clocks, memory layout): log-normal, standard deviation ``restart``
- every step jitters: log-normal, ``step``
- the machine drifts over the session: ``drift`` per restart, linearly
- some steps stall: probability ``stall_share``, ten times their length

A slow-down multiplies the candidate's step times. Every pair has a new plan, the same on both sides. Trials with
sequential rules add pairs until the verdict is known, as ``ebbench gate --max-pairs`` does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure
from ebbench.analysis.statistics import evidence
from ebbench.analysis.units import GateUnit, unit_figures
from ebbench.analysis.verdict import DEFAULT_RULES, MAX_PAIRS, MIN_PAIRS, Outcome, Pair, Rules, judge, pairs_needed
from ebbench.devices.base import CostModel, Device, StepShape
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.runs.pool import make_pool, values
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

OPTIONS = EngineOptions(max_num_seqs=32, max_num_batched_tokens=2048)
REQUESTS, CONCURRENCY, INPUT_TOKENS, OUTPUT_TOKENS = 96, 32, 256, 16  # small: a trial has twelve runs or more


@dataclass(frozen=True)
class Noise:
    """Disturbances of step times, as shares of the undisturbed time."""

    name: str
    restart: float = 0.01
    step: float = 0.05
    drift: float = 0.0
    stall_share: float = 0.0


NOISES = (
    Noise("restarts differ by 1 %, steps by 5 %"),
    Noise("and the machine slows by 0.3 % per restart", drift=0.003),
    Noise("and one step in 200 stalls tenfold", stall_share=0.005),
)
SLOWDOWNS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.10)


@dataclass(frozen=True)
class Design:
    """One kind of trial. ``pairs``: number of pairs, with sequential rules the maximum."""

    noise: Noise
    slowdown: float
    pairs: int
    rules: Rules = DEFAULT_RULES

    def __str__(self) -> str:
        candidate = f"candidate {self.slowdown:.0%} slower" if self.slowdown else "equal sides"
        pairs = f"at most {self.pairs}" if self.rules.sequential else f"{self.pairs}"
        return f"{candidate}, {pairs} pairs, {self.noise.name}"


@dataclass(frozen=True)
class Trial:
    """The outcome of one comparison and the number of pairs used."""

    outcome: Outcome
    pairs: int


@dataclass(frozen=True)
class TrialTally:
    """All trials of one design."""

    design: Design
    trials: list[Trial] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        """Number of trials with this outcome."""
        return sum(trial.outcome == outcome for trial in self.trials)


@dataclass(frozen=True)
class SelfTest:
    """Trials of equal sides under each noise and of slow-downs under the first, with fixed and sequential rules."""

    equal: tuple[TrialTally, ...]
    slowed: tuple[TrialTally, ...]
    equal_sequential: tuple[TrialTally, ...]
    slowed_sequential: tuple[TrialTally, ...]


def tried_in_parallel(trials: int, workers: int | None, rules: Rules, say: Callable[[str], None]) -> SelfTest:
    """The self-test with so many trials per noise in worker processes. Raises UsageError."""
    if trials < 20:
        raise UsageError(f"--trials must be at least 20, not {trials}")
    tried = partial(values, make_pool(workers, trials), run_trial)
    return run_self_test(trials=trials, power_trials=trials // 5, rules=rules, tried=tried, say=say)


Task = tuple[int, Design, int]
"""Number of the design, the design, the seed of the trial."""
Try = Callable[[Sequence[Task]], Iterable[tuple[int, Trial]]]


def run_trial(task: Task) -> tuple[int, Trial]:
    """Run the trial of a design from a seed; called in worker processes. Returns the number of its design with it."""
    number, design, seed = task
    return number, trial(design, seed)


def run_self_test(
    *,
    trials: int = 1_000,
    power_trials: int = 200,
    rules: Rules = DEFAULT_RULES,
    tried: Try | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> SelfTest:
    """Try the gate ``trials`` times per noise on equal sides and ``power_trials`` times per slow-down.

    Sequential trials need more pairs, so there are fewer: a quarter of ``trials`` per noise, a fifth of
    ``power_trials`` per slow-down. ``tried`` runs all tasks, once, and yields results in any order (worker processes
    are started once, not per design); the default runs them one after another in this process. ``say`` gets a line
    per design when its trials are done.
    """
    looked = replace(rules, sequential=True)
    groups = [
        [(Design(noise, 0.0, MIN_PAIRS, rules), trials) for noise in NOISES],
        [(Design(NOISES[0], slowdown, MIN_PAIRS, rules), power_trials) for slowdown in SLOWDOWNS],
        [(Design(noise, 0.0, MAX_PAIRS, looked), max(trials // 4, 1)) for noise in NOISES],
        [(Design(NOISES[0], slowdown, MAX_PAIRS, looked), max(power_trials // 5, 1)) for slowdown in SLOWDOWNS[2:]],
    ]
    counted = [pair for group in groups for pair in group]
    tallies = [TrialTally(design) for design, _ in counted]
    tasks = [
        (number, design, number * 1_000_000 + repeat)
        for number, (design, count) in enumerate(counted)
        for repeat in range(count)
    ]
    done = itertools.count(1)
    for number, result in map(run_trial, tasks) if tried is None else tried(tasks):
        tally, (design, count) = tallies[number], counted[number]
        tally.trials.append(result)
        if len(tally.trials) == count:
            failed = f"{tally.count('fail')} of {count} failed, {tally.count('pass')} passed"
            say(f"{next(done)} of {len(counted)}: {design}: {failed}")
    in_order = iter(tallies)
    return SelfTest(*(tuple(itertools.islice(in_order, len(group))) for group in groups))


def trial(design: Design, seed: int) -> Trial:
    """Run one comparison from its seed."""
    drawn = np.random.default_rng(seed)
    least = pairs_needed(design.rules, len(design.rules.gated)) if design.rules.sequential else design.pairs
    pairs: list[Pair] = []
    outcome: Outcome = "inconclusive"
    for index in range(design.pairs):
        pairs.append(_pair(design, index, seed, drawn))
        if len(pairs) >= least:
            outcome = judge(pairs, design.rules, with_detectable=False).outcome
            if outcome != "inconclusive":
                break
    return Trial(outcome, len(pairs))


def _pair(design: Design, index: int, seed: int, drawn: np.random.Generator) -> Pair:
    """One restart of each side on a new plan, the candidate first in every second pair."""
    plan_seed = seed * 100 + index
    plan = build_plan(
        "balanced", num_prompts=REQUESTS, seed=plan_seed, max_concurrency=CONCURRENCY, input_len=INPUT_TOKENS,
        output_len=OUTPUT_TOKENS,
    )  # fmt: skip
    turn = 1 if index % 2 == 0 else -1
    sides = []
    for number, slowdown in enumerate((0.0, design.slowdown)[::turn], start=2 * index):
        figures = _restart(design.noise, slowdown, number, plan, drawn)
        sides.append(GateUnit({}, "v1", str(plan_seed), plan_seed, False, number, "", figures))
    return Pair(*sides[::turn])


def pairs_by_spread(
    ratios: Sequence[float], *, margin: float = 0.03, confidence: float = 0.95, draws: int = 1_000
) -> list[tuple[float, float, float]]:
    """For each ratio of the losses' spread to the margin: pairs until one figure of equal sides passes.

    Rows of (ratio, median, 90th percentile); losses drawn from a normal distribution; infinite beyond 200 pairs.
    """
    rows = []
    limit, level = math.log1p(margin), (1 - confidence) / 2
    for ratio in ratios:
        losses = np.random.default_rng(7).normal(0.0, ratio * limit, (draws, 200))
        known = [evidence(-drawn, -limit) >= 1 / level for drawn in losses]
        counts = [float(np.argmax(drawn)) + 1 if drawn.any() else math.inf for drawn in known]
        middle, upper = np.quantile(counts, (0.5, 0.9), method="higher")
        rows.append((ratio, float(middle), float(upper)))
    return rows


def _restart(
    noise: Noise, slowdown: float, number: int, plan: Plan, drawn: np.random.Generator
) -> dict[str, float | None]:
    """The figures of one run of the plan on a server of this speed."""
    speed = math.exp(drawn.normal(0.0, noise.restart)) * (1 + noise.drift * number) * (1 + slowdown)
    device, own = _device(), np.random.default_rng(drawn.integers(2**63))
    disturbed = replace(device, cost=_Disturbed(device.cost, speed, noise, own))
    result = SimEngine().run(plan, parse_policy("v1"), disturbed, OPTIONS).uninterrupted()
    return unit_figures(measure(RequestColumns.of(result.requests)))


class _Disturbed:
    """A cost model with noise; created anew for every restart."""

    def __init__(self, cost: CostModel, speed: float, noise: Noise, drawn: np.random.Generator) -> None:
        self._cost, self._speed, self._noise, self._drawn = cost, speed, noise, drawn
        self._factors: list[float] = []

    def step_s(self, shape: StepShape) -> float:
        """The model's step time (s) with noise."""
        if not self._factors:
            factors = self._speed * np.exp(self._drawn.normal(0.0, self._noise.step, 512))
            if self._noise.stall_share:
                factors *= np.where(self._drawn.random(512) < self._noise.stall_share, 10.0, 1.0)
            self._factors = factors.tolist()
        return self._cost.step_s(shape) * self._factors.pop()


@cache
def _device() -> Device:
    return load_device("rtx-pro-6000", "qwen3-8b", max_num_seqs=32, max_num_batched_tokens=2048)


def false_alarms(tallies: Sequence[TrialTally]) -> float:
    """The highest share of failed trials of equal sides."""
    return max(tally.count("fail") / len(tally.trials) for tally in tallies)
