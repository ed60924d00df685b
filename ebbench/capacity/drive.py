"""Carry out a capacity search: probe, read, decide, until the answer is precise enough or the budget is spent.

The search first measures requests alone. Limits that they miss even then cannot be met at any load; the outcome then
says so and names the lowest limits that can be met. Their latency also gives the first load to try.

Every probe is an ordinary run directory. A search that was stopped reads the directories it left and goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ebbench.analysis.columns import RequestColumns
from ebbench.capacity.limits import Limits
from ebbench.capacity.probe import FEWEST_PER_OPEN, Reading, least_possible, read_probe
from ebbench.capacity.search import Estimate, Probe, Search, estimate, next_load
from ebbench.errors import RunError
from ebbench.records.run import Run

ALONE_SESSIONS = 40
_FIRST_OPEN = 4
"""Sessions that are open on average at the first load tried."""
_TRIES = 3
"""INVALID runs in a row after which a search is given up: the client's machine is too busy or too slow."""
_NEAR, _NEAR_ABOVE = 1.05, 1.25
"""Loads this much lower, and this much higher, than one whose run was too short need as long a run."""


class Prober(Protocol):
    """Makes runs. ``load`` is a request rate or a concurrency, as the search is asked."""

    def alone(self, sessions: int) -> Run:
        """Run so many sessions one after the other."""
        ...

    def probe(self, load: float, sessions: int, seed: int) -> Run:
        """Run so many sessions at a load."""
        ...


@dataclass(frozen=True)
class Budget:
    """When to stop: after so many probes, or seconds of wall-clock time since ``begun`` (:func:`time.monotonic`).

    ``named_s``: the time that the user gave for all policies together; messages name it.
    """

    probes: int = 60
    seconds: float = math.inf
    named_s: float = math.inf
    begun: float = field(default_factory=time.monotonic)

    def spent(self, probes: int) -> str:
        """Which limit was reached; empty while none is."""
        if probes >= self.probes:
            return f"--max-probes {self.probes}"
        if time.monotonic() - self.begun > self.seconds:
            return self.of_time
        return ""

    @property
    def of_time(self) -> str:
        """The option that limits the time, as the user gave it."""
        return f"--max-time {self.named_s if math.isfinite(self.named_s) else self.seconds:g}"


@dataclass(frozen=True)
class SearchConfig:
    """One search. ``sessions``: fewest per probe. ``seconds``: least time over which sessions arrive. ``real_time``:
    probes last as long as they say. ``longest``: a probe gets at most so many times the fewest sessions.
    """

    limits: Limits
    by_concurrency: bool
    sessions: int
    seconds: float
    precision: float
    seed: int
    real_time: bool = False
    longest: int = 16
    most: float = math.inf

    def fewest(self, load: float) -> int:
        """Sessions of a probe at ``load`` at least."""
        return max(self.sessions, math.ceil(2 * FEWEST_PER_OPEN * load if self.by_concurrency else self.seconds * load))


_NOTHING = Search((), start=1.0)


@dataclass(frozen=True)
class Outcome:
    """What a search found. ``stopped``: why it ended early; empty when the interval is as narrow as asked.

    ``refused``: why no load can meet the limits; nothing was searched for then.
    """

    estimate: Estimate
    readings: tuple[Reading, ...]
    alone: Reading
    stopped: str = ""
    refused: str = ""

    @property
    def decided(self) -> bool:
        """Whether any probe said anything about capacity."""
        return self.estimate.capacity is not None or math.isfinite(self.estimate.high)

    @property
    def nearest(self) -> Reading:
        """The reading with a bounded queue nearest to the capacity; requests alone where there is none."""
        capacity = self.estimate.capacity
        bounded = [r for r in self.readings if r.decides and not r.probe.runaway and not r.probe.failed]
        if capacity is None:
            return min(bounded, key=lambda reading: reading.probe.load, default=self.alone)
        return min(bounded, key=lambda reading: abs(math.log(reading.probe.load / capacity)), default=self.alone)

    @property
    def limited_by(self) -> str:
        """``ttft``, ``tpot``, ``e2el``, ``memory``, ``queue``, ``errors`` or ``not reached``.

        Of limits that must be met together, the one that the fewest requests met. ``memory``: the KV cache was full
        for most of the time at capacity, so that more memory, not more speed, would carry more.
        """
        by = self.estimate.limited_by
        if self.refused:
            return "limits"
        if by in ("queue", "errors", "not reached"):
            return by
        over = [r for r in self.readings if r.probe.load >= (self.estimate.capacity or 0) and r.decides]
        reading = min(over, key=lambda r: r.probe.load, default=self.nearest)
        if reading.memory_full > 0.5:
            return "memory"
        names = [name for name in reading.shares if name.partition(":")[0] in by.split()]
        return min(names, key=lambda name: reading.shares[name]).partition(":")[0] if names else by


def search_capacity(
    config: SearchConfig,
    prober: Prober,
    budget: Budget,
    earlier: Sequence[tuple[float, Run]] = (),
    seen: Callable[[Reading, Estimate], None] = lambda _reading, _estimate: None,
) -> Outcome:
    """Search until the interval is as narrow as asked. ``earlier``: loads and runs of a search that was stopped.

    Raises RunError when runs cannot be carried out.
    """
    alone = _measure_alone(config, prober)
    if refused := _unreachable(config, alone):
        return Outcome(estimate(_NOTHING, ()), (), alone, refused=refused)
    first = _first_load(config, alone)
    search = Search(config.limits.requirements(), first, config.precision, config.by_concurrency, config.most)
    readings = [read_probe(run, load, config.limits) for load, run in earlier]
    stopped = ""
    while (load := next_load(search, decided(config, readings))) is not None:
        sessions = _sessions(config, readings, load)
        stopped = budget.spent(len(readings)) or _given_up(readings) or _too_long(config, readings, load, budget)
        if stopped:
            break
        run = prober.probe(load, sessions, config.seed + len(readings))
        readings.append(read_probe(run, load, config.limits))
        seen(readings[-1], estimate(search, decided(config, readings)))
    return Outcome(estimate(search, decided(config, readings)), tuple(readings), alone, stopped)


def _given_up(readings: Sequence[Reading]) -> str:
    """Why no further probe makes sense; empty while one does."""
    last = readings[-_TRIES:]
    if len(last) == _TRIES and all(reading.invalid for reading in last):
        return f"{_TRIES} INVALID probes in a row ({last[-1].invalid})"
    return ""


def decided(config: SearchConfig, readings: Sequence[Reading]) -> list[Probe]:
    """The probes that the search may use: those of valid runs that were long enough.

    A run that is too short shows too many requests within the limits, since it starts with an empty queue. Where few
    of them met the limits anyway, it is long enough.
    """
    return [
        reading.probe
        for reading in readings
        if reading.decides
        and (reading.clearly_over or reading.sessions >= _long_enough(config, readings, reading.probe.load))
    ]


def _needed(readings: Sequence[Reading], load: float) -> int:
    """Sessions that a probe needs to decide: twice those of a run nearby that was too short to tell the share.

    This holds for all runs nearby, also for those that do not look too short: to repeat only some would favour one
    outcome.
    """
    near = [r.sessions for r in readings if r.correlated and 1 / _NEAR <= load / r.probe.load <= _NEAR_ABOVE]
    return 2 * max(near, default=0)


def _long_enough(config: SearchConfig, readings: Sequence[Reading], load: float) -> int:
    return min(_needed(readings, load), config.longest * config.fewest(load))


def _measure_alone(config: SearchConfig, prober: Prober) -> Reading:
    """Requests one at a time. Raises RunError when the run is INVALID again and again."""
    for _ in range(_TRIES):
        run = prober.alone(ALONE_SESSIONS)
        if run.manifest.valid:
            return read_probe(run, 1.0, config.limits)
    raise RunError(f"requests sent one at a time are INVALID: {'; '.join(run.manifest.reasons)}")


def _unreachable(config: SearchConfig, alone: Reading) -> str:
    """Why no load can meet the limits, with the least that can be had; empty where requests alone meet them."""
    columns = RequestColumns.of(Run.load(alone.run_dir).requests)
    requirements, slos = config.limits.requirements(), config.limits.slos()
    for requirement, slo, count in zip(requirements, slos, alone.probe.counts, strict=True):
        if count.share >= requirement.share:
            continue
        least = {name: least_possible(columns, name, requirement.share) for name in slo.limits()}
        words = ", ".join(f"{name}:{_up(value)}" for name, value in least.items() if value is not None)
        return (
            f"one request at a time, {100 * count.share:.0f} % meet {slo}, and {100 * requirement.share:g} % must; "
            f"the least that can be had is about {words}"
        )
    return ""


def _up(value_ms: float) -> str:
    """Two significant digits, rounded up."""
    digits = 1 - math.floor(math.log10(value_ms))
    return f"{math.ceil(value_ms * 10**digits) / 10**digits:g}"


def _first_load(config: SearchConfig, alone: Reading) -> float:
    if config.by_concurrency:
        return float(_FIRST_OPEN)
    columns = RequestColumns.of(Run.load(alone.run_dir).requests)
    ok = columns.ok
    spans: dict[int, list[int]] = {}
    for session, start, end in zip(columns.session[ok], columns.intended[ok], columns.last_token[ok], strict=True):
        spans.setdefault(int(session), []).extend((int(start), int(end)))
    lasting_s = sum(max(times) - min(times) for times in spans.values()) / 1e9 / max(1, len(spans))
    return _FIRST_OPEN / max(lasting_s, 1e-6)


def _sessions(config: SearchConfig, readings: Sequence[Reading], load: float) -> int:
    """Sessions of the next probe: enough for the number that will be open, by what nearby loads had open."""
    fewest = config.fewest(load)
    near = [r.mean_open for r in readings if 0.7 <= r.probe.load / load <= 1.25 and not r.probe.runaway]
    wanted = 0 if config.by_concurrency else math.ceil(1.5 * FEWEST_PER_OPEN * max(near, default=0.0))
    repeated = sum(r.short and r.probe.load == load for r in readings)
    return int(min(max(fewest * 2**repeated, wanted, _needed(readings, load)), config.longest * fewest))


def _too_long(config: SearchConfig, readings: Sequence[Reading], load: float, budget: Budget) -> str:
    """Why no time is left for a probe in real time at ``load``; empty while there is."""
    if not config.real_time or math.isinf(budget.seconds):
        return ""
    served = [r.completed_sessions_per_s for r in readings if r.completed_sessions_per_s]
    rate = max(served, default=math.inf) if config.by_concurrency else load
    needs_s = _sessions(config, readings, load) / rate
    left_s = budget.seconds - (time.monotonic() - budget.begun)
    return f"{budget.of_time} (the next run takes {needs_s:.0f} s)" if needs_s > left_s else ""
