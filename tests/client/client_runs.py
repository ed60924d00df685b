"""Plans and shortcuts for the client's tests."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ebbench.client import DriveResult, drive
from ebbench.engines.base import EngineResult
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import PLAN
from ebbench.spec.client import ClientOptions


def plan_of(
    sessions: int = 8,
    *,
    concurrency: int | None = 4,
    arrivals_ms: list[float] | None = None,
    input_tokens: int = 5,
    output_tokens: int = 6,
    turns: int = 1,
    prompts: list[str] | list[None] | None = None,
    ids: list[str] | None = None,
    phases: tuple[ClosedPhase, ...] = (),
) -> Plan:
    """A small plan, closed loop unless ``arrivals_ms`` gives each session a time."""
    n = sessions * turns
    session = [i // turns for i in range(n)]
    turn = [i % turns for i in range(n)]
    arrival = [
        round(arrivals_ms[s] * 1e6) if arrivals_ms is not None and t == 0 else None
        for s, t in zip(session, turn, strict=True)
    ]
    table = pa.table(
        {
            "request_id": ids or [f"r{i}" for i in range(n)],
            "session": session,
            "turn": turn,
            "phase": ["measure"] * n,
            "arrival_ns": arrival,
            "input_tokens": [input_tokens] * n,
            "output_tokens": [output_tokens] * n,
            "content": session,
            "hash_ids": [None] * n,
            "prompt": prompts or [None] * n,
        },
        schema=PLAN,
    )
    if arrivals_ms is not None:
        return Plan(table, (), {}, concurrency)
    return Plan(table, phases or (ClosedPhase("measure", sessions, concurrency or 1),), {})


def run(url: str, plan: Plan, environ: dict[str, str] | None = None, **options: object) -> DriveResult:
    """Drive in this process, without metrics. Timeouts are long enough for a machine that stalls for seconds."""
    settings: dict[str, object] = {"workers": 0, "metrics_interval_s": None, "idle_timeout_s": 30.0, **options}
    return drive(url, plan, ClientOptions(**settings), environ=environ or {})  # type: ignore[arg-type]


def column(result: DriveResult | EngineResult, name: str) -> list[Any]:
    """A column of the requests as a list."""
    values: list[Any] = result.requests.column(name).to_pylist()
    return values
