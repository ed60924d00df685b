"""Sessions whose later turns have a delay in place of a time, as AIPerf writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbench.errors import InputFileError
from ebbench.workloads import build_plan
from ebbench.workloads.trace import Trace, read_trace

SESSIONS = [
    {"session_id": "x", "timestamp": 0, "input_length": 900, "output_length": 60, "hash_ids": [7, 8]},
    {"session_id": "y", "timestamp": 1500, "input_length": 700, "output_length": 30, "hash_ids": [7, 9]},
    {"session_id": "x", "delay": 3000, "input_length": 40, "output_length": 20, "hash_ids": [10]},
    {"session_id": "x", "delay": 500, "input_length": 10, "output_length": 5, "hash_ids": [11]},
]


def read(folder: Path, rows: list[dict[str, Any]]) -> Trace:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(path)


def test_delays_become_pauses_and_prompts_hold_the_session(tmp_path: Path) -> None:
    trace = read(tmp_path, SESSIONS)
    requests = trace.timed()
    assert requests.session.tolist() == [0, 0, 0, 1]
    assert requests.input_tokens.tolist() == [900, 900 + 60 + 40, 1000 + 20 + 10, 700]
    assert requests.pause_s is not None
    assert requests.pause_s[1:3].tolist() == [3.0, 0.5]
    assert requests.arrival_s is not None
    assert requests.arrival_s.tolist() == [0.0, 1.5]
    assert any("delay after the turn before" in note for note in map(str, trace.requests.warnings))
    table = build_plan(f"log:{trace.path}").table
    assert table["pause_ns"].to_pylist() == [None, 3_000_000_000, 500_000_000, None]


def test_sessions_without_any_time_follow_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "timestamp"} for row in SESSIONS]
    requests = read(tmp_path, rows).requests
    assert requests.input_tokens.tolist() == [900, 1000, 1030, 700]
    assert requests.arrival_s is None
    assert requests.pause_s is not None
    assert requests.pause_s[1:3].tolist() == [3.0, 0.5]


def test_whole_messages_are_whole_prompts(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "word " * 80}]
    rows = [
        {"session_id": "x", "timestamp": 0, "messages": said, "output_length": 9},
        {"session_id": "x", "delay_s": 2, "messages": said * 2, "output_length": 9},
        {"session_id": "z", "timestamp": 4000, "messages": said, "output_length": 9},
    ]
    requests = read(tmp_path, rows).requests
    assert requests.input_tokens[1] < 2.1 * requests.input_tokens[0]
    assert requests.pause_s is not None
    assert requests.pause_s[1] == 2.0


def test_a_delay_beside_times_is_a_column_like_any_other(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 100.5 * i, "session": i % 2, "delay": "n/a", "input_tokens": 5, "output_tokens": 5}
        for i in range(4)
    ]
    columns = read(tmp_path, rows).columns
    assert columns is not None
    assert "delay" not in columns.names


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"session_id": "new", "delay": 5}, "the first turn of its session has no timestamp"),
        ({"session_id": "x", "delay": -1}, "expected a delay of 0 or more in delay, found '-1'"),
        ({"session_id": "x", "delay": "soon"}, "found 'soon'"),
        ({"session_id": "x", "delay": float("nan")}, "found 'nan'"),
        ({"session_id": "x", "delay": 1, "input_length": 16_777_000}, "more than 16,777,216 tokens"),
    ],
)
def test_delays_that_cannot_be_used_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    added = {"input_length": 4, "output_length": 4, **row}
    with pytest.raises(InputFileError, match=message) as caught:
        read(tmp_path, [*SESSIONS, added])
    assert caught.value.line == 5
