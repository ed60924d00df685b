"""Logs with a key or a column that is there twice are refused, with the line where the format has lines."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbench.errors import InputFileError
from ebbench.workloads.trace import read_trace


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"timestamp": 0.5, "input_length": 1, "input_length": 2, "output_length": 4}', ":1: has the key"),
        ('{"timestamp" : 0.5, "input_length" : 1, "input_length" : 2, "output_length" : 4}', ":1: has the key"),
        (
            '{"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "a": [{"input_length": 1, "input_length": 2}]}',
            ":1:",
        ),
        ('[{"timestamp": 1},\n{"input_length": 1, "input_length": 2}]', ":2: record 2 has the key"),
        ('{"metadata": {"input_length": 1,\n "input_length": 2}}', ": has the key"),
        ("metadata:\n  input_length: 1\n  input_length: 2\n", ":3: is not valid YAML: the key"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(InputFileError) as caught:
        read_trace(path)
    assert f"log{where}" in str(caught.value)
    assert "'input_length'" in str(caught.value)


def test_a_text_that_looks_like_a_key_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    row = {"time": "09:00", "note": '"input_length": 1, "input_length": 2', "input_length": 3, "output_length": 4}
    path.write_text(json.dumps({**row, "time": "2026-03-01T09:00:00Z"}) + "\n")
    assert read_trace(path).requests.input_tokens.tolist() == [3]


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    columns = tmp_path / "twice.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["isl", "isl"]), columns)
    with pytest.raises(InputFileError, match="two columns named 'isl'"):
        read_trace(columns)
