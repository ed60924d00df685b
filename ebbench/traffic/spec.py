"""Scenario files: when requests are asked. One TOML per traffic pattern; a user adds one without code."""

from __future__ import annotations

from typing import Literal

import msgspec

from ebbench.resources import bundled_dir
from ebbench.simulation.topology import TopologySpec
from ebbench.traffic.arrivals import Process
from ebbench.workloads.lengths import LengthSpec
from ebbench.workloads.spec import resolve
from ebbench.workloads.strict_toml import load_toml


class CurveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Relative rate over time, scaled to a mean of one. Without ``period_s`` one period spans the whole phase.

    ``steps`` are equally long pieces of constant rate; ``lines`` joins equally spaced corners.
    """

    levels: tuple[float, ...]
    shape: Literal["steps", "lines"] = "steps"
    period_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.levels) < 2:
            raise ValueError("a curve needs at least two levels")
        if min(self.levels) < 0 or max(self.levels) <= 0:
            raise ValueError("curve levels must not be negative, and not all zero")
        if self.period_s is not None and not self.period_s > 0:
            raise ValueError("period_s must be positive")


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One phase. Closed loop: ``max_concurrency``. Open loop: ``process`` and a rate.

    ``requests`` sessions, or as many as arrive in ``duration_s`` (open loop only), or all when neither is given
    and there is one phase. The rate in sessions/s is ``--request-rate`` times ``level`` where that option is
    given, else ``rate``, else ``share`` times the saturation rate. ``burstiness`` is the shape of gamma gaps
    (below 1: burstier than Poisson). ``input`` and ``output`` replace the workload's lengths in this phase.
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
    input: LengthSpec | None = None
    output: LengthSpec | None = None

    def __post_init__(self) -> None:
        for key in ("requests", "duration_s", "max_concurrency", "rate", "share", "level", "burstiness"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be positive, not {value:g}")
        if self.requests is not None and self.duration_s is not None:
            raise ValueError("a phase has requests or duration_s, not both")
        if (self.input is None) != (self.output is None):
            raise ValueError("a phase that brings its own lengths needs both input and output")


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which part of a trace is replayed: from ``start_s`` for ``duration_s`` (all), ``repeat`` times over."""

    speed: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    repeat: int = 1

    def __post_init__(self) -> None:
        if not self.speed > 0 or not self.repeat >= 1 or not self.start_s >= 0:
            raise ValueError("a replay needs speed > 0, repeat >= 1 and start_s >= 0")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ValueError("duration_s must be positive")


class ScenarioSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One traffic pattern. ``loop``: closed (released by completions), open (by the clock), trace (as recorded).

    ``topology``: the instances this traffic is meant for, where it needs several; short (``dp=4``) or as a table.
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
        """Whether every phase brings its own lengths, so that the workload's are not used."""
        return bool(self.phases) and all(phase.input is not None for phase in self.phases)


def _problem(spec: ScenarioSpec) -> str:
    if spec.loop == "trace":
        return "a trace scenario has [replay] and no phases" if spec.phases else ""
    if not spec.phases:
        return "needs at least one [[phases]] table"
    if spec.replay is not None:
        return "[replay] belongs to loop = 'trace'"
    for phase in spec.phases:
        label = f"phase {phase.name!r}"
        if len(spec.phases) > 1 and phase.requests is None and phase.duration_s is None:
            return f"{label} needs requests or duration_s, since there is more than one phase"
        if spec.loop == "closed" and (phase.max_concurrency is None or phase.process or phase.duration_s):
            return f"{label} of a closed loop needs max_concurrency, and neither process nor duration_s"
        if spec.loop == "open" and (phase.process is None or phase.max_concurrency):
            return f"{label} of an open loop needs process; its cap is the scenario's max_concurrency"
    return ""


def list_scenarios() -> list[str]:
    """Names of the bundled scenarios."""
    return sorted(path.stem for path in bundled_dir("scenarios").glob("*.toml"))


def load_scenario(name_or_path: str) -> ScenarioSpec:
    """Load a bundled scenario by name, or a user's file by path. Raises UsageError."""
    return load_toml(resolve(name_or_path, "scenarios", list_scenarios()), ScenarioSpec)
