"""Synthetic plans, request tables and an engine, for tests of analysis and reports."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ebbench.devices.base import Device, StepShape
from ebbench.engines.base import EngineResult
from ebbench.records.plan import ClosedPhase, Observer, Plan, Progress
from ebbench.records.schema import DECISIONS, PLAN, REQUESTS, STEPS
from ebbench.records.warnings import RunWarning
from ebbench.spec.server import EngineOptions
from vllm_eb.calibration import Calibration, MixedCost
from vllm_eb.policy import PolicySpec

MS = 1_000_000


def request(number: int, **values: Any) -> dict[str, Any]:
    """A completed request of two tokens, 10 ms to the first and 5 ms to the second, changed as given."""
    row: dict[str, Any] = {field.name: None for field in REQUESTS}
    intended = values.get("intended_ns", 0) or 0
    row |= {
        "request_id": f"r-{number}",
        "session": number,
        "turn": 0,
        "phase": "all",
        "input_tokens": 100,
        "output_tokens_planned": 2,
        "output_tokens": 2,
        "status": "ok",
        "intended_ns": intended,
        "sent_ns": intended,
        "first_token_ns": intended + 10 * MS,
        "last_token_ns": intended + 15 * MS,
        "end_ns": intended + 15 * MS,
        "itl_ns": [5 * MS],
    }
    return row | values


def requests_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows in the REQUESTS schema."""
    return pa.Table.from_pylist(list(rows), schema=REQUESTS)


def plan_of(
    count: int,
    *,
    concurrency: int = 8,
    output_tokens: int = 20,
    phases: Sequence[ClosedPhase] | None = None,
    seed: int = 0,
) -> Plan:
    """A closed-loop plan of single-turn requests; phases default to one."""
    chosen = tuple(phases or [ClosedPhase("all", count, concurrency)])
    names = [phase.name for phase in chosen for _ in range(phase.sessions)]
    rows = [
        {
            "request_id": f"r-{i}",
            "session": i,
            "turn": 0,
            "phase": names[i],
            "input_tokens": 100,
            "output_tokens": output_tokens,
            "content": i,
        }
        for i in range(count)
    ]
    facts = {"workload": "made-up", "scenario": "saturated", "seed": seed, "source": "profile"}
    table = pa.Table.from_pylist([{field.name: None for field in PLAN} | row for row in rows], schema=PLAN)
    return Plan(table, chosen, facts, warnings=(RunWarning("", message="lengths are made up"),))


class _NoCost:
    def step_s(self, shape: StepShape) -> float:
        """Unused by the engine below."""
        return 0.001


def device_of(capacity: int = 100_000) -> Device:
    """A device with round numbers."""
    calibration = Calibration(0.01, 1e-5, 0.02, 1e-5, MixedCost(4e-5, 1e-6, -1e-6), margin=1e-5)
    return Device("made-gpu", "made-model", _NoCost(), capacity, calibration, "invented for tests")


class MadeEngine:
    """Slots that each serve one request at a time; the token gap depends on the policy only.

    ``fail_from`` fails every request from that number on; ``stop_after`` interrupts after so many requests.
    """

    name = "sim"
    GAP_MS = {"v1": 20, "ebplus": 10, "eb": 11, "v0": 25, "deferred": 12}  # noqa: RUF012

    def __init__(self, *, fail_from: int | None = None, stop_after: int | None = None) -> None:
        self.fail_from, self.stop_after = fail_from, stop_after
        self.runs: list[str] = []

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Serve the plan."""
        self.runs.append(policy.name)
        gap = self.GAP_MS[policy.kind] * MS
        rows = self._serve(plan, gap)
        end = max((row["end_ns"] or 0) for row in rows)
        if observer is not None:
            tokens = sum(row["output_tokens"] or 0 for row in rows)
            observer.update(Progress(policy.name, len(rows), len(plan), tokens, tokens, end / 1e9, "eb", 1, 0))
        return EngineResult(
            requests_table(rows),
            _steps(end, policy.kind),
            _decisions(end) if policy.kind == "ebplus" else DECISIONS.empty_table(),
            warnings=(),
            interrupted=self.stop_after is not None,
        )

    def _serve(self, plan: Plan, gap: int) -> list[dict[str, Any]]:
        open_until: list[int] = []
        concurrency = {phase.name: phase.max_concurrency for phase in plan.phases}
        rows: list[dict[str, Any]] = []
        release = 0
        for number, asked in enumerate(plan.table.to_pylist()):
            while len(open_until) >= concurrency[asked["phase"]]:
                release = max(release, heapq.heappop(open_until))
            rows.append(self._row(number, asked, release, gap))
            heapq.heappush(open_until, rows[-1]["end_ns"] or release)
        return rows

    def _row(self, number: int, asked: dict[str, Any], start: int, gap: int) -> dict[str, Any]:
        n = asked["output_tokens"]
        base = {
            "phase": asked["phase"],
            "intended_ns": start,
            "output_tokens_planned": n,
            "request_id": asked["request_id"],
        }
        if self.stop_after is not None and number >= self.stop_after:
            absent = dict.fromkeys(("intended_ns", "sent_ns", "first_token_ns", "last_token_ns", "end_ns"))
            return request(number, **(base | absent), status="never_sent", output_tokens=0, itl_ns=None)
        first, last = start + 2 * gap, start + (n + 1) * gap
        if self.fail_from is not None and number >= self.fail_from:
            return request(
                number, **base, status="failed", output_tokens=0, itl_ns=None, first_token_ns=None, last_token_ns=None,
                end_ns=last,
            )  # fmt: skip
        return request(
            number, **base, output_tokens=n, first_token_ns=first, last_token_ns=last, end_ns=last,
            itl_ns=[gap] * (n - 1),
        )  # fmt: skip


def _steps(end: int, kind: str) -> pa.Table:
    mixed = kind == "v1"
    rows = [
        {
            "step_id": i,
            "instance": 0,
            "scheduled_ns": i * end // 10,
            "start_ns": i * end // 10,
            "end_ns": (i + 1) * end // 10,
            "phase": "mixed" if mixed else ("prefill" if i % 5 == 0 else "decode"),
            "mode": "mb" if mixed or i < 2 else "eb",
            "prefill_tokens": 400 if mixed else (2000 if i % 5 == 0 else 0),
            "decode_seqs": 8 if mixed or i % 5 else 0,
            "request_ids": ["r-0"],
            "request_tokens": [1],
            "kv_blocks_used": 10 * i,
            "kv_blocks_total": 100,
            "waiting": 3,
            "running": 8,
            "preemptions": 0,
            "preempted_ids": [],
            "k": 5,
            "n_limit": 8,
        }
        for i in range(10)
    ]
    return pa.Table.from_pylist(rows, schema=STEPS)


def _decisions(end: int) -> pa.Table:
    common = {"step_id": 0, "instance": 0, "phase": "decode", "k": 5, "n_limit": 8, "theta": 0.62, "n_obs": 8.0}
    mode = common | {"kind": "mode", "margin": 1e-5, "r": 0.2}
    ahead = {"mode": "eb", "lhs": 4e-5, "rhs": 5e-6}
    update = {"kind": "update", "reason": "algorithm_1", "mode": "mb", "theta0": 0.6, "p0": 0.05}
    behind = {"reason": "within_margin", "mode": "mb", "lhs": 3e-5, "rhs": 2.5e-5}
    rows = [
        common | update | {"time_ns": end // 10},
        mode | behind | {"time_ns": end // 10},
        mode | ahead | {"time_ns": end // 5, "reason": "mixing_costs_more"},
        mode | ahead | {"time_ns": end // 2, "reason": "mode_confirmed"},
    ]
    empty: dict[str, Any] = {field.name: None for field in DECISIONS}
    return pa.Table.from_pylist([empty | row for row in rows], schema=DECISIONS)
