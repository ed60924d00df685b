"""From record shards to tables: names, times and joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ebbench.engines.vllm import joined_requests, planned_name, read_recording
from ebbench.errors import DataError
from ebbench.records.schema import DECISIONS, REQUESTS, STEPS
from vllm_eb.reports import Recorder, StepRecord
from vllm_eb.strategy import Record


@pytest.mark.parametrize(
    "wrapped",
    ["cmpl-ab12-r-7-0-0f3c9a21", "cmpl-ab12-r-7-0", "chatcmpl-ab12-r-7-9abcdef0", "chatcmpl-ab12-r-7", "ab12-r-7-0"],
)
def test_planned_ids_are_found_inside_the_servers(wrapped: str) -> None:
    assert planned_name("ab12-", ["r-7", "r-70", "r"])(wrapped) == "r-7"


def test_ids_that_are_not_of_the_plan_stay_unchanged() -> None:
    assert planned_name("ab12-", ["r1"])("cmpl-warmup-3-0-01234567") == "cmpl-warmup-3-0-01234567"


def record(folder: Path) -> None:
    writer = Recorder(folder, {"policy": "eb:k=2", "kv_blocks_total": 50})
    facts: dict[str, Any] = {"mode": "eb", "kv_blocks_used": 4, "waiting": 0, "running": 2, "k": 2, "n_limit": 8}
    for number, (prefill, scheduled, preempted, start_ns) in enumerate(
        [(9, {"cmpl-x-a-0": 4, "cmpl-x-b-0": 5}, set(), 1100), (0, {"cmpl-x-b-0": 1}, {"cmpl-x-a-0"}, 1200)]
    ):
        writer.step(
            StepRecord(
                step_id=number, scheduled_ns=1100 + 50 * number, prefill_tokens=prefill, decode_seqs=number,
                scheduled=scheduled, preempted=preempted, start_ns=start_ns, end_ns=start_ns + 100, **facts,
            )
        )  # fmt: skip
    writer.decisions([Record(1.5e-6, 1, "phase", "refill complete", "eb", "decode", {"idle": 2, "theta": 0.25})])
    writer.close()


def test_tables_in_the_stored_schemas_and_times_from_the_start(tmp_path: Path) -> None:
    record(tmp_path)
    found = read_recording(tmp_path, planned_name("x-", ["a", "b"]), start_ns=1000)
    assert found.steps.schema == STEPS
    assert found.decisions.schema == DECISIONS
    first, second = found.steps.to_pylist()
    assert (first["request_ids"], first["request_tokens"], first["phase"]) == (["a", "b"], [4, 5], "prefill")
    assert (second["request_ids"], second["request_tokens"], second["phase"]) == (["b"], [1], "decode")
    assert (second["scheduled_ns"], second["start_ns"], second["end_ns"]) == (150, 200, 300)
    assert (second["preempted_ids"], second["preemptions"], second["kv_blocks_total"]) == (["a"], 1, 50)
    (decision,) = found.decisions.to_pylist()
    assert (decision["time_ns"], decision["idle"], decision["theta"], decision["p0"]) == (500, 2, 0.25, None)


def test_requests_learn_when_they_were_scheduled(tmp_path: Path) -> None:
    record(tmp_path)
    steps = read_recording(tmp_path, planned_name("x-", ["a", "b"]), start_ns=1000).steps
    requests = pa.Table.from_pylist(
        [{"request_id": name, "status": "ok"} for name in ("b", "a", "never")], schema=REQUESTS
    )
    rows = joined_requests(requests, steps).to_pylist()
    assert [(row["scheduled_ns"], row["preemptions"]) for row in rows] == [(100, 0), (100, 1), (None, None)]


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no records of the scheduler plugin"):
        read_recording(tmp_path, str, 0)
