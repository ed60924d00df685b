"""Scenario files: one TOML file per traffic pattern; users add patterns without code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ebbench.config.topology import TopologySpec
from ebbench.errors import UsageError
from ebbench.foreign.documents import given_keys, load_toml, not_positive
from ebbench.installation import bundled_dir, resolve
from ebbench.records.plan import ClosedPhase
from ebbench.traffic.arrivals import Curve, Process, arrival_times, substream
from ebbench.traffic.lengths import LengthSpec


class CurveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Relative rate over time, scaled to a mean of one. Without ``period_s`` one period spans the whole phase.

    ``steps``: pieces of constant rate, equally long or with relative ``widths``. ``lines``: equally spaced corners
    connected by lines.
    """

    levels: tuple[float, ...]
    shape: Literal["steps", "lines"] = "steps"
    period_s: float | None = None
    widths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.widths and (self.shape != "steps" or len(self.widths) != len(self.levels)):
            raise ValueError("widths belong to shape = 'steps', one per level")
        if not all(0 < width < math.inf for width in self.widths):
            raise ValueError("curve widths must be finite and above 0")
        if len(self.levels) < 2:
            raise ValueError("a curve needs at least two levels")
        if not all(0 <= level < math.inf for level in self.levels) or not any(self.levels):
            raise ValueError("curve levels must be finite, not negative, and not all zero")
        _refuse([not_positive("period_s", self.period_s)])


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One phase. Closed loop: ``max_concurrency``. Open loop: ``process`` and a rate.

    It has ``requests`` sessions, or those that arrive in ``duration_s`` (open loop only), or all if neither is given
    and there is one phase. The rate in sessions/s is ``--request-rate`` times ``level`` if that option is given, else
    ``rate``, else ``share`` times the saturation rate. ``burstiness``: shape of gamma gaps (below 1: burstier than
    Poisson). ``tick_s``: sessions arrive only at multiples of it. ``gaps``: means of equally many sorted gaps, in the
    mean gap, which take the place of the gamma distribution. ``even``: the gaps drawn are scaled to their mean, so that
    n sessions take n / rate seconds. ``roots`` and ``centres``: mean square root of the ``gaps`` in each step of the
    curve, and where in it they lie (0 to 1). ``input`` and ``output`` replace the workload's lengths, in all phases or
    in none.
    """

    name: str
    requests: int | None = None
    duration_s: float | None = None
    max_concurrency: int | None = None
    process: Process | None = None
    rate: float | None = None
    share: float | None = None
    level: float = 1.0
    burstiness: float = 1.0
    curve: CurveSpec | None = None
    gaps: tuple[float, ...] = ()
    tick_s: float | None = None
    even: bool = False
    roots: tuple[float, ...] = ()
    centres: tuple[float, ...] = ()
    input: LengthSpec | None = None
    output: LengthSpec | None = None

    def __post_init__(self) -> None:
        numbers = ("requests", "duration_s", "max_concurrency", "rate", "share", "level", "burstiness", "tick_s")
        _refuse(not_positive(key, getattr(self, key)) for key in numbers)
        if self.requests is not None and self.duration_s is not None:
            raise ValueError("a phase has requests or duration_s, not both")
        if self.rate is not None and self.share is not None:
            raise ValueError("a phase has rate or share, not both")
        if (self.input is None) != (self.output is None):
            raise ValueError("a phase that brings its own lengths needs both input and output")
        if self.roots and (self.curve is None or len(self.curve.widths) != len(self.roots) or not self.gaps):
            raise ValueError("roots are those of gaps in the steps of a curve; give gaps, and as many curve.widths")
        if len(self.centres) != len(self.roots):
            raise ValueError("roots and centres are those of the same steps; give as many of both")


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Part of a trace to replay: from ``start_s`` for ``duration_s`` (None: to the end), ``repeat`` times."""

    speed: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    repeat: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf or not self.repeat >= 1 or not 0 <= self.start_s < math.inf:
            raise ValueError("a replay needs speed > 0, repeat >= 1 and start_s >= 0, all of them finite")
        _refuse([not_positive("duration_s", self.duration_s)])


class ScenarioSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One traffic pattern. ``loop``: closed (released by completions), open (at arrival times), trace (as recorded).

    ``topology``: the instances that this traffic is meant for, as text (``dp=4``) or as a table.
    """

    name: str
    description: str
    loop: Literal["closed", "open", "trace"]
    phases: tuple[Phase, ...] = ()
    replay: Replay | None = None
    max_concurrency: int | None = None
    topology: TopologySpec | str | None = None

    def __post_init__(self) -> None:
        if self.loop == "trace":
            _refuse(["a trace scenario has [replay] and no phases" if self.phases else ""])
            return
        if not self.phases:
            raise ValueError("needs at least one [[phases]] table")
        if self.replay is not None:
            raise ValueError("[replay] belongs to loop = 'trace'")
        if self.loop == "closed" and self.max_concurrency is not None:
            raise ValueError("the phases of a closed loop set max_concurrency")
        if not self.own_lengths and any(phase.input is not None for phase in self.phases):
            raise ValueError("either all phases bring their own input and output lengths, or none does")
        for phase in self.phases:
            _refuse([self._problem_of(phase)])

    @property
    def own_lengths(self) -> bool:
        """Whether every phase has its own lengths, so that the workload's are not used."""
        return bool(self.phases) and all(phase.input is not None for phase in self.phases)

    def _problem_of(self, phase: Phase) -> str:
        label = f"phase {phase.name!r}"
        if len(self.phases) > 1 and phase.requests is None and phase.duration_s is None:
            return f"{label} needs requests or duration_s, since there is more than one phase"
        if self.loop == "closed" and (phase.max_concurrency is None or phase.process or phase.duration_s):
            return f"{label} of a closed loop needs max_concurrency, and neither process nor duration_s"
        if self.loop == "open" and (phase.process is None or phase.max_concurrency):
            return f"{label} of an open loop needs process; its cap is the scenario's max_concurrency"
        if self.loop == "closed" and (
            idle := given_keys(phase, ("rate", "share", "level", "burstiness", "curve", "tick_s"))
        ):
            return f"{label} of a closed loop has no {idle[0]}: a request is sent when one ends; leave it out"
        if phase.process != "gamma" and given_keys(phase, ("burstiness",)):
            return f"{label}: burstiness shapes gamma gaps; write process = 'gamma', or leave it out"
        return ""


def _refuse(problems: Iterable[str]) -> None:
    """Raise ValueError with the first problem that is not empty."""
    for problem in filter(None, problems):
        raise ValueError(problem)


def list_scenarios() -> list[str]:
    """Names of the bundled scenarios."""
    return sorted(path.stem for path in bundled_dir("scenarios").glob("*.toml"))


def load_scenario(name_or_path: str) -> ScenarioSpec:
    """Load a bundled scenario by name, or a user's file by path. Raises UsageError."""
    return load_toml(resolve(name_or_path, "scenarios", list_scenarios()), ScenarioSpec)


Floats = npt.NDArray[np.float64]

MOST_SESSIONS = 10_000_000
"""Most sessions in phases of fixed duration without --num-prompts: more would not fit into memory."""


@dataclass(frozen=True)
class Load:
    """Load options that override the scenario file: a cap on open sessions, rates in sessions/s."""

    max_concurrency: int | None = None
    request_rate: float | None = None
    saturation_rate: float | None = None
    burstiness: float | None = None  # shape of the gamma distribution of gaps
    duration_s: float | None = None  # open loop: later arrivals are left out
    rate_scale: float = 1.0  # factor of the rates that a scenario gives

    @property
    def unlimited(self) -> bool:
        """Whether sessions are released at once, up to ``max_concurrency``."""
        return self.request_rate == math.inf


@dataclass(frozen=True)
class Schedule:
    """Sessions per phase, in order; ``arrival_s`` has one entry per session in an open loop and is None in a closed
    one."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    concurrency: tuple[int, ...] = ()
    arrival_s: Floats | None = None

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return sum(self.sizes)

    @property
    def phase_of_session(self) -> npt.NDArray[np.int64]:
        """Phase index of each session."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)


def closed_phases(schedule: Schedule, sizes: Sequence[int]) -> tuple[ClosedPhase, ...]:
    """The plan's closed-loop phases with ``sizes`` sessions each; empty phases are dropped."""
    triples = zip(schedule.names, sizes, schedule.concurrency, strict=True)
    return tuple(ClosedPhase(name, int(n), c) for name, n, c in triples if n)


def make_schedule(spec: ScenarioSpec, load: Load, total: int | None, default_total: int, seed: int) -> Schedule:
    """Schedule of ``total`` sessions (None: the number in the file, else ``default_total``). Raises UsageError."""
    if spec.loop == "closed":
        return _closed(spec, load, total, default_total)
    return _open(spec, load, total, default_total, seed)


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Split ``total`` in proportion to ``weights`` by largest remainder."""
    exact = np.asarray(weights, np.float64) * total / float(sum(weights))
    counts = np.floor(exact).astype(int)
    for index in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    return [int(count) for count in counts]


def _sizes(phases: Sequence[Phase], total: int | None, default_total: int) -> list[int]:
    asked = [phase.requests for phase in phases]
    if len(phases) == 1 and asked[0] is None:
        return [default_total if total is None else total]
    weights = [count or 0 for count in asked]
    return weights if total is None else apportion(weights, total)


def _closed(spec: ScenarioSpec, load: Load, total: int | None, default_total: int) -> Schedule:
    if load.request_rate is not None and not load.unlimited:
        raise UsageError(
            f"scenario {spec.name!r} is a closed loop, which has no request rate; use --scenario poisson, "
            "or --max-concurrency to change its load"
        )
    levels = [phase.max_concurrency or 1 for phase in spec.phases]
    if load.max_concurrency is not None:
        if len(set(levels)) > 1:
            raise UsageError(f"scenario {spec.name!r} sets the concurrency of each phase; leave out --max-concurrency")
        levels = [load.max_concurrency] * len(levels)
    names = tuple(phase.name for phase in spec.phases)
    sizes = tuple(_sizes(spec.phases, total, default_total))
    if load.unlimited and load.max_concurrency is None:
        if len(sizes) > 1:
            raise UsageError(f"scenario {spec.name!r} sets the concurrency of each phase; leave out --request-rate inf")
        levels = [max(1, sum(sizes))]
    return Schedule(names, sizes, tuple(levels))


def _open(spec: ScenarioSpec, load: Load, total: int | None, default_total: int, seed: int) -> Schedule:
    phases = spec.phases
    if load.burstiness is not None:
        if not any(phase.process == "gamma" for phase in phases):
            raise UsageError(f"scenario {spec.name!r} has no gamma gaps to make bursty; use --scenario gamma")
        bursty = {"burstiness": load.burstiness, "gaps": (), "roots": (), "centres": ()}
        phases = tuple(msgspec.structs.replace(phase, **bursty) for phase in phases)
    if load.duration_s is not None and total is None and len(phases) == 1 and phases[0].duration_s is None:
        # A single phase without duration has as many sessions as arrive in that time.
        phases = (msgspec.structs.replace(phases[0], duration_s=load.duration_s, requests=None),)
    timed = any(phase.duration_s is not None for phase in phases)
    sizes = _sizes(phases, None if timed else total, default_total)
    start, pieces = 0.0, list[Floats]()
    for index, phase in enumerate(phases):
        wanted = None if total is None else total - sum(map(len, pieces))
        rng = substream(seed, f"arrivals/{index}")
        times, start = _phase_times(phase, phase_rate(spec, phase, load), sizes[index], wanted, start, rng)
        pieces.append(times if phase.tick_s is None else np.floor(times / phase.tick_s) * phase.tick_s)
    arrival_s = np.concatenate(pieces)[:total]
    if load.duration_s is not None:
        arrival_s = arrival_s[arrival_s < load.duration_s]
    if not len(arrival_s):
        raise UsageError(f"no session arrives in {start:g} s at this rate; raise --request-rate or duration_s")
    names = tuple(phase.name for phase in spec.phases)
    ends = np.minimum(np.cumsum([len(piece) for piece in pieces]), len(arrival_s))
    return Schedule(names, tuple(int(size) for size in np.diff(ends, prepend=0)), arrival_s=arrival_s)


def _phase_times(
    phase: Phase, rate: float, size: int, wanted: int | None, start_s: float, rng: np.random.Generator
) -> tuple[Floats, float]:
    """Arrival times (s) of one phase, at most ``wanted`` in a phase of fixed duration, and the end of the phase."""
    if phase.duration_s is None:
        times = _draw(phase, rate, size, size / rate, rng)
        return start_s + times, start_s + (float(times[-1]) if size else 0.0)
    expected = rate * phase.duration_s
    # Ten standard deviations above the expected number, enough for any practical burstiness.
    enough = expected + 10 * np.sqrt(expected / min(1.0, phase.burstiness)) + 10
    if wanted is None and enough > MOST_SESSIONS:
        raise UsageError(
            f"phase {phase.name!r} would have about {expected:,.3g} arrivals, more than {MOST_SESSIONS:,}; "
            "give --num-prompts, or a lower rate"
        )
    times = _draw(phase, rate, int(enough if wanted is None else min(enough, wanted)), phase.duration_s, rng)
    return start_s + times[times < phase.duration_s], start_s + phase.duration_s


def _draw(phase: Phase, rate: float, size: int, length_s: float, rng: np.random.Generator) -> Floats:
    assert phase.process is not None  # ScenarioSpec checks this for open loops
    curve = None
    if phase.curve is not None:
        linear = phase.curve.shape == "lines"
        curve = Curve(phase.curve.levels, phase.curve.period_s or max(length_s, 1e-9), linear, phase.curve.widths)
    return arrival_times(
        phase.process,
        rate,
        rng,
        size,
        burstiness=phase.burstiness,
        gaps=phase.gaps,
        curve=curve,
        even=phase.even,
        roots=phase.roots,
        centres=phase.centres,
    )


def under(spec: ScenarioSpec, load: Load, total: int | None, seed: int) -> ScenarioSpec:
    """The scenario with the rates of its phases, and with their number of sessions if ``total`` gives it.

    Raises UsageError if a rate is missing.
    """
    phases = list(spec.phases)
    if spec.loop == "open":
        phases = [
            msgspec.structs.replace(phase, rate=phase_rate(spec, phase, load), share=None, level=1.0)
            for phase in phases
        ]
    if total is not None:
        sizes = make_schedule(spec, load, total, total, seed).sizes
        sized = [(phase, size) for phase, size in zip(phases, sizes, strict=True) if size]
        phases = [p if p.duration_s is not None else msgspec.structs.replace(p, requests=size) for p, size in sized]
    return msgspec.structs.replace(spec, phases=tuple(phases))


def phase_rate(spec: ScenarioSpec, phase: Phase, load: Load) -> float:
    """Mean rate of a phase in sessions/s. Raises UsageError if there is none."""
    if load.request_rate is not None:
        return load.request_rate * phase.level
    if phase.rate is not None:
        return phase.rate * load.rate_scale
    if phase.share is None:
        raise UsageError(f"scenario {spec.name!r} needs a rate: give --request-rate in requests per second")
    if load.saturation_rate is None:
        raise UsageError(
            f"scenario {spec.name!r} gives its rates as shares of saturation: give --saturation-rate "
            "(sessions per second, measured with --scenario saturated or `ebbench capacity`), or --request-rate"
        )
    return phase.share * load.saturation_rate
