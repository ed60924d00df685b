"""Carry out a capacity search: probe, read, decide, until the answer is precise enough or the budget is spent.

The search first measures requests alone. Limits that they miss even then cannot be met at any load; the search ends
with an error that names the lowest limits that can be met. Their latency also gives the first load to try.

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
from ebbench.errors import RunError, UsageError
from ebbench.records.run import Run

ALONE_SESSIONS = 40
_FIRST_OPEN = 4
"""Sessions that are open on average at the first load tried."""
_TRIES = 3
"""INVALID runs in a row after which a search is given up: the client's machine is too busy or too slow."""
_LONGEST = 16
"""A probe gets at most this many times the sessions asked for."""


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
    """When to stop: after so many probes, or seconds of wall-clock time since ``begun`` (:func:`time.monotonic`)."""

    probes: int = 60
    seconds: float = math.inf
    begun: float = field(default_factory=time.monotonic)

    def spent(self, probes: int) -> str:
        """Which limit was reached; empty while none is."""
        if probes >= self.probes:
            return f"--max-probes {self.probes}"
        if time.monotonic() - self.begun > self.seconds:
            return f"--max-time {self.seconds:g}"
        return ""


@dataclass(frozen=True)
class SearchConfig:
    """One search. ``sessions``: fewest per probe. ``seconds``: least time over which sessions arrive."""

    limits: Limits
    by_concurrency: bool
    sessions: int
    seconds: float
    precision: float
    seed: int
    most: float = math.inf


@dataclass(frozen=True)
class Outcome:
    """What a search found. ``stopped``: why it ended early; empty when the interval is as narrow as asked."""

    estimate: Estimate
    readings: tuple[Reading, ...]
    alone: Reading
    stopped: str = ""

    @property
    def nearest(self) -> Reading:
        """The reading at the highest load that met the limits, or the one nearest to the capacity."""
        capacity = self.estimate.capacity
        decided = [reading for reading in self.readings if reading.decides] or list(self.readings)
        if capacity is None:
            return min(decided, key=lambda reading: reading.probe.load, default=self.alone)
        return min(decided, key=lambda reading: abs(math.log(reading.probe.load / capacity)))

    @property
    def limited_by(self) -> str:
        """``ttft``, ``tpot``, ``e2el``, ``memory``, ``queue``, ``errors`` or ``not reached``.

        Of limits that must be met together, the one that the fewest requests met. ``memory``: the KV cache was full
        for most of the time at capacity, so that more memory, not more speed, would carry more.
        """
        by = self.estimate.limited_by
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

    Raises UsageError when requests miss the limits even alone, RunError when runs cannot be carried out.
    """
    alone = _measure_alone(config, prober)
    first = _first_load(config, alone)
    search = Search(config.limits.requirements(), first, config.precision, config.by_concurrency, config.most)
    readings = [read_probe(run, load, config.limits) for load, run in earlier]
    stopped = ""
    while (load := next_load(search, _decided(readings))) is not None:
        if stopped := budget.spent(len(readings)) or _given_up(readings):
            break
        run = prober.probe(load, _sessions(config, readings, load), config.seed + len(readings))
        readings.append(read_probe(run, load, config.limits))
        seen(readings[-1], estimate(search, _decided(readings)))
    decided = _decided(readings)
    if not decided:
        why = stopped or "no probe was long enough"
        raise RunError(f"no probe decided anything ({why}); give more --num-prompts or a larger budget")
    return Outcome(estimate(search, decided), tuple(readings), alone, stopped)


def _given_up(readings: Sequence[Reading]) -> str:
    """Why no further probe makes sense; empty while one does."""
    last = readings[-_TRIES:]
    if len(last) == _TRIES and all(reading.invalid for reading in last):
        return f"{_TRIES} INVALID probes in a row ({last[-1].invalid})"
    return ""


def _decided(readings: Sequence[Reading]) -> list[Probe]:
    return [reading.probe for reading in readings if reading.decides]


def _measure_alone(config: SearchConfig, prober: Prober) -> Reading:
    """Requests one at a time. Raises UsageError when too few of them meet the limits."""
    for _ in range(_TRIES):
        run = prober.alone(ALONE_SESSIONS)
        if run.manifest.valid:
            break
    else:
        raise RunError(f"requests sent one at a time are INVALID: {'; '.join(run.manifest.reasons)}")
    columns = RequestColumns.of(run.requests)
    reading = read_probe(run, 1.0, config.limits)
    requirements, slos = config.limits.requirements(), config.limits.slos()
    for requirement, slo, count in zip(requirements, slos, reading.probe.counts, strict=True):
        if count.share >= requirement.share:
            continue
        least = {name: least_possible(columns, name, requirement.share) for name in slo.limits()}
        words = ", ".join(f"{name}:{_up(value)}" for name, value in least.items() if value is not None)
        raise UsageError(
            f"one request at a time, {100 * count.share:.0f} % meet {slo}, and {100 * requirement.share:g} % must; "
            f"the least that can be had is about {words}"
        )
    return reading


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
    fewest = max(config.sessions, math.ceil(config.seconds * load) if not config.by_concurrency else 0)
    if config.by_concurrency:
        return min(max(fewest, math.ceil(2 * FEWEST_PER_OPEN * load)), _LONGEST * max(fewest, math.ceil(load)))
    near = [r.mean_open for r in readings if 0.7 <= r.probe.load / load <= 1.25 and not r.probe.runaway]
    wanted = math.ceil(1.5 * FEWEST_PER_OPEN * max(near, default=0.0))
    repeated = sum(r.short and r.probe.load == load for r in readings)
    return int(min(max(fewest * 2**repeated, wanted), _LONGEST * fewest))
