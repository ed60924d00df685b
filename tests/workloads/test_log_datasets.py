"""Data sets given as logs, and the columns of other simulators' traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbench.errors import InputFileError
from ebbench.workloads.trace import Trace, read_trace


def read(folder: Path, rows: list[dict[str, Any]], columns: str | None = None) -> Trace:
    path = folder / "data.json"
    path.write_text(json.dumps(rows))
    return read_trace(path, columns)


ASKED = {"role": "user", "content": "how are you " * 9}
SAID = {"role": "assistant", "content": "well " * 9}


@pytest.mark.parametrize(
    ("row", "workload"),
    [
        ({"id": "1", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "sharegpt"),
        ({"conversation_id": "1", "model": "m", "conversation": [ASKED, SAID], "turn": 1}, "wildchat"),
        ({"conversation_hash": "1", "timestamp": "2023-04-09T00:00:00Z", "conversation": [ASKED, SAID]}, "wildchat"),
        ({"source": "x", "problem": "1 + 1", "solution": "2", "messages": [ASKED, SAID]}, "numinamath"),
        ({"context": "a", "input": "b", "answers": ["c"]}, "longbench"),
    ],
)
def test_a_data_set_names_the_workload_that_sends_it(tmp_path: Path, row: dict[str, Any], workload: str) -> None:
    with pytest.raises(InputFileError, match=rf"no log; .*ebbench run {workload} --source file:{tmp_path}"):
        read(tmp_path, [row, row])


def test_a_table_of_questions_is_no_log_unless_its_columns_are_named(tmp_path: Path) -> None:
    rows = [{"question": "what is it", "answer": "a question"}] * 3
    tasks = [{"instruction": "add them", "input": "2 3", "output": "5"}] * 3
    with pytest.raises(InputFileError, match=r"not a log: .*--columns prompt=instruction,answer=output"):
        read(tmp_path, tasks)
    with pytest.raises(InputFileError, match=r"not a log: .*--columns prompt=question,answer=answer"):
        read(tmp_path, rows)
    assert len(read(tmp_path, rows, "prompt=question,answer=answer").requests) == 3
    timed = [{**row, "timestamp": f"2026-01-0{day}T00:00:00Z"} for day, row in enumerate(rows, start=1)]
    assert len(read(tmp_path, timed).requests) == 3


def test_long_questions_include_their_context_and_choices(tmp_path: Path) -> None:
    row = {"_id": "7", "question": "which?", "choice_A": "one", "choice_B": "two", "choice_C": "three",
           "choice_D": "four", "answer": "B", "context": "long " * 1000}  # fmt: skip
    trace = read(tmp_path, [row, {**row, "context": "short"}])
    assert trace.name == "LongBench v2"
    assert trace.requests.input_tokens.tolist() == [1257, 8]


def test_a_chat_that_ends_with_its_answer_is_read(tmp_path: Path) -> None:
    trace = read(tmp_path, [{"prompt_id": "1", "messages": [ASKED, SAID, ASKED, SAID]}] * 2)
    assert trace.requests.input_tokens.tolist() == [72, 72]
    assert trace.requests.output_tokens.tolist() == [12, 12]
    assert any("is taken as the answer" in note for note in map(str, trace.requests.warnings))


@pytest.mark.parametrize(
    "header",
    [
        "arrived_at,num_prefill_tokens,num_decode_tokens",
        "arrival_timestamp,prompt_size,token_size",
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size",
        "Unnamed: 0,arrived_at,num_prefill_tokens,num_decode_tokens,pd_ratio,total_tokens",
    ],
)
def test_traces_of_other_simulators_are_read(tmp_path: Path, header: str) -> None:
    values = {"arrived_at": "2.5", "arrival_timestamp": "2.5", "num_prefill_tokens": "70", "prompt_size": "70",
              "num_decode_tokens": "8", "token_size": "8"}  # fmt: skip
    row = ",".join(values.get(name, "1") for name in header.split(","))
    path = tmp_path / "trace.csv"
    path.write_text(f"{header}\n{row}\n{row.replace('2.5', '4.5')}\n")
    requests = read_trace(path).timed()
    assert requests.input_tokens.tolist() == [70, 70]
    assert requests.output_tokens.tolist() == [8, 8]
    assert requests.arrival_s is not None
    assert requests.arrival_s.tolist() == [0.0, 2.0]


def test_a_column_that_counts_rows_is_not_offered_as_times(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",Unnamed: 0,input_tokens,output_tokens\n0,0,5,5\n1,1,5,5\n")
    assert read_trace(path).reading.time_hint == ""
