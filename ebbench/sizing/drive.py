"""Runs a capacity search: probe, evaluate, decide, until the interval is narrow enough or the budget is spent.

The search first measures requests one at a time. If the limits are missed even then, no load can meet them; the outcome
says so and names the lowest limits that can be met. These latencies also give the first load to try.

Every probe is an ordinary run directory. A stopped search reads its directories and continues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ebbench.analysis.columns import RequestColumns
from ebbench.errors import RunError
from ebbench.grouping import by_key
from ebbench.records.run import Run
from ebbench.records.warnings import Fact, RunWarning, fact
from ebbench.sizing.estimate import (
    FEWEST,
    SURELY_OVER,
    USUAL_PROBES,
    Estimate,
    Probe,
    Requirement,
    SearchSettings,
    bracket,
    estimate,
    is_certain,
    is_clear,
    supported,
    waits_only,
)
from ebbench.sizing.limits import LatencyLimits
from ebbench.sizing.probe import CORRELATED, FEWEST_PER_OPEN, ProbeReading, least_limits_ms, read_probe, why_invalid

if TYPE_CHECKING:
    from ebbench.sizing.prober import RunProber

# Finds the load at which requirements stop being met, from noisy probes.
#
# A probe runs one load with one seed and counts, per requirement, how many requests met it. That share falls as the
# load grows. Capacity is the load at which the share equals the required one; of several requirements the one with
# the lowest capacity decides.
#
# The search has no state: `next_load` and `~ebbench.sizing.estimate.estimate` are pure functions of the probes so
# far, so a stopped search continues from stored probes. It has three stages:
#
# 1. Bracket: double or halve the load until one probe met every requirement and a higher one did not.
# 2. Narrow: bisect the bracket, on a log scale, down to a ratio of `NARROW`.
# 3. Refine: probe on both sides of the estimated crossing, each time with a new seed, until the interval is narrow
#    enough. If the share falls too steeply for a fit, bisect to the end and repeat the probes at both ends. If requests
#    meet the requirements even while the queue grows without bound (a limit on TPOT alone), there is no crossing:
#    capacity is then the rate at which an overloaded system completes sessions, so probes go above it. A limit on the
#    wait is missed in the end where the queue grows, so there the highest load that was carried is the capacity.

NARROW = 1.15
"""Ratio of the bracket's ends at which refining begins."""
_OVERLOAD = 1.25
"""Load of a probe that measures the rate at which an overloaded system completes sessions, over that rate."""
_BELOW = 0.8
"""Load of a probe that is surely carried, over the rate at which an overloaded system completed sessions."""
_LOWEST = 1 / 1024
"""The lowest load tried, over the first one: there requests hardly overlap."""
_CONFIRMED = 2
"""Probes at each end of a bracket that is narrow enough, before it is accepted as the result."""
_LEAST_FREEDOM = 13
"""Degrees of freedom of a fit that may end a search of short probes: bursts are rare, and an interval from before one
was seen is too narrow."""


def next_load(search: SearchSettings, probes: Sequence[Probe]) -> float | None:
    """The next load to probe, or None if the interval is narrow enough or no other load may be tried."""
    if not probes:
        return search.rounded(search.start)
    low, high = bracket(search, probes)
    if low is None:
        return _lower(search, min(probes, key=lambda probe: probe.load))
    if high is None:
        return None if low >= search.most or waits_only(search, probes) else search.rounded(2 * low)
    if search.integer and high - low <= 1 and len(probes) >= FEWEST:
        return None
    if high / low > NARROW:
        return _between(search, low, high, probes)
    estimated = estimate(search, probes)
    if estimated.fitted:
        if _narrow_enough(search, estimated):
            return None
        if estimated.limited_by == "queue":
            return _overloading(search, probes, estimated)
        # Where a vague fit knows less than the bracket, loads around it may lie outside and tell nothing for ever.
        vague = estimated.low <= low and high <= estimated.high
        if vague and (high - low) / (high + low) > search.precision:
            return _between(search, low, high, probes)
        return _refined(search, probes, estimated)
    overloads = estimated.limited_by == "queue" and not search.waiting_counts
    if overloads and (load := _overloading(search, probes, estimated)) is not None:
        return load
    if (high - low) / (high + low) > search.precision:
        return _between(search, low, high, probes)
    again = _unconfirmed(low, high, probes)
    certain = estimated.half_width <= search.precision and is_certain(search, probes)
    return _refined(search, probes, estimated) if again is None and not certain else again


def _narrow_enough(search: SearchSettings, fitted: Estimate) -> bool:
    """Whether a fit's interval ends the search. With short probes even if it came out one standard error too narrow:
    its own relative error is 1 / sqrt(2 * freedom), and a search that looks after each probe meets the narrow ones."""
    if not search.short_probes:
        return fitted.half_width <= search.precision
    surely = fitted.half_width * (1 + 1 / math.sqrt(2 * fitted.freedom))
    return fitted.freedom >= _LEAST_FREEDOM and surely <= search.precision


_REFINING = 4
"""Probes from a narrow bracket to the end, before a fit tells more."""


def probes_left(search: SearchSettings, probes: Sequence[Probe]) -> int:
    """About how many more probes a search takes: for its progress, no promise."""
    if not probes:
        return USUAL_PROBES
    low, high = bracket(search, probes)
    if low is None or high is None:
        return max(USUAL_PROBES - len(probes), _REFINING + 1)
    if high / low > NARROW:
        return math.ceil(math.log2(math.log(high / low) / math.log(NARROW))) + _REFINING
    reached = estimate(search, probes)
    if not reached.fitted or not math.isfinite(reached.half_width):
        return _REFINING
    missing = _LEAST_FREEDOM - int(min(reached.freedom, _LEAST_FREEDOM)) if search.short_probes else 1
    return max(1, missing, math.ceil(len(probes) * ((reached.half_width / search.precision) ** 2 - 1)))


def _wide(search: SearchSettings, probes: Sequence[Probe]) -> bool:
    """Whether the bracket is not narrow yet: a probe only has to tell on which side of the capacity it is."""
    low, high = bracket(search, probes) if probes else (None, None)
    return low is None or high is None or high / low > NARROW


def _lower(search: SearchSettings, lowest: Probe) -> float | None:
    """Half the lowest load so far, or less if that was an overload: then surely below what the system completed."""
    if lowest.load <= (1 if search.integer else _LOWEST * search.start):
        return None
    served = lowest.served_per_s if lowest.runaway else None
    return search.rounded(min(lowest.load / 2, _BELOW * served if served else math.inf))


def _between(search: SearchSettings, low: float, high: float, probes: Sequence[Probe]) -> float:
    """A load inside the bracket: its middle on a log scale."""
    middle = search.rounded(math.sqrt(low * high))
    if search.integer and middle in (low, high):
        return low if sum(p.load == low for p in probes) <= sum(p.load == high for p in probes) else high
    return middle


def _unconfirmed(low: float, high: float, probes: Sequence[Probe]) -> float | None:
    """The end of the bracket with fewer probes; None if both have enough."""
    seen = {end: sum(probe.load == end and not probe.coarse for probe in probes) for end in (low, high)}
    least = min(seen, key=lambda end: seen[end])
    return least if seen[least] < _CONFIRMED else None


def _overloading(search: SearchSettings, probes: Sequence[Probe], estimated: Estimate) -> float | None:
    """A load well above the capacity, but at most the highest load that was observed to overload; None without one."""
    assert estimated.capacity is not None
    highest = max((probe.load for probe in probes if probe.runaway), default=0.0)
    load = search.rounded(min(_OVERLOAD * estimated.capacity, highest))
    return load if load >= SURELY_OVER * estimated.capacity else None


def _refined(search: SearchSettings, probes: Sequence[Probe], estimated: Estimate) -> float:
    """Loads alternately below and above the crossing: two distinct loads determine the slope, which the interval
    needs."""
    assert estimated.capacity is not None
    spread = min(max(search.precision, estimated.half_width / 2), math.log(NARROW) / 2)
    side = 1 if len(probes) % 2 else -1
    return search.rounded(estimated.capacity * math.exp(side * spread))


ALONE_SESSIONS = 40
_FIRST_OPEN = 4
"""Mean number of open sessions at the first load tried."""
_TRIES = 3
"""Consecutive INVALID runs after which a search stops: the client's machine is too busy or too slow."""
_NEAR, _NEAR_ABOVE = 1.05, 1.25
"""Loads within this factor of one whose run was too short need runs of the same length."""
_ALIKE, _DEVIATION = math.sqrt(2), 0.2
"""Runs whose sessions differ by less than this factor are of one length; standard deviation of their correlation."""


@dataclass(frozen=True)
class SearchBudget:
    """When to stop: after a number of probes, or of seconds since ``begun`` (:func:`time.monotonic`).

    ``named_s``: the total time for all policies that the user gave.
    """

    probes: int = 60
    seconds: float = math.inf
    named_s: float = math.inf
    begun: float = field(default_factory=time.monotonic)

    def spent(self, probes: int) -> Fact | None:
        """The limit that was reached; None if there is none."""
        if probes >= self.probes:
            return fact("max_probes", probes=self.probes)
        return self.of_time() if time.monotonic() - self.begun > self.seconds else None

    def of_time(self, **values: float) -> Fact:
        """The fact that the time given by the user is spent."""
        return fact("max_time", limit_s=self.named_s if math.isfinite(self.named_s) else self.seconds, **values)


@dataclass(frozen=True)
class SearchConfig:
    """Configuration of one search.

    ``sessions``: fewest per probe. ``seconds``: least duration of arrivals. ``real_time``: the engine's time is the
    wall clock's. ``longest``: a probe gets at most this many times the fewest sessions. ``alone``: sessions sent one at
    a time before the search. ``per_open``: counted sessions that a probe needs per concurrently open session.
    ``coarse``: before the bracket is narrow, a load is first tried with this share of the sessions and seconds.
    """

    limits: LatencyLimits
    by_concurrency: bool
    sessions: int
    seconds: float
    precision: float
    seed: int
    real_time: bool = False
    longest: int = 16
    most: float = math.inf
    alone: int = ALONE_SESSIONS
    per_open: int = FEWEST_PER_OPEN
    coarse: float = 1.0

    def fewest(self, load: float, share: float = 1.0) -> int:
        """Least number of sessions of a probe at ``load``; ``share``: of a whole probe's sessions and seconds."""
        for_load = 2 * self.per_open * load if self.by_concurrency else share * self.seconds * load
        return max(math.ceil(share * self.sessions), math.ceil(for_load))


_NOTHING = SearchSettings((), start=1.0)


@dataclass(frozen=True)
class SearchOutcome:
    """Result of a search. ``stopped``: why it ended early; None if the interval is narrow enough.

    ``refused``: why no load can meet the limits; no search took place.
    """

    estimate: Estimate
    readings: tuple[ProbeReading, ...]
    alone: ProbeReading
    stopped: Fact | None = None
    refused: Fact | None = None
    requirements: tuple[tuple[Requirement, Estimate], ...] = ()
    """Each requirement with the load up to which it alone is met, by the same probes."""

    @property
    def decided(self) -> bool:
        """Whether any probe was usable."""
        return self.estimate.capacity is not None or math.isfinite(self.estimate.high)

    @property
    def caveats(self) -> list[tuple[RunWarning, ...]]:
        """The caveats of each probe, or of requests one at a time if there is none."""
        return [reading.caveats for reading in self.readings or (self.alone,)]

    @property
    def nearest(self) -> ProbeReading:
        """The reading nearest to the capacity among those that kept the limits; else that of requests one at a time.

        Half of the probes near a fitted capacity miss them by chance: they would not stand for a load that is carried.
        """
        capacity = self.estimate.capacity
        bounded = [r for r in self.readings if r.decides and not r.probe.runaway and not r.probe.failed]
        if capacity is None:
            return min(bounded, key=lambda reading: reading.probe.load, default=self.alone)
        kept = [reading for reading in bounded if reading.met]
        kept = [reading for reading in kept if not reading.probe.coarse] or kept
        return min(kept, key=lambda reading: abs(math.log(reading.probe.load / capacity)), default=self.alone)

    @property
    def limited_by(self) -> str:
        """``ttft``, ``tpot``, ``e2el``, ``memory``, ``queue``, ``errors`` or ``not reached``.

        Of limits that must be met jointly, the one that the fewest requests met. ``memory``: the KV cache was full for
        most of the time at capacity, so that more memory, not more speed, would increase it.
        """
        by = self.estimate.limited_by
        if self.refused:
            return "limits"
        if by in ("queue", "errors", "not reached"):
            return by
        over = [r for r in self.readings if r.probe.load >= (self.estimate.capacity or 0) and r.decides]
        # A capacity that is a load tried, and carried, misses nothing there: the next load that missed tells why.
        reading = min(over, key=lambda r: (r.met, r.probe.load), default=self.nearest)
        if reading.memory_full > 0.5:
            return "memory"
        # A limit (``ttft``, ``ttft:p99:500``) is one on the word that it begins with (``ttft``, ``chat:ttft``).
        named = [(f"{name}:", share) for name, share in reading.shares.items()]
        shares = [(share, word) for word in by.split() for name, share in named if name.startswith(f"{word}:")]
        return min(shares)[1] if shares else by


def search_capacity(
    config: SearchConfig,
    prober: RunProber,
    budget: SearchBudget,
    earlier: Sequence[tuple[float, Run]] = (),
    seen: Callable[[ProbeReading, Estimate], None] = lambda _reading, _estimate: None,
    ahead: Callable[[int], None] = lambda _probes: None,
) -> SearchOutcome:
    """Search until the interval is narrow enough. ``earlier``: loads and runs of a search that was stopped.

    ``seen`` gets each probe with the estimate after it, ``ahead`` before each probe how many are probably left.
    Raises RunError if runs fail.
    """
    alone = _measure_alone(config, prober)
    if refused := _unreachable(config, alone):
        return SearchOutcome(estimate(_NOTHING, ()), (), alone, refused=refused)
    first = _first_load(config, alone)
    search = SearchSettings(
        config.limits.requirements(), first, config.precision, config.by_concurrency, config.most, config.real_time
    )

    def read(run: Run, load: float, asked: int = 0) -> ProbeReading:
        reading = read_probe(run, load, config.limits, config.per_open)
        return replace(reading, asked=asked or reading.sessions)

    readings = [read(run, load) for load, run in earlier]
    stopped = None
    while (load := next_load(search, used := _probes(judged(config, readings), decides=True))) is not None:
        sessions = _sessions(config, readings, load, coarse=_wide(search, used))
        stopped = (
            budget.spent(len(readings))
            or _given_up(config, readings)
            or _too_long(config, readings, load, sessions, budget)
        )
        if stopped:
            break
        left = probes_left(search, used)
        ahead(min(left, budget.probes - len(readings)))
        run = prober.probe(load, sessions, config.seed + len(readings))
        readings.append(read(run, load, sessions))
        known = judged(config, readings)
        seen(known[-1], _supported(search, known))
    known = judged(config, readings)
    if not _supported(search, known).fitted and _supported(search, judged(config, readings, patient=False)).fitted:
        # Stopped just after longer runs were found to be needed: what all runs tell is more than what few tell.
        known = judged(config, readings, patient=False)
    alone_met = tuple(
        (requirement, _supported_alone(search, known, at)) for at, requirement in enumerate(search.requirements)
    )
    return SearchOutcome(_supported(search, known), tuple(known), alone, stopped, requirements=alone_met)


def _supported_alone(search: SearchSettings, readings: Sequence[ProbeReading], index: int) -> Estimate:
    """The load up to which one requirement is met, whatever the others."""
    only = replace(search, requirements=(search.requirements[index],))
    alone = [
        replace(reading, probe=replace(reading.probe, counts=(reading.probe.counts[index],))) for reading in readings
    ]
    return _supported(only, alone)


def _supported(search: SearchSettings, readings: Sequence[ProbeReading]) -> Estimate:
    used, short = (_probes(readings, decides=decides) for decides in (True, False))
    return supported(search, estimate(search, used), used, short)


def _probes(readings: Sequence[ProbeReading], *, decides: bool) -> list[Probe]:
    """The probes that the search may use, or those that were too short; INVALID ones are neither."""
    return [reading.probe for reading in readings if reading.decides is decides and not reading.invalid]


def _given_up(config: SearchConfig, readings: Sequence[ProbeReading]) -> Fact | None:
    """Why no further probe is useful; None otherwise."""
    last = readings[-_TRIES:]
    if len(last) == _TRIES and all(reading.invalid for reading in last):
        return fact("invalid", probes=_TRIES, last=last[-1].invalid)
    return _too_short(config, judged(config, readings))


def _too_short(config: SearchConfig, readings: Sequence[ProbeReading]) -> Fact | None:
    """Why a probe at the last load cannot be long enough: it had all sessions allowed or available."""
    if not readings or readings[-1].decides or readings[-1].invalid:
        return None
    *before, last = readings
    load, most = last.probe.load, config.longest * config.fewest(last.probe.load)
    same = [reading for reading in before if reading.short and reading.probe.load == load]
    ended = any(reading.asked < last.asked and reading.sessions >= last.sessions for reading in same)
    if last.sessions < most and not ended:
        return None
    code = "all_too_short" if last.sessions < most else "too_short"  # all: texts are not sent twice
    return fact(code, load=load, by_concurrency=config.by_concurrency, sessions=last.sessions)


def judged(config: SearchConfig, readings: Sequence[ProbeReading], *, patient: bool = True) -> list[ProbeReading]:
    """The readings; also ``short`` are coarse ones that leave open on which side of the capacity they are.

    With ``patient`` so are those of runs in which the queue changed more slowly than they lasted. A run that is too
    short overstates the share within the limits, since it starts with an empty queue. If few requests met the limits
    anyway, it is long enough.
    """

    def one(reading: ProbeReading) -> ProbeReading:
        load = reading.probe.load
        coarse = config.coarse < 1 and reading.asked < config.fewest(load)
        if coarse:
            unclear = not (reading.clearly_over or is_clear(config.limits.requirements(), reading.probe))
        else:
            unclear = patient and not reading.clearly_over and reading.sessions < _long_enough(config, readings, load)
        return replace(reading, probe=replace(reading.probe, coarse=coarse), short=reading.short or unclear)

    return [one(reading) for reading in readings]


def _needed(config: SearchConfig, readings: Sequence[ProbeReading], load: float) -> int:
    """Sessions that a probe needs: twice those of the runs at similar loads that were too short for their queue.

    This applies to all runs at similar loads, also to those that look long enough: repeating only some of them would
    bias the result. The correlation of one run of 20 batches is off by 0.2 (one standard deviation), so that of forty
    probes one or two seem too short by chance. In real time, where that doubles minutes, it takes the mean of the runs
    of about one length.
    """
    near = [r for r in readings if 1 / _NEAR <= load / r.probe.load <= _NEAR_ABOVE]

    def slow(one: ProbeReading) -> bool:
        if not config.real_time:
            return one.correlated
        alike = [r.correlation for r in near if 1 / _ALIKE <= r.sessions / one.sessions <= _ALIKE]
        return sum(alike) / len(alike) > CORRELATED + _DEVIATION / math.sqrt(len(alike))

    return 2 * max((one.sessions for one in near if slow(one)), default=0)


def _long_enough(config: SearchConfig, readings: Sequence[ProbeReading], load: float) -> int:
    return min(_needed(config, readings, load), config.longest * config.fewest(load))


def _measure_alone(config: SearchConfig, prober: RunProber) -> ProbeReading:
    """Measure requests one at a time. Raises RunError if the run is INVALID repeatedly."""
    for _ in range(_TRIES):
        run = prober.alone(config.alone)
        if run.manifest.valid:
            return read_probe(run, 1.0, config.limits)
    raise RunError(f"requests sent one at a time are INVALID: {why_invalid(run)}")


def _unreachable(config: SearchConfig, alone: ProbeReading) -> Fact | None:
    """Why no load can meet the limits, with the lowest possible limits; None if requests one at a time meet them."""
    run = Run.load(alone.run_dir)
    by_requirement = zip(config.limits.requirements(), alone.probe.counts, strict=True)
    for index, (requirement, count) in enumerate(by_requirement):
        if count.share >= requirement.share:
            continue
        least = least_limits_ms(run.requests, run.manifest.phases, config.limits, index)
        of = f"{requirement.of_class}: " if requirement.of_class else ""
        return fact(
            "limits_missed_alone", limits=f"{of}{requirement.slo}", met=count.share, required=requirement.share,
            least_ms={name: value for name, value in least.items() if 0 < value < math.inf},
            without=[name for name, value in least.items() if math.isinf(value)],
        )  # fmt: skip
    return None


def _first_load(config: SearchConfig, alone: ProbeReading) -> float:
    if config.by_concurrency:
        return float(_FIRST_OPEN)
    columns = RequestColumns.of(Run.load(alone.run_dir).requests)
    ok = columns.ok
    requests = zip(columns.session[ok], columns.intended[ok], columns.last_token[ok], strict=True)
    spans = by_key((int(session), int(time_ns)) for session, *times in requests for time_ns in times)
    lasting_s = sum(max(times) - min(times) for times in spans.values()) / 1e9 / max(1, len(spans))
    return _FIRST_OPEN / max(lasting_s, 1e-6)


def _sessions(config: SearchConfig, readings: Sequence[ProbeReading], load: float, *, coarse: bool = False) -> int:
    """Sessions of the next probe: enough for the number expected to be open, from similar loads."""
    fewest = config.fewest(load)
    if coarse and config.coarse < 1 and not any(r.probe.load == load for r in readings):
        return config.fewest(load, config.coarse)
    near = [r.mean_open for r in readings if 0.7 <= r.probe.load / load <= 1.25 and not r.probe.runaway]
    wanted = 0 if config.by_concurrency else math.ceil(1.5 * config.per_open * max(near, default=0.0))
    repeated = sum(r.short and r.probe.load == load and r.asked >= fewest for r in readings)
    return int(min(max(fewest * 2**repeated, wanted, _needed(config, readings, load)), config.longest * fewest))


def _too_long(
    config: SearchConfig, readings: Sequence[ProbeReading], load: float, sessions: int, budget: SearchBudget
) -> Fact | None:
    """Why no time is left for a probe in real time at ``load``; None if there is."""
    if not config.real_time or math.isinf(budget.seconds):
        return None
    served = [r.completed_sessions_per_s for r in readings if r.completed_sessions_per_s]
    rate = max(served, default=math.inf) if config.by_concurrency else load
    needs_s = sessions / rate
    left_s = budget.seconds - (time.monotonic() - budget.begun)
    return budget.of_time(next_run_s=needs_s) if needs_s > left_s else None
