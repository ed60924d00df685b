"""The engine interface: from plan and policy to tables of requests, steps and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from ebbench.devices.base import Device
from ebbench.records.files import TableParts
from ebbench.records.plan import Plan
from ebbench.records.warnings import RunWarning
from ebbench.spec.server import EngineOptions
from vllm_eb.policy import PolicySpec


@dataclass(frozen=True)
class Progress:
    """A snapshot for the progress line."""

    policy: str
    completed: int
    planned: int
    output_tokens: int
    total_tokens: int
    time_s: float  # engine time, virtual or real
    mode: str
    running: int
    waiting: int
    # Known during the run only for engines that measure a server; medians in ms, failures by class.
    failures: Mapping[str, int] = field(default_factory=dict)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    # What the engine waits for before the first request; ``time_s`` is then the time of the wait.
    waiting_for: str = ""


class Observer(Protocol):
    """Receives snapshots during a run; must return quickly."""

    def update(self, progress: Progress) -> None:
        """Process a snapshot."""
        ...


class StepTableParts(TableParts, Protocol):
    """The table of steps in parts."""

    @property
    def last_mode(self) -> str:
        """The mode of the last step; "" if there is none."""
        ...

    def table(self) -> pa.Table:
        """All parts as one table."""
        ...


@dataclass(frozen=True)
class EngineResult:
    """Tables in the schemas of :mod:`ebbench.records.files`, and entries for the manifest.

    ``steps`` of an engine that was asked for figures only lacks columns that no figure needs.

    ``invalid``: reasons that make the run INVALID and that only the engine knows. ``facts`` are added to the plan's.
    ``server_metrics``: samples of the server's metrics page, if it has one. ``device``: the device of one instance, if
    that is a unit of several GPUs instead of the given single GPU. ``step_parts``: the steps of a long run in parts, to
    be stored one after the other; ``steps`` is then empty.
    """

    requests: pa.Table
    steps: pa.Table
    decisions: pa.Table
    warnings: tuple[RunWarning, ...] = ()
    interrupted: bool = False
    invalid: tuple[RunWarning, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    server_metrics: pa.Table | None = None
    device: Device | None = None
    step_parts: StepTableParts | None = None

    def uninterrupted(self) -> EngineResult:
        """This result, for callers that can do nothing with a part. Raises KeyboardInterrupt if it is one."""
        if self.interrupted:
            raise KeyboardInterrupt
        return self

    @property
    def last_mode(self) -> str:
        """The mode of the last step, eb or mb; "" if no modes are known."""
        if self.step_parts is not None:
            return self.step_parts.last_mode
        known = self.steps.num_rows and "mode" in self.steps.column_names
        return str(self.steps["mode"][-1].as_py()) if known else ""


class Engine(Protocol):
    """Runs a plan under a policy."""

    @property
    def name(self) -> str:
        """The engine's name on the command line."""
        ...

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Run to the end of the plan. Raises RunError if that fails."""
        ...
