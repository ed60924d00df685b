"""The request plan: which requests are sent and when, independent of engine and policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa


@dataclass(frozen=True)
class ClosedPhase:
    """A closed-loop phase: ``sessions`` released in plan order while fewer than ``max_concurrency`` are open.

    A session holds one slot from its first turn's release until its last turn ends. The next phase begins with
    the release that follows the last one of this phase; sessions still open keep their slots.
    """

    name: str
    sessions: int
    max_concurrency: int


@dataclass(frozen=True)
class Plan:
    """A table in the PLAN schema, ordered by release, and the release rules.

    The table may also have columns of PLAN_EXTRAS: pauses, requests that wait for several others, clients that hang up.
    ``phases`` not empty: closed loop. Empty: open loop, sessions start at ``arrival_ns``; ``max_concurrency`` may cap
    open sessions (a request above the cap waits; its intended start does not change). ``facts``: entries for the
    manifest (workload, scenario, seed, source and others). ``release_for_s``: a closed loop releases no session after
    so many seconds; open sessions run to their end. ``cut_from``: the original plan, if this one holds only its
    released sessions.
    """

    table: pa.Table
    phases: tuple[ClosedPhase, ...]
    facts: Mapping[str, Any]
    max_concurrency: int | None = None
    warnings: tuple[str, ...] = field(default=())
    release_for_s: float | None = None
    cut_from: Plan | None = None

    @property
    def closed_loop(self) -> bool:
        """Whether completions release sessions, instead of arrival times."""
        return bool(self.phases)

    def __len__(self) -> int:
        return int(self.table.num_rows)
