"""Scenario files: one TOML file per traffic pattern; users add patterns without code."""

from __future__ import annotations

import math
from collections.abc import Iterable
from math import inf
from typing import Literal

import msgspec

from ebbench.config.topology import TopologySpec
from ebbench.foreign.documents import given_of, load_toml, not_positive
from ebbench.resources import bundled_dir
from ebbench.traffic.arrivals import Process
from ebbench.workloads.lengths import LengthSpec
from ebbench.workloads.options import is_recorded
from ebbench.workloads.spec import resolve

# Default scenario, the same for all commands that take a load.


def scenario_meant(
    workload: str, scenario: str | None, request_rate: float | None, burstiness: float | None
) -> str | None:
    """The given scenario, or the one implied by the other options, by the rules of `vllm bench serve`.

    An infinite rate releases all requests at once, up to the concurrency cap: ``saturated``.
    """
    if scenario is None and request_rate == inf and not is_recorded(workload):
        return "saturated"
    if scenario is None and request_rate is not None and not is_recorded(workload):
        return "poisson" if burstiness is None else "gamma"
    return scenario


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


_OF_ARRIVALS = ("rate", "share", "level", "burstiness", "curve", "gaps", "tick_s", "even", "roots", "centres")


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
        problem = _problem(self)
        if problem:
            raise ValueError(problem)

    @property
    def own_lengths(self) -> bool:
        """Whether every phase has its own lengths, so that the workload's are not used."""
        return bool(self.phases) and all(phase.input is not None for phase in self.phases)


def _problem(spec: ScenarioSpec) -> str:
    if spec.loop == "trace":
        return "a trace scenario has [replay] and no phases" if spec.phases else ""
    if not spec.phases:
        return "needs at least one [[phases]] table"
    if spec.replay is not None:
        return "[replay] belongs to loop = 'trace'"
    if spec.loop == "closed" and spec.max_concurrency is not None:
        return "the phases of a closed loop set max_concurrency"
    if not spec.own_lengths and any(phase.input is not None for phase in spec.phases):
        return "either all phases bring their own input and output lengths, or none does"
    for phase in spec.phases:
        label = f"phase {phase.name!r}"
        if len(spec.phases) > 1 and phase.requests is None and phase.duration_s is None:
            return f"{label} needs requests or duration_s, since there is more than one phase"
        if spec.loop == "closed" and (phase.max_concurrency is None or phase.process or phase.duration_s):
            return f"{label} of a closed loop needs max_concurrency, and neither process nor duration_s"
        if spec.loop == "open" and (phase.process is None or phase.max_concurrency):
            return f"{label} of an open loop needs process; its cap is the scenario's max_concurrency"
        if spec.loop == "closed" and (
            idle := given_of(phase, ("rate", "share", "level", "burstiness", "curve", "tick_s"))
        ):
            return f"{label} of a closed loop has no {idle[0]}: a request is sent when one ends; leave it out"
        if phase.process != "gamma" and given_of(phase, ("burstiness",)):
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
