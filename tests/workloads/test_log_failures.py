"""Failed requests of a log: recognised by status, error or success under many names, said, and kept if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbench.errors import EbbenchError
from ebbench.workloads.trace import Trace, read_trace


def trace_of(folder: Path, column: str, values: list[Any], columns: str | None = None) -> Trace:
    """A log of a request per value, each with token counts."""
    path = folder / "log.jsonl"
    rows = [
        {"timestamp": 1_700_000_000.5 + i, "prompt_tokens": 90, "completion_tokens": 7, column: value}
        for i, value in enumerate(values)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(path, columns)


@pytest.mark.parametrize(
    ("column", "completed", "failed"),
    [
        ("http_code", 200, 500),
        ("httpCode", 200, 429),
        ("response_code", "200", "404"),
        ("http_status", 200.0, 500.0),
        ("statusCode", "200 OK", "503 Service Unavailable"),
        ("sc-status", "200", "502"),
        ("status_class", "2xx", "5xx"),
        ("code", 201, 503),
        ("outcome", "ok", "cancelled"),
        ("result", "success", "failure"),
        ("state", "completed", "timed out"),
        ("finish_reason", "stop", "error"),
        ("success", True, False),
        ("succeeded", "true", "False"),
        ("ok", 1, 0),
        ("is_error", False, True),
        ("failed", 0, 1),
        ("errors", [], ["reset"]),
        ("error_code", None, "500"),
        ("error_msg", "", "connection reset"),
    ],
)
def test_failed_requests_are_left_out(tmp_path: Path, column: str, completed: object, failed: object) -> None:
    trace = trace_of(tmp_path, column, [completed, completed, failed])
    assert len(trace.requests) == 2
    assert [line for _, line in trace.collected.dropped.values()] == [3]


def test_among_http_codes_0_is_no_answer(tmp_path: Path) -> None:
    assert len(trace_of(tmp_path, "http_code", [200, 0, 200, 200]).requests) == 3


@pytest.mark.parametrize("values", [[0, 0, 1], ["eu-1", "eu-2", "us-1"], [4711, 4712, 450]])
def test_a_code_that_is_no_status_leaves_nothing_out(tmp_path: Path, values: list[Any]) -> None:
    trace = trace_of(tmp_path, "code", values)
    assert len(trace.requests) == 3
    assert trace.columns is not None
    assert "status" not in trace.columns.names


@pytest.mark.parametrize(
    ("column", "values", "role"),
    [("http_code", [200, 200, 503], "status"), ("ok", [True, True, False], "success"), ("err", ["", "", "x"], "error")],
)
def test_failed_requests_are_kept_as_asked(tmp_path: Path, column: str, values: list[Any], role: str) -> None:
    said = map(str, trace_of(tmp_path, column, values).requests.warnings)
    assert any(f"--columns {role}=- keeps failed requests" in line for line in said)
    assert len(trace_of(tmp_path, column, values, f"{role}=-").requests) == 3


def test_a_log_of_failed_requests_only_says_how_to_keep_them(tmp_path: Path) -> None:
    with pytest.raises(EbbenchError, match=r"3 of 3 rows have status 500.*--columns status=- keeps failed requests"):
        trace_of(tmp_path, "http_code", [500, 500, 500])
