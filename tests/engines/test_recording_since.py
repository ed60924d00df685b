"""Several runs on one server: the record of each begins where the run before ended."""

from __future__ import annotations

from pathlib import Path

from ebbench.engines.vllm import planned_name, read_recording
from vllm_eb.reports import Recorder, StepRecord


def test_a_run_has_its_own_steps_numbered_from_zero(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "record", {"policy": "eb", "kv_blocks_total": 100})
    for number in range(6):
        recorder.step(
            StepRecord(
                step_id=number, scheduled_ns=1000 + 10 * number, mode="eb", prefill_tokens=0, decode_seqs=1,
                scheduled={f"cmpl-run{number // 3}-r1-0": 1}, kv_blocks_used=1, waiting=0, running=1, preempted=(),
                k=None, n_limit=None, start_ns=1001 + 10 * number, end_ns=1009 + 10 * number,
            )
        )  # fmt: skip
    recorder.close()
    whole = read_recording(tmp_path / "record", planned_name("run1-", ["r1"]), 1000)
    second = read_recording(tmp_path / "record", planned_name("run1-", ["r1"]), 1030, since_ns=1030)
    assert whole.steps["step_id"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert second.steps["step_id"].to_pylist() == [0, 1, 2]
    assert second.steps["start_ns"].to_pylist() == [1, 11, 21]
    assert second.steps["request_ids"].to_pylist() == [["r1"]] * 3
