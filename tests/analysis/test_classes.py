"""Classes of requests and sessions as jobs: their figures add up to the run's, and each follows its definition."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import (
    Slo,
    measure,
    measure_classes,
    meets,
    parse_slo,
    refuse_unknown_classes,
    slo_from_limits,
)
from ebbench.analysis.sessions import SessionFigures, figures_by_class, sessions_table
from ebbench.errors import UsageError
from ebbench.records.schema import REQUESTS_EXTRAS
from tests.analysis.made_runs import MS, request, requests_table
from tests.analysis.test_metrics import rows

CLASSES = st.sampled_from(["chat", "rag", None])


def columns_of(made: list[dict[str, Any]], classes: list[str | None]) -> RequestColumns:
    table = requests_table(made)
    return RequestColumns.of(table.append_column(REQUESTS_EXTRAS.field("class"), pa.array(classes, pa.string())))


@given(rows(), st.data())
@settings(max_examples=150, deadline=None)
def test_class_figures_add_up_to_those_of_the_run(made: list[dict[str, Any]], data: st.DataObject) -> None:
    classes = data.draw(st.lists(CLASSES, min_size=len(made), max_size=len(made)))
    columns = columns_of(made, classes)
    slo = Slo(ttft=300.0, tpot=100.0)
    whole = measure(columns, slo=slo)
    parts = measure_classes(columns, slo, whole.duration_s)
    assert bool(parts) == any(classes)
    if not parts:
        return
    for name in ("planned", "completed", "total_input_tokens", "total_output_tokens", "cached_tokens", "preemptions"):
        assert sum(getattr(part, name) for part in parts.values()) == getattr(whole, name)
    for status, count in whole.counts.items():
        assert sum(part.counts[status] for part in parts.values()) == count
    for rate in ("request_throughput", "output_throughput", "request_goodput", "token_goodput"):
        known = [getattr(part, rate) for part in parts.values()]
        if getattr(whole, rate) is not None:
            assert sum(known) == pytest.approx(getattr(whole, rate))
    met = sum((part.slo_attainment or 0.0) * part.planned for part in parts.values())
    assert met == pytest.approx((whole.slo_attainment or 0.0) * whole.planned)


@given(rows(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_request_is_held_to_the_limits_of_its_class(made: list[dict[str, Any]], data: st.DataObject) -> None:
    classes = data.draw(st.lists(CLASSES, min_size=len(made), max_size=len(made)))
    columns = columns_of(made, classes)
    slo = parse_slo(["ttft:300 chat:ttft:50,tpot:20"])
    whole = meets(columns, columns.ok, slo)
    for name in ("chat", "rag", ""):
        alone = meets(columns, columns.ok, slo.of_class(name))
        own = columns.request_class == name
        assert (whole[own] == alone[own]).all()


@given(rows())
@settings(max_examples=150, deadline=None)
def test_session_time_is_model_time_plus_wait(made: list[dict[str, Any]]) -> None:
    columns = RequestColumns.of(requests_table(made))
    table = sessions_table(columns)
    by_session: dict[int, list[dict[str, Any]]] = {}
    for row in made:
        by_session.setdefault(row["session"], []).append(row)
    if table is None:
        assert len(by_session) == len(made)
        return
    assert table["session"].to_pylist() == list(by_session)
    for row in table.to_pylist():
        own = by_session[row["session"]]
        assert row["turns"] == len(own)
        assert row["completed_turns"] == sum(one["status"] == "ok" for one in own)
        assert row["complete"] == (row["completed_turns"] == row["turns"])
        assert row["output_tokens"] == sum(one["output_tokens"] for one in own if one["status"] == "ok")
        if row["complete"]:
            assert row["completion_ms"] == pytest.approx(row["model_ms"] + row["wait_ms"])
            moments = _open_ns(own)
            assert row["model_ms"] == pytest.approx(moments / 1e6)
            assert row["request_ms"] >= row["model_ms"] - 1e-6


def _open_ns(own: list[dict[str, Any]]) -> int:
    """How long at least one of the requests was open, interval by interval."""
    total, until = 0, -1
    for start, end in sorted((one["intended_ns"], one["last_token_ns"]) for one in own):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def test_a_single_request_session_takes_its_e2el() -> None:
    made = [
        request(0, session=0, intended_ns=0, first_token_ns=5 * MS, last_token_ns=10 * MS, end_ns=10 * MS),
        request(1, session=1, intended_ns=0, first_token_ns=5 * MS, last_token_ns=10 * MS, end_ns=10 * MS),
        request(2, session=1, intended_ns=30 * MS, first_token_ns=35 * MS, last_token_ns=50 * MS, end_ns=50 * MS),
    ]
    table = sessions_table(RequestColumns.of(requests_table(made)))
    assert table is not None
    assert table["completion_ms"].to_pylist() == [10.0, 50.0]
    assert table["wait_ms"].to_pylist() == [0.0, 20.0]
    figures = SessionFigures.of(table)
    assert figures.model_share == pytest.approx(40 / 60)
    assert figures.completion.median == statistics.median([10.0, 50.0])


def test_sub_agents_at_the_same_time_count_once_in_model_time() -> None:
    made = [
        request(n, session=0, intended_ns=start * MS, first_token_ns=(start + 1) * MS, last_token_ns=end * MS)
        for n, (start, end) in enumerate([(0, 10), (10, 40), (10, 30), (45, 60)])
    ]
    table = sessions_table(RequestColumns.of(requests_table(made)))
    assert table is not None
    [row] = table.to_pylist()
    assert (row["completion_ms"], row["model_ms"], row["wait_ms"], row["request_ms"]) == (60.0, 55.0, 5.0, 75.0)


def test_figures_of_sessions_are_by_the_class_of_the_first_request() -> None:
    made = [request(n, session=n // 2, intended_ns=n * MS) for n in range(6)]
    columns = columns_of(made, ["chat", "rag", "rag", "rag", None, None])
    found = figures_by_class(sessions_table(columns))
    assert {name: each.planned for name, each in found.items()} == {"": 3, "chat": 1, "rag": 1}


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        (["chat:ttft:500,tpot:50"], {"chat:ttft": 500.0, "chat:tpot": 50.0}),
        (["ttft:900 chat:ttft:500", "rag:e2el:9000"], {"ttft": 900.0, "chat:ttft": 500.0, "rag:e2el": 9000.0}),
        (["chat:ttft:500 tpot:50"], {"chat:ttft": 500.0, "tpot": 50.0}),
    ],
)
def test_limits_of_classes_are_read_and_written_alike(text: list[str], limits: dict[str, float]) -> None:
    slo = parse_slo(text)
    assert slo.limits() == limits
    assert slo_from_limits(limits).limits() == limits
    assert parse_slo([str(slo)]).limits() == limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat:tfft:500", "metric"),
        ("chat:ttft:0", "ttft"),
        ("chat:ttft:500,ttft:600", "ttft"),
        ("chat:ttft:p99:500", "percentile"),
        ("tfft:p99:500", "percentile"),
    ],
)
def test_a_wrong_limit_of_a_class_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_slo([text])


def test_a_limit_of_a_class_without_requests_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'code'.*chat, rag"):
        refuse_unknown_classes(["chat", "code"], ["rag", "chat", ""])


def test_a_class_that_was_not_reached_in_time_has_no_figures() -> None:
    columns = columns_of([request(0), request(1)], ["chat", "rag"])
    assert set(measure_classes(columns, parse_slo(["code:ttft:5"]), 1.0)) == {"chat", "rag"}
    assert np.array_equal(columns.request_class, ["chat", "rag"])
