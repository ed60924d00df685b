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
    """A table in the PLAN schema, ordered by release, plus how releases happen.

    ``phases`` non-empty: closed loop. Empty: open loop, sessions start at their ``arrival_ns``; an optional
    ``max_concurrency`` then caps open sessions (a request over the cap waits, its intended start unchanged).
    ``facts`` goes into the manifest: workload, scenario, seed, source and anything worth knowing.
    ``release_for_s``: in a closed loop no session is released after so many seconds; what runs then goes on to its end.
    ``cut_from``: the plan as it was asked, where this one holds only what was released of it.
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
        """Whether sessions are released by completions instead of by the clock."""
        return bool(self.phases)

    def __len__(self) -> int:
        return int(self.table.num_rows)
