"""Recovery times of synthetic runs whose recovery time is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.phases import (
    attainment_document,
    mode_changes,
    phases_document,
    recoveries,
    served_spans,
    token_times,
    ttft_recovery,
)
from ebbench.records.schema import REQUESTS
from ebbench.runs.store import Measured

S = 1_000_000_000


def rows(starts_s: np.ndarray, phase: str, *, ttft_s: np.ndarray | float = 0.0, first: int = 0) -> list[dict[str, Any]]:
    """Requests of one prompt and one output token, their first token ``ttft_s`` after their start."""
    waits = np.broadcast_to(ttft_s, starts_s.shape)
    made = []
    for i, (start, wait) in enumerate(zip(starts_s, waits, strict=True)):
        row: dict[str, Any] = {field.name: None for field in REQUESTS}
        token = round((start + wait) * S)
        row |= {
            "request_id": f"{phase}{i}", "session": first + i, "turn": 0, "phase": phase, "input_tokens": 1,
            "output_tokens_planned": 1, "output_tokens": 1, "status": "ok", "intended_ns": round(start * S),
            "sent_ns": round(start * S), "first_token_ns": token, "last_token_ns": token, "end_ns": token,
            "itl_ns": [],
        }  # fmt: skip
        made.append(row)
    return made


class Made:
    """Stands for a run: a request table and the steps given."""

    def __init__(self, made: list[dict[str, Any]], **steps: list[Any]) -> None:
        self.steps = steps
        self.requests = pa.Table.from_pylist(made, schema=REQUESTS)

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        if name == "steps":
            types = {"start_ns": pa.int64(), "mode": pa.string(), "instance": pa.int32()}
            return pa.table({column: pa.array(self.steps.get(column, []), kind) for column, kind in types.items()})
        return self.requests if columns is None else self.requests.select(list(columns))


def even(rate: float, start_s: float, end_s: float) -> np.ndarray:
    return np.arange(start_s, end_s, 1 / rate)


def test_a_slow_start_is_a_recovery_of_its_length() -> None:
    """2 tokens/s for 20 s, then 20 tokens/s to 100 s: from 20 s on the rate is the settled one."""
    slow_then_fast = np.concatenate([even(1, 0, 20), even(10, 20, 100)])
    (found,) = recoveries(Made(rows(slow_then_fast, "p")))  # type: ignore[arg-type]
    assert found.settled_tokens_per_s == pytest.approx(20, rel=0.02)
    assert found.recovery_s == pytest.approx(18.5, abs=1.0), "the mean over the rest may be 5 % short"
    assert found.lost_s == pytest.approx(18.0, abs=0.5), "20 s at a tenth of the rate"


def test_the_controller_is_timed_until_its_last_change() -> None:
    made = Made(
        rows(even(10, 0, 100), "p"), start_ns=[0, 20 * S, 30 * S, 40 * S], mode=["mb", "eb", "mb", "eb"],
        instance=[0, 0, 0, 0],
    )  # fmt: skip
    (phase,) = recoveries(made)  # type: ignore[arg-type]
    assert phase.controller_s == 40.0
    assert phase.controller_requests == 400, "those that ended in these 40 s"
    assert phase.switches == 3
    assert phase.mean_tokens_per_s == pytest.approx(20, rel=0.02), "over all of the phase"


def test_an_even_rate_needs_no_recovery() -> None:
    (found,) = recoveries(Made(rows(even(10, 0, 100), "p")))  # type: ignore[arg-type]
    assert found.recovery_s == 0.0
    assert found.lost_s == pytest.approx(0.0, abs=0.2)
    assert (found.controller_s, found.switches) == (0.0, 0)


def test_a_phase_too_short_has_no_recovery() -> None:
    (found,) = recoveries(Made(rows(even(10, 0, 15), "p")))  # type: ignore[arg-type]
    assert found.recovery_s is None
    assert found.settled_tokens_per_s is None


def test_phases_are_served_from_first_token_to_first_token() -> None:
    made = rows(even(1, 0, 40), "a", ttft_s=2.0) + rows(even(1, 35, 80), "b", ttft_s=4.0, first=100)
    spans = served_spans(RequestColumns.of(Made(made).requests))
    assert [(name, round(start), round(end)) for name, start, end in spans] == [("a", 2, 39), ("b", 39, 83)]


def test_ttft_recovers_when_the_slow_requests_end() -> None:
    starts = even(10, 0, 100)  # 1,000 requests, blocks of 50: 5 s each
    waits = np.where(starts < 20, 5.0, 0.1)
    columns = RequestColumns.of(Made(rows(starts, "p", ttft_s=waits)).requests)
    assert ttft_recovery(columns, "p") == pytest.approx(20, abs=0.2)
    steady = RequestColumns.of(Made(rows(starts, "p", ttft_s=0.1)).requests)
    assert ttft_recovery(steady, "p") == 0.0
    assert ttft_recovery(steady, "no such phase") is None


def test_token_times_hold_every_token(shift_run: Measured) -> None:
    requests = shift_run.run.requests
    times, tokens = token_times(RequestColumns.of(requests))
    prompts, outputs = (sum(requests[name].to_pylist()) for name in ("input_tokens", "output_tokens"))
    assert tokens.sum() == prompts + outputs
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(max(requests["last_token_ns"].to_pylist()) / S)


def test_the_phase_table_has_a_row_a_phase(shift_run: Measured) -> None:
    (section,) = phases_document([shift_run.run]).sections
    assert [row[0] for row in section.rows] == ["prompts", "answers"]
    assert [row[1] for row in section.rows] == [150, 150]


def test_attainment_of_runs_by_phase(shift_run: Measured) -> None:
    document = attainment_document([shift_run.run], [1000.0], [50.0], by_phase=True)
    assert len(document.sections) == 3
    assert all(0 <= float(section.rows[0][1]) <= 100 for section in document.sections)  # type: ignore[arg-type]


def test_modes_change_by_instance() -> None:
    """Two instances in turns, one exclusive throughout, the other from 4 s on: one change, not seven."""
    modes = ["eb", "mb", "eb", "mb", "eb", "eb", "eb", "eb"]
    run = Made([], start_ns=[place * S for place in range(8)], mode=modes, instance=[0, 1] * 4)
    assert mode_changes(run).tolist() == [5.0]  # type: ignore[arg-type]
